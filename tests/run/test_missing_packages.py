"""A package that is not installed is named before anything starts; one that the run does not use is not missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples/math"
SCRIPT, CONFIG = EXAMPLES / "gsm8k_rl.py", EXAMPLES / "gsm8k_grpo_cpu.yaml"
FEW = "train_dataset.arithmetic.size=256"
LONG = pytest.mark.long

# Runs the command line in an interpreter that finds everything but some packages.
WITHOUT = """
import runpy
import sys
from importlib.machinery import PathFinder

hidden = tuple(f"{name}." for name in sys.argv.pop(1).split(","))

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if f"{name}.".startswith(hidden) else PathFinder.find_spec(name, path, target)

sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
script = sys.argv.pop(1)
runpy.run_path(script, run_name="__main__")
"""


def dry_run(package: str, directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, package, str(SCRIPT), "--config", str(CONFIG), "--dry-run", *overrides]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("package", "key", "name"),
    [
        ("ray", "scheduler.type", "ray"),
        pytest.param("megatron.core", "actor.backend", "megatron-core", marks=LONG),
        pytest.param("torch", "actor.backend", "torch", marks=LONG),
        pytest.param("sglang", "rollout.backend", "sglang", marks=LONG),
    ],
)
def test_a_missing_package_is_named(tmp_path: Path, package: str, key: str, name: str) -> None:
    result = dry_run(package, tmp_path, FEW)
    assert result.returncode == 2, result.stderr
    assert f"the package {name} is not installed" in result.stderr
    assert f" in {key} (" in result.stderr
    assert "make setup" in result.stderr
    assert result.stderr.count("error[") == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_all_missing_packages_are_named_together(tmp_path: Path) -> None:
    keys = {
        "mbridge": "actor.megatron.bridge_type",
        "math-verify": "reward.type",
        "tensorboard": "stats_logger.tensorboard",
        "matplotlib": "stats_logger",
    }
    result = dry_run("mbridge,math_verify,tensorboard,matplotlib", tmp_path, FEW)
    assert result.returncode == 2, result.stderr
    for name, key in keys.items():
        (line,) = (line for line in result.stderr.splitlines() if f"the package {name} is not installed" in line)
        assert f" in {key} (" in line
    assert result.stderr.count("error[") == len(keys), result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "package",
    [
        "areal_like",
        "typer",
        "jinja2",
        *(pytest.param(it, marks=LONG) for it in ("yaml", "pydantic", "aiohttp", "psutil")),
    ],
)
def test_a_missing_package_that_every_run_needs_is_named(tmp_path: Path, package: str) -> None:
    result = dry_run(package, tmp_path)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert f"error[RUN-PACKAGE]: the package {package} is not installed\n  help: run `make setup`" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("package", "path"),
    [
        ("pyarrow", "rows.parquet"),
        pytest.param("datasets", "owner/name", marks=LONG),
        pytest.param("huggingface_hub", "owner/name", marks=LONG),
    ],
)
def test_a_missing_package_that_reads_the_data_is_named(tmp_path: Path, package: str, path: str) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"")
    result = dry_run(package, tmp_path, f"train_dataset.path={path}", "gconfig.top_k=1")
    assert result.returncode == 2, result.stderr
    assert f"in train_dataset.path (command line): the package {package} is not installed" in result.stderr
    assert "in gconfig.top_k (command line)" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_package_that_reads_the_model_is_named(tmp_path: Path) -> None:
    result = dry_run("huggingface_hub", tmp_path, FEW, "tokenizer_path=owner/name")
    assert result.returncode == 2, result.stderr
    assert "in tokenizer_path (command line): the package huggingface_hub is not installed" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("package", "overrides"),
    [("tensorboard", ["stats_logger.tensorboard=false"]), pytest.param("megatron.bridge", [], marks=LONG)],
)
def test_a_package_that_the_run_does_not_use_is_not_needed(tmp_path: Path, package: str, overrides: list[str]) -> None:
    result = dry_run(package, tmp_path, FEW, *overrides)
    assert result.returncode == 0, result.stderr
