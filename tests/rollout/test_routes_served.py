"""Routes of a real server, whose routers choose by noise: a model that is told them has the server's log-probs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_server import RunningServer, server_on_cpu
from limits import HUNG_S
from serving import load_from_disk, peaked_model
from told_experts import ToldModel
from tolerance import BACKWARD, rounding

from areal_like.capabilities.router_replay.columns import ROUTES, RouteShape
from areal_like.config.load import load
from areal_like.demo.init_model import write_init_model
from areal_like.rollout.pool import Response, Sampling, ServerPool
from areal_like.rollout.sglang.http import Deadline

DEMO = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
OVERRIDES = [
    "sglang.context_length=128",
    "actor.init_model.num_experts=8",
    "actor.init_model.num_experts_per_tok=2",
    "actor.init_model.moe_intermediate_size=64",
    "actor.init_model.tie_word_embeddings=false",
]
TEMPERATURE = 0.8
LONG = [4 + 7 * place % 11 for place in range(70)]  # whose other samples wait for the first (LONG_PROMPT)


@pytest.fixture(scope="module")
def config():
    return load(DEMO, OVERRIDES).config


@pytest.fixture(scope="module")
def shape(config) -> RouteShape:
    layers = config.actor.init_model.num_hidden_layers
    return RouteShape(layers, tuple(range(layers)), 2, 8)


@pytest.fixture(scope="module")
def server(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("noisy")
    write_init_model(config.actor.init_model, folder / "small", seed=0)
    model = peaked_model(folder / "small", folder / "model", seed=1)
    with server_on_cpu(config, model, folder, launcher="noisy_launcher", routes=True) as running:
        yield running


@pytest.fixture(scope="module")
def told(server) -> ToldModel:
    return ToldModel(server.model)


def distances(told: ToldModel, prompt: list[int], response: Response, routes: np.ndarray) -> tuple[float, float]:
    """The mean distances of log-probs with the routes, of all tokens but the last, and without."""
    tokens = np.array([*prompt, *response.tokens], np.int32)
    rows = np.concatenate([routes, np.full_like(routes[:1], 255)])
    said = response.logprobs
    replayed, own = (
        told.log_probs(tokens, given, TEMPERATURE).detach().numpy()[len(prompt) - 1 :] for given in (rows, None)
    )
    return float(np.abs(replayed - said).mean()), float(np.abs(own - said).mean())


def test_routes_reproduce_the_log_probs_of_responses_across_an_update(server: RunningServer, shape, told):
    sampling = Sampling(40, TEMPERATURE, ignore_eos=True, columns={ROUTES: shape})
    prompts = [LONG] * 3 + [[9, 8, 7]] * 2

    async def run() -> list[Response]:
        async with ServerPool([server.url], server.token, timeout_s=HUNG_S) as pool:
            await update(pool, server.model, 1)
            asked = asyncio.ensure_future(pool.generate(prompts, sampling))
            while pool.tokens_generated < 1 and not asked.done():
                await asyncio.sleep(0.01)
            await update(pool, server.model, 2)
            return await asked

    responses = asyncio.run(run())
    assert any(len(set(response.versions.tolist())) > 1 for response in responses)
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.inputs[ROUTES].shape == (len(prompt) + 39, shape.layers, 2)
        assert response.inputs[ROUTES].dtype == np.uint8
        replayed, own = distances(told, prompt, response, response.inputs[ROUTES])
        assert replayed <= rounding(depth=BACKWARD)  # of transformers, with weights that enlarge rounding
        assert own > 1e-2


def test_a_later_turn_is_asked_for_new_rows_alone(server: RunningServer, shape, told):
    sampling = Sampling(10, TEMPERATURE, ignore_eos=True, columns={ROUTES: shape})
    prompt, question = LONG, [3, 4, 5]

    async def run() -> tuple[Response, Response]:
        async with ServerPool([server.url], server.token, timeout_s=HUNG_S) as pool:
            await update(pool, server.model, 3)
            first = await pool.sample(prompt, sampling, session=1)
            earlier = [*prompt, *first.tokens.tolist()]
            second = await pool.sample([*earlier, *question], sampling, session=1, inputs_from=len(earlier) - 1)
            return first, second

    first, second = asyncio.run(run())
    assert len(second.inputs[ROUTES]) == 1 + len(question) + 10 - 1
    rows = np.concatenate([first.inputs[ROUTES], second.inputs[ROUTES]])
    earlier = [*prompt, *first.tokens.tolist()]
    replayed, own = distances(told, [*earlier, *question], second, rows)
    assert replayed <= rounding(depth=BACKWARD)  # of transformers, with weights that enlarge rounding
    assert own > 1e-2


def test_tokens_that_are_scored_anew_have_the_experts_that_they_were_scored_with(server: RunningServer, shape, told):
    async def run() -> list[tuple[np.ndarray, Any]]:
        async with ServerPool([server.url], server.token, timeout_s=HUNG_S) as pool:
            (one,) = pool.servers
            return [
                await one.token_scores(tokens, HUNG_S, start=len(LONG) - 1, cache=cache, shape=shape)
                for cache in ("probe", "probe", None)
            ]

    tokens = np.array([*LONG, *range(20, 40)], np.int32)
    for logprobs, routes in asyncio.run(run()):
        assert routes.shape == (len(tokens), shape.layers, 2)
        replayed, own = (told.log_probs(tokens, given, 1.0).detach().numpy() for given in (routes, None))
        scored = logprobs[len(LONG) :]
        assert np.abs(replayed[-len(scored) :] - scored).mean() <= rounding(depth=BACKWARD)  # as above
        assert np.abs(own[-len(scored) :] - scored).mean() > 1e-2


async def update(pool: Any, model: Path, version: int) -> None:
    async with pool.interrupt(version, Deadline(HUNG_S)):
        await load_from_disk(pool, model, version)
