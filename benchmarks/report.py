"""The environment in which a benchmark ran, and the file with its figures."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
PACKAGES = ("torch", "transformers", "megatron-core", "sglang", "ray")


def save(name: str, figures: Mapping[str, Any]) -> None:
    """Write figures and circumstances to `results/name.json`."""
    file = ROOT / RESULTS / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**circumstances(), **figures}, indent=1) + "\n")
    print(f"written: {file.relative_to(ROOT)}")


def circumstances() -> dict[str, Any]:
    """The command, the commit, the machine and how busy it was, and the versions that matter."""
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *map(_named, sys.argv[1:])]),
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": {"cpu": _cpu(), "cpus": len(os.sched_getaffinity(0)), "gpu": _gpu()},
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _named(argument: str) -> str:
    """An argument without where on this machine it lies."""
    return Path(argument).name if argument.startswith("/") else argument.replace(f"{ROOT}/", "")


def _commit() -> str:
    """Return the commit, with `+` if tracked files but results differ; without a repository, COMMIT sets it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + (
            "+" if git("status", "--porcelain", "-uno", "--", ".", f":!{RESULTS}") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _gpu() -> str | None:
    try:
        names = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return names.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
