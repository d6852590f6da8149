"""A main process that cannot react any more is reported with its line, and ends by a signal all the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from limits import HUNG_S

ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio, re, signal, sys, time
from pathlib import Path
from areal_like.runtime.watchdog import watch_loop

def stubborn():
    while True:
        try:
            time.sleep(1)
        except KeyboardInterrupt:
            pass

async def main():
    async with watch_loop(Path(sys.argv[1]), blocked_s=1, signal_s=1.5):
        await asyncio.sleep(0.5)
        print("begins", flush=True)
        {code}
    print("ends", flush=True)

signal.signal(signal.SIGTERM, lambda *_: None)
asyncio.run(main())
"""
REGEX = 're.match(r"(a+)+$", "a" * 45 + "b")'


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts a process whose loop a watchdog watches, and which runs some code."""
    processes: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        (script := tmp_path / "script.py").write_text(SCRIPT.format(code=code))
        started = subprocess.Popen(
            [sys.executable, script, tmp_path / "stacks.log"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(started)
        assert started.stdout is not None
        assert started.stdout.readline() == "begins\n"
        return started

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("code", "number"),
    [(f"await asyncio.to_thread(lambda: {REGEX})", signal.SIGTERM), ("stubborn()", signal.SIGINT)],
)
def test_a_signal_ends_a_process_that_cannot_react(start, tmp_path, code, number):
    process = start(code)
    process.send_signal(number)
    _, errors = process.communicate(timeout=HUNG_S)
    assert process.returncode == -signal.SIGKILL
    assert re.search(r"main process \(at .*script.py:\d+; .*\) does not react to the signal, and was killed", errors)
    assert "script.py" in (tmp_path / "stacks.log").read_text()


def test_a_process_that_stands_still_is_reported_and_goes_on(start):
    process = start("time.sleep(4)")
    output, errors = process.communicate(timeout=HUNG_S)
    assert (process.returncode, output) == (0, "ends\n")
    assert re.findall(r"stood still for 1 s \(at .*script.py:(\d+)", errors) == ["17"]


def test_a_killed_watchdog_is_replaced_and_the_next_one_watches(start):
    """Nothing noticed its end: a signal to a blocked process then had no effect."""
    process = start("await asyncio.sleep(5); stubborn()")
    (before,) = psutil.Process(process.pid).children()
    before.kill()
    limit = time.monotonic() + HUNG_S
    while not (after := set(psutil.Process(process.pid).children()) - {before}) and time.monotonic() < limit:
        time.sleep(0.1)
    assert after
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HUNG_S)
    assert process.returncode == -signal.SIGKILL
    assert "the loop watchdog ended (exit code -9) and was started again" in errors


def test_a_signal_that_is_heeded_kills_nothing(start):
    process = start("await asyncio.Event().wait()")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HUNG_S)
    assert process.returncode == -signal.SIGINT and "watchdog" not in errors
