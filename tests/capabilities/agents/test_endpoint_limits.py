"""The endpoint on an address of the cluster: what it refuses, without an effect on other episodes, and how it ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from limits import HUNG_S
from scripted import says, session

from areal_like.capabilities.agents.endpoint import Endpoint
from areal_like.capabilities.agents.openai_api import OpenSessions
from areal_like.capabilities.agents.schema import EpisodeConfig
from areal_like.core.errors import RunError

HELLO: list[Any] = [{"role": "user", "content": "x"}]


AGENT = """
import openai
client = openai.OpenAI(max_retries=0)  # OPENAI_BASE_URL and OPENAI_API_KEY say where
messages = [{"role": "user", "content": "x"}]
print(client.chat.completions.create(model="policy", messages=messages).choices[0].message.content)
"""


class Open:
    """An endpoint with two episodes, each with a client of OpenAI."""

    def __init__(self, stack: ExitStack, **settings: Any) -> None:
        self.sessions = OpenSessions()
        self.endpoint = stack.enter_context(Endpoint(self.sessions, EpisodeConfig(**settings)))
        recorded = [session("plain", says("ab", "th", "ab", "th", "ab", "th"))[0] for _ in range(2)]
        self.recorded = recorded
        self.keys = [stack.enter_context(self.sessions.open(one)) for one in recorded]
        self.clients = [self.client(stack, key) for key in self.keys]

    def client(self, stack: ExitStack, key: str, **options: Any) -> openai.OpenAI:
        http = stack.enter_context(httpx.Client(trust_env=False, **options))
        return openai.OpenAI(base_url=self.endpoint.base_url, api_key=key, max_retries=0, http_client=http)

    def ask(self, number: int = 0) -> str | None:
        answer = self.clients[number].chat.completions.create(model="any", messages=HELLO, timeout=HUNG_S)
        return answer.choices[0].message.content


@contextmanager
def opened(**settings: Any) -> Iterator[Open]:
    with ExitStack() as stack:
        yield Open(stack, **settings)


def own_addresses() -> list[str]:
    """Addresses of this host beside loopback."""
    every = [each.address for addresses in psutil.net_if_addrs().values() for each in addresses]
    return [each for each in every if each.count(".") == 3 and not each.startswith("127.")]


def test_it_listens_on_the_address_that_is_asked_for_alone():
    if not (addresses := own_addresses()):
        pytest.skip("this host has loopback alone")
    with opened(endpoint_host=addresses[0]) as own:
        assert own.endpoint.base_url.startswith(f"http://{addresses[0]}:") and own.ask() == "ab"
        port = int(own.endpoint.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=HUNG_S)


@contextmanager
def namespace() -> Iterator[tuple[str, str]]:
    """A network of its own, as a container has it: its name, and this host's address in it."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    name, link = f"agent{os.getpid()}", f"a{os.getpid()}"
    try:
        for command in (
            f"ip netns add {name}",
            f"ip link add {link} type veth peer name eth0 netns {name}",
            f"ip addr add 10.214.7.1/30 dev {link}",
            f"ip link set {link} up",
            f"ip -n {name} addr add 10.214.7.2/30 dev eth0",
            f"ip -n {name} link set eth0 up",
        ):
            made = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"this host makes no network namespace: {made.stderr.strip()}")
        yield name, "10.214.7.1"
    finally:
        subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def test_an_agent_with_a_network_of_its_own_reaches_its_episode():
    with namespace() as (name, address), opened(endpoint_host=address) as own:
        environment = {
            "OPENAI_BASE_URL": own.endpoint.base_url,
            "OPENAI_API_KEY": own.keys[0],
            "PATH": os.environ["PATH"],
        }
        command = ["ip", "netns", "exec", name, sys.executable, "-c", AGENT]
        agent = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG_S, check=False)
        assert (agent.stdout.strip(), agent.returncode) == ("ab", 0), agent.stderr
        environment["OPENAI_BASE_URL"] = own.endpoint.base_url.replace(address, "127.0.0.1")
        other = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG_S, check=False)
        assert "APIConnectionError" in other.stderr  # loopback is its own
    assert len(own.recorded[0].turns) == 1


def test_auto_is_an_address_of_this_host():
    if not own_addresses():
        pytest.skip("this host has no address but loopback")
    with Endpoint(OpenSessions(), EpisodeConfig(endpoint=True, endpoint_host="auto")) as endpoint:
        assert httpx.URL(endpoint.base_url).host in own_addresses()


def test_an_endpoint_that_does_not_start_is_an_error(tmp_path):
    file = tmp_path / "a.pem"
    file.write_text("no certificate")
    with pytest.raises(RunError, match=r"did not start .* episode.endpoint_certificate"):
        Endpoint(OpenSessions(), EpisodeConfig(endpoint_certificate=str(file), endpoint_key=str(file))).__enter__()


def test_an_address_of_another_host_is_refused_in_words():
    with pytest.raises(RunError, match=r"cannot listen on 192.0.2.1 .episode.endpoint_host"):
        Endpoint(OpenSessions(), EpisodeConfig(endpoint_host="192.0.2.1")).__enter__()


