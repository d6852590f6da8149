"""Sandboxes in containers. Those that need an engine use the one of $SANDBOX_TOOL with the image $SANDBOX_IMAGE."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from limits import HUNG_S
from sandboxes import opened, why_not

from areal_like.backends.ray.containers import label, note_containers, remove_containers
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.capabilities.sandbox.backends import Recipe
from areal_like.capabilities.sandbox.handle import Sandbox
from areal_like.capabilities.sandbox.protocol import SandboxError
from areal_like.capabilities.sandbox.schema import SandboxConfig

TOOL, IMAGE = os.environ.get("SANDBOX_TOOL", "docker"), os.environ.get("SANDBOX_IMAGE")
MISSING = why_not(TOOL, IMAGE) if IMAGE else "$SANDBOX_IMAGE names no image"
engine = pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is one")
SETTINGS = SandboxConfig(backend=TOOL, image=IMAGE, memory_mb=128, disk_mb=4, output_kb=4, timeout_s=HUNG_S, warm=0)
FAKE = """#!/bin/sh
echo "$@" >> LOG
case "$1" in ps) echo one two;; run) echo no such image >&2; exit 125;; esac
"""


@pytest.fixture
def fake(tmp_path: Path) -> tuple[Path, Path]:
    """A program that lists two containers and starts none, and where it writes its arguments."""
    (program := tmp_path / "docker").write_text(FAKE.replace("LOG", str(tmp_path / "log")))
    program.chmod(0o755)
    return program, tmp_path / "log"


def in_container[T](body: Callable[[Sandbox], Awaitable[T]]) -> T:
    async def main() -> T:
        async with opened(SETTINGS) as sandbox:
            return await body(sandbox)

    return asyncio.run(main())


def test_the_janitor_removes_the_containers_of_its_run(fake):
    program, log = fake
    with run_lifetime("containers-of-a-test") as directory:
        note_containers(directory, str(program))
    assert log.read_text().splitlines() == [
        f"ps --all --quiet --filter label={label('containers-of-a-test')}",
        "rm --force --volumes one two",
    ]


def test_a_run_without_containers_asks_no_engine(fake, tmp_path):
    remove_containers(tmp_path, "a run")
    assert not fake[1].exists()


def test_an_engine_that_fails_is_quoted(fake, monkeypatch):
    monkeypatch.setenv("PATH", f"{fake[0].parent}:{os.environ['PATH']}")
    settings = SandboxConfig(backend="docker", image="nobody/nothing")
    with pytest.raises(SandboxError, match="no such image"):
        asyncio.run(Recipe.pack(settings).backend().start())
    started, *_ = fake[1].read_text().splitlines()
    for words in (
        "--network none",
        "--read-only",
        "--cap-drop ALL",
        "--pids-limit 64",
        "--memory 512m",
        "--pull never",
    ):
        assert words in started


@engine
def test_a_command_in_a_container():
    async def body(sandbox: Sandbox) -> None:
        await sandbox.write("folder/in", "given")
        assert await sandbox.read("folder/in") == b"given"
        assert (await sandbox.run("cat; exit 3", stdin="in")).status == 3
        assert (await sandbox.run("echo x > /written")).status != 0
        assert (await sandbox.run("echo left > kept; sleep 9999 & echo done")).stdout == "done\n"
        assert (await sandbox.run("cat kept")).stdout == "left\n"

    in_container(body)


@engine
@pytest.mark.parametrize(("command", "limit"), [("while :; do :; done", "time"), ("cat /dev/zero", "output")])
def test_a_limit_ends_a_command_in_a_container(command, limit):
    async def body(sandbox: Sandbox) -> None:
        met = await sandbox.run(command, timeout_s=1.0 if limit == "time" else HUNG_S)
        assert met.limit == limit and len(met.stdout) <= 4096
        assert (await sandbox.run("echo alive")).stdout == "alive\n"

    in_container(body)


@engine
def test_a_container_is_removed_with_its_episode():
    in_container(lambda sandbox: sandbox.run("sleep 9999 &"))
    names = subprocess.run([TOOL, "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True, check=True)
    assert "areal-sandbox" not in names.stdout
