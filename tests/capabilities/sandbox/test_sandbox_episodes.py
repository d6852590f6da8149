"""Workflows with sandboxes: each episode has its own, which ends with it, and with its worker in whatever way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from known import found_in
from limits import HUNG_S
from playing import ASK, Pool, score
from sandboxes import why_not
from scripted import tokenizer

from areal_like.capabilities.agents.forms import WorkflowError, level_of
from areal_like.capabilities.agents.make import Workflows
from areal_like.capabilities.agents.workers.processes import UserProcesses
from areal_like.config.load import load
from areal_like.rollout.pool import Sampling
from areal_like.types import Prompt

pytestmark = pytest.mark.covers("sandboxes")

bubblewrap = pytest.mark.skipif(bool(why_not()), reason=why_not() or "bubblewrap")
ROW = {"question": "1 + 1?"}
SLEEP = "88664433.125"
BUBBLEWRAP = "episode.sandbox={}"


@pytest.fixture
def play(write: Callable[..., Path], tmp_path: Path, processes: UserProcesses) -> Callable[..., Any]:
    """Plays a workflow's source; gives rewards, what was said, and the metrics."""

    def play(source: str, *overrides: str, n: int = 2) -> tuple[list[Any], list[str], dict[str, float]]:
        file = tmp_path / f"workflow_{time.monotonic_ns()}.py"
        file.write_text("import asyncio, os\n" + source)
        config = load(write(), [f"workflow={file}:run", "episode.max_failed_share=1", *overrides]).config
        said, own = list[str](), tokenizer("plain")

        async def main() -> tuple[list[Any], list[str], dict[str, float]]:
            async with Workflows(config, Pool(), score, own, said.append, 1000, processes) as workflows:  # type: ignore[arg-type]
                workflow = workflows.train(Sampling(8, stop_token_ids=own.eos_token_ids), n)
                group = await workflow(Prompt(0, [7], row=ROW), 0)
                await asyncio.sleep(0)  # counts come through the loop
                return [item.reward for item in group], said, workflows.counts()

        return asyncio.run(main())

    return play


def ends(seconds: str) -> bool:
    """Whether nobody sleeps for so long any more, soon."""
    limit = time.monotonic() + HUNG_S
    while any(seconds in (it.info["cmdline"] or []) for it in psutil.process_iter(["cmdline"])):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


@bubblewrap
def test_an_episode_runs_commands_in_a_sandbox_of_its_own(play):
    source = f"""
async def run(row, client, sandbox):
    await {ASK}
    await sandbox.write("in", "5")
    flood = await sandbox.run("yes")
    result = await sandbox.run("ls -A | wc -l; cat in")
    return float(result.stdout.split() == ["1", "5"] and flood.limit == "output")
"""
    rewards, said, counts = play(source, BUBBLEWRAP)
    assert (rewards, said) == ([1.0, 1.0], [])
    numbers = {name.removeprefix("sandbox/"): n for name, n in counts.items() if name.startswith("sandbox/")}
    assert {"starts": 2, "commands": 4, "limit_output": 2}.items() <= numbers.items()
    assert min(numbers["start_s"], numbers["wait_s"]) > 0


@bubblewrap
def test_a_workflow_that_uses_no_sandbox_starts_none(play):
    rewards, _, counts = play(
        f"async def run(row, client, *, sandbox=None):\n    await {ASK}\n    return 1.0", BUBBLEWRAP
    )
    assert rewards == [1.0, 1.0] and not counts.get("sandbox/starts")
    assert play(f"async def run(row, client, sandbox=None):\n    await {ASK}\n    return sandbox is None")[0] == [
        1.0,
        1.0,
    ]


@bubblewrap
def test_a_group_opens_its_sandboxes(play):
    source = """
async def run(prompt, n, rollout):
    async with rollout.sandbox() as sandbox:
        assert (await sandbox.run("echo $((1 + 1))")).stdout == "2\\n"
    response = await rollout.sample(prompt.tokens)
    return [rollout.trajectory([prompt.tokens, response], 1.0)]
"""
    rewards, said, counts = play(source, BUBBLEWRAP)
    assert (rewards, said, counts["sandbox/commands"]) == ([1.0], [], 1)
    _, (said_without,), _ = play(source)
    assert "set episode.sandbox" in said_without


@bubblewrap
@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("os._exit(3)", "died"),
        ("os.kill(os.getpid(), 9)", "died"),
        ("await asyncio.sleep(9999)", "time_limit"),
        ("1 / 0", "raised"),
    ],
)
def test_what_a_command_has_started_ends_with_the_episode(play, end, cause):
    source = f"""
import glob
def sleeps():
    for file in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if b"{SLEEP}" in open(file, "rb").read():
                return True
        except OSError:
            continue
    return False

async def run(row, client, sandbox):
    await {ASK}
    running = asyncio.ensure_future(sandbox.run("setsid sleep {SLEEP} & sleep {SLEEP}", timeout_s=9999))
    while not sleeps():
        await asyncio.sleep(0.05)
    {end}
"""
    limit_s = 3 if cause == "time_limit" else 600
    rewards, _, counts = play(source, BUBBLEWRAP, f"episode.timeout_s={limit_s}", n=1)
    assert rewards in ([], [None]) and counts[f"episodes/{cause}"] == 1
    assert ends(SLEEP)


