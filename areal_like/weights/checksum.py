"""Checksums of weights on trainer and servers (`weight_update.checksum`), over every transport."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from areal_like.rollout.sglang import COMPARE, WATCH
from areal_like.rollout.sglang.http import Deadline, Server
from areal_like.trainer.remote import Trainer


@asynccontextmanager
async def compare_checksums(trainer: Trainer, servers: Sequence[Server], deadline: Deadline) -> AsyncIterator[None]:
    """Have servers compare the tensors that the body sends with the trainer's; raise ServerError if one differs."""
    await _post(servers, WATCH, "", deadline)
    yield
    await _post(servers, COMPARE, json.dumps(await trainer.checksums(timeout_s=deadline.left)), deadline)


async def _post(servers: Sequence[Server], what: str, text: str, deadline: Deadline) -> None:
    body = {"zmq_handles": {what: text}, "flush_cache": False}
    await asyncio.gather(*(server.update("/update_weights_from_ipc", body, deadline.left) for server in servers))
