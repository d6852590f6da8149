"""How the ranks of one engine find each other. No torch, so that whoever starts them can use it."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one engine meet: rank 0 serves a store at (address, port); all calls end within `timeout_s`."""

    rank: int
    world_size: int
    address: str
    port: int
    timeout_s: float = 600.0


def open_listener(address: str) -> socket.socket:
    """A listening socket on a free port of `address` alone; torch's own store would listen on every interface.

    Rank 0 opens it, tells the others its port, and passes it to the engine.
    """
    return socket.create_server((address, 0), backlog=1024)
