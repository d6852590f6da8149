"""Agents in processes of their own, by way of the shipped adapter."""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from left_processes import session_processes
from limits import HUNG_S
from scripted import Model, tokenizer

from areal_like.capabilities.agents.make import Workflows
from areal_like.capabilities.agents.playing import ENTRY
from areal_like.capabilities.agents.workers.processes import UserProcesses
from areal_like.capabilities.agents.workers.remote import WorkerLimits
from areal_like.core.config.load import load
from areal_like.core.rollout.pool import Sampling
from areal_like.core.types import Prompt, Reward, Trajectory
from areal_like.core.user_code import load_object

ADAPTER = Path(__file__).parents[3] / "examples/adapters/command.py"
AGENT = """
import json, sys, openai
row = json.load(sys.stdin)
client = openai.OpenAI()
ask = lambda: client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["question"]}])
print("the answer is", ask().choices[0].message.content)
print(0.75)
"""


said: list[str] = []  # what the last episode reported


async def no_score(prompt: Prompt, responses: Sequence[Any]) -> list[Reward]:
    raise AssertionError("nobody asked")


@pytest.fixture(scope="module")
def agents(tmp_path_factory) -> Iterator[tuple[UserProcesses, Path]]:
    """A process that runs the adapter, and the file of the agent that the adapter starts."""
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    shared = UserProcesses(ENTRY, pickle.dumps([]), WorkerLimits(1, 1, 60.0), print)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_COMMAND", f"{sys.executable} {file}")
        asyncio.run(shared.__aenter__())
        yield shared, file
        asyncio.run(shared.__aexit__())


@pytest.fixture
def play(write, agents):
    """What an episode with an agent of this source gives, and how it ended."""
    processes, file = agents

    def play(source: str, *overrides: str) -> tuple[list[Trajectory], dict[str, float]]:
        file.write_text(source)
        settings = [f"workflow={ADAPTER}:run", "episode.endpoint=true", "episode.max_tokens=500", *overrides]
        config, own = load(write(), settings).config, tokenizer("plain")
        said.clear()
        model = Model(lambda n: [*own.encode_text("ab"), own.eos_token_ids[0]])

        async def main() -> tuple[list[Trajectory], dict[str, float]]:
            async with Workflows(config, model, no_score, own, said.append, None, processes) as workflows:  # type: ignore[arg-type]
                workflow = workflows.train(Sampling(8, stop_token_ids=own.eos_token_ids), 1)
                return await workflow(Prompt(0, [], row={"question": "x"}), 0), workflows.counts()

        return asyncio.run(main())

    return play


def test_a_program_is_an_agent(play):
    (item,), counts = play(AGENT)
    assert item.reward == 0.75 and item.generated.any() and counts["episodes/done"] == 1


def test_a_program_that_fails_or_hangs_is_counted_and_ended(play):
    assert play("raise SystemExit(3)")[1] == {"episodes/raised": 1}
    assert play("import time; time.sleep(99999)", "episode.timeout_s=1")[1] == {"episodes/time_limit": 1}
    assert not left()


@pytest.mark.parametrize("client", ["openai.OpenAI()", "anthropic.Anthropic()"])
def test_a_proxy_is_not_asked_for_the_endpoint(play, client):
    """Port 9 discards; the proxy's variables are set in the agent before its clients read them."""
    proxies = "".join(f"os.environ['{name}'] = 'http://127.0.0.1:9'; " for name in ("http_proxy", "HTTP_PROXY"))
    ask = (
        "client.messages.create(max_tokens=9, **asked)"
        if "anthropic" in client
        else "client.chat.completions.create(**asked)"
    )
    source = f"""
import os, sys, openai, anthropic
{proxies}
client = {client}
asked = dict(model="policy", messages=[{{"role": "user", "content": "x"}}])
{ask}
print(0.5)
"""
    (item,), counts = play(source)
    assert item.reward == 0.5 and counts["episodes/done"] == 1, said


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, ("h", "h")),
        ({"NO_PROXY": "a,b"}, ("a,b,h", "a,b,h")),
        ({"no_proxy": "a", "NO_PROXY": ""}, ("a,h", "a,h")),
        ({"no_proxy": "a", "NO_PROXY": "b"}, ("a,h", "b,h")),
        ({"no_proxy": "*"}, ("*", "*")),
    ],
)
def test_hosts_that_need_no_proxy_stay_so(before, after):
    exempt = load_object(f"{ADAPTER}:without_proxy")("h", before)
    assert (exempt["no_proxy"], exempt["NO_PROXY"]) == after


@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("raise ValueError('the tool is missing')", "ValueError: the tool is missing"),
        ("import sys; sys.stderr.write('x' * 9**6 + '\\nout of disk\\n\\n'); raise SystemExit(3)", "out of disk"),
        ("import sys; print('not a number'); sys.stderr.write('odd')", "odd"),
        ("import sys; sys.stderr.write('silent')", "silent"),
        ("import os; os.write(2, bytes([255, 10])); raise SystemExit(1)", "\ufffd"),
    ],
)
def test_the_last_line_of_standard_error_is_reported(play, source, last):
    assert play(source)[1] == {"episodes/raised": 1}
    assert any(last in line for line in said), said


def test_a_process_that_leaves_the_group_delays_nothing(play):
    """It holds standard error open until the worker ends; the end of the episode does not wait for it."""
    source = "import subprocess\n"
    source += "subprocess.Popen(['sleep', '88888'], stdout=subprocess.DEVNULL, start_new_session=True)\n"
    started = time.monotonic()
    counts = play(source + AGENT)[1]
    assert counts["episodes/done"] == 1 and time.monotonic() - started < HUNG_S / 2


@pytest.mark.parametrize("then", ["child.wait()", pytest.param("raise SystemExit(3)", marks=pytest.mark.long)])
def test_what_a_program_has_started_ends_with_the_episode(play, then):
    source = "import subprocess\nchild = subprocess.Popen(['sleep', '99999'])\n"
    assert play(source + then, "episode.timeout_s=3")[1] == {"episodes/time_limit": 1}
    assert not left()


def left() -> list[str]:
    """Processes of agents that do not end."""
    limit = time.monotonic() + HUNG_S
    while (
        found := [it for it in session_processes() if "agent.py" in it or "99999" in it]
    ) and time.monotonic() < limit:
        time.sleep(0.2)
    return found
