"""Weights change under running requests of a real server: what each token says of its version is what happened.

transformers computes every log-prob again: with the weights that the token's version names, on the keys and values that
older weights have left for the positions before. One token more or less of a version, or a prefix of the wrong one, is
off by 0.4 and more; what is right by 1e-5.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving as real
from limits import HUNG_S
from tolerance import assert_close, rounding

from areal_like.rollout.http import Deadline
from areal_like.rollout.pool import Requests, Response, Sampling, ServerPool

pytestmark = pytest.mark.covers("updates in flight")

EXACT, WRONG = rounding(8.0), 0.1
PROMPTS = [[5 + (i * 7 + j * 3) % 20 for j in range(4 + 5 * i)] for i in range(6)]
LENGTH = 90


@pytest.fixture(scope="module")
def models(sglang_server: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of the server's shape with different opinions; the place in the list is the version."""
    folder = tmp_path_factory.mktemp("models")
    return [real.peaked_model(sglang_server.model, folder / str(seed), seed) for seed in range(3)]


async def crossing(pool: ServerPool, models: list[Path]) -> list[Response]:
    """Responses to PROMPTS that are generated while weights change, from version 0 to the last."""
    await real.serve(pool, models[0], 0)
    asking = asyncio.gather(*(pool.generate([prompt], Sampling(LENGTH, ignore_eos=True)) for prompt in PROMPTS))
    for version in range(1, len(models)):
        await working(pool)
        await real.serve(pool, models[version], version)
    return [response for (response,) in await asking]


async def working(pool: ServerPool) -> None:
    """Wait until the server has generated something."""
    seen = set()
    for _ in range(1000):
        seen.add(str(await pool.servers[0].work_done(HUNG_S)))
        if len(seen) > 2:
            return
        await asyncio.sleep(0.005)


def distance(networks: Any, prompt: list[int], response: Response, **more: Any) -> float:
    return float(np.abs(real.recomputed_logprobs(networks, prompt, response, **more) - response.logprobs).max())


@pytest.mark.parametrize("requests", ["in_place", "drain"])
def test_every_token_has_the_version_that_made_it(sglang_server, models, requests: Requests):
    async def run() -> list[Response]:
        async with real.pool_on(sglang_server, requests) as pool:
            return await crossing(pool, models)

    responses = asyncio.run(run())
    networks = real.load_networks(*models)
    assert all(len(response.tokens) == LENGTH for response in responses)
    crossed = [response for response in responses if len(set(response.versions)) > 1]
    assert bool(crossed) == (requests == "in_place")
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert distance(networks, prompt, response) < EXACT
    for response in crossed[:1]:
        prompt = PROMPTS[responses.index(response)]
        response.versions = np.append(response.versions[1:], response.versions[-1])
        assert distance(networks, prompt, response) > WRONG, "a wrong label would not show"


def test_recompute_has_all_that_follows_made_by_the_new_weights_alone(sglang_server, models):
    async def run() -> list[Response]:
        async with real.pool_on(sglang_server, "recompute") as pool:
            return await crossing(pool, models)

    responses = asyncio.run(run())
    by_model = [
        [real.transformers_logprobs(model, prompt, response.tokens) for model in models]
        for prompt, response in zip(PROMPTS, responses, strict=True)
    ]
    assert any(len(set(response.versions)) > 1 for response in responses)
    for response, logprobs in zip(responses, by_model, strict=True):
        expected = [logprobs[version][place] for place, version in enumerate(response.versions)]
        assert_close(response.logprobs, expected)


def test_prefixes_are_shared_within_a_version_and_never_with_an_older_one(sglang_server, models):
    prompt = [5 + i % 20 for i in range(80)]

    async def run() -> list[int]:
        async with real.pool_on(sglang_server) as pool:
            cached = []
            for version in (0, 1):
                await real.serve(pool, models[version], version)
                for _ in range(2):
                    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4}}
                    answer = await pool.servers[0].connection.post("/generate", body, HUNG_S)
                    cached.append(answer["meta_info"]["cached_tokens"])
            return cached

    assert asyncio.run(run()) == [0, 79, 0, 79]


def test_a_group_shares_its_prompt_after_an_update_that_it_waited_for(sglang_server, models):
    """Samples that come while the server is paused are of the new version, and prefill their prompt once."""
    prompt = [5 + i % 20 for i in range(80)]

    async def run() -> tuple[list[Response], int]:
        async with real.pool_on(sglang_server) as pool:
            await real.serve(pool, models[0], 0)
            await pool.generate([prompt], Sampling(2))
            before = await prefilled(pool)
            async with pool.interrupt(1, Deadline(HUNG_S)):
                asking = asyncio.create_task(pool.generate([prompt] * 4, Sampling(4)))
                await asyncio.sleep(0.2)
                await real.load_from_disk(pool, models[1], 1)
            responses = await asking
            return responses, await prefilled(pool) - before

    async def prefilled(pool: ServerPool) -> int:
        """The count when it no longer changes: the server adds a request's tokens shortly after its answer."""
        count, last = (await pool.servers[0].work_done(HUNG_S))[0][3], -1
        while count != last:
            await asyncio.sleep(0.5)
            count, last = (await pool.servers[0].work_done(HUNG_S))[0][3], count
        return count

    responses, tokens = asyncio.run(run())
    assert {version for response in responses for version in response.versions} == {1}
    assert 80 <= tokens <= 80 + 4
    networks = real.load_networks(*models)
    assert all(distance(networks, prompt, response) < EXACT for response in responses)
