"""`uv sync --extra cpu` and `--extra gpu` install the pinned sets, no more and no less; `uv pip sync` takes the locks.

There is no uv.lock here: uv writes the address of a registry beside every package, and `uv sync` refuses a lock that
has none. What it writes on its own is the same set, as every version is given.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from limits import HUNG_S

ROOT = Path(__file__).parents[2]
UV = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
FOLLOWED = {
    "cpu": ["cpu"],
    "gpu": ["cpu", "gpu"],
    "dev": ["dev"],
    "docs": ["docs"],
    "opentelemetry": ["opentelemetry"],
}  # the files behind a set


def pins(name: str) -> dict[str, str]:
    """The packages of a set with their versions."""
    text = "".join((ROOT / f"requirements/{file}.txt").read_text() for file in FOLLOWED[name])
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def stub(folder: Path, name: str, version: str) -> None:
    """A wheel without contents that needs what the installed package of this version says it needs."""
    needs: list[str] = []
    if name in INSTALLED and INSTALLED[name].version == version:
        needs = INSTALLED[name].metadata.get_all("Requires-Dist") or []
    normal = f"{name.replace('-', '_')}-{version}"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"{normal}-py3-none-any.whl", "w") as wheel:
        extras = {found for need in needs for found in re.findall(r"extra == [\"']([^\"']+)", need)}
        lines = [*(f"Provides-Extra: {extra}" for extra in extras), *(f"Requires-Dist: {need}" for need in needs)]
        wheel.writestr(f"{normal}.dist-info/METADATA", head + "".join(f"{line}\n" for line in lines))
        wheel.writestr(f"{normal}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{normal}.dist-info/RECORD", "")


INSTALLED = {re.sub(r"[-_.]+", "-", found.name).lower(): found for found in metadata.distributions()}


def uv(project: Path, *words: str) -> str:
    """What uv answers without a network, where it knows the stubs alone."""
    command = [sys.executable, "-m", "uv", *words, "--offline", "--no-cache", "--python", sys.executable]
    env = {**os.environ, "UV_FIND_LINKS": "stubs"}
    result = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=HUNG_S)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, locked by uv from stubs of every pinned package."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "requirements", project / "requirements")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, project)
    (project / "stubs").mkdir()
    for name, version in (pins("gpu") | pins("opentelemetry")).items():
        stub(project / "stubs", name, version)
    uv(project, "lock", "--no-build-isolation")
    return project


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_an_extra_is_its_pinned_set(project: Path, extra: str) -> None:
    words = ["--extra", extra, "--no-hashes", "--no-emit-project", "--no-annotate", "--no-header", "--frozen"]
    found = dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", uv(project, "export", *words), re.MULTILINE))
    assert found == pins(extra)


def test_the_lock_names_each_wheel_by_its_place(project: Path) -> None:
    """The reason why no uv.lock is kept with the sources; without a network the place is this machine's folder."""
    lock = tomllib.loads((project / "uv.lock").read_text())
    places = [package["source"]["registry"] for package in lock["package"] if "registry" in package["source"]]
    assert set(places) == {"stubs"} and len(places) == len(pins("gpu") | pins("opentelemetry"))
    ignored = (ROOT / ".gitignore").read_text().split()
    assert "uv.lock" in ignored


def test_requirements_that_are_not_followed_are_of_pinned_packages() -> None:
    left_out = [entry["name"] for entry in UV["dependency-metadata"]]
    assert left_out == sorted(set(left_out)) and set(left_out) <= (pins("gpu") | pins("opentelemetry")).keys()


@pytest.mark.parametrize("name", ["cpu", "dev", "docs"])
def test_the_locks_are_read_by_uv(project: Path, name: str) -> None:
    """Resolved without a network from the lock's own lines."""
    for package, version in pins(name).items():
        stub(project / "stubs", package, version)
    words = ["pip", "compile", "-q", "--no-deps", "--no-annotate", "--no-header"]
    found = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", uv(project, *words, f"requirements/{name}.lock"), re.MULTILINE))
    assert found == pins(name)
