"""One console line when most groups are dropped or the trainer mostly waits, with the key to change."""

from __future__ import annotations

import pytest

from areal_like.config.keys import annotation_of
from areal_like.metrics.waiting import REPEAT_S, WaitingNotes, explain

WAITS = {"seconds/step": 100.0, "seconds/wait_for_rollouts": 80.0, "idle/servers": 0.1}


@pytest.mark.parametrize(
    ("scalars", "agents", "keys"),
    [
        ({"rollout/dropped_groups": 259.0}, False, ["train_dataset.curriculum", "gconfig.n_samples"]),
        ({"reward/queue_seconds_mean": 40.0}, False, ["reward.workers"]),
        ({"rollout/queue_seconds_mean": 40.0}, False, ["rollout.backend"]),
        ({"idle/servers": 0.9}, True, ["rollout.max_concurrent_rollouts", "rollout.max_head_offpolicyness"]),
        ({"idle/servers": 0.9}, False, ["rollout.max_head_offpolicyness", "train_dataset.batch_size"]),
        ({"rollout/longest_seconds": 75.0}, False, ["gconfig.max_new_tokens", "rollout.oversampling"]),
        ({}, False, ["rollout.backend"]),
    ],
)
def test_the_cause_names_existing_keys(scalars: dict[str, float], agents: bool, keys: list[str]) -> None:
    said = explain(WAITS | scalars, 4, agents=agents)
    assert said is not None
    for key in keys:
        assert key in said and annotation_of(key) is not None


@pytest.mark.parametrize("scalars", [{"seconds/wait_for_rollouts": 40.0}, {"seconds/wait_for_rollouts": 0.0}])
def test_a_busy_trainer_is_not_mentioned(scalars: dict[str, float]) -> None:
    assert explain(WAITS | scalars | {"rollout/dropped_groups": 4.0}, 4, agents=False) is None


def test_a_line_is_repeated_after_ten_minutes_at_the_earliest() -> None:
    said, time = list[str](), [0.0]
    notes = WaitingNotes(4, False, said.append, clock=lambda: time[0])
    for step, present in enumerate((0.0, 1.0, 2.0, REPEAT_S, 1.0 + REPEAT_S), 1):
        time[0] = present
        notes.log(step, WAITS)
        notes.log(step, {"reward/held_out": 0.5})
    assert [line.partition(":")[0] for line in said] == ["step 2", "step 5"]
