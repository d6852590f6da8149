"""The launched server: serves, lets nobody in without the token, opens no port beyond loopback, leaves no process."""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
from limits import HUNG_S


def generate(url: str, headers: dict[str, str]) -> Any:
    body = {
        "input_ids": [3, 4, 5],
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
    }
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), headers | {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=HUNG_S) as answer:
        return json.load(answer)


def processes_of(url: str) -> list[psutil.Process]:
    """The server's main process, found by the port it serves on, and its children."""
    port = int(url.rsplit(":", 1)[1])
    for process in psutil.process_iter():
        try:
            if any(c.status == "LISTEN" and c.laddr.port == port for c in process.net_connections("tcp")):
                return [process, *process.children(recursive=True)]
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    raise LookupError(url)


def test_generates_with_logprobs(sglang_server: Any) -> None:
    answer = generate(sglang_server.url, sglang_server.headers)
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert len(answer["output_ids"]) == len(logprobs) == 4
    assert all(logprob < 0 for logprob in logprobs)


def test_holds_a_connection_longer_than_its_http_server_would(sglang_server: Any) -> None:
    connection = http.client.HTTPConnection(sglang_server.url.removeprefix("http://"))
    for pause_s in (6, 0):  # uvicorn's own limit is 5
        connection.request("GET", "/model_info", headers=sglang_server.headers)
        assert connection.getresponse().read()
        assert connection.sock is not None
        time.sleep(pause_s)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_refuses_strangers(sglang_server: Any, headers: dict[str, str]) -> None:
    with pytest.raises(HTTPError, match="401"):
        generate(sglang_server.url, headers)


@pytest.mark.parametrize("path", ["/health_generate", "/health/", "/healthy", "/metrics", "/v1/loads", "/docs"])
def test_only_health_is_answered_without_the_token(sglang_server: Any, path: str) -> None:
    with pytest.raises(HTTPError, match="401"):
        urllib.request.urlopen(sglang_server.url + path, timeout=HUNG_S)


def test_health_generates_nothing_and_health_generate_does(sglang_server: Any) -> None:
    def prefilled() -> int:
        return sglang_server.log_file.read_text().count("Prefill batch")

    before = prefilled()
    urllib.request.urlopen(sglang_server.url + "/health", timeout=HUNG_S).close()
    time.sleep(1)
    assert prefilled() == before
    request = urllib.request.Request(sglang_server.url + "/health_generate", headers=sglang_server.headers)
    urllib.request.urlopen(request, timeout=HUNG_S).close()
    assert prefilled() > before


def test_a_paused_scheduler_takes_no_core(sglang_server: Any) -> None:
    """A server is paused for as long as the trainer has its GPU."""

    def post(path: str, body: dict[str, Any]) -> None:
        headers = sglang_server.headers | {"Content-Type": "application/json"}
        request = urllib.request.Request(sglang_server.url + path, json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=HUNG_S).close()

    (scheduler,) = (it for it in processes_of(sglang_server.url) if "scheduler" in " ".join(it.cmdline()))
    post("/pause_generation", {"mode": "in_place"})
    before = sum(scheduler.cpu_times()[:2])
    time.sleep(3)
    used = sum(scheduler.cpu_times()[:2]) - before
    post("/continue_generation", {})
    assert used < 0.5  # of a core that spins, all of it
    assert len(generate(sglang_server.url, sglang_server.headers)["output_ids"]) == 4


def test_no_websocket_is_open_to_strangers(sglang_server: Any) -> None:
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    request = urllib.request.Request(sglang_server.url + "/v1/realtime", headers=headers)
    with pytest.raises(HTTPError) as refused:
        urllib.request.urlopen(request, timeout=HUNG_S)
    assert refused.value.code in (401, 403, 404)


def test_shows_no_token_to_other_users(sglang_server: Any) -> None:
    for process in processes_of(sglang_server.url):
        assert sglang_server.token not in " ".join(process.cmdline())


def test_listens_on_loopback_alone(sglang_server: Any) -> None:
    listening = [
        c.laddr.ip for p in processes_of(sglang_server.url) for c in p.net_connections("tcp") if c.status == "LISTEN"
    ]
    assert listening
    assert set(listening) == {"127.0.0.1"}
