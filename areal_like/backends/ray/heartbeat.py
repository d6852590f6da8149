"""Heartbeats of hosts: Ray needs a minute or more to notice that a host is dead or cut off.

A beat is a TCP connection to a port of the host. Its kernel accepts or refuses it, however busy or hung the process
behind the port is, so only a host that cannot be reached stays silent. An error of this host, such as too many open
files, says nothing about the other one.
"""

import asyncio
import errno
import time
from collections.abc import Collection
from contextlib import suppress
from urllib.parse import urlsplit

BEATS = 5  # in the time after which a host is lost
LEAST_BEATS = 3  # without an answer in a row: a process that stood still itself has sent fewer
_SILENT = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})
_CLOSED = _SILENT | {errno.ECONNREFUSED, errno.ECONNRESET}


async def answers(url: str, limit_s: float) -> bool:
    """Return whether the host of a URL accepts or refuses a connection within the limit."""
    return await _connects(url, limit_s, _SILENT)


async def accepts(url: str, limit_s: float) -> bool:
    """Return whether a URL accepts a connection within the limit; a host whose process has ended refuses it."""
    return await _connects(url, limit_s, _CLOSED)


async def wait_for_silence(url: str, limit_s: float, *, accepting: bool = False) -> None:
    """Return when a URL has not answered for `limit_s` seconds; with `accepting`, refusals are not answers."""
    beat, beat_s = accepts if accepting else answers, limit_s / BEATS
    answered, missed = time.monotonic(), 0
    while missed < LEAST_BEATS or time.monotonic() - answered < limit_s:
        asked = time.monotonic()
        if await beat(url, beat_s):
            answered, missed = time.monotonic(), 0
        else:
            missed += 1
        await asyncio.sleep(max(0.0, asked + beat_s - time.monotonic()))


async def _connects(url: str, limit_s: float, failures: Collection[int]) -> bool:
    address = urlsplit(url)
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(str(address.hostname), address.port or 80)
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno not in failures
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
