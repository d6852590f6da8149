"""Ctrl-C saves a checkpoint of the last step, and the same command resumes there, without a name too."""

from __future__ import annotations

import signal
import stat
from pathlib import Path

import pytest
from running import run

from areal_like.core.checkpoint.store import DIRECTORY, newest

TINY = (
    *(
        "trial_name=",
        "recover.mode=auto",
        "total_train_steps=400",
        "train_dataset.batch_size=2",
        "gconfig.n_samples=2",
        "actor.backend=megatron:d1",
    ),
    *("warm_start=null", "evaluator.at_start=false", "evaluator.at_end=false", "actor.ppo_n_minibatches=1"),
    *("actor.init_model.num_hidden_layers=1", "actor.init_model.hidden_size=64", "total_train_epochs=100"),
)


@pytest.mark.long
def test_the_same_command_resumes_after_an_interrupt(tmp_path: Path) -> None:
    saved = 0
    for _ in range(2):
        with run(tmp_path, *TINY) as started:
            started.wait_for_step(saved + 3)
            started.process.send_signal(signal.SIGINT)
            assert started.end() == 130
            (directory,) = (tmp_path / "runs/test").iterdir()
            found = newest(directory / DIRECTORY)[0]
            assert found is not None and found.state.version == max(started.steps()) > saved
            assert f"resuming from {directory / DIRECTORY / f'step-{saved}'}" in started.output or not saved
            saved = found.state.version
    modes = [path for path in [directory, *directory.rglob("*")] if stat.S_IMODE(path.lstat().st_mode) & 0o077]
    assert [path for path in modes if not path.is_symlink()] == []
