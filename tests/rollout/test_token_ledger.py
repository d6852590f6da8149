"""Every token that a server answered is in one place of the account, at every step, whatever is cancelled or breaks."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from aiohttp import web
from fake_server import Body, FakeServer, event, output, serving

from areal_like.backends import http
from areal_like.capabilities.agents.playing import Rollout
from areal_like.core.config.schema import EvaluatorConfig
from areal_like.core.loop.evaluation import EvaluationSet, Evaluator
from areal_like.core.rollout import pool, router
from areal_like.core.rollout.admission import Admission
from areal_like.core.rollout.collector import Collector, token_ledger
from areal_like.core.rollout.http import Deadline
from areal_like.core.rollout.pool import Sampling, ServerPool
from areal_like.core.rollout.single_turn import SingleTurn
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.types import Ints, Prompt, Reward, Trajectory

STOP, ENDLESS = 7, 50
STEPS, BATCH = 4, 4


def breaking(answered: list[int]) -> FakeServer:
    """A server that answers in two parts, notes how many tokens each has, and breaks off now and then."""

    async def generate(server: FakeServer, body: Body) -> Any:
        async def say(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for place, tokens in sorted(enumerate(body["input_ids"]), key=lambda numbered: numbered[1][0]):
                for is_end in [False, True][len(tokens) > 1 :]:
                    await asyncio.sleep(600 if is_end and tokens[0] == ENDLESS else 0.001)
                    while server.is_paused:
                        await asyncio.sleep(0.001)
                    made = [STOP] if is_end else [3] * (1 + tokens[0])
                    part = output(made, server.version, reason="stop" if is_end else None)
                    if random.random() < 0.02:
                        assert request.transport
                        request.transport.abort()
                        return response
                    await response.write(event(place, part))
                    answered.append(len(made))
            return response

        return say

    return FakeServer(generate)


async def score(prompt: Prompt, responses: list[Ints]) -> list[Reward]:
    return [Reward(float(prompt.sample_id % 3)) for _ in responses]


@pytest.mark.parametrize("spare", [0, 3], ids=["", "oversampling"])
def test_generated_is_the_sum_of_the_others_at_every_step(spare: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router, "PAUSE_S", 0.02)
    monkeypatch.setattr(http, "AFTERMATH_S", 0.02)
    monkeypatch.setattr(pool, "MOST_TRIES", 1000)
    random.seed(0)
    answered: list[int] = []
    servers = [breaking(answered) for _ in range(2)]
    prompts = [Prompt(row, [row]) for row in range(40)]

    async def run() -> list[dict[str, float]]:
        async with serving(*servers) as urls, ServerPool(urls, "token", 30) as everyone, asyncio.TaskGroup() as tasks:
            workflow = SingleTurn(everyone, cast(Any, score), Sampling(100, stop_token_ids=(STOP,)), 4)
            evaluator = Evaluator(EvaluatorConfig(), {"held out": EvaluationSet(prompts[:3], workflow, 4)})
            collector = Collector(
                prompts=PromptStream(prompts, shuffle=False, seed=0),
                groups=STEPS * BATCH,
                workflow=workflow,
                admission=Admission(BATCH, 1, spare=spare),
                max_groups=None,
                tasks=tasks,
                keeps=lambda group: bool(group[0].reward),
                max_drops=100,
            )
            accounts = []
            for version in range(STEPS):
                async with everyone.interrupt(version, Deadline(5)):
                    for server in servers:
                        server.version = str(version)
                collector.publish(version)
                evaluating = asyncio.create_task(evaluator.evaluate())
                given_up = asyncio.create_task(everyone.sample([ENDLESS], Sampling(100)))
                await collector.next_batch()
                accounts.append(dict(token_ledger(everyone, collector, evaluator.tokens)))
                await evaluating
                while everyone.tokens_generated == everyone.tokens.total():  # the one that never ends has to begin
                    await asyncio.sleep(0.001)
                given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            accounts.append(dict(token_ledger(everyone, collector, evaluator.tokens)))
            return accounts

    *steps, end = [
        SimpleNamespace(**{tag[len("tokens/") :]: value for tag, value in a.items()}) for a in asyncio.run(run())
    ]
    for account in [*steps, end]:
        places = {place: tokens for place, tokens in vars(account).items() if place != "generated"}
        assert sum(places.values()) == account.generated
        assert min(places.values()) >= 0
    assert np.all(np.diff([account.trained for account in steps]) > 0)
    assert end.unfinished == end.in_flight == end.waiting == end.failed == 0
    assert min(end.trained, end.dropped, end.evaluated, end.cancelled) > 0
    assert end.evaluated == STEPS * 4 * sum(2 + row for row in range(3))
    assert end.generated <= sum(answered)


def test_tokens_of_a_dataset_are_trained_and_were_generated_by_nobody():
    async def data(prompt: Prompt, group_id: int) -> list[Trajectory]:
        unused: Any = None
        rollout = Rollout(prompt, group_id, unused, Sampling(9), 0, unused, unused, unused)
        return [rollout.wrap_response(prompt.tokens, [1, 2, STOP], 1.0)]

    async def run() -> dict[str, float]:
        async with ServerPool([], "token", 30) as nobody, asyncio.TaskGroup() as tasks:
            prompts = PromptStream([Prompt(0, [5])], shuffle=False, seed=0)
            collector = Collector(
                prompts=prompts, groups=3, workflow=data, admission=Admission(2, 1), max_groups=None, tasks=tasks
            )
            collector.publish(0)
            assert len(await collector.next_batch()) == 2
            return dict(token_ledger(nobody, collector, 0))

    assert set(asyncio.run(run()).values()) == {0}
