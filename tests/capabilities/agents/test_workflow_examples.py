"""The shipped workflows against a real server: what is trained on is what it produced, token for token."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted import Model
from serving import pool_on, serve

from areal_like.capabilities.agents.make import Workflows
from areal_like.capabilities.agents.workers.processes import UserProcesses
from areal_like.config.load import load
from areal_like.data.tokenizer import Tokenizer
from areal_like.demo import arithmetic
from areal_like.rollout.pool import Response, Sampling, ServerPool
from areal_like.runtime.user_code import load_object
from areal_like.types import Prompt, Reward, Trajectory

pytestmark = pytest.mark.covers("agents")

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/workflows"
ROW = arithmetic.generate(1, 5, 0, "train")[0]
SETTINGS = ("episode.max_tokens=120", "episode.tool_call_parser=qwen25")  # the server holds 128


async def no_score(prompt: Prompt, responses: Sequence[Any]) -> list[Reward]:
    raise AssertionError("nobody asked")


type Heard = list[tuple[tuple[int, ...], tuple[int, ...]]]


def overhear(pool: ServerPool) -> Heard:
    """What servers are asked from now on and what they answer, as token ids; without what is only prefilled."""
    heard: Heard = []
    sample = pool.sample

    async def listening(tokens: Sequence[int], sampling: Sampling, **more: Any) -> Response:
        response = await sample(tokens, sampling, **more)
        if sampling.max_new_tokens > 1:
            heard.append((tuple(tokens), tuple(response.tokens.tolist())))
        return response

    pool.sample = listening  # type: ignore[method-assign]
    return heard


async def play(
    pool: ServerPool, config: Any, tokenizer: Tokenizer, groups: int, processes: UserProcesses
) -> tuple[list[Trajectory], Any, list[str]]:
    said: list[str] = []
    async with Workflows(config, pool, no_score, tokenizer, said.append, None, processes) as workflows:
        workflow = workflows.train(Sampling(6, stop_token_ids=tokenizer.eos_token_ids), 3)
        played = await asyncio.gather(*(workflow(Prompt(i, [], row=ROW), i) for i in range(groups)))
        return [item for group in played for item in group], workflows.counts(), said


@pytest.mark.parametrize("name", ["retry", "guess"])
def test_an_example_trains_on_what_a_real_server_produced(name, write, sglang_server, processes):
    config = load(write(), [f"workflow={EXAMPLES / name}.py:run", *SETTINGS]).config
    tokenizer = Tokenizer.load(str(sglang_server.model))

    async def main() -> tuple[Heard, list[Trajectory], Any, list[str]]:
        async with pool_on(sglang_server) as pool:
            await serve(pool, sglang_server.model, 0)
            heard = overhear(pool)
            return heard, *await play(pool, config, tokenizer, 2, processes)

    heard, items, counts, said = asyncio.run(main())
    assert (said, counts["episodes/done"]) == ([], 6)
    assert all(item.reward is not None for item in items)
    assert {tuple(item.tokens.tolist()) for item in items} <= {asked + answered for asked, answered in heard}
    trained = Counter(token for item in items for token in item.tokens[item.generated].tolist())
    assert trained == Counter(token for _, answered in heard for token in answered)
    if name == "retry":  # the second try's prompt begins with the first one
        assert len(items) == 6 and any(item.generated.sum() > 6 for item in items)
    if name == "guess":
        assert len(items) == 12


def call(arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'calculate', 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("first", "result"),
    [
        (call({"a": 4, "operator": "*", "b": 5}), "20"),
        (call({"a": 4, "operator": "/", "b": 0}), "error: float division by zero"),
        (call({"a": 4}), "error: 'operator'"),
        ('<tool_call>\n{"name": "calculate", "arguments": \n</tool_call>', None),
        (call({"a": 4}).replace("calculate", "unheard_of"), None),
    ],
)
def test_tool_calls_are_read_by_sglangs_parser(first, result, write, sglang_server, processes):
    """The answers are told by the test, and parsed by the real server."""
    config = load(
        write(),
        [f"workflow={EXAMPLES}/calculator.py:run", *SETTINGS, "episode.max_tokens=5000", "rollout.prefill_once=false"],
    ).config
    tokenizer = Tokenizer.make("bytes")
    end = tokenizer.eos_token_ids[0]
    model = Model(lambda n: [*tokenizer.encode_text(["ok " + first, "#### 20"][n % 2]), end])

    async def main() -> tuple[list[Trajectory], Any, list[str]]:
        async with pool_on(sglang_server) as pool:
            pool.sample = model.sample  # type: ignore[method-assign]
            async with Workflows(config, pool, no_score, tokenizer, print, None, processes) as workflows:
                workflow = workflows.train(Sampling(300, stop_token_ids=tokenizer.eos_token_ids), 1)
                row = {"question": "4 * 5?", "answer": "20"}
                return await workflow(Prompt(0, [], row=row), 0), workflows.counts(), []

    (item,), counts, _ = asyncio.run(main())
    text = tokenizer.decode(item.tokens.tolist())
    assert counts["episodes/done"] == 1
    if result is None:  # the episode ends with what could not be parsed
        assert len(model.asked) == 1 and item.reward == 0
    else:
        assert f"tool: {result}\n" in text and item.reward == 1
    assert tokenizer.decode(item.tokens[item.generated].tolist()) == "ok " + first + ("#### 20" if result else "")


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        (4, 5, "20"),
        (0.5, "3", "1.5"),
        ("12", 20000000, "240000000"),
        ("twelve", 2, "error: could not convert string to float: 'twelve'"),
        ([1], 2, "error: float() argument must be a string or a real number, not 'list'"),
    ],
)
def test_what_the_model_gives_the_calculator_are_numbers_or_an_error(a, b, result):
    arguments = json.dumps({"a": a, "operator": "*", "b": b})
    assert load_object(f"{EXAMPLES}/calculator.py:calculate")(arguments) == result


def test_the_tool_agent_is_short():
    spec = importlib.util.find_spec("areal_like")
    assert spec is not None
    lines = [line for line in (EXAMPLES / "calculator.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 30
