"""Planted faults are found and named with their place, in records that were changed and in runs that were wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from recorded import CONFIG, GROUPS, SAMPLES, batch, record, trajectory, write
from safetensors.numpy import load_file, save_file

from areal_like.capabilities.replay.audit import audit_run
from areal_like.capabilities.replay.checkpoint_files import check_checkpoint, note_checkpoints
from areal_like.capabilities.replay.comparison import compare, first_difference
from areal_like.capabilities.replay.log_prob_check import LogProbCheck
from areal_like.capabilities.replay.reader import open_run
from areal_like.capabilities.replay.step_file import path_of, read_step
from areal_like.errors import CheckpointError

STEP = 4
LONG = 10**5 // (GROUPS * SAMPLES)  # tokens of each trajectory: 1e5 in a step


@pytest.fixture
def run(tmp_path):
    record(tmp_path, STEP, kept=[STEP])
    journal = open_run(tmp_path)
    write(tmp_path / "recover/replay", journal.run, STEP, batch(STEP, tokens=LONG))
    return tmp_path


def change(run: Any, name: str, place: Any, value: Any) -> None:
    """Change one value of the record, as a fault on disk would."""
    path = path_of(run / "recover/replay", STEP)
    metadata = {"areal_like.replay": _described(path)}
    arrays = load_file(path)
    arrays[name][place] = value(arrays[name][place])
    save_file(arrays, path, metadata)


def _described(path: Any) -> str:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return file.metadata()["areal_like.replay"]


def faults(run: Any) -> list[str]:
    return list(audit_run(open_run(run), CONFIG, [STEP]))


def test_a_run_without_a_fault_has_none(run):
    assert faults(run) == []


TOKEN = 5 * LONG + 777  # of sample 1 of group 10


@pytest.mark.parametrize(
    ("column", "place", "value", "said"),
    [
        ("versions", TOKEN, lambda old: old - 1 if old else 1, r"versions is \d at token 777 of trajectory 5 \(group 10, sample 1\)"),
        ("logprobs", TOKEN, lambda old: old * np.float32(1.01), r"logprobs is -0\.\d+ at token 777 of trajectory 5"),
        ("tokens", TOKEN, lambda old: old ^ 4, r"tokens is \d+ at token 777 of trajectory 5 .* one flipped bit \(2\)"),
        ("reward", 6, lambda old: -old, r"reward is -0\.\d+ of trajectory 6 \(group 10, sample 2\)"),
    ],
)  # fmt: skip
def test_one_changed_value_of_a_record_is_named(run, column, place, value, said):
    before = load_file(path_of(run / "recover/replay", STEP))[f"trajectories/{column}"][place]
    change(run, f"trajectories/{column}", place, value)
    (fault,) = faults(run)
    assert re.search(said, fault), fault
    assert f"the run recorded {before}" in fault


def test_a_flipped_route_is_named(run):
    change(run, "trajectories/routes", (1234, 1, 0), lambda old: old ^ 1)
    (fault,) = faults(run)
    assert "trajectories/routes" in fault
    assert "one flipped bit (0)" in fault


def wrong(run: Any, trajectories: Any) -> list[str]:
    """Faults of a run that has trained these trajectories, so that its record has whole digests."""
    write(run / "recover/replay", open_run(run).run, STEP, trajectories)
    return faults(run)


@pytest.mark.parametrize("label", [0, 2, 3, 4])
def test_a_wrong_version_label_of_a_run_is_named(run, label):
    """Not one that is right between its neighbours: only the servers' weights tell."""
    trajectories = batch(STEP, tokens=LONG)
    versions = trajectories[5].versions.copy()
    versions[5:] = 3
    versions[777] = label
    trajectories[5] = replace(trajectories[5], versions=versions)
    found = wrong(run, trajectories)
    if label == 3:
        assert found == []
        return
    (fault,) = found
    assert f"version {label} at token 777 of trajectory 5 (group 10, sample 1)" in fault


def test_a_missing_sample_of_a_run_is_named(run):
    trajectories = batch(STEP, tokens=LONG)
    del trajectories[5]
    (fault,) = wrong(run, trajectories)
    assert "group 10 has 3 of 4 samples; missing: sample 1" in fault


def test_a_rank_with_another_seed_is_named(run):
    journal = open_run(run)
    write(run / "recover/replay", journal.run, STEP, batch(STEP), seeds={"actor": [7, 8]})
    assert [fault for fault in faults(run) if "actor rank 1 has the seed 8, the run's is 7" in fault]


def test_the_same_expert_twice_is_named(run):
    trajectories = batch(STEP, tokens=LONG)
    routes = trajectories[4].columns["routes"].copy()
    routes[50, 1, 0] = routes[50, 1, 1]
    trajectories[4] = replace(trajectories[4], columns={**trajectories[4].columns, "routes": routes})
    (fault,) = wrong(run, trajectories)
    assert "layer 1 has the same expert twice" in fault


def test_a_flipped_bit_in_a_checkpoint_is_named(run):
    checkpoint = run / "recover/step-4"
    (checkpoint / "actor").mkdir(parents=True)
    rng = np.random.default_rng(0)
    file = checkpoint / "actor/__0_0.distcp"
    file.write_bytes(rng.bytes(100_000))
    (checkpoint / "state.json").write_text("{}")
    note_checkpoints(run / "recover")
    assert "2 files" in check_checkpoint(checkpoint)
    data = bytearray(file.read_bytes())
    data[77_777] ^= 16
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"actor/__0_0\.distcp has changed"):
        check_checkpoint(checkpoint)
    (fault,) = faults(run)
    assert "__0_0.distcp" in fault


def test_two_runs_are_compared_in_the_order_of_a_step(tmp_path):
    """The first quantity that differs is a cause, the later ones follow from it."""
    for name in "ab":
        record(tmp_path / name, 1)
    runs = [open_run(tmp_path / name) for name in "ab"]
    one, other = (run.step(1).file for run in runs)
    assert first_difference(compare(one, other)) is None
    rng = np.random.default_rng(1)
    trajectories = [*batch(1)[:-1], trajectory(1, 2, 3, rng)]
    write(runs[1].folder, runs[1].run, 1, trajectories, statistics={"loss": 9.0, "grad_norm": 1.0})
    different = [each.name for each in compare(one, read_step(path_of(runs[1].folder, 1))) if not each.agrees]
    assert different[0].startswith("trajectories/")
    assert different[-1] == "loss"


@pytest.mark.parametrize(
    ("trajectory", "fault"),
    [
        (4, "the routes of token 19 of trajectory 4"),  # with routes
        (2, "token 20 of trajectory 2"),  # without: each token has a fault of its own
    ],
)
def test_a_flipped_route_of_the_run_changes_the_log_probs_after_it(run, trajectory, fault):
    """As a replay measures it: the trainer follows the routes of the record, the servers chose others."""
    items = open_run(run).step(STEP).file.trajectories()
    versions = sorted({int(version) for item in items for version in item.versions if version >= 0})
    starts = np.cumsum([0, *(len(item.tokens) for item in items)])
    measured = {version: np.full(starts[-1], 0.5 + version) for version in versions}
    labels = np.concatenate([item.versions for item in items])
    for version, distances in measured.items():
        distances[labels == version] = 1e-7
        distances[starts[trajectory] + 20 : starts[trajectory + 1]] = 0.02
    check = LogProbCheck(open_run(run), STEP, STEP, 2, in_place=False)
    check._distances[STEP] = measured
    found = list(check.faults())
    assert fault in found[0]
    assert len(found) == (1 if "routes" in fault else LONG - 20)