OWN = """
import asyncio, tempfile, time
from areal_like.capabilities.sandbox.protocol import Outcome, SandboxError

class Sandboxes:
    def __init__(self, settings):
        self.memory_mb = settings.memory_mb

    async def start(self):
        if self.memory_mb == 65:
            raise SandboxError("the cloud is full")
        return Box()

class Box:
    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()

    async def run(self, command, stdin, timeout_s, output_bytes):
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, cwd=self.folder.name, stdin=pipe, stdout=pipe, stderr=pipe)
        out, err = await asyncio.wait_for(process.communicate(stdin), timeout_s)
        return Outcome(process.returncode, out[:output_bytes], err[:output_bytes], None, 0.0)

    async def close(self):
        self.folder.cleanup()
"""
USING = f"""
async def run(row, client, sandbox):
    await {ASK}
    await sandbox.write("file", "own")
    return float(await sandbox.read("file") == b"own")
"""


def test_a_user_s_own_backend_is_a_class(play, tmp_path):
    (tmp_path / "cloud.py").write_text(OWN)
    backend = f"episode.sandbox.backend={tmp_path}/cloud.py:Sandboxes"
    rewards, said, counts = play(USING, BUBBLEWRAP, backend)
    assert (rewards, said, counts["sandbox/starts"]) == ([1.0, 1.0], [], 2)
    rewards, (said,), counts = play(USING, BUBBLEWRAP, backend, "episode.sandbox.memory_mb=65")
    assert rewards == [None, None] and counts["episodes/sandbox"] == 2 and "the cloud is full" in said


@pytest.fixture
def findings(write, tmp_path):
    """Codes, keys and messages about a run with a workflow and sandboxes."""

    def findings(*overrides: str, source: str = USING, dry_run: bool = False) -> list[tuple[str, str, str]]:
        own = tmp_path / f"own_{abs(hash(source))}.py"  # a file is loaded once
        own.write_text(source)
        (tmp_path / "cloud.py").write_text(OWN)
        config = load(write(), [f"workflow={own}:run", *overrides]).config
        return [(f.code, f.key, f.message + " " + (f.help or "")) for f in found_in(config, dry_run=dry_run)]

    return findings


@bubblewrap
def test_a_backend_that_works_is_fine(findings):
    assert findings(BUBBLEWRAP) == []


@bubblewrap
def test_a_backend_that_does_not_start_is_refused(findings):
    ((code, key, message),) = findings("episode.sandbox={read_only: [/none]}")
    assert (code, key) == ("RUN-SANDBOX-START", "episode.sandbox.backend") and "/none" in message
    assert findings("episode.sandbox={read_only: [/none]}", dry_run=True) == []


def test_a_backend_that_is_not_installed_is_refused_with_the_fix(findings, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    ((code, key, message),) = findings(BUBBLEWRAP)
    assert (code, key) == ("RUN-SANDBOX-MISSING", "episode.sandbox.backend")
    assert "apt-get install bubblewrap" in message and ", or set" not in message
    (tmp_path / "docker").write_text("#!/bin/sh\necho no daemon >&2; exit 1\n")
    (tmp_path / "docker").chmod(0o755)
    assert "set episode.sandbox.backend=docker" in findings(BUBBLEWRAP)[0][2]
    ((code, _, message),) = findings("episode.sandbox={backend: docker, image: x}")
    assert code == "RUN-SANDBOX-START" and "no daemon" in message


def test_sandboxes_and_workflows_have_to_fit(findings):
    ((code, key, _),) = findings()
    assert (code, key) == ("RUN-SANDBOX-NEEDED", "workflow")
    ((code, key, _),) = findings("episode.sandbox={backend: docker}")
    assert (code, key) == ("RUN-SANDBOX-IMAGE", "episode.sandbox.image")
    ((_, key, message),) = findings(BUBBLEWRAP, source="async def run(row, client): ...", dry_run=True)
    assert key == "episode.sandbox" and "no workflow has a parameter `sandbox`" in message
    with_tools = "async def run(row, client, tools=None): ..."
    assert "episode.sandbox" in [key for _, key, _ in findings(BUBBLEWRAP, source=with_tools, dry_run=True)]
    group = "async def run(prompt, n, rollout): ..."
    assert findings(BUBBLEWRAP, source=group, dry_run=True) == []


def test_an_own_backend_is_loaded_and_tried(findings, tmp_path):
    own = f"episode.sandbox={{backend: '{tmp_path}/cloud.py:Sandboxes'}}"
    assert findings(own) == []
    ((code, _, message),) = findings(own, "episode.sandbox.memory_mb=65")
    assert code == "RUN-SANDBOX-START" and "the cloud is full" in message
    for name in ("nowhere:Sandboxes", f"{tmp_path}/cloud.py:Box", "bubblewarp"):
        ((code, key, _),) = findings(f"episode.sandbox={{backend: '{name}'}}")
        assert (code, key) == ("RUN-SANDBOX-BACKEND", "episode.sandbox.backend"), name


def test_a_group_has_no_parameter_for_a_sandbox():
    async def run(prompt, n, rollout, sandbox): ...

    with pytest.raises(WorkflowError, match=r"rollout\.sandbox\(\)"):
        level_of(run)

    async def other(row, client, sandbox): ...

    assert level_of(other) == "episode"
