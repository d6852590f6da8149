"""Exports: Prometheus behind a token, and events as OpenTelemetry spans, read by a collector of this test."""

from __future__ import annotations

import importlib.util
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from areal_like.capabilities.operations import exports
from areal_like.capabilities.operations.exports import check_exports
from areal_like.capabilities.operations.prometheus import TOKEN_FILE, PrometheusEndpoint, split_address
from areal_like.capabilities.operations.spans import Spans
from areal_like.errors import RecordError
from areal_like.events import Event


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def serving(directory: Path) -> Iterator[tuple[PrometheusEndpoint, int]]:
    port = free_port()
    endpoint = PrometheusEndpoint(port, directory)
    try:
        yield endpoint, port
    finally:
        endpoint.close()


def fetch(port: int, token: str | None, path: str = "/metrics", method: str = "GET") -> str:
    headers = {} if token is None else {"Authorization": token}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as response:
        return str(response.read().decode())


def test_prometheus_reads_the_newest_metrics_by_tag(tmp_path: Path) -> None:
    with serving(tmp_path) as (endpoint, port):
        file = tmp_path / TOKEN_FILE
        assert file.stat().st_mode & 0o077 == 0
        endpoint.log(1, {"reward/mean": 0.25, "a/b_c": 1.0})
        endpoint.log(2, {"reward/mean": 0.5, "a_b/c": 2.0, "bad/value": float("nan")})
        text = fetch(port, f"Bearer {file.read_text().strip()}")
    found = {
        (sample.name, sample.labels["tag"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["areal_like_reward_mean", "reward/mean"] == 0.5 and found["areal_like_step", "step"] == 2.0
    assert found["areal_like_a_b_c", "a/b_c"] == 1.0 and found["areal_like_a_b_c", "a_b/c"] == 2.0
    with serving(tmp_path):
        assert file.read_text().strip()  # a resumed run has the same token


@pytest.mark.parametrize("token", [None, "", "Bearer", "Bearer wrong", "Bearer \xff", "Basic eDp5"])
def test_prometheus_answers_nobody_else(tmp_path: Path, token: str | None) -> None:
    with serving(tmp_path) as (_, port), pytest.raises(urllib.error.HTTPError) as raised:
        fetch(port, token)
    assert raised.value.code == 401 and raised.value.read() == b""


def test_prometheus_serves_metrics_alone(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, port):
        right = f"Bearer {(tmp_path / TOKEN_FILE).read_text().strip()}"
        for path, method in (("/", "GET"), ("/metrics/../x", "GET"), ("/metrics", "POST")):
            with pytest.raises(urllib.error.HTTPError) as raised:
                fetch(port, right, path, method)
            assert raised.value.code == 404


def test_prometheus_is_on_loopback_unless_an_address_is_named(tmp_path: Path) -> None:
    assert split_address(9400) == ("127.0.0.1", 9400)
    assert split_address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    assert split_address("[::1]:9400") == ("::1", 9400)
    with serving(tmp_path) as (endpoint, port):
        assert endpoint._server.server_address[0] == "127.0.0.1"
        with pytest.raises(RecordError, match=r"stats_logger\.prometheus"):
            PrometheusEndpoint(port, tmp_path)


@contextmanager
def collecting(status: int = 200) -> Iterator[tuple[str, list[bytes]]]:
    """A collector: its URL, and what it was sent."""
    sent: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", sent
    finally:
        server.shutdown()
        server.server_close()


EVENTS = [Event("actor 0", "training", 100.5, 101.25, {"step": 3}), Event("groups", "group", 90.0, 101.0, {"group": 7})]


def test_events_are_exported_as_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with collecting() as (url, sent):
        spans = Spans(url, "gsm8k/first")
        spans.events(EVENTS)
        spans.close()
    requests = [ExportTraceServiceRequest.FromString(body) for body in sent]
    resources = [resource for request in requests for resource in request.resource_spans]
    about = {each.key: each.value.string_value for each in resources[0].resource.attributes}
    assert about["service.name"] == "areal-like" and about["run"] == "gsm8k/first"
    found = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert [(span.name, span.start_time_unix_nano, span.end_time_unix_nano) for span in found] == [
        ("training", 100_500_000_000, 101_250_000_000),
        ("group", 90_000_000_000, 101_000_000_000),
    ]
    attributes = {each.key: each.value for each in found[0].attributes}
    assert attributes["lane"].string_value == "actor 0" and attributes["step"].int_value == 3


def test_a_collector_that_refuses_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    with collecting(400) as (url, sent):
        spans = Spans(url, "run")
        for _ in range(2):
            spans.events(EVENTS)
            spans._provider.force_flush(5000)
        spans.close()
    assert len(sent) >= 2
    assert capsys.readouterr().err.count("stats_logger.opentelemetry") == 1


def known(**keys: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(stats_logger=keys_of(**keys)))


def keys_of(**keys: Any) -> Any:
    from areal_like.config.schema import RunConfig

    kind = RunConfig.model_fields["stats_logger"].annotation
    assert kind is not None
    return kind(**keys)


def test_what_would_fail_is_found_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = list(check_exports(known(prometheus=server.getsockname()[1])))
    assert [each.code for each in found] == ["RUN-PROMETHEUS-ADDRESS"]
    assert list(check_exports(known(prometheus=free_port(), opentelemetry="http://localhost:4318/v1/traces"))) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = list(check_exports(known(opentelemetry="http://localhost:4318/v1/traces")))
    assert [each.code for each in found] == ["RUN-OPENTELEMETRY"] and exports.PACKAGES
    assert list(check_exports(known())) == []


@pytest.mark.parametrize("value", [0, 70000, -1, "x", "localhost:", "127.0.0.1:0", "a b:1x", ""])
def test_addresses_that_are_none_are_refused(value: int | str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        keys_of(prometheus=value)


@pytest.mark.parametrize("value", ["localhost:4318", "ftp://x", "http://"])
def test_urls_that_are_none_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        keys_of(opentelemetry=value)
