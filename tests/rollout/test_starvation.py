"""However unequal responses are, what is trained is the dataset's, in an order that is nearly its own."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import HUNG_S

from areal_like.core.rollout.admission import Admission
from areal_like.core.rollout.collector import Collector
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import FinishReason, Prompt, Trajectory


class Clock:
    """Time that passes when everybody waits, so that hours take none."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, asyncio.Event]] = []
        self._numbers = itertools.count()

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        heapq.heappush(self._waiting, (self.now + seconds, next(self._numbers), event))
        await event.wait()

    async def tick(self) -> None:
        while True:
            for _ in range(20):  # until everybody waits
                await asyncio.sleep(0)
            if self._waiting:
                self.now, _, event = heapq.heappop(self._waiting)
                event.set()


async def trained(
    lengths: Sequence[int], steps: int, batch: int, eta: int, most: int | None, spare: int = 0
) -> tuple[list[list[int]], Collector, float]:
    """Ids of the groups of each step, and how long it took; prompt i takes `lengths[i]` seconds, a step takes 10."""
    clock = Clock()

    async def workflow(prompt: Prompt, group_id: int) -> list[Trajectory]:
        await clock.sleep(lengths[prompt.sample_id])
        made = np.zeros(3, np.int32)
        return [Trajectory(prompt.sample_id, group_id, made, made.astype(np.float32), made, FinishReason.STOP, 1.0)]

    async with asyncio.timeout(HUNG_S), asyncio.TaskGroup() as tasks:
        ticking = tasks.create_task(clock.tick())
        collector = Collector(
            prompts=PromptStream([Prompt(row, [row]) for row in range(len(lengths))], shuffle=False, seed=0),
            groups=steps * batch,
            workflow=workflow,
            admission=Admission(batch, eta, spare=spare),
            max_groups=most,
            tasks=tasks,
        )
        taken = []
        for version in range(steps):
            collector.publish(version)
            taken.append([item.group_id for item in await collector.next_batch()])
            await clock.sleep(10)
        ticking.cancel()
    return taken, collector, clock.now


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 6),
    eta=st.integers(0, 4),
    most=st.one_of(st.none(), st.integers(1, 8)),
    sigma=st.floats(0, 4),
)
def test_every_prompt_is_trained_once_per_pass_and_hardly_later_or_earlier_than_in_order(
    seed: int, batch: int, eta: int, most: int | None, sigma: float
):
    """Lengths from 1 to 100,000 and more: a slow group is trained at the step that is its place plus the bound."""
    steps = 8
    lengths = np.random.default_rng(seed).lognormal(3, sigma, steps * batch // 2 or 1).astype(int).tolist()
    taken, collector, _ = asyncio.run(trained(lengths, steps, batch, eta, most))
    assert sorted(group for step in taken for group in step) == list(range(steps * batch)), "each exactly once"
    for step, groups in enumerate(taken):
        for group in groups:
            ideal = group // batch
            assert ideal - eta <= step
            if most is None:
                assert step <= max(ideal, eta)
    rows = Counter(group % len(lengths) for step in taken for group in step)
    assert max(rows.values()) - min(rows.values()) <= 1, "each prompt as often as the dataset has it"
    assert collector.dropped == 0


def test_with_eta_the_mean_length_of_what_is_trained_settles_at_the_datasets():
    """Short ones are trained first, at most `eta` steps early; it never adds up."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(3, 1.5, 4000).astype(int).tolist()
    taken, _, _ = asyncio.run(trained(lengths, 100, 8, 4, None))
    sums = np.cumsum([sum(lengths[group] for group in step) for step in taken])
    ideal = np.cumsum([sum(lengths[8 * step : 8 * step + 8]) for step in range(100)])
    behind = ideal - sums  # seconds of work that the order of the dataset would have trained by now
    assert behind[-1] == 0
    assert behind.max() <= max(sum(lengths[8 * step : 8 * (step + 5)]) for step in range(96)), "of five steps at most"


@pytest.mark.parametrize("eta", [0, 1])
def test_oversampling_is_quicker_and_trains_shorter_responses_as_its_description_says(eta: int):
    lengths = np.random.default_rng(1).lognormal(3, 1.5, 1000).astype(int).tolist()
    means, seconds = [], []
    for spare in (0, 4):
        taken, collector, took = asyncio.run(trained(lengths, 40, 8, eta, None, spare))
        assert [len(step) for step in taken] == [8] * 40
        assert len({group for step in taken for group in step}) == 320
        assert collector.dropped == collector.started - 320
        means.append(np.mean([lengths[group] for step in taken for group in step]))
        seconds.append(took)
    assert seconds[1] < 0.8 * seconds[0]
    assert means[1] < 0.8 * means[0]
