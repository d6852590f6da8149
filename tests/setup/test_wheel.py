"""What `pip install .` gives: a command with the libraries and the files that it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("allocation", "areal_like")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built offline from a copy, because setuptools builds beside the sources."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(built)]
    made = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    (file,) = built.glob("*.whl")
    return zipfile.ZipFile(file)


def read(wheel: zipfile.ZipFile, name: str) -> str:
    (file,) = (file for file in wheel.namelist() if file.endswith(f".dist-info/{name}"))
    return wheel.read(file).decode()


def distribution(requirement: str) -> str:
    """The normal name of what is required."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()  # type: ignore[index]


def test_the_wheel_holds_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    files = (file for name in PACKAGES for file in (ROOT / name).rglob("*") if file.is_file())
    wanted = {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}
    assert any(file.endswith(".lark") for file in wanted)
    assert wanted - set(wheel.namelist()) == set()


def test_the_wheel_says_what_it_needs_and_gives(wheel: zipfile.ZipFile) -> None:
    stated: Message = Parser().parsestr(read(wheel, "METADATA"))
    assert {distribution(name) for name in stated.get_all("Requires-Dist", [])} == {
        distribution(name) for name in PROJECT["dependencies"]
    }
    entries = read(wheel, "entry_points.txt")
    assert "[console_scripts]\nallocation = allocation.cli:app\nareal-like = areal_like.commands:main" in entries
    assert all(f"[{group}]" in entries for group in PROJECT.get("entry-points", {}))


def test_every_dependency_has_a_lower_bound_that_the_pinned_set_satisfies() -> None:
    for requirement in PROJECT["dependencies"]:
        name, bound = requirement.split(">=")
        pinned = metadata.version(name)
        assert [int(part) for part in pinned.split(".")[:2]] >= [int(part) for part in bound.split(".")], requirement


IMPORT_ALL = """
import importlib, pkgutil, sys
import allocation
for module in pkgutil.walk_packages(allocation.__path__, "allocation."):
    if not module.name.endswith(("calculator", "__main__")):  # the first is the notebook's, which brings its own
        importlib.import_module(module.name)
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_the_command_imports_only_what_is_declared() -> None:
    answer = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    owners = metadata.packages_distributions()
    used = {distribution(owner) for name in answer.stdout.split() for owner in owners.get(name, [])}
    assert (
        used - closure(PROJECT["dependencies"]) - {"areal-like", "setuptools", "regex"} == set()
    )  # Lark takes the last if it is there


def closure(requirements: Iterable[str]) -> set[str]:
    """The distributions that are installed with the required ones, they themselves included."""
    installed = {distribution(found.name): found for found in metadata.distributions()}
    found: set[str] = set()
    left = [distribution(requirement) for requirement in requirements]
    while left:
        name = left.pop()
        if name in installed and name not in found:  # some are another platform's alone
            found.add(name)
            left += [distribution(need) for need in installed[name].requires or [] if "extra ==" not in need]
    return found
