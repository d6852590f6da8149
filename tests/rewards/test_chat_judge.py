"""A language model judges over OpenAI's interface; what it does not score is missing, with the cause in words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from areal_like.core.config.schema import ChatJudgeConfig, RewardConfig, RewardPartConfig
from areal_like.core.errors import RunError
from areal_like.core.types import Prompt, Reward
from areal_like.data.tokenizer import Tokenizer
from areal_like.rewards.chat_judge import ChatJudge, JudgeServer
from areal_like.rewards.judge_texts import fill, read_score
from areal_like.rewards.pool import Cause, Failure
from areal_like.rewards.scoring import Rewards

QUESTION = "How many legs do {four} cats have?"
PROMPT = Prompt(0, [1], answer="16", messages=lambda: [{"role": "user", "content": QUESTION}])
TEMPLATE = 'Question: {question}\nReference: {answer}\nResponse: {response}\nAnswer as { "score": 0 }.'

type Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def completion(content: str | None, reason: str = "stop") -> web.Response:
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": content}}
    return web.json_response({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


async def with_judge[T](handler: Handler, use: Callable[[ChatJudge], Awaitable[T]], **keys: Any) -> T:
    """What `use` makes of a judge whose server answers with `handler`."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        config = ChatJudgeConfig(**{"url": url, "model": "m", "prompt": TEMPLATE, "retries": 0, **keys})
        async with ChatJudge(config, PROMPT, [JudgeServer.from_config(config)]) as judge:
            return await use(judge)
    finally:
        await runner.cleanup()


def sent(body: Any) -> str:
    return body["messages"][0]["content"]


def test_a_score_is_a_reward_between_0_and_1(monkeypatch) -> None:
    monkeypatch.setenv("JUDGES_TOKEN", "secret")
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        bodies.append(await request.json())
        return completion("It adds 4 four times. Score: 3, no: **Score: 7.5**")

    async def use(judge: ChatJudge) -> Any:
        return await judge(["4 x 4 = {answer}"], PROMPT), judge.statistics()

    (outcome,), counts = asyncio.run(with_judge(handler, use, token_variable="JUDGES_TOKEN"))
    assert outcome == Reward(0.75)
    assert counts == {"judge/judged": 1, "judge/cached": 0, "judge/failed": 0}  # the probe is not counted
    assert bodies[1]["model"] == "m" and bodies[1]["temperature"] == 0 and bodies[1]["max_tokens"] == 1024
    assert sent(bodies[1]) == (
        f'Question: {QUESTION}\nReference: 16\nResponse: 4 x 4 = {{answer}}\nAnswer as {{ "score": 0 }}.'
    )


def test_equal_responses_cost_one_request_and_failures_are_asked_again() -> None:
    requests: list[str] = []
    fails = True

    async def handler(request: web.Request) -> web.Response:
        requests.append(text := sent(await request.json()))
        return completion("no idea" if "bad" in text and fails else "Score: 10")

    async def use(judge: ChatJudge) -> Any:
        nonlocal fails
        first = await judge(["good", "good", "bad", "bad"], PROMPT)
        fails = False
        return first, await judge(["good", "bad"], PROMPT), judge.statistics()

    first, second, counts = asyncio.run(with_judge(handler, use))
    assert first[:2] == second == [Reward(1.0)] * 2
    assert all(isinstance(item, Failure) and item.cause is Cause.UNREADABLE for item in first[2:])
    assert len(requests) == 1 + 3  # the probe, `good`, `bad` twice
    assert counts == {"judge/judged": 2, "judge/cached": 2, "judge/failed": 2}


def test_the_cache_is_bounded() -> None:
    requests: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        requests.append(sent(await request.json()))
        return completion("Score: 1")

    async def use(judge: ChatJudge) -> None:
        for response in ("a", "b", "a", "c", "a", "b"):  # `b` gives way to `c`
            await judge([response], PROMPT)

    asyncio.run(with_judge(handler, use, cache_size=2))
    assert len(requests) == 1 + 4
    requests.clear()
    asyncio.run(with_judge(handler, use, cache_size=0))
    assert len(requests) == 1 + 6


def test_a_cancelled_caller_leaves_the_request_to_the_others() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        if "slow" in sent(await request.json()):
            asked.set()
            await answer.wait()
        return completion("Score: 5")

    async def use(judge: ChatJudge) -> Any:
        first = asyncio.create_task(judge(["slow"], PROMPT))
        await asked.wait()
        second = asyncio.create_task(judge(["slow"], PROMPT))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        answer.set()
        return await second

    assert asyncio.run(with_judge(handler, use)) == [Reward(0.5)]


def test_busy_servers_are_asked_again_and_no_more_than_allowed_at_once() -> None:
    running, most, refusals = 0, 0, 2

    async def handler(request: web.Request) -> web.Response:
        nonlocal running, most, refusals
        if refusals:
            refusals -= 1
            return web.json_response({"error": {"message": "busy"}}, status=429, headers={"retry-after-ms": "1"})
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return completion("Score: 10")

    async def use(judge: ChatJudge) -> Any:
        return await judge([str(number) for number in range(12)], PROMPT)

    assert asyncio.run(with_judge(handler, use, retries=2, requests=3)) == [Reward(1.0)] * 12
    assert most <= 3


