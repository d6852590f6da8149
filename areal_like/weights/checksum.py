"""Checksums of weights on trainer and servers (`weight_update.checksum`), over every transport."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from areal_like.rollout.http import Deadline
from areal_like.rollout.server import Server
from areal_like.trainer.remote import Trainer


@asynccontextmanager
async def compare_checksums(trainer: Trainer, servers: Sequence[Server], deadline: Deadline) -> AsyncIterator[None]:
    """Compare the tensors that servers receive in the body with the trainer's; raise ServerError if one differs."""
    await asyncio.gather(*(server.watch_checksums(deadline.left) for server in servers))
    yield
    expected = json.dumps(await trainer.checksums(timeout_s=deadline.left))
    await asyncio.gather(*(server.compare_checksums(expected, deadline.left) for server in servers))
