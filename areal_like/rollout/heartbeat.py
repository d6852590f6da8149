"""Heartbeats of servers' hosts: Ray needs a minute or more to notice that a host is dead or cut off.

A beat is a TCP connection to the server's port. The host's kernel accepts or refuses it, however busy or hung the
server is, so only a host that cannot be reached stays silent. An error of this host, such as too many open files, says
nothing about the other one.
"""

import asyncio
import errno
import time
from contextlib import suppress
from urllib.parse import urlsplit

BEATS = 5  # in the time after which a host is lost
_SILENT = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})
LEAST_BEATS = 3  # without an answer in a row: a controller that stood still itself has sent fewer


async def wait_for_silence(url: str, limit_s: float) -> None:
    """Return when the host of a URL has been silent for `limit_s` seconds."""
    beat_s = limit_s / BEATS
    answered, missed = time.monotonic(), 0
    while missed < LEAST_BEATS or time.monotonic() - answered < limit_s:
        asked = time.monotonic()
        if await answers(url, beat_s):
            answered, missed = time.monotonic(), 0
        else:
            missed += 1
        await asyncio.sleep(max(0.0, asked + beat_s - time.monotonic()))


async def answers(url: str, limit_s: float) -> bool:
    """Return whether the host of a URL accepts or refuses a connection within the limit."""
    address = urlsplit(url)
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(str(address.hostname), address.port or 80)
    except TimeoutError:
        return False
    except OSError as error:  # refused by the host, whose server has ended, or an error of this host
        return error.errno not in _SILENT
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
