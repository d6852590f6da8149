"""How the ranks of one engine find each other. No torch, so that whoever starts them can use it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of an engine meet: rank 0 serves a store at (address, port); all calls end within `timeout_s`."""

    rank: int
    world_size: int
    address: str
    port: int
    timeout_s: float = 600.0
