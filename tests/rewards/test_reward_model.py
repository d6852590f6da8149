"""A reward model's scores are transformers' own, and what it cannot score is missing, with the cause in words."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from classifiers import classifier, scores
from limits import HUNG_S

from allocation import ParallelSizes
from areal_like.cluster.lifetime import run_lifetime
from areal_like.config.load import load
from areal_like.config.schema import RewardConfig
from areal_like.data.tokenizer import Tokenizer
from areal_like.rewards.pool import Cause, Failure
from areal_like.rewards.reward_model import RewardModel
from areal_like.rewards.scoring import Rewards
from areal_like.rollout.server import ServerSpec
from areal_like.rollout.sglang.options import classifier_arguments
from areal_like.rollout.sglang.process import SGLangServer
from areal_like.types import Prompt, Reward

pytestmark = pytest.mark.covers("reward model")

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]
PROMPT = Prompt(0, [1], messages=lambda: MESSAGES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier(tmp_path_factory.mktemp("classifier") / "model")


async def asked(model: Path, handler: Callable[[Any], Any], texts: list[str], timeout_s: float = HUNG_S) -> Any:
    """What the model makes of the texts, where `handler` answers for its server."""
    app = web.Application()
    app.router.add_post("/classify", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with RewardModel([url], "token", model, timeout_s) as judge:
            return await judge(texts, PROMPT)
    finally:
        await runner.cleanup()


def test_what_is_scored_is_the_conversation_in_the_models_own_template(model: Path) -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], await request.json()))
        return web.json_response({"embedding": [len(seen)]})

    assert asyncio.run(asked(model, handler, ["4", "5\0"])) == [Reward(1.0), Reward(2.0)]
    own = Tokenizer.load(str(model))
    for (authorization, body), text in zip(seen, ["4", "5\0"], strict=True):
        tokens = own.encode_chat([*MESSAGES, {"role": "assistant", "content": text}], add_generation_prompt=False)
        assert authorization == "Bearer token" and body == {"input_ids": tokens}


def test_padding_at_the_end_has_no_score(model: Path, tmp_path: Path) -> None:
    """transformers takes the last token that is not padding; here that of newline is."""
    padded = tmp_path / "padded"
    padded.mkdir()
    for file in model.iterdir():
        (padded / file.name).write_bytes(file.read_bytes())
    own = Tokenizer.load(str(model))
    described = json.loads((padded / "config.json").read_text()) | {"pad_token_id": own.encode_text("\n")[-1]}
    (padded / "config.json").write_text(json.dumps(described))

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"embedding": [len((await request.json())["input_ids"])]})

    (whole,) = asyncio.run(asked(model, handler, ["4"]))
    assert asyncio.run(asked(padded, handler, ["4"])) == [Reward(whole.value - 1)]


@pytest.mark.parametrize(
    ("answer", "cause", "words"),
    [
        (web.Response(status=400, text="too long"), Cause.RAISED, "answered 400: too long"),
        (web.Response(text="["), Cause.RAISED, "an unusable answer"),
        (web.json_response({"embedding": [1, 2]}), Cause.RAISED, "an unusable answer"),
        (None, Cause.TIMED_OUT, "more than 0.5 s"),
    ],
)
def test_what_cannot_be_scored_is_missing(model: Path, answer: web.Response | None, cause: Cause, words: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        if answer is None:
            await asyncio.sleep(5)
        return web.Response(status=answer.status, body=answer.body) if answer else web.Response()

    (failure,) = asyncio.run(asked(model, handler, ["4"], timeout_s=HUNG_S if answer else 0.5))
    assert isinstance(failure, Failure) and failure.cause == cause and words in failure.message


def test_a_server_that_is_gone_is_a_cause(model: Path) -> None:
    async def run() -> Any:
        async with RewardModel(["http://127.0.0.1:1"], "token", model, HUNG_S) as judge:
            return await judge(["4"], PROMPT)

    (failure,) = asyncio.run(run())
    assert failure.cause == Cause.DIED


def test_it_is_one_of_the_weighted_parts(model: Path) -> None:
    config = RewardConfig.model_validate(
        {"parts": {"right": {"type": "gsm8k"}, "liked": {"type": "model", "weight": 0.5}}, "workers": 1}
    )

    async def judge(responses: Any, prompt: Prompt) -> Any:
        return [Reward(3.0), Failure(Cause.DIED, "gone")]

    async def run() -> Any:
        async with Rewards(config, Tokenizer.load(str(model)), model=judge) as rewards:
            return await rewards.score_texts(Prompt(0, [], "#### 4"), ["#### 4", "#### 4"])

    assert asyncio.run(run()) == [Reward(2.5, {"right": 1.0, "liked": 3.0}), Reward(None)]


@pytest.mark.long
@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama"])
def test_a_real_server_scores_as_transformers_does(family: str, tmp_path: Path, write: Callable[..., Path]) -> None:
    directory = classifier(tmp_path / "model", family)
    config = load(write(), [f"reward.model.path={directory}", "reward.model.dtype=float32"]).config
    assert config.reward.model
    arguments = classifier_arguments(config, config.reward.model, directory, ParallelSizes(), "cpu")
    texts = ["4", "the answer is 4", "5", ""]

    async def run() -> Any:
        async with AsyncExitStack() as stack:
            stack.enter_context(run_lifetime(secrets.token_hex(6)))
            server = SGLangServer(
                ServerSpec("reward", arguments, tmp_path / "log", "token", None, 600, True), "127.0.0.1"
            )
            url = await server.start()
            stack.push_async_callback(server.end)
            async with RewardModel([url], "token", directory, HUNG_S) as judge:
                return await judge(texts, PROMPT)

    rewards = asyncio.run(run())
    want = scores(directory, [[*MESSAGES, {"role": "assistant", "content": text}] for text in texts])
    assert [reward.value for reward in rewards] == pytest.approx(want, abs=1e-4)
    assert len({round(value, 2) for value in want}) > 1
