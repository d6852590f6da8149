"""A run's directory has one owner, also where the file system keeps its locks to each host."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from limits import HUNG_S

from areal_like.core.checkpoint.journal import Journal, RunState, Step
from areal_like.core.checkpoint.store import JOURNAL, Store
from areal_like.core.errors import DirectoryTaken
from areal_like.runtime import owner
from areal_like.runtime.owner import Ownership, Silence, holders, is_taken, take_over


@pytest.fixture
def of_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ownership | None]:
    """Take the directory as a process of a host would, over a file system without locks between hosts."""
    monkeypatch.setattr(owner, "BEAT_S", 0.02)
    monkeypatch.setattr(owner, "SILENT_S", 0.5)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)

    def take(host: str, silence: Silence | None = None) -> Ownership | None:
        monkeypatch.setattr(owner, "boot_id", lambda: f"boot of {host}")
        monkeypatch.setattr("socket.gethostname", lambda: host)
        lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
        taken = take_over(tmp_path, lock, silence or Silence())
        if taken is None:
            os.close(lock)
        return taken

    return take


def until[T](ask: Callable[[], T | None]) -> T:
    deadline = time.monotonic() + HUNG_S
    while (answer := ask()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


def test_a_second_host_is_kept_out_while_the_first_one_counts(tmp_path: Path, of_host) -> None:
    first, silence = of_host("a"), Silence()
    for _ in range(100):  # for longer than an owner may be silent
        assert of_host("b", silence) is None
        time.sleep(0.01)
    assert is_taken(tmp_path)
    first.release()
    second = of_host("b", silence)
    second.check()
    second.release()
    assert not is_taken(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "owner-2.json"]


def test_an_owner_file_that_stays_unreadable_is_waited_for_less_than_a_silent_host(
    tmp_path: Path, of_host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "SILENT_S", 10 * HUNG_S)
    (tmp_path / "owner-3.json").write_text('{"host": "a", "boo')
    silence = Silence()
    assert of_host("b", silence) is None
    until(lambda: of_host("b", silence)).release()
    assert [path.name for path in tmp_path.glob("owner-*")] == ["owner-4.json"]


def test_an_owner_that_was_silent_for_too_long_finds_that_it_writes_no_more(
    tmp_path: Path, of_host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "BEAT_S", HUNG_S)
    frozen, silence = of_host("a"), Silence()
    journal = Journal(tmp_path / JOURNAL, "data", check=frozen.check)
    store = Store(tmp_path, journal.run, 2, frozen.check)
    journal.append(Step(1, [0], [0]))
    begun = store.begin(1)
    before = (tmp_path / JOURNAL).read_bytes()
    second = until(lambda: of_host("b", silence))
    for write in (
        lambda: journal.append(Step(2, [1], [1])),
        lambda: journal.cut(0),
        lambda: store.begin(2),
        lambda: store.commit(begun, RunState(1), {}),
        lambda: store.clean(0),
    ):
        with pytest.raises(
            DirectoryTaken, match=r"was taken over by process \d+ on host b.* This process stops writing"
        ):
            write()
    assert (tmp_path / JOURNAL).read_bytes() == before
    assert not list(tmp_path.glob("step-*"))
    for each in (frozen, second):
        each.release()


def test_of_two_hosts_that_find_an_owner_gone_one_takes_over(tmp_path: Path, of_host) -> None:
    of_host("a").release()
    assert owner.claim(tmp_path, os.open(tmp_path / "lock", os.O_RDWR), 2) is not None
    assert owner.claim(tmp_path, os.open(tmp_path / "lock", os.O_RDWR), 2) is None
    (tmp_path / "owner-7.json").touch()  # a third one took over meanwhile
    assert owner.claim(tmp_path, os.open(tmp_path / "lock", os.O_RDWR), 3) is None
    assert not (tmp_path / "owner-3.json").exists()


def test_on_one_host_an_owner_that_was_killed_is_followed_at_once(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from areal_like.runtime.owner import Silence, take_over
lock = os.open({str(tmp_path / "lock")!r}, os.O_RDWR | os.O_CREAT)
assert take_over(Path({str(tmp_path)!r}), lock, Silence())
print("taken", flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"taken\n"
        lock = os.open(tmp_path / "lock", os.O_RDWR)
        assert take_over(tmp_path, lock, Silence()) is None
        (holder,) = holders(tmp_path / "lock")
        assert holder.pid == process.pid
        assert is_taken(tmp_path)
        process.kill()
    taken = until(lambda: take_over(tmp_path, lock, Silence()))
    taken.check()
    taken.release()
