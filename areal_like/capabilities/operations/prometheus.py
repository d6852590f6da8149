"""An endpoint for Prometheus with the newest value of each metric; every request needs a token."""

import hmac
import re
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector as MetricsCollector

from areal_like.errors import RecordError, private, writing
from areal_like.metrics.listener import Listener

TOKEN_FILE = "prometheus.token"
REQUEST_S = 10.0  # for a client to send its request


def split_address(value: int | str) -> tuple[str, int]:
    """Return host and port of a port, which is on loopback, or of `HOST:PORT`."""
    host, _, port = str(value).rpartition(":")
    return host.strip("[]") or "127.0.0.1", int(port)


class PrometheusEndpoint(Listener):
    """Serves metrics at `/metrics`. Raises RecordError if the address is taken."""

    name = "stats_logger.prometheus"

    def __init__(self, address: int | str, directory: Path) -> None:
        self._newest = _Newest()
        registry = CollectorRegistry()
        registry.register(self._newest)
        app = _with_token(make_wsgi_app(registry), _read_token(directory / TOKEN_FILE))
        host, port = split_address(address)
        try:
            self._server = (_Server6 if ":" in host else _Server)((host, port), _Handler)
        except OSError as error:
            raise RecordError(
                f"{host}:{port} cannot be served: {error.strerror}. Set stats_logger.prometheus to another port"
            ) from error
        self._server.set_app(app)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Replace the values of the metrics of a step."""
        self._newest.values = {**self._newest.values, **scalars, "step": float(step)}

    def forget(self, step: int) -> None:
        """Forget all values: those of earlier steps may be void."""
        self._newest.values = {}

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Newest(MetricsCollector):
    """The newest value of each metric."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a family for each name, whose label has the tag."""
        families: dict[str, GaugeMetricFamily] = {}
        for tag, value in self.values.items():
            name = "areal_like_" + re.sub(r"[^a-zA-Z0-9_]", "_", tag)
            family = families.setdefault(name, GaugeMetricFamily(name, "See docs/metrics.md.", labels=["tag"]))
            family.add_metric([tag], value)
        yield from families.values()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without asking the name service for this host's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, *_: object) -> None:
        """Log nothing: the console belongs to the run."""


def _with_token(app: Callable[..., Iterable[bytes]], token: str) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application that answers only requests with the token."""
    wanted = f"Bearer {token}".encode()

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", errors="replace")
        status = None
        if not hmac.compare_digest(given, wanted):
            status = HTTPStatus.UNAUTHORIZED
        elif environ.get("PATH_INFO") != "/metrics" or environ.get("REQUEST_METHOD") != "GET":
            status = HTTPStatus.NOT_FOUND
        if status is None:
            return app(environ, start)
        start(f"{status.value} {status.phrase}", [("Content-Length", "0"), ("WWW-Authenticate", "Bearer")])
        return []

    return answer


def _read_token(file: Path) -> str:
    """Return the token of a run, which is created with its directory's first endpoint. Raises RecordError."""
    with writing(file):
        with suppress(FileExistsError), open(file, "x", opener=private) as new:
            new.write(secrets.token_urlsafe() + "\n")
        if token := file.read_text().strip():
            return token
    raise RecordError(f"{file} is empty. Delete it, so that the run creates a token")
