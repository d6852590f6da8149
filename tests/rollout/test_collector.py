"""Groups that the algorithm does not keep are replaced, and not for ever; a resumed run generates some again."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any, cast

import numpy as np
import pytest
from limits import HUNG_S

from areal_like.core.rollout.admission import Admission
from areal_like.core.rollout.collector import STARTED, Collector
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import FinishReason, Prompt, Trajectory

PROMPTS = [Prompt(row, [row]) for row in range(5)]


async def batches(rewards: list[float], groups: int, **settings: Any) -> tuple[list[list[int]], Collector]:
    """The ids of the groups of each batch of 2; group i has reward `rewards[i]`, the last one's from there on."""

    async def workflow(prompt: Prompt, group_id: int) -> list[Trajectory]:
        await asyncio.sleep(0)
        made, reward = np.zeros(3, np.int32), rewards[min(group_id, len(rewards) - 1)]
        return [Trajectory(0, group_id, made, made.astype(np.float32), made, FinishReason.STOP, reward)]

    async with asyncio.timeout(HUNG_S), asyncio.TaskGroup() as tasks:
        collector = Collector(
            prompts=PromptStream(PROMPTS, shuffle=True, seed=3),
            groups=groups,
            workflow=workflow,
            admission=Admission(2, 0),
            max_groups=None,
            tasks=tasks,
            **settings,
        )
        taken = []
        for version in range(groups // 2):
            collector.publish(version)
            taken.append([item.group_id for item in await collector.next_batch()])
    return taken, collector


def kept(group: Any) -> bool:
    return bool(group[0].reward > 0)


@pytest.mark.parametrize(
    ("rewards", "max_drops", "expected", "dropped"),
    [
        ([0, 1, 0, 0, 1, 1, 1], 9, [[1, 4], [5, 6]], 3),
        ([1], 9, [[0, 1], [2, 3]], 0),
        ([0], 3, [[3, 7], [11, 15]], 12),  # every fourth in a row is kept
        ([0, 0, 1, 0], 2, [[2, 5], [8, 11]], 8),  # one that is kept anyway lets two more be dropped
        ([0], 0, [[0, 1], [2, 3]], 0),
    ],
)
def test_a_group_that_is_not_kept_is_replaced(
    rewards: list[float], max_drops: int, expected: list[list[int]], dropped: int
) -> None:
    taken, collector = asyncio.run(batches(rewards, 4, keeps=kept, max_drops=max_drops))
    assert taken == expected
    assert collector.dropped == dropped
    assert collector.tokens_generated == 3 * (4 + dropped)


def test_rare_informative_groups_are_most_of_what_is_trained():
    """One group in twenty tells something: 64 in a row that do not are no reason to train on the next twenty."""
    uninformative, groups = 0, 400
    own = Collector(
        prompts=cast(Any, None),
        groups=groups,
        workflow=cast(Any, None),
        admission=cast(Any, None),
        max_groups=None,
        tasks=cast(Any, None),
        keeps=lambda group: cast(Any, group),
        max_drops=64,
    )
    chance, trained = random.Random(0), 0
    while trained < groups:
        tells = chance.random() < 0.05
        if not own._is_dropped(cast(Any, tells)):
            trained, uninformative = trained + 1, uninformative + (not tells)
    assert 0 < uninformative < 0.08 * groups


async def answer(prompt: Prompt, group_id: int) -> list[Trajectory]:
    tokens = np.array([0, 1], np.int32)
    logprobs, versions = np.zeros(2, np.float32), np.array([-1, 0], np.int32)
    return [Trajectory(prompt.sample_id, group_id, tokens, logprobs, versions, FinishReason.STOP, 1.0)]


def collector(tasks: asyncio.TaskGroup, version: int = 0, **settings) -> Collector:
    stream = PromptStream(PROMPTS, shuffle=True, seed=3)
    admission = Admission(2, 1, version)
    return Collector(
        prompts=stream, groups=12, workflow=answer, admission=admission, max_groups=None, tasks=tasks, **settings
    )


def test_groups_that_were_not_trained_come_first_with_their_own_prompts() -> None:
    async def run() -> tuple[list[Trajectory], list[int], list[Trajectory]]:
        async with asyncio.TaskGroup() as tasks:
            first = collector(tasks)
            trained = [item for version in (0, 1) for item in await batch(first, version)]
            left, started = first.untrained, first.started
            second = collector(tasks, version=2, again=left, started=started)
            assert second.untrained == left
            trained_later = [item for version in range(2, 6) for item in await batch(second, version)]
        return trained, left, trained_later

    trained, left, later = asyncio.run(run())
    assert [item.group_id for item in trained + later] == list(range(12))
    assert left == [4, 5, 6, 7]
    whole = PromptStream(PROMPTS, shuffle=True, seed=3)
    assert [item.sample_id for item in trained + later] == [whole[place].sample_id for place in range(12)]


async def batch(collector: Collector, version: int) -> list[Trajectory]:
    collector.publish(version)
    taken = await collector.next_batch()
    collector.publish(version + 1)
    return taken


def test_a_group_that_ends_as_it_is_given_up_is_dropped_with_its_tokens() -> None:
    """A workflow may return although it was broken off."""

    async def stubborn(prompt: Prompt, group_id: int) -> list[Trajectory]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0 if group_id else 60)
        return await answer(prompt, group_id)

    async def run() -> Collector:
        async with asyncio.TaskGroup() as tasks:
            stream, admission = PromptStream(PROMPTS, shuffle=True, seed=3), Admission(2, 0, spare=1)
            spared = Collector(
                prompts=stream, groups=3, workflow=stubborn, admission=admission, max_groups=None, tasks=tasks
            )
            assert {item.group_id for item in await batch(spared, 0)} == {1, 2}
        return spared

    spared = asyncio.run(run())
    assert (spared.dropped, spared.tokens_dropped, spared.tokens_generated) == (1, 1, 4)
    assert (spared.newly_dropped(), spared.newly_dropped()) == (1, 0)


def test_thousands_of_groups_start_in_order_and_never_in_one_turn_of_the_event_loop() -> None:
    async def run() -> None:
        begun: list[int] = []

        async def workflow(prompt: Prompt, group_id: int) -> list[Trajectory]:
            begun.append(group_id)
            return await answer(prompt, group_id)

        async with asyncio.timeout(HUNG_S), asyncio.TaskGroup() as tasks:
            stream, admission = PromptStream(PROMPTS, shuffle=True, seed=3), Admission(1000, 1)
            many = Collector(
                prompts=stream, groups=3000, workflow=workflow, admission=admission, max_groups=None, tasks=tasks
            )
            many.publish(0)
            before = 0
            while len(begun) < 2000:
                await asyncio.sleep(0)
                assert len(begun) - before <= STARTED
                before = len(begun)
            assert many.tokens_waiting == sum(many._tokens.values())
            taken = [item.group_id for item in await many.next_batch()]
            many.publish(1)
            taken += [item.group_id for item in await many.next_batch()]
            assert (many.tokens_waiting, many.tokens_trained) == (sum(many._tokens.values()), 2000)
        assert taken == list(range(2000))
        assert begun == list(range(3000))
        assert many.tokens_waiting == 1000

    asyncio.run(run())
