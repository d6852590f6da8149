"""What `pip install .` gives: a command with the libraries and the files that it needs."""

from __future__ import annotations

import re
import shlex
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
    shutil.copytree(ROOT / "requirements", source / "requirements")
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


def requirements(stated: Message, extra: str) -> set[str]:
    """What is required with an extra and not without; of an extra with versions, as in its file."""
    lines = [line.partition(";") for line in stated.get_all("Requires-Dist", [])]
    if not extra:
        return {distribution(line) for line, _, when in lines if not when}
    return {line.strip() for line, _, when in lines if when.strip() == f'extra == "{extra}"'}


def pinned(name: str) -> set[str]:
    return set(re.findall(r"^[a-z].*", (ROOT / f"requirements/{name}.txt").read_text(), re.MULTILINE))


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
    needs = {extra: requirements(stated, extra) for extra in ("", *stated.get_all("Provides-Extra", []))}
    assert needs == {
        "": {distribution(name) for name in PROJECT["dependencies"]},
        "cpu": pinned("cpu"),
        "gpu": pinned("cpu") | pinned("gpu"),
        "opentelemetry": pinned("opentelemetry"),
    }
    assert len(needs[""]) <= 5
    entries = read(wheel, "entry_points.txt")
    assert "[console_scripts]\nallocation = allocation.cli:app\nareal-like = areal_like.__main__:main" in entries
    assert all(f"[{group}]" in entries for group in PROJECT.get("entry-points", {}))


def test_every_dependency_has_a_lower_bound_that_the_pinned_set_satisfies() -> None:
    for requirement in PROJECT["dependencies"]:
        name, bound = requirement.split(">=")
        pinned = metadata.version(name)
        assert [int(part) for part in pinned.split(".")[:2]] >= [int(part) for part in bound.split(".")], requirement


@pytest.fixture(scope="module")
def clean(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment that has the wheel and what it says it needs, and nothing else.

    What it needs is linked from this environment, so that no network is used."""
    environment = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    for name in closure(PROJECT["dependencies"]):
        for file in metadata.distribution(name).files or []:
            top = packages / file.parts[0]
            if not top.exists() and file.parts[0] not in ("..", "__pycache__"):
                top.symlink_to(
                    Path(str(file.locate())).parents[len(file.parts) - 2] if file.parts[1:] else file.locate()
                )
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python"]
    made = subprocess.run([*pip, "install", "-q", "--no-deps", wheel.filename], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return environment / "bin"


def answer(clean: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Of a command in the clean environment, far from the sources."""
    environment = {"PATH": str(clean), "HOME": str(clean), **environment}
    return subprocess.run([clean / words[0], *words[1:]], cwd=clean, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "command",
    [
        "allocation check 'megatron:(attn:d1p4t2c2|ffn:e4)' --model qwen3-30b-a3b --cluster 4x8",
        "allocation plan --model qwen3-0.6b --cluster 1x8",
        "allocation convert megatron:d2t2 --to verl",
        "areal-like run --help",
        "areal-like explain-code RUN-MEGATRON-CONTEXT",
        *(
            pytest.param(command, marks=pytest.mark.long)
            for command in (
                "allocation explain sglang:d2t2+megatron:d2t2",
                "allocation groups megatron:d4t2 --name tp",
                "allocation memory megatron:d8t2 --model qwen3-8b --gpu h100",
                "allocation explain-code ALLOC-HEADS",
                "areal-like --help",
            )
        ),
    ],
)
def test_what_pip_installs_is_enough(clean: Path, command: str) -> None:
    result = answer(clean, *shlex.split(command))
    assert result.returncode == 0, result.stderr


def test_the_engine_without_its_packages_says_what_to_do(clean: Path) -> None:
    result = answer(clean, "areal-like", "check", "run.yaml")
    assert result.returncode == 2
    assert "error[RUN-PACKAGE]" in result.stderr and "uv sync --extra cpu" in result.stderr


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(shell, marks=pytest.mark.long) for shell in ("zsh", "fish"))])
@pytest.mark.parametrize("command", ["allocation", "areal-like"])
def test_shells_complete(clean: Path, command: str, shell: str) -> None:
    asked = {f"_{command.replace('-', '_').upper()}_COMPLETE": f"source_{shell}"}  # detects no shell, unlike an option
    assert "complet" in answer(clean, command, **asked).stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("allocation ex", "explain"),
        ("areal-like sam", "samples"),
        ("allocation plan --model qwen3-30", "qwen3-30b-a3b"),
    ],
)
def test_words_are_completed(clean: Path, words: str, completed: str) -> None:
    command = words.split()[0]
    asked = {f"_{command.replace('-', '_').upper()}_COMPLETE": "complete_bash", "COMP_WORDS": words}
    asked["COMP_CWORD"] = str(len(words.split()) - 1)
    assert completed in answer(clean, command, **asked).stdout.split()


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
