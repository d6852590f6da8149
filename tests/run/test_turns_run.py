"""A whole run with time-shared GPUs and weights over IPC; on CPU no memory is released."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import run

pytestmark = pytest.mark.covers("time-shared", "updates: IPC", "colocated")

# On CPU there is no memory to take turns on, so such a run is refused there.
SCRIPT = """
import sys
from areal_like.preflight import sharing
sharing._turns = lambda *_: ()
from areal_like.cli import app
if __name__ == "__main__":
    app()
"""
STEPS = 3
TURNS = (
    *("rollout.sharing=alternate", "weight_update.mode=ipc", "weight_update.requests=in_place"),
    *("actor.backend=null", "rollout.backend=null", "allocation_mode=sglang:d1|megatron:d1"),
    *("rollout.max_head_offpolicyness=2", "gconfig.max_new_tokens=48", "evaluator.freq_steps=1", "warm_start.steps=2"),
    *(f"total_train_steps={STEPS}", "weight_update.bucket_mb=1", "saver.freq_steps=1", "recover.mode=auto"),
)


@pytest.mark.long
def test_a_run_whose_ends_take_turns_trains_and_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    with run(tmp_path, *TURNS, script=script) as started:
        assert started.end() == 0, started.errors
        assert started.steps() == [1, 2, 3]
        assert started.remains() == []
    steps = [json.loads(line) for line in (started.directory / "metrics.jsonl").read_text().splitlines()]
    print(steps[-1])
    events = [json.loads(line) for line in (started.directory / "events.jsonl").read_text().splitlines()]
    turns = [event["name"] for event in events if event.get("name", "").startswith("time slice of")]
    assert turns == [*["time slice of the trainer", "time slice of the servers"] * (STEPS + 1)], turns
