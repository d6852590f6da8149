"""The pinned sets: complete, in step with their locks, and free of any index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"


def pins(file: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", file.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["cpu", "dev", "docs"])
def test_lock_holds_the_same_versions(name: str) -> None:
    assert pins(REQUIREMENTS / f"{name}.lock") == pins(REQUIREMENTS / f"{name}.txt")


@pytest.mark.parametrize("name", ["cpu", "dev", "docs"])
def test_every_locked_version_has_hashes(name: str) -> None:
    entries = re.split(r"\n(?=[a-z])", (REQUIREMENTS / f"{name}.lock").read_text())
    assert [entry.split("==")[0] for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("file", sorted(REQUIREMENTS.glob("*.txt")), ids=lambda file: file.name)
def test_every_line_is_a_pin(file: Path) -> None:
    """No index, no address, no open version."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.]+", line)] == []


def test_sets_do_not_contradict_each_other() -> None:
    sets = [pins(file) for file in REQUIREMENTS.glob("*.txt") if file.stem in ("cpu", "dev", "docs", "gpu")]
    versions = {pin for pinned in sets for pin in pinned.items()}
    assert len(versions) == len({name for name, _ in versions})


def test_project_builds_with_the_pinned_setuptools() -> None:
    """`make setup` builds without isolation, so offline: what the build asks for has to be in the set."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert requires == ["setuptools>=77"]
    assert int(pins(REQUIREMENTS / "cpu.txt")["setuptools"].split(".")[0]) >= 77
