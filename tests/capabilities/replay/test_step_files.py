"""What a step's file holds, and what is said of one that is torn, foreign or hostile."""

from __future__ import annotations

import json
import os
import pickle
import struct
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import GROUPS, SAMPLES, batch, record, write
from safetensors.numpy import load_file

from areal_like.capabilities.replay.arrays import from_arrays, to_arrays
from areal_like.capabilities.replay.digests import Change, digest, find_change
from areal_like.capabilities.replay.reader import open_run
from areal_like.capabilities.replay.step_file import path_of, prune, read_step, recorded_steps, remove_after
from areal_like.core.checkpoint.journal import Journal, read_header
from areal_like.core.errors import CheckpointError


def assert_same(one: Any, other: Any) -> None:
    """Equal in every bit and every type."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict) and any(isinstance(each, np.ndarray) for each in one.values()):
        assert {*one} == {*other}
        for name in one:
            assert_same(one[name], other[name])
    elif is_dataclass(one):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    else:
        assert repr(one) == repr(other)


def test_trajectories_come_back_with_the_same_bits():
    trajectories = batch(3)
    for read, made in zip(from_arrays(*to_arrays(trajectories)), trajectories, strict=True):
        assert_same(read, made)


def test_a_column_that_is_declared_elsewhere_is_recorded():
    made = batch(3)[0]
    made = replace(made, columns={**made.columns, "another": np.arange(len(made.tokens), dtype=np.float32)})
    read = from_arrays(*to_arrays([made, batch(3)[2]]))
    assert_same(read[0], made)
    assert "another" not in read[1].columns


@given(
    st.sampled_from(["uint8", "int16", "int32", "float32", "int64", "float64"]),
    st.integers(1, 300),
    st.integers(0, 2**32),
    st.data(),
)
def test_a_digest_names_the_changed_element_and_what_it_was(kind, size, seed, data):
    array = np.random.default_rng(seed).integers(0, 200, size).astype(kind)
    before = digest(array)
    place, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 8 * array.itemsize - 1))
    changed = array.copy()
    words = changed.view(f"u{array.itemsize}")
    words[place] ^= np.array(1 << bit, words.dtype)
    found = find_change(before, changed)
    assert isinstance(found, Change)
    assert found.place == place
    assert found.flipped_bit == bit % 32
    assert find_change(before, array) is None


def test_a_run_is_read_as_arrays(tmp_path):
    record(tmp_path, 3)
    run = open_run(tmp_path)
    assert run.steps == [1, 2, 3]
    step = run.step(2)
    made = batch(2)
    assert len(step) == len(made) == GROUPS * SAMPLES
    np.testing.assert_array_equal(step[5]["tokens"], made[5].tokens)
    np.testing.assert_array_equal(step[-1]["versions"], made[-1].versions)
    assert step.statistics["loss"] == 0.25
    for read, expected in zip(step.file.trajectories(), made, strict=True):
        assert_same(read, expected)


def test_files_are_readable_without_the_engine(tmp_path):
    record(tmp_path, 1)
    plain = load_file(path_of(tmp_path / "recover/replay", 1))
    np.testing.assert_array_equal(plain["trajectories/tokens"], np.concatenate([item.tokens for item in batch(1)]))


@pytest.mark.parametrize("cut", [0, 3, 8, 200, -1])
def test_a_torn_file_is_named(tmp_path, cut):
    record(tmp_path, 2)
    path = path_of(tmp_path / "recover/replay", 2)
    os.truncate(path, cut % path.stat().st_size if cut else 0)
    with pytest.raises(CheckpointError, match=r"step-000002\.safetensors is torn"):
        open_run(tmp_path).step(2)


def hostile(kind: str) -> bytes:
    """Contents that a stranger may have written."""
    header = {"trajectories/tokens": {"dtype": "I32", "shape": [2**40], "data_offsets": [0, 8]}}
    deep = "[" * 100_000 + "]" * 100_000
    metadata = {"__metadata__": {"areal_like.replay": deep}}
    made = {
        "pickle": pickle.dumps(os.system),
        "huge header": struct.pack("<Q", 2**60) + b"{}",
        "huge shape": struct.pack("<Q", len(json.dumps(header))) + json.dumps(header).encode() + bytes(8),
        "deep": struct.pack("<Q", len(json.dumps(metadata))) + json.dumps(metadata).encode(),
        "no metadata": struct.pack("<Q", 2) + b"{}",
    }
    return made[kind]


@pytest.mark.parametrize("kind", ["pickle", "huge header", "huge shape", "deep", "no metadata"])
def test_a_hostile_file_executes_nothing(tmp_path, kind):
    record(tmp_path, 1)
    path_of(tmp_path / "recover/replay", 1).write_bytes(hostile(kind))
    with pytest.raises(CheckpointError, match="is torn or is not a recorded step"):
        open_run(tmp_path).step(1)


@pytest.mark.parametrize("name", ["lengths", "sample", "kept.ends", "images.places", "reward"])
def test_arrays_that_do_not_fit_are_named(tmp_path, name):
    arrays, texts = to_arrays(batch(1))
    arrays[name] = arrays[name][:-1] + 10**6
    path = tmp_path / "step-000001.safetensors"
    journal = record(tmp_path / "run", 1)
    step = read_step(path_of(tmp_path / "run/recover/replay", 1), journal.run)
    broken = {f"trajectories/{key}": array for key, array in arrays.items()}
    with pytest.raises(CheckpointError, match="has no trajectories of a training step"):
        type(step)(broken, {**step.about, "texts": texts}, path).trajectories()


def test_a_step_that_the_run_does_not_have_is_explained(tmp_path):
    record(tmp_path, 4, kept=[2, 3, 4])
    run = open_run(tmp_path)
    with pytest.raises(CheckpointError, match="its journal ends with step 4"):
        run.step(9)
    with pytest.raises(CheckpointError, match=r"recover\.replay_keep"):
        run.step(1)


def test_a_run_without_replay_data_is_explained(tmp_path):
    record(tmp_path, 2, kept=[])
    with pytest.raises(CheckpointError, match=r"recover\.replay=true"):
        open_run(tmp_path).step(1)
    with pytest.raises(CheckpointError, match="has no journal"):
        open_run(tmp_path / "recover")


def test_a_step_that_a_resume_removed_is_explained(tmp_path):
    journal = record(tmp_path, 5)
    journal.cut(2)
    folder = tmp_path / "recover/replay"
    assert remove_after(folder, 2, journal.run) == [3, 4, 5]
    with pytest.raises(CheckpointError, match="was removed when the run resumed after step 2"):
        open_run(tmp_path).step(4)
    write(folder, journal.run, 3, batch(3, seed=5))
    journal.append(journal.steps()[0].__class__(3, [6, 7, 8], [6, 0, 1]))
    assert open_run(tmp_path).step(3).step == 3


def test_files_of_another_run_are_refused_and_removed_by_a_new_one(tmp_path):
    record(tmp_path / "a", 2)
    journal = record(tmp_path / "b", 2)
    ours, theirs = (path_of(tmp_path / name / "recover/replay", 2) for name in "ba")
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(CheckpointError, match="belongs to another run"):
        open_run(tmp_path / "b").step(2)
    remove_after(ours.parent, 2, journal.run)
    assert recorded_steps(ours.parent) == [1]


@pytest.mark.parametrize("text", ["", "{}\n", '{"run": "a"}\n', "\0\0\0\n"])
def test_a_torn_journal_is_named(tmp_path, text):
    record(tmp_path, 1)
    (tmp_path / "recover/journal.jsonl").write_text(text)
    with pytest.raises(CheckpointError, match=r"journal\.jsonl"):
        open_run(tmp_path).step(1)


def test_a_foreign_journal_is_named(tmp_path):
    record(tmp_path, 1)
    path = tmp_path / "recover/journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[0] = json.dumps({"run": "another", "data": "data"}) + "\n"
    path.write_text("".join(lines))
    with pytest.raises(CheckpointError, match="belongs to another run"):
        open_run(tmp_path).step(1)


def test_only_the_last_files_are_kept(tmp_path):
    record(tmp_path, 5)
    folder = tmp_path / "recover/replay"
    prune(folder, 2)
    assert recorded_steps(folder) == [4, 5]


@pytest.mark.parametrize("syncs", range(3))
def test_a_kill_leaves_whole_files(tmp_path, monkeypatch, syncs):
    """Killed at any sync or rename, the file is the old one, absent, or whole."""
    journal = record(tmp_path, 1)
    folder, left = tmp_path / "recover/replay", [syncs]

    def killed(way):
        def call(*arguments):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return way(*arguments)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", killed(os.fsync))
        patched.setattr(Path, "replace", killed(Path.replace))
        with pytest.raises(KeyboardInterrupt):
            write(folder, journal.run, 2, batch(2))
    assert recorded_steps(folder) in ([1], [1, 2])
    for step in recorded_steps(folder):
        assert read_step(path_of(folder, step), journal.run).step == step
    remove_after(folder, 1, journal.run)
    assert sorted(path.name for path in folder.iterdir()) in (
        ["step-000001.safetensors"],
        ["removed.json", "step-000001.safetensors"],
    )


def test_the_journal_of_a_recorded_run_is_its_own(tmp_path):
    journal = record(tmp_path, 1)
    assert (
        read_header(tmp_path / "recover/journal.jsonl")["run"]
        == Journal(tmp_path / "recover/journal.jsonl", "data").run
    )
    assert open_run(tmp_path).run == journal.run
