"""Whole runs with algorithms whose parts are tested alone elsewhere: turns as samples, tapered off-policy REINFORCE."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from guessing_agent import TURNS
from running import run

AGENT = (
    f"workflow={Path(__file__).with_name('guessing_agent.py')}:run",
    *("episode.max_tokens=120", "gconfig.max_new_tokens=8", "actor.turns_per_minibatch=16"),
)
STEPS = (*("total_train_steps=3", "warm_start.steps=2"), "actor.optimizer.lr_scheduler_type=linear")


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm=topr", "actor.optimizer.lr_decay_steps=6"),
        ("algorithm=turn_reinforce", "actor.optimizer.lr_decay_steps=12", *AGENT),
        ("algorithm=gigpo", "actor.optimizer.lr_decay_steps=12", "actor.state_coef=0.5", *AGENT),
    ],
    ids=["topr", "turn_reinforce", "gigpo"],
)
def test_a_run_trains(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    with run(tmp_path, *STEPS, *overrides) as started:
        assert started.end() == 0, started.output + started.errors
        assert started.steps() == [1, 2, 3]
        assert started.remains() == []
    rows = [json.loads(line) for line in (started.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/grad_norm" in row]
    print(steps[-1])
    assert len(steps) == 3
    assert all(math.isfinite(row["train/grad_norm"]) for row in steps)
    assert any(row["train/grad_norm"] > 0 for row in steps)  # a step whose rewards are all equal has none
    rates = [row["train/lr"] for row in steps]
    assert rates[0] > rates[-1] > 0  # falls to 0 after lr_decay_steps, which the run does not reach
    if AGENT[0] in overrides:
        turns = sum(n for row in rows for name, n in row.items() if name.startswith("turns/"))
        assert turns >= TURNS * sum(row.get("episodes/done", 0) for row in rows) > 0
        assert all(row["reward_parts/turns"] > 0 for row in steps)
