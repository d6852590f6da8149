"""A run whose reward is partly a language model's, on a server with OpenAI's interface beside it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web
from running import run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SMALL = ("total_train_steps=2", "warm_start.target_reward=0.2", "warm_start.steps=100", "saver.freq_steps=null")


@contextmanager
def judge_server(seen: list[Any]) -> Iterator[str]:
    """The base URL of a judge, in a thread of its own, that likes short responses and does not score empty ones."""

    async def judge(request: web.Request) -> web.Response:
        seen.append(body := await request.json())
        response = body["messages"][0]["content"].rpartition("Response:")[2]
        answer = f"Score: {10 if len(response) < 40 else 5}" if response.strip() else "I cannot tell."
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
        )

    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge)
    runner = web.AppRunner(app)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        port = asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield f"http://127.0.0.1:{port}/v1"
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.long
def test_a_judge_is_a_part_of_the_reward(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    seen: list[Any] = []
    parts = ("reward.parts.liked.type=judge", "reward.parts.liked.weight=0.5", "reward.parts.right.type=gsm8k")
    with judge_server(seen) as url:
        judge = (
            f"reward.judge.url={url}",
            "reward.judge.model=judge",
            'reward.judge.prompt="{question} Response:{response}"',
        )
        with run(tmp_path, *parts, *judge, *SMALL) as started:
            assert started.end() == 0, started.errors
            assert started.remains() == []
    samples = [json.loads(line) for line in (started.directory / "samples/step-000002.jsonl").read_text().splitlines()]
    assert any(sample["parts"].get("liked") for sample in samples)
    for sample in (sample for sample in samples if sample["reward"] is not None):
        assert sample["reward"] == pytest.approx(sample["parts"]["liked"] / 2 + sample["parts"]["right"])
    events = EventAccumulator(str(started.directory / "tensorboard"))
    events.Reload()
    counted = {
        name: sum(int(item.value) for item in events.Scalars(f"judge/{name}"))
        for name in ("judged", "cached", "failed")
    }
    # Responses of groups that were not trained, and of evaluations after the last step, are not counted by a step.
    assert sum(counted.values()) >= 32 and counted["judged"] <= len(seen) - 1


@pytest.mark.long
def test_a_judge_with_a_wrong_url_ends_the_run_before_trainers_start(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    judge = ("reward.type=judge", "reward.judge.url=http://127.0.0.1:1/v1", "reward.judge.model=judge")
    with run(tmp_path, *judge, "reward.judge.retries=0") as started:
        assert started.end() == 1
        assert started.remains() == []
    assert "did not score row 1: the judge cannot be reached" in started.errors
    assert "Traceback" not in started.errors
