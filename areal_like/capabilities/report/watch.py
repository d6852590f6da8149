"""A server of the page of a run, which updates itself while the run adds entries to its file."""

import hmac
import json
import secrets
import tempfile
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from areal_like.capabilities.report.page import END_OF_ENTRY, REPORT_FILE
from areal_like.capabilities.report.write import write_report
from areal_like.errors import RecordError
from areal_like.metrics.names import METRICS_FILE

LIVE = Path(__file__).with_name("live.html")
MOST_BYTES = 4 << 20  # of the entries in one answer
REBUILD_S = 30.0  # between two pages of a run that keeps none itself
REQUEST_S = 10.0  # for a client to send its request
_POLICY, _LIVE_POLICY = "default-src 'none';", "default-src 'none'; connect-src 'self';"
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class WatchedPage:
    """The page of a run: the file that the run keeps, or with `stats_logger.report=false` one that is rebuilt."""

    def __init__(self, run: Path, spare: Path) -> None:
        self._run, self._spare, self._built = run, spare / REPORT_FILE, 0.0

    def whole(self) -> bytes:
        """Return the page with the script that updates it. Raises OSError, RecordError."""
        file = self._file()
        with file.open("rb") as opened:
            text = opened.read()
        end = text.rfind(END_OF_ENTRY) + len(END_OF_ENTRY)
        live = LIVE.read_text().replace("PLACE", json.dumps([file.stat().st_ino, end]))
        return text[:end].replace(_POLICY.encode(), _LIVE_POLICY.encode(), 1) + live.encode()

    def more(self, page: int, start: int) -> dict[str, Any]:
        """Return entries after byte `start` of the page with the number `page`; the page has to be loaded again if the
        run has replaced it. Raises OSError, RecordError."""
        with self._file().open("rb") as opened:
            status = Path(f"/proc/self/fd/{opened.fileno()}").stat()
            if status.st_ino != page or status.st_size < start:
                return {"replaced": True}
            opened.seek(start)
            text = opened.read(max(MOST_BYTES, 1))
        end = text.rfind(END_OF_ENTRY) + len(END_OF_ENTRY) if END_OF_ENTRY in text else 0
        return {"end": start + end, "entries": text[:end].decode()}

    def _file(self) -> Path:
        if (kept := self._run / REPORT_FILE).is_file():
            return kept
        metrics = self._run / METRICS_FILE
        changed = metrics.stat().st_mtime if metrics.exists() else 0.0
        if not self._spare.exists() or (changed > self._built and time.time() - self._built > REBUILD_S):
            self._built = time.time()
            write_report([self._run], self._spare)
        return self._spare


def make_server(page: WatchedPage, port: int, token: str) -> ThreadingHTTPServer:
    """Return a server on loopback that answers requests with the token. Raises OSError if the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            if not hmac.compare_digest(query.get("token", "").encode(), token.encode()):
                return self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"Open the address that the command printed.\n")
            try:
                if url.path == "/":
                    return self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page.whole())
                if url.path == "/more":
                    found = page.more(int(query.get("page", "0")), max(0, int(query.get("from", "0"))))
                    return self._answer(HTTPStatus.OK, "application/json", json.dumps(found).encode())
            except ValueError:
                return self._answer(HTTPStatus.BAD_REQUEST, "text/plain", b"page and from are numbers.\n")
            except (OSError, RecordError) as error:
                return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.\n")

        def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: addresses contain the token."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def serve(run: Path, port: int, show: Callable[[str, int], None]) -> None:
    """Serve the page of a run until Ctrl-C; `show` is given its address and port. Raises OSError, RecordError."""
    token = secrets.token_urlsafe()
    with tempfile.TemporaryDirectory() as spare:
        page = WatchedPage(run, Path(spare))
        page.whole()
        with make_server(page, port, token) as server:
            show(f"http://127.0.0.1:{server.server_port}/?token={token}", server.server_port)
            server.serve_forever()