@pytest.mark.parametrize(
    ("answer", "cause", "words"),
    [
        (lambda: completion("Score: 11"), Cause.UNREADABLE, "no score in the range"),
        (lambda: completion("Sco", "length"), Cause.UNREADABLE, "reward.judge.max_tokens cut off"),
        (lambda: completion(None), Cause.UNREADABLE, "no score"),
        (lambda: web.json_response({"choices": []}), Cause.UNREADABLE, "not a chat completion"),
        (lambda: web.json_response({"choices": None}), Cause.UNREADABLE, "not a chat completion"),
        (lambda: web.Response(text="<html>", content_type="text/html"), Cause.UNREADABLE, "not a chat completion"),
        (lambda: web.Response(text="{", content_type="application/json"), Cause.UNREADABLE, "not a chat completion"),
        (lambda: web.json_response({"error": {"message": "no such model"}}, status=404), Cause.RAISED, "status 404"),
        (lambda: web.json_response({"error": {"message": "overloaded"}}, status=503), Cause.RAISED, "status 503"),
    ],
)
def test_what_the_judge_does_not_score_is_missing(answer: Callable[[], web.Response], cause: Cause, words: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return answer() if "strange" in sent(await request.json()) else completion("Score: 1")

    async def use(judge: ChatJudge) -> Any:
        return (await judge(["strange"], PROMPT))[0], judge.statistics()["judge/failed"]

    outcome, failed = asyncio.run(with_judge(handler, use))
    assert isinstance(outcome, Failure) and outcome.cause is cause and words in outcome.message
    assert failed == 1


def test_a_judge_that_does_not_answer_in_time_gives_no_reward() -> None:
    stop = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        if "slow" in sent(await request.json()):
            await stop.wait()
        return completion("Score: 1")

    async def use(judge: ChatJudge) -> Any:
        judge._config = judge._config.model_copy(update={"timeout_s": 0.05})
        outcomes = await judge(["slow"], PROMPT)
        stop.set()
        return outcomes

    (outcome,) = asyncio.run(with_judge(handler, use))
    assert outcome == Failure(Cause.TIMED_OUT, "the judge took more than 0.05 s")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda: web.json_response({"error": {"message": "wrong key"}}, status=401),
            ("status 401", "wrong key", "Correct reward.judge.url, reward.judge.model or reward.judge.token_variable"),
        ),
        (lambda: completion("fine"), ("no score in the range: 'fine'", "Correct reward.judge.prompt")),
    ],
)
def test_a_judge_that_does_not_score_the_probe_ends_the_run(
    answer: Callable[[], web.Response], words: tuple[str, ...]
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return answer()

    async def use(judge: ChatJudge) -> None:
        raise AssertionError("the judge was entered")

    with pytest.raises(RunError) as raised:
        asyncio.run(with_judge(handler, use))
    assert all(word in str(raised.value) for word in ("did not score row 1", "before the first step", *words))


def test_an_unreachable_judge_ends_the_run() -> None:
    async def enter() -> None:
        config = ChatJudgeConfig(url="http://127.0.0.1:1/v1", model="m", retries=0)
        async with ChatJudge(config, PROMPT, [JudgeServer.from_config(config)]):
            raise AssertionError("the judge was entered")

    with pytest.raises(RunError, match=r"127\.0\.0\.1:1/v1 did not score row 1: the judge cannot"):
        asyncio.run(enter())


def test_a_judge_is_a_part_of_a_weighted_sum() -> None:
    said: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        return completion("?" if "unclear" in sent(await request.json()) else "Score: 5")

    async def use(judge: ChatJudge) -> Any:
        parts = {"liked": RewardPartConfig(type="judge", weight=0.5), "right": RewardPartConfig(type="gsm8k")}
        async with Rewards(RewardConfig(parts=parts), Tokenizer.make("bytes"), chat=judge, say=said.append) as rewards:
            return await rewards.score_texts(PROMPT, ["The answer is 16", "unclear"]), rewards.statistics()

    (good, unclear), counts = asyncio.run(with_judge(handler, use))
    assert good == Reward(1.25, {"liked": 0.5, "right": 1.0}) and unclear == Reward(None)
    assert counts["judge/judged"] == 1 and counts["judge/failed"] == counts["reward_missing/unreadable"] == 1
    assert len(said) == 1 and "(reward.parts.liked): the judge's answer has no score" in said[0]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ('{"score": 4}', 0.75),
        ('Here it is:\n```json\n{"why": "}{", "score": "4"}\n```', 0.75),
        (json.dumps({"score": {"value": 4}}), None),
        ('{"score": true}', None),
        ('{"score": 6}', None),
        ('{"score": NaN}', None),
        ("4", None),
        ("", None),
    ],
)
def test_a_score_is_read_from_json(answer: str, reward: float | None) -> None:
    config = ChatJudgeConfig(url="http://a", model="m", score_field="score", score_min=1.0, score_max=5.0)
    assert read_score(config, answer) == reward


def test_a_nested_score_is_read_from_json() -> None:
    config = ChatJudgeConfig(url="http://a", model="m", score_field="scores.style")
    assert read_score(config, '{"scores": {"style": 2.5}}') == 0.25


def test_a_conversation_is_written_with_its_roles() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]},
    ]
    prompt = Prompt(0, [1], messages=lambda: messages)
    assert fill("{question}|{response}", prompt, "{question}") == "user: Hi\n\nassistant: \n\nuser: 2 + 2?|{question}"


def test_requests_go_to_the_servers_in_turn() -> None:
    models: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        models.append((await request.json())["model"])
        return completion("Score: 5")

    async def ask() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        config = ChatJudgeConfig(path="model", backend="sglang:d2", prompt=TEMPLATE)
        async with ChatJudge(config, PROMPT, [JudgeServer(url, "first"), JudgeServer(url, "second")]) as judge:
            await judge(["1", "2", "3"], PROMPT)
        await runner.cleanup()

    asyncio.run(ask())
    assert sorted(models) == ["first", "first", "second", "second"]
