"""A route that has a server download weight files while it generates (`weight_update.url`); SGLang 0.5.17 has none.

An interrupted download continues where it stopped if the web server knows ranges (RFC 9110, section 14).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import requests

from areal_like.backends.sglang import DOWNLOAD
from areal_like.backends.sglang.patch import Launch, Patch
from areal_like.core.transfer import FileSource, WeightFile, locate

CHUNK = 1 << 20  # bytes
SILENCE_S = 10.0  # without a byte; then the connection counts as lost
PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # between two attempts; the pause doubles
MOST_CORRUPT = 3  # whole downloads of one file with another checksum
_REFUSED = (401, 403)
_BEYOND_END = 416


class DownloadError(RuntimeError):
    """A file could not be downloaded; the message has its URL."""


class Downloads:
    """The downloaded files of one server. A new request ends an older one that still runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: object = None

    def fetch(self, source: FileSource, files: Sequence[WeightFile], keep: Collection[str], timeout_s: float) -> None:
        """Download missing files, and remove files that are not in `keep`; raise DownloadError."""
        own = self._newest = object()
        deadline = time.monotonic() + timeout_s
        with self._lock:
            folder = locate("")
            folder.mkdir(exist_ok=True)
            for path in folder.iterdir():
                if path.name.removesuffix(".partial") not in keep:
                    path.unlink()
            with requests.Session() as session:
                session.trust_env = False  # neither proxies nor ~/.netrc, which would replace the token
                session.headers["Accept-Encoding"] = "identity"
                if source.token:
                    session.headers["Authorization"] = f"Bearer {source.token}"
                for file in files:
                    self._fetch(session, f"{source.url}/{file.path}", file, deadline, own)

    def _fetch(self, session: requests.Session, url: str, file: WeightFile, deadline: float, own: object) -> None:
        """Download one file, with further attempts until the deadline."""
        path, partial = locate(file.path), locate(f"{file.path}.partial")
        pause, corrupt = PAUSE_S, 0
        while not path.exists():
            try:
                before = partial.stat().st_size if partial.exists() else 0
                self._receive(session, url, partial, before, file.size, own)
                if _sha256(partial) == file.sha256:
                    os.replace(partial, path)
                    return
                problem, corrupt = "its SHA-256 differs from the trainer's", corrupt + 1
                partial.unlink()
            except requests.RequestException as error:
                problem = _describe(error)
                if error.response is not None and error.response.status_code in _REFUSED:
                    raise DownloadError(f"{url}: {problem}") from error
                if partial.exists() and partial.stat().st_size > before:
                    pause = PAUSE_S
            if corrupt == MOST_CORRUPT or time.monotonic() + pause > deadline:
                raise DownloadError(f"{url}: {problem}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _receive(self, session: requests.Session, url: str, partial: Path, start: int, size: int, own: object) -> None:
        """Append the rest of a file from byte `start` on; raise requests.RequestException."""
        if start == size:
            return
        headers = {"Range": f"bytes={start}-"} if start else {}
        with session.get(url, headers=headers, stream=True, timeout=SILENCE_S) as reply:
            if reply.status_code == _BEYOND_END:
                partial.unlink()
            reply.raise_for_status()
            has_range = reply.status_code == requests.codes.partial
            with partial.open("ab" if has_range else "wb") as out:
                for chunk in reply.iter_content(CHUNK):
                    if self._newest is not own:
                        raise DownloadError(f"{url}: a newer update has begun")
                    out.write(chunk)
        if (received := partial.stat().st_size) < size:
            raise requests.ConnectionError(f"the connection closed after {received} of {size} bytes")


def add_route(_: Launch) -> None:
    """Add the route of `Server.download`."""
    from sglang.srt.entrypoints.http_server import app

    downloads = Downloads()

    @app.post(DOWNLOAD)
    async def download(body: dict[str, Any]) -> dict[str, object]:
        source, files = FileSource(body["url"], body["token"]), [WeightFile(*file) for file in body["files"]]
        try:
            await asyncio.to_thread(downloads.fetch, source, files, body["keep"], body["timeout_s"])
        except (DownloadError, OSError) as error:
            return {"success": False, "message": str(error)}
        return {"success": True, "message": "downloaded"}


def _describe(error: requests.RequestException) -> str:
    """Return the cause of a failure; the token is in no message of requests."""
    if error.response is not None:
        return f"HTTP status {error.response.status_code}"
    if isinstance(error, requests.Timeout):
        return f"no byte came for {SILENCE_S:g} s"
    return str(error)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


PATCH = Patch(serve=add_route)
