"""Steps of runs with real trainers are computed again: the same bits, other layouts, other settings, planted faults."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from launched_otherwise import EXPERTS
from limits import HUNG_S
from safetensors.numpy import load_file, save_file

from areal_like.capabilities.replay import evaluation
from areal_like.capabilities.replay.arrays import to_arrays
from areal_like.capabilities.replay.reader import open_run
from areal_like.capabilities.replay.step_file import TRAJECTORIES, path_of, write_step
from areal_like.capabilities.replay.verdicts import ReplayVerdict, ask, audit, compare_runs, counterfactual, verify
from areal_like.core.checkpoint.journal import count_steps
from areal_like.core.errors import CheckpointError
from areal_like.core.types import Trajectory

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("synthetic_run.py")
STEPS, KILLED, TRIES = 8, 5, 3
NARROW = ("actor.eps_clip=0.001", "actor.eps_clip_higher=0.001")  # so narrow that tokens leave the range

pytestmark = pytest.mark.long


def start(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """The command of a run; it resumes one that was killed."""
    command = [
        sys.executable,
        str(SCRIPT),
        str(folder),
        f"total_train_steps={STEPS}",
        "recover.freq_steps=3",
        *NARROW,
        *overrides,
    ]
    with (folder / "output.txt").open("ab") as output:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def finish(folder: Path, *overrides: str) -> Path:
    """Run to the end; the run's directory."""
    for _ in range(TRIES):
        if (ended := start(folder, *overrides).wait(HUNG_S)) == 0 or not ray_failed(folder):
            break
    assert ended == 0, (folder / "output.txt").read_text()
    return folder / "test/run"


def ray_failed(folder: Path) -> bool:
    """Whether Ray did not start for the last process of a run, as on a machine that is too busy."""
    last = (folder / "output.txt").read_text().rpartition("RUN-RECORD-SIZE")[2]
    return "the private Ray cluster" in last


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on Megatron that was killed once."""
    folder = tmp_path_factory.mktemp("run")
    journal, began = folder / "test/run/recover/journal.jsonl", time.monotonic()
    started, tries = start(folder), 1
    while not journal.exists() or count_steps(journal) < KILLED:
        if started.poll() is not None and ray_failed(folder) and tries < TRIES:
            started, tries = start(folder), tries + 1
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
    "changes",
    [
        ["actor.optimizer.lr=0.01"],  # the loss of the second mini-batch, which sees other weights
        ["actor.loss_agg_mode=sequence_mean"],
        [
            "actor.use_decoupled_loss=false"
        ],  # clips the distance to the servers' weights, not to those of the step's start
        ["actor.eps_clip=0.5", "actor.eps_clip_higher=0.5"],
        ["actor.behave_imp_weight_mode=disabled"],
    ],
    ids=lambda changes: changes[0],
)
def test_other_settings_part_from_the_run(run, changes):
    """In loss, gradient and policy. The run clips narrowly, as a limit that no token reaches changes nothing."""
    asked = ask(run, 7, STEPS, changes, lambda text: None)
    assert any(stale(item) for number in (7, STEPS) for item in open_run(run).step(number).file.trajectories())
    verdict = asyncio.run(counterfactual(asked, None))
    print(verdict)
    assert verdict.text.startswith("the runs part at step 7, first in loss ("), verdict
    assert [row[0] for row in verdict.rows] == ["7", "8"]
    for _, loss, other_loss, norm, other_norm, kl in verdict.rows:
        assert loss != other_loss and norm != other_norm and float(kl) > 0, verdict
    assert "rounding" not in verdict.text


def test_a_limit_that_no_token_reaches_changes_nothing(run):
    changes = ["actor.behave_imp_weight_cap=1000"]
    verdict = asyncio.run(counterfactual(ask(run, 7, STEPS, changes, lambda text: None), None))
    assert verdict.text == "equal bits: the settings change nothing", verdict


EVALUATED = re.compile(
    r"valid_dataset after step 8: reward (\S+) ± (\S+) as recorded, (\S+) ± (\S+) with the changes; "
    r"difference \S+ ± \S+ \(8 prompts\)"
)


@pytest.mark.parametrize(
    ("change", "differs"), [("actor.optimizer.lr=0.05", True), ("actor.behave_imp_weight_cap=1000", False)]
)
def test_both_trainings_are_evaluated_by_servers(run, monkeypatch, change, differs):
    """Servers check that the tensors which they receive are the trainer's; greedy responses show whose they are."""
    answers = list[list[tuple[list[int], list[int]]]]()

    def remember(trajectories: list[Trajectory]) -> evaluation.PromptRewards:
        own = sorted(trajectories, key=lambda item: item.group_id)
        answers.append([(item.tokens.tolist(), item.versions[item.generated].tolist()) for item in own])
        return rewards_by_prompt(trajectories)

    rewards_by_prompt = evaluation.rewards_by_prompt
    monkeypatch.setattr(evaluation, "rewards_by_prompt", remember)
    changes = [change, "weight_update.checksum=true", "evaluator.temperature=0", "rollout.startup_timeout_s=1500"]
    verdict = asyncio.run(counterfactual(ask(run, 7, STEPS, changes, lambda text: None, evaluates=True), None))
    before, after = answers
    assert {version for _, versions in before + after for version in versions} == {STEPS}
    assert (before != after) == differs
    (line,) = verdict.lines
    found = EVALUATED.fullmatch(line)
    assert found, line
    assert (found[1] != found[3]) == differs and float(found[2]) > 0, line


def stale(item: Trajectory) -> bool:
    """Whether older weights than those of the last step generated a trajectory of step 7 or later."""
    return item.oldest_version < 6


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


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory):
    """A run whose trainer follows recorded routes."""
    layout = ("actor.backend=megatron:d1", "rollout.router_replay=on", "total_train_steps=3")
    return finish(tmp_path_factory.mktemp("experts"), *EXPERTS, *layout)


def test_a_run_with_experts_has_the_same_bits(with_experts):
    verdict = replayed(with_experts, 1, 3, log_probs=True)
    assert verdict.good, verdict
    assert all("routes" in item.columns for item in open_run(with_experts).step(3).file.trajectories())


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (0, "the routes of token 6 of trajectory {}"),  # all later tokens see it
        (1, "token 7 of trajectory {} "),  # of two layers the last one, which only the next token sees
    ],
)
def test_a_flipped_route_is_named(with_experts, tmp_path, layer, said):
    """By a replay, which the trainer computes with the recorded route, and by a comparison with the run as it was."""
    planted = Path(shutil.copytree(with_experts, tmp_path / "planted"))
    trajectories = open_run(planted).step(3).file.trajectories()
    longest = max(range(len(trajectories)), key=lambda number: len(trajectories[number].tokens))

    def change(number: int, item: Trajectory) -> Trajectory:
        routes = item.columns["routes"].copy()
        if number == longest:
            routes[6, layer, 0] = next(expert for expert in range(8) if expert not in routes[6, layer])
        return replace(item, columns={**item.columns, "routes": routes})

    plant(planted, 3, change)
    verdict = replayed(planted, 3, 3, log_probs=True)
    told = [verdict.text, *verdict.warnings]
    assert not verdict.good
    assert any(said.format(longest) in text and "routes of token 6" in text for text in told), verdict
    compared = compare_runs(with_experts, planted)
    assert compared.text.startswith("the runs first differ at step 3 in trajectories/routes"), compared
    assert f"at token 6 of trajectory {longest} (" in compared.text


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
