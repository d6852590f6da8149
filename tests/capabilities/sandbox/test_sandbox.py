"""A command in a sandbox reaches nothing outside of it; each limit ends it with its name, and no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from limits import HUNG_S
from sandboxes import opened, why_not

from areal_like.capabilities.sandbox.backends import Recipe
from areal_like.capabilities.sandbox.handle import CommandResult, Sandbox
from areal_like.capabilities.sandbox.pool import Pool
from areal_like.capabilities.sandbox.protocol import SandboxError
from areal_like.capabilities.sandbox.schema import SandboxConfig

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "bubblewrap")

ROOT = Path(__file__).parents[3]
SMALL = SandboxConfig(memory_mb=128, processes=24, disk_mb=4, output_kb=4, timeout_s=HUNG_S, warm=0)
SLEEP = "88664422.125"  # of commands that must not be left


def in_sandbox[T](body: Callable[[Sandbox], Awaitable[T]], settings: SandboxConfig = SMALL) -> T:
    """What `body` gives with a sandbox, which is closed then."""

    async def main() -> T:
        async with opened(settings) as sandbox:
            return await body(sandbox)

    return asyncio.run(main())


def run(command: str | list[str], **more: object) -> CommandResult:
    """One command in a sandbox of its own."""
    return in_sandbox(lambda sandbox: sandbox.run(command, **more))  # type: ignore[arg-type]


def left(seconds: str) -> list[int]:
    """Processes that sleep for so long, anywhere on this machine."""
    return [it.pid for it in psutil.process_iter(["cmdline"]) if seconds in (it.info["cmdline"] or [])]


def gone(seconds: str) -> bool:
    limit = time.monotonic() + HUNG_S
    while left(seconds) and time.monotonic() < limit:
        time.sleep(0.05)
    return not left(seconds)


def test_a_command_has_a_status_two_outputs_and_an_input():
    result = run("cat; echo wrong >&2; exit 3", stdin="given")
    assert (result.status, result.stdout, result.stderr, result.limit) == (3, "given", "wrong\n", None)
    assert run(["printf", "%s", "a b; $HOME"]).stdout == "a b; $HOME"
    assert run("kill -SEGV $$").status == 128 + signal.SIGSEGV
    assert run(": " + "x" * (1 << 20)).status == 126  # too long for the system
    assert run("nothing_of_that_name").status == run(["nothing_of_that_name"]).status == 127


def test_files_stay_for_the_next_command_and_not_for_the_next_episode():
    async def body(sandbox: Sandbox) -> tuple[str, bytes, str]:
        await sandbox.write("folder/in", "of the workflow")
        copied = await sandbox.run("cp folder/in out; pwd")
        return copied.stdout, await sandbox.read("out"), (await sandbox.run("ls /tmp")).stdout

    assert in_sandbox(body) == ("/tmp/work\n", b"of the workflow", "work\n")
    assert run("ls -A").stdout == ""
    with pytest.raises(OSError, match="missing in the sandbox"):
        in_sandbox(lambda sandbox: sandbox.read("missing"))
    with pytest.raises(OSError, match=r"limit: disk|No space"):
        in_sandbox(lambda sandbox: sandbox.write("big", b"x" * (5 << 20)))


def test_a_large_file_arrives_whole():
    content = bytes(range(256)) * (3 << 12)

    async def body(sandbox: Sandbox) -> bytes:
        await sandbox.write("file", content)
        return await sandbox.read("file")

    assert in_sandbox(body) == content


def test_there_is_no_network():
    interfaces = run("cat /proc/net/dev").stdout.splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        reached = run(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}"])
    assert reached.status != 0 and "refused" in reached.stderr


@pytest.mark.parametrize("place", ["/", "/usr", "/etc", "/dev", "/proc/sys/kernel", "/var"])
def test_the_root_is_read_only(place):
    assert run(f"echo x > {place}/written").status != 0


def test_a_command_sees_neither_the_run_nor_other_processes_nor_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "abc")
    (tmp_path / "file").write_text("of the run")
    assert run(f"cat {tmp_path}/file {ROOT}/README.md").stdout == ""
    assert "SECRET" not in run("env; cat /proc/*/environ").stdout
    assert run("ls -d /proc/[0-9]* | wc -l").stdout.strip() in ("3", "4", "5")  # process 1, the shell and its commands
    assert run("cat /etc/shadow").status != 0
    tmp_path.chmod(0o755)
    shown = SMALL.model_copy(update={"read_only": [str(tmp_path)]})
    result = in_sandbox(lambda sandbox: sandbox.run(f"cat {tmp_path}/file; echo x > {tmp_path}/file"), shown)
    assert result.stdout == "of the run" and result.status != 0


def test_a_command_has_no_privileges():
    status = dict(line.split(":\t") for line in run("cat /proc/self/status").stdout.splitlines() if ":\t" in line)
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert run("unshare -U true").status != 0  # in a namespace of its own it could mount memory without a limit
    assert run("kill -9 1; cat /proc/1/environ").status != 0


HOSTILE = {
    "endless loop": ("while :; do :; done", "time"),
    "ignores signals": ("trap '' TERM INT HUP; while :; do sleep 1; done", "time"),
    "stops itself": ("kill -STOP $$", "time"),
    "fork bomb": ("exec bash -c 'b() { b & b & wait; }; b'", "processes"),  # it waits where a fork fails
    "memory hog": ("head -c 200M /dev/zero | tail -n 1 | sleep 9999", "memory"),
    "memory of many": ("for i in 1 2 3 4; do head -c 60M /dev/zero | tail -n 1 | sleep 9999 & done; wait", "memory"),
    "disk filler": ("cat /dev/zero > a; cat /dev/zero > b", "disk"),
    "many files": ("i=0; while echo x > f$i; do i=$((i+1)); done", "disk"),
    "output flood": ("yes", "output"),
    "error flood": ("yes >&2", "output"),
    "flood in the background": ("yes & yes & wait", "output"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_limit_ends_a_command_and_its_sandbox_goes_on(name):
    command, limit = HOSTILE[name]

    async def body(sandbox: Sandbox) -> tuple[CommandResult, CommandResult]:
        met = await sandbox.run(command, timeout_s=1.0 if limit == "time" else HUNG_S)
        await sandbox.run("rm -rf *")
        return met, await sandbox.run("echo alive; ls -d /proc/[0-9]* | wc -l")

    met, after = in_sandbox(body)
    assert met.limit == limit and len(met.stdout) <= 4096 and len(met.stderr) <= 4096, met
    assert after.stdout.split()[0] == "alive" and int(after.stdout.split()[1]) <= 5, after


def test_a_fork_bomb_that_gives_up_has_its_own_status():
    result = run("for i in $(seq 99); do sleep 9999 & done; wait")
    assert (
        (result.status, result.limit) == (2, None) and "Cannot fork" in result.stderr
    ) or result.limit == "processes"


def test_shared_memory_is_limited_too():
    result = run("cat /dev/zero > /dev/shm/big; wc -c < /dev/shm/big")
    assert 0 < int(result.stdout) <= 4 << 20


def test_a_background_process_ends_with_its_command():
    result = run(f"setsid nohup sleep {SLEEP} & (sleep {SLEEP} &) ; echo done")
    assert (result.stdout, result.status, result.limit) == ("done\n", 0, None)
    assert left(SLEEP) == []


def test_a_cancelled_command_ends_with_its_sandbox():
    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await sandbox.run(f"sleep {SLEEP}1")

    in_sandbox(body)
    assert gone(SLEEP + "1")


def test_commands_at_once_run_one_after_the_other():
    async def body(sandbox: Sandbox) -> list[CommandResult]:
        return await asyncio.gather(*(sandbox.run("mkdir here && sleep 0.05 && rmdir here") for _ in range(4)))

    assert [result.status for result in in_sandbox(body)] == [0] * 4


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, also where nobody has collected its status."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_sandbox_that_has_ended_says_so():
    async def body(sandbox: Sandbox) -> None:
        await sandbox.run("true")
        box = psutil.Process(sandbox._box._process.pid)  # type: ignore[union-attr]
        inside = box.children(recursive=True)
        assert inside
        box.kill()
        while not all(map(has_ended, inside)):  # the command could still run
            await asyncio.sleep(0.01)
        with pytest.raises(SandboxError, match="the sandbox has ended"):
            await sandbox.run("true")

    in_sandbox(body)


def test_the_pool_hides_the_start_and_each_sandbox_is_used_once():
    settings = SMALL.model_copy(update={"warm": 2})

    async def main() -> None:
        pool = Pool(Recipe.pack(settings).backend(), settings.warm)
        async with opened(settings, pool) as sandbox:
            await sandbox.run("touch here")
            assert sandbox.usage["starts"] == 1 and sandbox.usage["wait_s"] >= sandbox.usage["start_s"] > 0
        for _ in range(3):
            warm = [box for box, _ in await asyncio.gather(*pool._ready)]
            assert len(warm) == 2
            async with opened(settings, pool) as sandbox:
                assert (await sandbox.run("ls -A; touch here")).stdout == ""
                assert sandbox._box is warm[0]
        for box, _ in await asyncio.gather(*pool._ready):
            await box.close()

    asyncio.run(main())


KILLED = f"""
import asyncio, os, signal
from areal_like.capabilities.sandbox.schema import SandboxConfig
from areal_like.capabilities.sandbox.bubblewrap import Bubblewrap

async def main():
    box = await Bubblewrap(SandboxConfig()).start()
    asyncio.create_task(box.run(["/bin/sh", "-c", "trap '' TERM; setsid sleep {SLEEP}2 & sleep {SLEEP}2"], b"", 9999, 99))
    while not [f for f in os.listdir("/proc") if f.isdigit() and b"{SLEEP}2\\0" in read(f)]:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

def read(pid):
    try:
        return open(f"/proc/{{pid}}/cmdline", "rb").read()
    except OSError:
        return b""

asyncio.run(main())
"""


def test_everything_ends_with_a_parent_that_is_killed():
    killed = subprocess.run([sys.executable, "-c", KILLED], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=HUNG_S)
    assert killed.returncode == -signal.SIGKILL
    assert gone(SLEEP + "2")
