"""Reads the answers of servers in parts, so that long answers do not block the event loop."""

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from areal_like.rollout.server import Generation, Part, Server
from areal_like.rollout.turns import Turns

PARTS, EVENTS = 2, 16  # parts of answers that are decoded in one turn of the event loop, and the events of each, 6 KB


async def read(turn: Turns, server: Server, request: Generation) -> AsyncGenerator[Sequence[Part]]:
    """Request a generation from a server, and yield its answer in parts; raise as `Server.generate` does."""
    async with aclosing(server.generate(request)) as answer:
        async for events in answer:
            for some in itertools.batched(events, EVENTS):
                await turn()
                yield [server.part_of(event) for event in some]
