"""A package that is not installed is named before anything starts; one that the run does not use is not missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"

# Runs the command line in an interpreter that finds everything but one package.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

hidden = sys.argv.pop(1)

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if f"{name}.".startswith(f"{hidden}.") else PathFinder.find_spec(name, path, target)

sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
from areal_like.cli import app
app()
"""


def dry_run(package: str, directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, package, "--config", str(CONFIG), "--dry-run", *overrides]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("package", "key", "name"),
    [
        ("ray", "scheduler.type", "ray"),
        ("megatron.core", "actor.backend", "megatron-core"),
        ("sglang", "rollout.backend", "sglang"),
        ("mbridge", "actor.megatron.bridge_type", "mbridge"),
        ("math_verify", "reward.type", "math-verify"),
        ("tensorboard", "stats_logger.tensorboard", "tensorboard"),
        ("matplotlib", "stats_logger", "matplotlib"),
    ],
)
def test_a_missing_package_is_named(tmp_path: Path, package: str, key: str, name: str) -> None:
    result = dry_run(package, tmp_path)
    assert result.returncode == 2, result.stderr
    assert f"the package {name} is not installed" in result.stderr
    assert f" in {key} (" in result.stderr
    assert "make setup" in result.stderr
    assert result.stderr.count("error[") == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "overrides"), [("tensorboard", ["stats_logger.tensorboard=false"]), ("megatron.bridge", [])]
)
def test_a_package_that_the_run_does_not_use_is_not_needed(tmp_path: Path, package: str, overrides: list[str]) -> None:
    result = dry_run(package, tmp_path, *overrides)
    assert result.returncode == 0, result.stderr
