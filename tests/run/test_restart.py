"""Real servers of a run that die and hang: both are started again and join, and the run never stops."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Run, run

TWO_SERVERS = ("actor.backend=megatron:d1", "rollout.backend=sglang:d2", "cluster.n_gpus_per_node=3")
ENDLESS = (
    *("total_train_epochs=10000", "total_train_steps=null", "warm_start=null"),
    *("evaluator.at_start=false", "evaluator.at_end=false"),
    *("actor.init_model.num_hidden_layers=1", "actor.init_model.hidden_size=64", "train_dataset.batch_size=2"),
    *("rollout.request_timeout_s=45", "weight_update.timeout_s=90"),
)
HUNG_S = 400


def serving(started: Run) -> list[float]:
    """How many servers held the weights at each step."""
    lines = (started.directory / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["rollout/servers"] for row in rows if "rollout/servers" in row]


def wait(started: Run, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HUNG_S
    while not what():
        assert started.process.poll() is None, started.output + started.errors
        assert time.monotonic() < deadline, started.output
        started.observe()
        time.sleep(0.2)


@pytest.mark.long
def test_a_server_that_dies_and_one_that_hangs_are_started_again(tmp_path: Path) -> None:
    with run(tmp_path, *TWO_SERVERS, *ENDLESS) as started:
        started.wait_for_step(2)
        for log, signals in (("server-0.log", signal.SIGKILL), ("server-1.log", signal.SIGSTOP)):
            before = len(serving(started))
            for process in started.find(log):
                os.kill(process.pid, signals)
            wait(started, lambda at=before: 1.0 in serving(started)[at:])
            wait(started, lambda at=before: serving(started)[at:][-3:] == [2.0] * 3)
        assert re.search("server-0 ended with exit code -9.*; 1 others go on, and it is started again", started.output)
        assert "server 1 did nothing although it had" in started.output
        assert "server 0 runs again as server 2" in started.output
        assert "server 1 runs again as server 3" in started.output
        os.killpg(started.process.pid, signal.SIGINT)
        assert started.end() == 130
        assert started.remains() == []
