"""The trajectories of groups that end together are made in pieces between which the event loop turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from limits import HUNG_S

from areal_like.core.rollout import single_turn
from areal_like.core.rollout.pool import Response, Sampling
from areal_like.core.rollout.single_turn import TRAJECTORIES, SingleTurn
from areal_like.core.types import FinishReason, Prompt, Reward, Trajectory

SAMPLES = 3 * TRAJECTORIES


class Pool:
    """A pool that has every response at once."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def generate(self, prompts: Sequence[Any], *_: Any) -> list[Response]:
        return [
            Response(np.array([sample]), np.zeros(1, np.float32), np.zeros(1, np.int32), FinishReason.LENGTH)
            for sample in range(len(prompts))
        ]

    def cancel(self, responses: Sequence[Response]) -> None:
        self.cancelled += len(responses)


async def no_reward(prompt: Prompt, responses: Sequence[Any]) -> list[Reward]:
    return [Reward(0.0)] * len(responses)


@pytest.mark.parametrize("broken_off", [False, True])
def test_groups_that_end_together_never_block_for_long(monkeypatch: pytest.MonkeyPatch, broken_off: bool):
    made: list[Trajectory] = []
    join_parts = single_turn.join_parts

    def counted(*args: Any) -> Trajectory:
        made.append(join_parts(*args))
        return made[-1]

    async def run() -> None:
        pool = Pool()
        workflow = SingleTurn(cast(Any, pool), no_reward, Sampling(1), SAMPLES)
        groups = [asyncio.create_task(workflow(Prompt(0, [1, 2]), group)) for group in range(2)]
        counts = [0]
        while not all(group.done() for group in groups):
            await asyncio.sleep(0)
            counts.append(len(made))
            if broken_off and len(made) > TRAJECTORIES:
                groups[0].cancel()
        assert max(np.diff(counts)) <= TRAJECTORIES
        assert pool.cancelled == broken_off * SAMPLES
        for group_id, group in enumerate(groups[broken_off:], broken_off):
            trajectories = group.result()
            assert [item.tokens.tolist() for item in trajectories] == [[1, 2, sample] for sample in range(SAMPLES)]
            assert {item.group_id for item in trajectories} == {group_id}

    monkeypatch.setattr(single_turn, "join_parts", counted)
    asyncio.run(asyncio.wait_for(run(), HUNG_S))
