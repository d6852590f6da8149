"""Messages between the main process and a worker: length, kind, number and body on a stream socket."""

import asyncio
import io
import pickle
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any

_HEAD = struct.Struct("!IBQ")  # length of the body, kind, number of the call or question
_MOST = 1 << 31  # bytes of a body; a longer one is garbage, for example from a reused descriptor


class Kind(IntEnum):
    """Kind of a message."""

    READY = 1  # worker: its loop runs
    CALL = 2  # main: begin call NUMBER
    CANCEL = 3  # main: cancel call NUMBER
    DONE = 4  # worker: call NUMBER has ended
    ASK = 5  # worker: question NUMBER; the body begins with the call's number (CALL_NUMBER)
    ANSWER = 6  # main: the answer to question NUMBER
    DROP = 7  # worker: the answer to question NUMBER is not needed any more
    END = 8  # main: cancel everything, then exit


CALL_NUMBER = struct.Struct("!Q")

type OnFrame = Callable[[Kind, int, bytes], None]


class Unanswered(Exception):
    """The main process has no answer to a question; the message is the reason."""


def frame(kind: Kind, number: int, body: bytes = b"") -> bytes:
    """Return a message as bytes."""
    return _HEAD.pack(len(body), kind, number) + body


def _ignore(*_: object) -> None: ...


class Frames(asyncio.Protocol):
    """One end of a connection; `on_lost` is called once, when the other end is closed or sends garbage."""

    def __init__(self, on_frame: OnFrame, on_lost: Callable[[], None]) -> None:
        self._on_frame, self._on_lost = on_frame, on_lost
        self._held = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # for the type checker
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        start = 0
        while len(self._held) - start >= _HEAD.size:
            length, kind, number = _HEAD.unpack_from(self._held, start)
            if kind not in Kind or length > _MOST:
                self.close()
                return
            end = start + _HEAD.size + length
            if len(self._held) < end:
                break
            body = bytes(memoryview(self._held)[start + _HEAD.size : end])
            start = end
            self._on_frame(Kind(kind), number, body)
        del self._held[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, on_lost = None, self._on_lost
        self._on_frame, self._on_lost = _ignore, _ignore  # they refer to objects that refer to this connection
        on_lost()

    def send(self, kind: Kind, number: int, body: bytes = b"") -> None:
        """Send a message; a lost connection ignores it."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(kind, number, body))

    def close(self) -> None:
        """Close the connection; `on_lost` is called soon."""
        if self._transport is not None:
            self._transport.abort()


_KNOWN = {("areal_like.core.types", name) for name in ("Trajectory", "Reward", "FinishReason")} | {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} does not leave the process of the user's code")
        return super().find_class(module, name)


class NotPlain(Exception):
    """A worker has sent values that the main process does not accept, or garbage."""


def plain(body: bytes) -> Any:
    """Unpickle a worker's message: built-in values, numpy arrays and trajectories.

    Raises NotPlain for anything else, because the main process does not import user code.
    """
    try:
        return _Plain(io.BytesIO(body)).load()
    except Exception as error:
        raise NotPlain(str(error)) from error
