"""A curriculum is a function of the seed and of the results of each step; so a resumed run has the same stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.capabilities.curriculum.schema import CurriculumConfig
from areal_like.capabilities.curriculum.stream import Curriculum
from areal_like.core.checkpoint.journal import Step
from areal_like.core.loop.prompt_results import PromptResults, PromptValues, prompt_keys
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import FinishReason, Prompt, Trajectory

PROMPTS = [Prompt(row, [row], row={"level": row % 3}) for row in range(11)]
BLOCK = 3


def curriculum(ahead: int = 1, seed: int = 0, prompts: Sequence[Prompt] = PROMPTS, **keys: Any) -> Curriculum:
    config = CurriculumConfig(**keys)
    own = prompt_keys(prompts, config.field)
    return Curriculum(prompts, shuffle=True, seed=seed, config=config, keys=own, block=BLOCK, ahead=ahead)


def results_of(stream: Curriculum) -> PromptResults:
    return PromptResults(stream, PromptValues(prompt_keys(PROMPTS), 0.9))


def group(group_id: int, reward: float | None) -> Trajectory:
    made = np.zeros(2, np.int32)
    return Trajectory(0, group_id, made, made.astype(np.float32), made, FinishReason.STOP, reward)


def rows(stream: PromptStream, places: range) -> list[int]:
    return [stream.row(place) for place in places]


def test_without_results_it_is_the_plain_stream() -> None:
    plain, stream = PromptStream(PROMPTS, shuffle=True, seed=7), curriculum(seed=7)
    assert rows(stream, range(40)) == rows(plain, range(40))


def test_solved_and_hopeless_prompts_come_seldom() -> None:
    stream = curriculum(revisit=0.0)
    stream.observe(range(11), [0.0, 1.0, 0.05, 0.95, 0.5, 0.1, 0.9, 0.0, 1.0, 1.0, 1.0])
    assert set(rows(stream, range(60))) == {4, 5, 6}
    again = curriculum(revisit=0.3)
    again.observe(range(11), [0.0] * 10 + [0.5])
    counts = np.bincount(rows(again, range(600)), minlength=11)
    assert counts[10] > 2 * counts[:10].max() and counts[:10].min() > 0
    assert again.statistics()["curriculum/skipped"] > 0 == again.statistics()["curriculum/skipped"]


def test_prompts_that_are_all_outside_the_bounds_are_trained_nevertheless() -> None:
    stream = curriculum(revisit=0.0)
    stream.observe(range(11), [1.0] * 11)
    assert len(set(rows(stream, range(60)))) > 1


def test_later_results_bring_a_prompt_back() -> None:
    stream = curriculum(revisit=0.0, decay=0.5)
    stream.observe(range(11), [1.0] * 10 + [0.5])
    assert rows(stream, range(3)) == [10] * 3
    stream.observe([4], [0.0])  # 1/3 with the earlier 1 at half weight
    assert set(rows(stream, range(3, 30))) == {4, 10}


def test_rows_share_a_mean_by_a_column_or_by_equal_prompts() -> None:
    by_level = curriculum(revisit=0.0, field="level")
    by_level.observe([0, 1, 2], [1.0, 0.5, 0.0])
    assert {row % 3 for row in rows(by_level, range(40))} == {1}
    twins = [Prompt(row, [row // 2]) for row in range(6)]
    assert prompt_keys(twins).tolist() == [0, 0, 1, 1, 2, 2]
    mixed = [Prompt(0, [5]), Prompt(0, [5], dataset="other")]
    assert prompt_keys(mixed).tolist() == [0, 1]


def test_a_baseline_is_the_decayed_mean_with_the_overall_mean_as_one_more() -> None:
    values = PromptValues(prompt_keys(PROMPTS), 0.5)
    assert values.baselines([0, 1]).tolist() == [0, 0] and values.mean(0) is None
    values.observe([0, 1], [1.0, 0.0])
    np.testing.assert_allclose(values.baselines([0, 1, 2]), [0.75, 0.25, 0.5])
    values.observe([0], [0.0])
    overall = (0.5 * 1 + 0) / (0.5 * 2 + 1)
    np.testing.assert_allclose(values.baselines([0, 2]), [(0.5 + overall) / 2.5, overall])


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=90, max_size=90),
    drops=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    late=st.lists(st.integers(0, 8), min_size=6, max_size=6),
    ahead=st.integers(0, 3),
    seed=st.integers(0, 5),
)
def test_a_resumed_run_has_the_same_stream_from_every_step(rewards, drops, late, ahead, seed) -> None:
    """Groups may start early, because others were dropped; their rewards are those of their numbers."""

    def resumed(journal: list[Step], more: int) -> tuple[list[int], list[float], list[Step]]:
        stream = curriculum(ahead, seed)
        results = results_of(stream)
        results.resume(journal, len(journal))
        steps, next_group = list(journal), max((g for step in journal for g in step.groups), default=-1) + 1
        for version in range(len(journal) + 1, more + 1):
            stream.row(next_group + late[version - 1])  # what the servers start
            dropped = [(next_group + i, rewards[next_group + i] or 0.0) for i in range(drops[version - 1])]
            groups = [next_group + len(dropped) + i for i in range(BLOCK)]
            items = [group(number, rewards[number]) for number in groups]
            for number, reward in dropped:
                results.note_drop(number, reward)
            step = results.describe(version, groups, items)
            steps.append(Step.from_json(step.to_json()))
            next_group = groups[-1] + 1
        baselines = results.baselines(np.arange(BLOCK, dtype=np.int32)).tolist()
        return rows(stream, range(60)), baselines, steps

    places, baselines, whole = resumed([], 6)
    assert [step.samples for step in whole] == [[places[number] for number in step.groups] for step in whole]
    for stop in range(7):
        assert resumed(whole[:stop], 6) == (places, baselines, whole)


def test_the_stream_does_not_depend_on_when_groups_start() -> None:
    eager, lazy = results_of(curriculum(ahead=1)), results_of(curriculum(ahead=1))
    for results in (eager, lazy):
        results.resume([], 0)
    for version in range(1, 9):
        groups = list(range(BLOCK * (version - 1), BLOCK * version))
        rows(eager.stream, range(BLOCK * (version + 1)))  # all that may start before the step
        items = [group(number, float(number % 3 == 0)) for number in groups]
        assert eager.describe(version, groups, items) == lazy.describe(version, groups, items)
    assert rows(eager.stream, range(30)) == rows(lazy.stream, range(30))


def test_a_step_without_results_is_written_as_before() -> None:
    assert json.loads(Step(1, [0], [5]).to_json()) == {"version": 1, "groups": [0], "samples": [5]}


def test_a_run_without_values_has_no_baselines() -> None:
    with pytest.raises(ValueError, match="no values"):
        PromptResults(PromptStream(PROMPTS, shuffle=False, seed=0)).baselines(np.zeros(1, np.int32))
