"""Whichever system call on a run's files fails once, nothing is lost: the command goes on, or names path and reason.

A dry pass counts the calls of a start and of a resume, so that none is missed; see `faulty_run.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from limits import HUNG_S

HERE, PARTS = Path(__file__).parent, 16


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes calls fail."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and Linux")
    made = tmp_path_factory.mktemp("faults") / "faults.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", made, HERE / "faults.c", "-ldl"]
    subprocess.run(command, check=True)
    return made


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that is possible: thousands of files are synced."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as made:
        yield Path(made)


def problems(library: Path, folder: Path, *arguments: str) -> list[str]:
    """What was wrong after the faults; there were some."""
    command = [sys.executable, HERE / "faulty_run.py", library, folder, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * HUNG_S, env={**os.environ, "LD_PRELOAD": str(library)}
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    calls = [int(line.split()[0]) for line in lines if line.endswith(" calls")]
    cases = int(lines.pop().removesuffix(" cases"))
    assert len(calls) == 2 and min(calls) > 300, "the library does not see the calls"
    assert cases >= sum(calls) // int(arguments[0])
    return [line for line in lines if not line.endswith(" calls")]


def test_a_call_that_fails_loses_neither_a_checkpoint_nor_a_line(library: Path, folder: Path) -> None:
    assert problems(library, folder, "40", "0") == []


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_every_call_may_fail_in_every_way(library: Path, folder: Path, part: int) -> None:
    assert problems(library, folder, str(PARTS), str(part), "--every-error") == []
