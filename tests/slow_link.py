"""A proxy between two hosts: delay, limited bandwidth, and connections that close or stall. The kernel has no netem."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Literal
from urllib.parse import urlsplit

READ = 1 << 16

type Fault = tuple[Literal["close", "stall"], int]
"""What happens to a connection after so many bytes towards the client."""


class SlowLink:
    """A link to `target`, shared by all of its connections; each further connection takes the next of the `faults`.

    `delay_s` is that of one direction. `sent` counts the bytes towards clients, `connections` all that were opened.
    """

    def __init__(
        self, target: str, *, delay_s: float = 0.0, bytes_per_s: float = math.inf, faults: Iterable[Fault] = ()
    ) -> None:
        where = urlsplit(target)
        self._host, self._port = where.hostname, where.port
        self.delay_s, self.bytes_per_s, self.faults = delay_s, bytes_per_s, deque(faults)
        self.sent = self.connections = 0
        self._free_at = {"up": 0.0, "down": 0.0}
        self._open: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin to carry a connection."""
        task = asyncio.get_running_loop().create_task(self._connect(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def close(self) -> None:
        """End all connections."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until either side closes it."""
        self.connections += 1
        fault = self.faults.popleft() if self.faults else None
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        ways = [self._carry("up", reader, back, None), self._carry("down", there, writer, fault)]
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for side in (writer, back):
                side.close()

    async def _carry(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        reading = asyncio.ensure_future(self._read(way, reader, queue))
        try:
            await self._deliver(way, queue, writer, fault)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, way: str, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(READ):
                await queue.put((self._arrival(way, len(data)), data))
        await queue.put((0.0, b""))

    def _arrival(self, way: str, size: int) -> float:
        now = asyncio.get_running_loop().time()
        self._free_at[way] = max(now, self._free_at[way]) + size / self.bytes_per_s
        return self._free_at[way] + self.delay_s

    async def _deliver(
        self, way: str, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, fault: Fault | None
    ) -> None:
        passed, clock = 0, asyncio.get_running_loop().time
        with suppress(ConnectionError):
            while True:
                due, data = await queue.get()
                if not data:
                    return
                await asyncio.sleep(due - clock())
                if fault and passed + len(data) > fault[1]:
                    writer.write(data[: fault[1] - passed])
                    if fault[0] == "close":
                        return
                    await asyncio.Event().wait()
                writer.write(data)
                passed += len(data)
                self.sent += len(data) if way == "down" else 0
                await writer.drain()


@asynccontextmanager
async def slow_link(
    target: str, *, delay_s: float = 0.0, bytes_per_s: float = math.inf, faults: Iterable[Fault] = ()
) -> AsyncIterator[tuple[str, SlowLink]]:
    """Yield the URL of a slow link to the URL `target`, and the link."""
    link = SlowLink(target, delay_s=delay_s, bytes_per_s=bytes_per_s, faults=faults)
    server = await asyncio.start_server(link.accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", link
    finally:
        server.close()
        await link.close()
