"""Requests to servers: their session, a time limit that they share, and failures that may pass."""

import time

import aiohttp

from areal_like.core.errors import ServerError

KEEP_ALIVE_S = 600  # time that a server keeps an idle connection

# A request to a dying server fails before the server's watcher reports the cause: the failure waits for that report.
AFTERMATH_S = 3.0


class Unavailable(ServerError):
    """A server failed, did not answer or left. The request may be repeated, on another server or later."""


def session(token: str) -> aiohttp.ClientSession:
    """Return a session for requests to servers, for one event loop; the caller closes it."""
    # The client closes idle connections. A server might close one just when it is used again.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S / 2)
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}, connector=connector)


class Deadline:
    """A time limit that several requests share, in seconds from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Restart the time limit."""
        self._end = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """Seconds left; never 0, which would mean no limit to a request."""
        return max(self._end - time.monotonic(), 1e-3)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._end
