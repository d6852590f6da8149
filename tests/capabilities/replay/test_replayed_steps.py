"""Steps of runs with real trainers are computed again: the same bits, other layouts, other settings, planted faults."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from limits import HUNG_S
from safetensors.numpy import load_file, save_file

from areal_like.capabilities.replay.arrays import to_arrays
from areal_like.capabilities.replay.reader import open_run
from areal_like.capabilities.replay.step_file import TRAJECTORIES, path_of, write_step
from areal_like.capabilities.replay.verdicts import ReplayVerdict, ask, audit, compare_runs, counterfactual, verify
from areal_like.checkpoint.journal import count_steps
from areal_like.errors import CheckpointError
from areal_like.types import Trajectory

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("synthetic_run.py")
STEPS, KILLED = 8, 5

pytestmark = pytest.mark.long


def start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """The command of a run; it resumes one that was killed."""
    command = [
        sys.executable,
        str(SCRIPT),
        str(folder),
        f"total_train_steps={STEPS}",
        "recover.freq_steps=3",
        *overrides,
    ]
    with (folder / "output.txt").open("ab") as output:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def finish(folder: Path, *overrides: str) -> Path:
    """Run to the end; the run's directory."""
    output = folder / "output.txt"
    for _ in range(3):  # Ray may not start on a machine that is too busy
        before = output.stat().st_size if output.exists() else 0
        if (ended := start(folder, *overrides).wait(HUNG_S)) == 0 or "timed out" not in output.read_text()[before:]:
            break
    assert ended == 0, output.read_text()
    return folder / "test/run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on Megatron that was killed once."""
    folder = tmp_path_factory.mktemp("run")
    journal, began = folder / "test/run/recover/journal.jsonl", time.monotonic()
    started = start(folder)
    while not journal.exists() or count_steps(journal) < KILLED:
        assert started.poll() is None, (folder / "output.txt").read_text()
        assert time.monotonic() - began < HUNG_S
        time.sleep(0.1)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    return finish(folder)


def replayed(run: Path, first: int, last: int, *overrides: str, log_probs: bool = False) -> ReplayVerdict:
    return asyncio.run(verify(ask(run, first, last, overrides, lambda text: None), log_probs=log_probs))


def test_every_step_of_a_killed_run_has_the_same_bits(run):
    """From the beginning, so that a resume that changed a bit would be seen; the labels are those of the weights."""
    verdict = replayed(run, 1, STEPS, log_probs=True)
    assert verdict.good, verdict
    assert verdict.text.startswith("equal: steps 1 to 8, computed again from the beginning of the run")
    assert verdict.warnings == []


def test_a_step_is_computed_from_the_nearest_checkpoint(run):
    verdict = replayed(run, STEPS, STEPS)
    assert verdict.good, verdict
    assert "recover/step-6" in verdict.text
    assert {row[0] for row in verdict.rows} >= {"loss", "grad_norm", "actor weights", "actor optimizer state"}


@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:t2"])
def test_another_layout_agrees_up_to_rounding(run, layout):
    verdict = replayed(run, 7, STEPS, f"actor.backend={layout}")
    assert verdict.good, verdict
    assert verdict.text.startswith("equal up to rounding")
    assert any("is replayed as" in text for text in verdict.warnings)


def test_fsdp_has_the_same_bits(tmp_path):
    run = finish(tmp_path, "actor.backend=fsdp:d2", "total_train_steps=3")
    verdict = replayed(run, 1, 3)
    assert verdict.good, verdict
    assert verdict.text.startswith("equal: steps 1 to 3")


@pytest.mark.parametrize(
    "change",
    [
        "actor.optimizer.lr=0.01",
        "actor.loss_agg_mode=sequence_mean",  # the loss
    ],
)
def test_other_settings_part_from_the_run(run, change):
    verdict = asyncio.run(counterfactual(ask(run, 7, STEPS, [change], lambda text: None), None))
    assert verdict.text.startswith("the runs part at step 7, first in "), verdict
    for row in verdict.rows:
        assert row[1] != row[2], "the loss, of which the second mini-batch sees other weights"
        assert float(row[-1]) > 0, "the divergence"


def test_old_samples_can_be_left_out(run):
    asked = ask(run, 7, 7, [], lambda text: None)
    assert "part at step 7" in asyncio.run(counterfactual(asked, 0)).text
    assert asyncio.run(counterfactual(asked, 9)).text.startswith("equal bits")


