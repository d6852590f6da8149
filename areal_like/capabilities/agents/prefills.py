"""Shared prefixes of the samples of a group, computed once by a server."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from areal_like.core.rollout.pool import LONG_PROMPT, Sampling, ServerPool
from areal_like.core.types import Images


class Prefills:
    """Caches the shared start of a group's episodes on a server; concurrent episodes would each prefill it."""

    def __init__(self, pool: ServerPool, group_id: int) -> None:
        self._pool, self._group_id = pool, group_id
        self._begun: dict[bytes, asyncio.Task[None]] = {}

    async def cache(self, tokens: Sequence[int], sampling: Sampling, images: Images = ()) -> None:
        """Wait until the server has cached these tokens; send them once, in a request for one unused token.

        Return immediately for short prompts, for which waiting would cost more (LONG_PROMPT).
        """
        if len(tokens) < LONG_PROMPT:
            return
        key = b"".join([np.array(tokens, np.int32).tobytes(), *images])
        if key not in self._begun:
            self._begun[key] = asyncio.create_task(
                self._prefill(tokens, replace(sampling, max_new_tokens=1, columns={}), images)
            )
        await asyncio.shield(self._begun[key])

    async def _prefill(self, tokens: Sequence[int], shortest: Sampling, images: Images) -> None:
        response = await self._pool.sample(
            tokens, shortest, priority=self._group_id, session=self._group_id, images=images
        )
        self._pool.cancel([response])
