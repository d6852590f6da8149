"""A trainer that loses a rank restarts by itself from the last checkpoint, and the servers keep running."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from running import run

from areal_like.core.checkpoint.journal import Journal, read_header
from areal_like.core.checkpoint.store import DIRECTORY, JOURNAL, newest

pytestmark = [pytest.mark.long, pytest.mark.covers("resume after SIGKILL")]

STEPS, BATCH = 10, 2
TINY = (
    *("recover.mode=auto", "recover.freq_steps=2", f"total_train_steps={STEPS}", f"train_dataset.batch_size={BATCH}"),
    *("gconfig.n_samples=2", "warm_start=null", "evaluator.freq_steps=3", "evaluator.at_start=false"),
    *("actor.init_model.num_hidden_layers=1", "actor.init_model.hidden_size=64", "actor.ppo_n_minibatches=1"),
    *("valid_dataset.arithmetic.size=8", "actor.backend=megatron:d2"),
)


def test_a_trainer_that_loses_a_rank_restarts_while_its_servers_keep_running(tmp_path: Path) -> None:
    with run(tmp_path, *TINY) as started:
        started.wait_for_step(3)
        servers, ranks = started.find("server-0.log"), started.find("actor-1.log")
        ranks[0].kill()
        started.wait_for(lambda: "The trainer restarts from the last checkpoint" in started.output)
        started.wait_for(lambda: len(started.steps()) > len(set(started.steps())) or STEPS in started.steps())
        assert servers == started.find("server-0.log")[: len(servers)]
        assert started.end() == 0, started.errors
        assert started.remains() == []
    assert re.search(r"actor rank 1: the process died .*\(recover.restarts_per_hour=3\)", started.output)
    assert re.search(rf"resuming from {started.directory / DIRECTORY}/step-\d+, after step", started.output)
    file = started.directory / DIRECTORY / JOURNAL
    steps = Journal(file, read_header(file)["data"]).steps()
    assert [step.version for step in steps] == list(range(1, STEPS + 1))
    assert sorted(group for step in steps for group in step.groups) == list(range(STEPS * BATCH))
    found, _ = newest(started.directory / DIRECTORY)
    assert found and (found.state.version, found.state.untrained) == (STEPS, ())
    rows = [json.loads(line) for line in (started.directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "seconds/step" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "reward/held_out" in row] == [3, 6, 9, STEPS]
