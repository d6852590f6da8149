"""A proxy between an agent's client and the endpoint that loses, holds back and repeats what passes through it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal["none", "lose_answer", "cut_answer", "hold_answer", "twice", "both"]


class UnreliableProxy(AbstractContextManager["UnreliableProxy"]):
    """Forwards HTTP requests, each on connections of its own; request number n has `faults[n]`, later ones none.

    - `lose_answer`: reads the answer, closes the client's connection
    - `cut_answer`: sends half of the answer
    - `hold_answer`: reads the answer and keeps it until the client has gone
    - `twice`: sends the request twice, passes the first answer on and closes the other connection
    - `both`: sends the request twice, reads both answers and passes the second one on
    """

    def __init__(self, upstream: str, faults: Sequence[Fault]) -> None:
        address = urlsplit(upstream)
        self._upstream = str(address.hostname), int(address.port or 80)
        self._faults = list(faults)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> UnreliableProxy:
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = starting.result()
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        try:
            request = await _message(reader)
            await self._pass_on(self._faults.pop(0) if self._faults else "none", request, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass_on(
        self, fault: Fault, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        sent = [await self._send(request) for _ in range(2 if fault in ("twice", "both") else 1)]
        if fault == "twice":
            answers = [asyncio.ensure_future(_message(answer)) for answer, _ in sent]
            done, pending = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
            writer.write(done.pop().result())
            for task in pending:
                task.cancel()
        else:
            whole = [await _message(answer) for answer, _ in sent][-1]
            if fault == "hold_answer":
                await reader.read()
            elif fault != "lose_answer":
                writer.write(whole[: -len(whole) // 9] if fault == "cut_answer" else whole)
        for _, connection in sent:
            connection.close()
        with suppress(ConnectionError):
            await writer.drain()

    async def _send(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._upstream)
        writer.write(request)
        return reader, writer


async def _message(reader: asyncio.StreamReader) -> bytes:
    """A request or an answer with its body, as bytes; the connection is not used for another one."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    fields = [line for line in lines if not line.lower().startswith(b"connection:")]
    size = next((int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")), 0)
    closing = b"\r\n".join([fields[0], b"connection: close", *fields[1:]])
    if any(line.lower() == b"transfer-encoding: chunked" for line in lines):
        return closing + await _chunks(reader)
    return closing + await reader.readexactly(size)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """A chunked body, as it was sent."""
    body = b""
    while not body.endswith(b"\r\n0\r\n\r\n"):
        line = await reader.readuntil(b"\r\n")
        body += line + await reader.readexactly(int(line, 16) + 2)
    return body
