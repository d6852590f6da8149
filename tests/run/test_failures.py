"""However a run ends, nothing of it stays, and its message names what failed first."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from limits import HUNG_S
from running import Run, run

ENDLESS = ("total_train_epochs=10000", "total_train_steps=null", "evaluator.at_start=false", "warm_start=null")


def crash_rank_within_save(started: Run) -> None:
    wait_for_weights(started)
    started.find("actor-1.log")[0].kill()


def crash_server(started: Run) -> None:
    started.find("server-0.log")[0].kill()


def interrupt(started: Run) -> None:
    os.killpg(started.process.pid, signal.SIGINT)  # as a terminal does


def terminate(started: Run) -> None:
    os.killpg(started.process.pid, signal.SIGTERM)  # as timeout, Slurm and systemd do


def kill_within_weight_update(started: Run) -> None:
    wait_for_weights(started)
    started.process.kill()


def wait_for_weights(started: Run) -> None:
    """Return as soon as a file of weights is on its way."""
    deadline = time.monotonic() + 600
    while not any(started.weights.glob("*")):
        assert time.monotonic() < deadline, "no weights are written"
        time.sleep(0.001)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stop", "mode", "code", "message"),
    [
        (
            crash_rank_within_save,
            "collective",
            1,
            r"The run failed: actor rank 1 failed during [\w -]+: the process died",
        ),
        (
            crash_server,
            "collective",
            1,
            r"The run failed: rollout rank 0 failed during serving: .*server-0 ended with exit code -9",
        ),
        (interrupt, "disk", 130, "Interrupted. Every process of the run has ended."),
        (terminate, "collective", 143, "Terminated. Every process of the run has ended."),
        (kill_within_weight_update, "disk", -signal.SIGKILL, ""),
    ],
    ids=["rank", "server", "Ctrl-C", "SIGTERM", "SIGKILL"],
)
def test_a_run_that_does_not_finish(
    tmp_path: Path, stop: Callable[[Run], None], mode: str, code: int, message: str
) -> None:
    with run(tmp_path, *ENDLESS, f"weight_update.mode={mode}", "saver.freq_steps=1") as started:
        started.wait_for_step(3)
        stop(started)
        ended = started.end(HUNG_S)
        assert started.remains() == []
    assert "Traceback" not in started.errors
    if stop is terminate and ended == 1:  # Ray ends its driver if it notices first that its node is gone
        return
    assert ended == code, started.errors
    assert re.match(message, started.errors)
