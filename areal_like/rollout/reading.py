"""Reads the answers of servers in parts, so that long answers do not block the event loop."""

import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from areal_like.rollout.sglang.answers import Part, part_of
from areal_like.rollout.sglang.server import Server
from areal_like.rollout.turns import Turns

PARTS, EVENTS = 2, 16  # parts of answers that are decoded in one turn of the event loop, and the events of each, 6 KB

type Parts = Sequence[Part]
type Read = Callable[[Server, bytes], AsyncGenerator[Parts]]


async def read(turn: Turns, server: Server, request: bytes) -> AsyncGenerator[Parts]:
    """Have a server generate, and give its answer in parts, at first none: the request is on its way then.

    Raises as `Server.generate` does.
    """
    yield ()
    async with aclosing(server.generate(request)) as answer:
        async for events in answer:
            for some in itertools.batched(events, EVENTS):
                await turn()
                yield [part_of(event, server.name) for event in some]