def test_a_large_request_is_refused_and_other_episodes_go_on():
    with opened(endpoint_max_mb=1) as own:
        with pytest.raises(openai.APIStatusError, match=r"more than 1 MB .episode.endpoint_max_mb") as refused:
            own.clients[0].chat.completions.create(model="any", messages=[{"role": "user", "content": "x" * (2 << 20)}])
        assert refused.value.status_code == 413
        assert own.ask(1) == "ab" and own.ask(0) == "ab"
        assert len(own.recorded[0].turns) == 1


def test_an_episode_that_asks_too_often_is_refused_and_others_are_not():
    with opened(endpoint_rate=0.2) as own:  # two requests in ten seconds
        assert [own.ask(), own.ask()] == ["ab", "th"]
        with pytest.raises(openai.RateLimitError, match=r"more than 0\.2 requests per second") as refused:
            own.ask()
        assert refused.value.response.headers["Retry-After"] == "1"
        assert own.ask(1) == "ab"


def test_connections_beyond_the_limit_are_refused():
    with opened(endpoint_max_connections=2) as own:
        port = int(own.endpoint.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
        with ExitStack() as idle:
            for _ in range(3):
                idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HUNG_S))
            with pytest.raises(openai.InternalServerError) as refused:
                own.ask()
            assert refused.value.status_code == 503
        with ExitStack() as stack:  # once they have left, there is room for others
            for _ in range(100):
                try:
                    assert own.client(stack, own.keys[0]).models.list().data
                    break
                except openai.InternalServerError:
                    continue
            else:
                pytest.fail("connections that were closed still count")


def test_a_client_that_keeps_its_connection_is_refused_after_the_end_of_its_episode():
    with opened() as own:
        assert own.ask() == "ab"
        own.sessions.close(own.keys[0])
        with pytest.raises(openai.AuthenticationError, match="the API key does not belong to a running episode"):
            own.ask()
        assert own.ask(1) == "ab"


def test_a_body_that_does_not_come_ends_with_a_status(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("areal_like.capabilities.agents.endpoint.BODY_LIMIT_S", 0.2)
    with opened() as own:
        host, port = own.endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port)), timeout=HUNG_S) as stalled:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nx-api-key: {own.keys[0]}\r\nContent-Length: 9\r\n\r\n{{"
            stalled.sendall(head.encode())
            answer = b""
            while part := stalled.recv(4096):
                answer += part
        assert answer.startswith(b"HTTP/1.1 408") and b"not complete" in answer
        assert own.ask() == "ab"


@pytest.mark.parametrize(
    ("request_fields", "words"),
    [
        ({"tools": [{"type": "function", "function": {"name": "add", "parameters": "none"}}]}, "tools"),
        ({"tools": "add"}, "tools"),
        ({"messages": "x"}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
)
def test_what_is_not_a_request_gets_a_status_with_the_field(request_fields: dict[str, Any], words: str):
    with opened() as own:
        body = {"model": "any", "messages": HELLO, **request_fields}
        with pytest.raises(openai.BadRequestError, match=words):
            own.clients[0].post("/chat/completions", body=body, cast_to=object)
        assert own.ask() == "ab" and own.ask(1) == "ab"


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b"\xff\xfe", b"null"])
def test_broken_json_gets_a_status(body: bytes):
    with opened() as own, httpx.Client(trust_env=False) as http:
        headers = {"x-api-key": own.keys[0], "Content-Type": "application/json"}
        reply = http.post(own.endpoint.base_url + "/chat/completions", content=body, headers=headers)
        assert reply.status_code == 400 and "body is not" in reply.json()["error"]["message"]
        assert own.ask() == "ab"


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    if not (program := shutil.which("openssl")):
        pytest.skip("openssl makes the certificate, and is not installed")
    chain, key = folder / "certificate.pem", folder / "key.pem"
    command = [
        program,
        *[
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=endpoint",
        ],
    ]
    alternative = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(chain)]
    subprocess.run([*command, *alternative, *files], check=True, capture_output=True)
    return chain, key


def test_with_a_certificate_it_speaks_tls_alone(tmp_path: Path):
    chain, key = certificate(tmp_path)
    with ExitStack() as stack:
        own = Open(stack, endpoint_certificate=str(chain), endpoint_key=str(key))
        assert own.endpoint.base_url.startswith("https://")
        client = own.client(stack, own.keys[0], verify=ssl.create_default_context(cafile=str(chain)))
        assert client.chat.completions.create(model="any", messages=HELLO).choices[0].message.content == "ab"
        with pytest.raises(openai.APIConnectionError):  # a client that does not trust it
            own.ask(1)
        plain = own.endpoint.base_url.replace("https", "http")
        with pytest.raises(httpx.HTTPError), httpx.Client(trust_env=False) as http:
            http.get(plain + "/models")


def test_many_agents_are_answered_at_once():
    async def run(own: Open) -> list[str | None]:
        async with httpx.AsyncClient(trust_env=False) as http:
            clients = [
                openai.AsyncOpenAI(base_url=own.endpoint.base_url, api_key=key, http_client=http) for key in own.keys
            ]
            asked = [
                client.chat.completions.create(model="any", messages=[{"role": "user", "content": f"{number}"}])
                for client in clients
                for number in range(3)
            ]
            return sorted(str(answer.choices[0].message.content) for answer in await asyncio.gather(*asked))

    with opened() as own:
        assert asyncio.run(run(own)) == ["ab", "ab", "ab", "ab", "th", "th"]
