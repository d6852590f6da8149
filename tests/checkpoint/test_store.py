"""A checkpoint is whole, or it is named and an older one is taken."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_like.core.checkpoint.journal import Journal, RunState, Step, count_steps
from areal_like.core.checkpoint.store import JOURNAL, Store, newest
from areal_like.core.errors import CheckpointError, RecordError


def save(store: Store, version: int) -> Path:
    partial = store.begin(version)
    (partial / "actor").mkdir()
    (partial / "actor/weights").write_text("w" * 100)
    return store.commit(partial, RunState(version, started=2 * version), {})


def make(directory: Path, keep: int = 3) -> Store:
    directory.mkdir()
    store = Store(directory, Journal(directory / JOURNAL, "data").run, keep)
    for version in (1, 2, 3):
        save(store, version)
    return store


def half_written(path: Path) -> None:
    os.truncate(path / "actor/weights", 50)


def without_a_file(path: Path) -> None:
    (path / "actor/weights").unlink()


def without_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def of_another_run(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"run": "another"}))


def with_state(path: Path, **changes: object) -> None:
    """Another state of the size that the manifest names."""
    state = json.loads((path / "state.json").read_text())
    text = json.dumps(state | changes)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = len(text)
    (path / "state.json").write_text(text)
    (path / "manifest.json").write_text(json.dumps(manifest))


def of_another_step(path: Path) -> None:
    with_state(path, version=7)


def of_another_version(path: Path) -> None:
    with_state(path, streams=[3])
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"program": "9.8.7"}))


def garbled(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def zeros(path: Path) -> None:
    size = (path / "state.json").stat().st_size
    (path / "state.json").write_bytes(bytes(size))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (half_written, "actor/weights has 50 bytes of 100"),
        (without_a_file, "actor/weights is missing"),
        (without_manifest, "it has no manifest.json, so it was never complete"),
    ],
)
def test_an_incomplete_checkpoint_is_named_and_the_one_before_it_taken(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    directory = tmp_path / "recover"
    store = make(directory)
    damage(directory / "step-3")
    found, complaints = newest(directory)
    assert found is not None
    assert (found.path, found.state) == (directory / "step-2", RunState(2, started=4))
    (complaint,) = complaints
    assert complaint.startswith(f"{directory / 'step-3'} is not whole: {reason}")

    store.clean(2)  # what cannot be used is not in the way of what comes
    save(store, 3)
    assert newest(directory)[0].state.version == 3
    assert (directory / "unused-step-3").exists()


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (of_another_run, "", "is another run's"),
        (of_another_step, "", "it is the checkpoint of step 7"),
        (
            of_another_version,
            "state.json",
            r"fields that this version does not know: streams. Version 9\.8\.7 of areal-like",
        ),
        (garbled, "manifest.json", "is damaged: Expecting property name"),
        (zeros, "state.json", "is damaged: Expecting value"),
    ],
)
def test_a_checkpoint_that_is_wrong_in_another_way_is_never_skipped(
    tmp_path: Path, damage: Callable[[Path], None], file: str, reason: str
) -> None:
    directory = tmp_path / "recover"
    make(directory)
    damage(directory / "step-3")
    with pytest.raises(CheckpointError, match=reason) as raised:
        newest(directory)
    assert str(raised.value).startswith(str(directory / "step-3" / file))
    (directory / "step-3").rename(tmp_path / "away")  # the way out that the message names
    assert newest(directory)[0].state.version == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "weights", "recover", JOURNAL])
def test_an_io_error_while_checkpoints_are_read_is_never_taken_for_a_torn_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    directory = tmp_path / "recover"
    make(directory)

    def failing(way: Callable[..., Any]) -> Callable[..., Any]:
        def fail(path: str | Path, *arguments: Any, **options: Any) -> Any:
            if Path(path).name == name:
                raise OSError(number, os.strerror(number))
            return way(path, *arguments, **options)

        return fail

    for owner, function in ((Path, "stat"), (Path, "open"), (Path, "read_text"), (os, "listdir")):
        monkeypatch.setattr(owner, function, failing(getattr(owner, function)))
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: {os.strerror(number)}"):
        newest(directory)


def test_checkpoints_without_their_journal_are_not_begun_anew(tmp_path: Path) -> None:
    make(tmp_path / "recover")
    (tmp_path / "recover" / JOURNAL).unlink()
    with pytest.raises(CheckpointError, match=rf"{JOURNAL} is missing"):
        newest(tmp_path / "recover")


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    make(tmp_path / "recover", keep=2)
    assert sorted(path.name for path in (tmp_path / "recover").iterdir()) == [JOURNAL, "step-2", "step-3"]


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path / "recover")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match=r"\.step-4-\w+/state.json cannot be written: No space left on device"):
        save(store, 4)
    assert newest(tmp_path / "recover")[0].state.version == 3


def test_a_journal_is_cut_where_the_run_goes_on_and_a_torn_line_is_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path / JOURNAL, "data")
    steps = [Step(version, [2 * version, 2 * version + 1], [5, 6]) for version in (1, 2, 3)]
    for step in steps:
        journal.append(step)
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"version": 4, "gro')
    assert journal.steps() == steps
    journal.cut(2)
    assert Journal(tmp_path / JOURNAL, "data").steps() == steps[:2]
    with pytest.raises(CheckpointError, match="does not have every step up to 3"):
        journal.cut(3)


@pytest.mark.parametrize("line", [b"\0" * 40 + b"\n", b"[1]\n", b'{"version": 2}\n', b"\xff\n"])
def test_a_damaged_line_is_named_and_only_lines_that_are_made_anew_may_be_damaged(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / JOURNAL
    journal = Journal(file, "data")
    journal.append(Step(1, [2], [5]))
    with file.open("ab") as opened:
        opened.write(line)
    with pytest.raises(CheckpointError, match=rf"{JOURNAL}, line 3 is not a step of a run: .*Restore it from a backup"):
        journal.steps()
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match="line 3"):
        journal.cut(2)
    assert file.read_bytes() == before
    assert count_steps(file) == 2
    journal.cut(1)
    assert journal.steps() == [Step(1, [2], [5])]


def test_other_data_or_another_file_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / JOURNAL, "data")
    with pytest.raises(
        CheckpointError, match="belongs to a run with other training prompts; choose another trial_name"
    ):
        Journal(tmp_path / JOURNAL, "other data")
    (tmp_path / JOURNAL).write_text("something")
    with pytest.raises(CheckpointError, match="is not a run's journal"):
        Journal(tmp_path / JOURNAL, "data")


def test_a_line_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / JOURNAL, "data")
    journal.append(Step(1, [2], [5]))
    before = (tmp_path / JOURNAL).read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RecordError, match=rf"{JOURNAL} cannot be written: Input/output error"):
        journal.append(Step(2, [3], [6]))
    assert (tmp_path / JOURNAL).read_bytes() == before
