"""A Ray that hangs during its start ends with Ctrl-C, with SIGTERM, and after a limit that names its logs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("hanging_start.py")
ROOT = Path(__file__).parents[2]
END_S = 10.0


def begin(directory: Path, limit_s: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, PROGRAM, directory, str(limit_s)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_signal_ends_a_start_that_hangs(tmp_path: Path, number: signal.Signals) -> None:
    process = begin(tmp_path, 300)
    assert process.stdout and process.stdout.readline() == "hangs\n"
    time.sleep(0.5)
    process.send_signal(number)
    process.communicate(timeout=END_S)
    assert process.returncode == 128 + number


def test_the_limit_of_the_start_names_the_logs_that_it_keeps(tmp_path: Path) -> None:
    output, _ = begin(tmp_path, 1).communicate(timeout=60)
    logs = tmp_path / "logs" / "ray"
    assert "scheduler.startup_timeout_s" in output and str(logs) in output
    assert (logs / "gcs_server.out").read_text() == "the reason\n"