@pytest.fixture
def copied(run, tmp_path):
    """A copy of the run, to plant faults in."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def plant(run: Path, step: int, change) -> None:
    """Have a step's record be one of a run that trained other trajectories."""
    found = open_run(run).step(step).file
    arrays, texts = to_arrays([change(number, item) for number, item in enumerate(found.trajectories())])
    whole = {**found.arrays, **{TRAJECTORIES + name: array for name, array in arrays.items()}}
    write_step(open_run(run).folder, whole, {**found.about, "texts": texts})


def test_a_changed_log_prob_is_named(copied):
    def change(number: int, item: Trajectory) -> Trajectory:
        logprobs = item.logprobs.copy()
        logprobs[6] += np.float32(0.01 if number == 2 else 0)
        return replace(item, logprobs=logprobs)

    plant(copied, 8, change)
    verdict = replayed(copied, 8, 8, log_probs=True)
    assert not verdict.good
    told = [verdict.text, *verdict.warnings]
    assert any("step 8: token 6 of trajectory 2" in text and "has a log-prob" in text for text in told), verdict


def test_a_wrong_version_label_between_right_ones_is_named(copied):
    """All tokens of a sequence have the label of another version in the bound, which only the weights tell."""
    right = int(open_run(copied).step(8).file.trajectories()[1].versions[-1])
    wrong = 6 if right == 5 else 5

    def change(number: int, item: Trajectory) -> Trajectory:
        versions = np.where((item.versions >= 0) & (number == 1), wrong, item.versions).astype(np.int32)
        return replace(item, versions=versions)

    plant(copied, 8, change)
    verdict = replayed(copied, 8, 8, log_probs=True)
    told = [verdict.text, *verdict.warnings]
    assert any(f"is labelled version {wrong}, but the weights of version {right}" in text for text in told), verdict


def test_a_changed_file_is_named_before_anything_else(copied):
    path = path_of(open_run(copied).folder, 8)
    arrays, metadata = load_file(path), {"areal_like.replay": json.dumps(dict(open_run(copied).step(8).file.about))}
    arrays["trajectories/versions"][7] = 1
    save_file(arrays, path, metadata)
    verdict = replayed(copied, 8, 8)
    assert not verdict.good
    assert verdict.text.startswith("step 8: trajectories/versions is 1 at token 7 of trajectory 0")
    assert not audit(copied).good


def flip(checkpoint: Path) -> Path:
    """Flip one bit of a weight in a checkpoint."""
    file = max((checkpoint / "actor").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    weights = open_run(checkpoint.parents[1]).path / "recover"
    assert weights.exists()
    data[len(data) // 2] ^= 16
    file.write_bytes(bytes(data))
    return file


def test_a_flipped_bit_in_a_checkpoint_is_named(copied):
    """By the file's checksum; without it by the tensor, and an earlier checkpoint is used where there is one."""
    checkpoint = copied / "recover/step-6"
    file = flip(checkpoint)
    verdict = audit(copied)
    assert file.name in verdict.text
    (copied / "recover/replay/step-6.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-6 is damaged: .* of actor rank \d"):
        replayed(copied, 8, 8)


def test_a_damaged_checkpoint_is_replaced_by_an_earlier_place(copied):
    flip(copied / "recover/step-6")
    verdict = replayed(copied, 8, 8)
    assert verdict.good, verdict
    assert "the beginning of the run" in verdict.text


def test_two_runs_part_at_the_first_difference(copied, run):
    assert compare_runs(run, copied).good

    def change(number: int, item: Trajectory) -> Trajectory:
        return replace(item, reward=1.5 if number == 3 else item.reward)

    plant(copied, 4, change)
    verdict = compare_runs(run, copied)
    assert not verdict.good
    assert verdict.text.startswith("the runs first differ at step 4 in trajectories/reward")


def test_recorded_steps_that_are_gone_are_explained(copied):
    for step in (1, 2):
        path_of(open_run(copied).folder, step).unlink()
    with pytest.raises(CheckpointError, match=r"recover\.replay_keep"):
        replayed(copied, 3, 3)
    assert replayed(copied, 7, 7).good


def test_another_version_of_the_code_is_a_warning(copied):
    found = open_run(copied).step(8).file
    write_step(open_run(copied).folder, dict(found.arrays), {**found.about, "program": "0.0.1"})
    verdict = replayed(copied, 8, 8)
    assert verdict.good
    assert any("0.0.1" in text for text in verdict.warnings)
