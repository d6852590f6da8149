"""A run whose Ray loses a process ends soon, with an error that names the process and its log, and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from limits import HUNG_S

from areal_like.backends.ray.janitor import RUN_VARIABLE

HERE = Path(__file__).parent
VICTIMS = {"gcs/gcs_server": "gcs_server", "raylet/raylet": "raylet", "ray::DashboardAgent": "dashboard_agent"}


def kill(when: str, victim: str, folder: Path) -> str:
    """Return the output of the run."""
    command = [sys.executable, str(HERE / "ray_victims.py"), when, victim, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HUNG_S)
    return done.stdout + done.stderr


def is_left(folder: Path) -> bool:
    """Whether a process of the run lives; its workers have the run's directory in their command or environment."""
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) and RUN_VARIABLE in process.environ():
                return True
        except (psutil.Error, OSError):
            continue
    return False


@pytest.mark.parametrize(
    "victim", [pytest.param(name, marks=[pytest.mark.long] if name != "gcs/gcs_server" else []) for name in VICTIMS]
)
def test_the_death_of_a_process_of_ray_ends_the_run_with_its_name(tmp_path: Path, victim: str) -> None:
    output = kill("work", victim, tmp_path)
    logs = tmp_path / "logs/ray"
    named = (VICTIMS[victim], "raylet")  # which ends itself when an agent of it has ended
    assert any(f"{name}, a process of the private Ray cluster, has ended" in output for name in named), output
    assert str(logs) in output and (logs / "raylet.out").exists()
    assert not is_left(tmp_path)


@pytest.mark.long
def test_a_gcs_that_is_killed_during_the_start_ends_the_run(tmp_path: Path) -> None:
    """It is noticed at once, unless Ray holds the GIL: then Ray ends the process at its own limit of a minute."""
    output = kill("start", "gcs/gcs_server", tmp_path)
    assert "GCS" in output or "gcs" in output, output
    assert not is_left(tmp_path)
