"""A killed or interrupted run goes on with the same command, and what it leaves is that of a run that was not."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
from running import ROOT, run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_like.core.checkpoint.journal import Journal, Step, read_header
from areal_like.core.checkpoint.store import DIRECTORY, JOURNAL, newest
from areal_like.core.config.load import load
from areal_like.core.rollout.stream import PromptStream
from areal_like.preflight import preflight

pytestmark = pytest.mark.covers("resume after SIGKILL")

STEPS, BATCH = 16, 2
TINY = (
    *("recover.mode=fault", "recover.freq_steps=2", f"total_train_steps={STEPS}", f"train_dataset.batch_size={BATCH}"),
    *("gconfig.n_samples=2", "warm_start=null", "evaluator.at_start=false", "evaluator.at_end=false"),
    *("actor.init_model.num_hidden_layers=1", "actor.init_model.hidden_size=64", "actor.ppo_n_minibatches=1"),
)


# at tokens of a response, and at turns of an agent
BRANCHES = {
    "tokens": ("rollout.branch={after: [1, 2]}",),
    "turns": (
        *("rollout.branch={after: [1], width: 4}", f"workflow={ROOT / 'examples/workflows/retry.py'}:run"),
        *("episode.max_tokens=110", "episode.max_turns=2"),
    ),
}


def steps_of(directory: Path) -> list[Step]:
    file = directory / DIRECTORY / JOURNAL
    return Journal(file, read_header(file)["data"]).steps()


def check_exactly_once(directory: Path) -> None:
    """Check that a run of `STEPS` steps has trained each group once, and nothing is left over."""
    state = newest(directory / DIRECTORY)[0].state
    assert (state.version, state.started, state.untrained) == (STEPS, STEPS * BATCH, ())
    steps = steps_of(directory)
    assert [step.version for step in steps] == list(range(1, STEPS + 1))
    assert sorted(group for step in steps for group in step.groups) == list(range(STEPS * BATCH))


def test_a_killed_run_goes_on_in_another_layout_and_after_ctrl_c(tmp_path: Path) -> None:
    settings = (*TINY, "recover.mode=auto")
    with run(tmp_path, *settings, "actor.backend=megatron:d2") as first:
        first.wait_for_step(4)
        os.killpg(first.process.pid, signal.SIGKILL)
        assert first.end() == -signal.SIGKILL
    with run(tmp_path, *settings, "actor.backend=megatron:t2") as interrupted:
        interrupted.wait_for(interrupted.steps)
        interrupted.process.send_signal(signal.SIGINT)
        assert interrupted.end() == 130, interrupted.errors
    saved = newest(interrupted.directory / DIRECTORY)[0].state.version
    assert saved == max(interrupted.steps()) and min(interrupted.steps()) > 1
    with run(tmp_path, *settings, "actor.backend=megatron:t2") as second:
        assert second.end() == 0, second.errors
        assert [*first.remains(), *interrupted.remains(), *second.remains()] == []

    check_exactly_once(second.directory)
    assert f"resuming from {second.directory / DIRECTORY / f'step-{saved}'}" in second.output
    assert min(second.steps()) == saved + 1
    modes = [path for path in second.directory.rglob("*") if not path.is_symlink()]
    assert [path for path in modes if stat.S_IMODE(path.stat().st_mode) & 0o077] == []

    steps = steps_of(second.directory)
    loaded = load(second.directory / "config.yaml", ["trial_name=other"])
    prompts = PromptStream(preflight(loaded).job.train_prompts, shuffle=True, seed=loaded.config.seed)
    assert all(
        prompts[group].sample_id == row for step in steps for group, row in zip(step.groups, step.samples, strict=True)
    )

    events = EventAccumulator(str(second.directory / "tensorboard"))
    events.Reload()
    for tag in ("train/lr", "reward/mean", "staleness/max"):
        assert [event.step for event in events.Scalars(tag)] == list(range(1, STEPS + 1)), tag
    rates = [event.value for event in events.Scalars("train/lr")]
    optimizer = loaded.config.actor.optimizer
    whole = optimizer.lr * (1 - (1 - optimizer.min_lr_ratio) * np.arange(STEPS) / STEPS)
    assert rates == pytest.approx(list(whole), rel=1e-5)
    summary = json.loads((second.directory / "summary.json").read_text())
    assert (summary["steps"], list(summary["rewards"])) == (STEPS, [str(step) for step in range(1, STEPS + 1)])
    assert len(list((second.directory / DIRECTORY).glob("step-*"))) == 2


@pytest.mark.long
@pytest.mark.parametrize("branches", BRANCHES)
def test_a_killed_run_with_branches_trains_each_group_once(tmp_path: Path, branches: str) -> None:
    overrides = (*TINY, "gconfig.n_samples=4", "actor.backend=megatron:d1", *BRANCHES[branches])
    with run(tmp_path, *overrides) as first:
        first.wait_for_step(4)
        os.killpg(first.process.pid, signal.SIGKILL)
        assert first.end() == -signal.SIGKILL
    with run(tmp_path, *overrides) as second:
        assert second.end() == 0, second.errors
        assert [*first.remains(), *second.remains()] == []
    assert min(second.steps()) > 1
    check_exactly_once(second.directory)
