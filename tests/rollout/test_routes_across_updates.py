"""Tokens keep the experts that they were computed with while a real server's weights change under their request.

The routers choose by noise in the hidden states, so other weights choose other experts. transformers computes every
log-prob again: with the weights of the token's version, and in each pass the experts that the server returned.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving as real
import torch
from cpu_server import RunningServer, server_on_cpu
from limits import HUNG_S
from test_routes_served import DEMO, OVERRIDES
from test_versions import working
from told_experts import ToldModel
from tolerance import BACKWARD, rounding

from areal_like.capabilities.router_replay.columns import ROUTES, Routes, RouteShape
from areal_like.config.load import load
from areal_like.demo.init_model import write_init_model
from areal_like.rollout.pool import Response, Sampling, ServerPool
from areal_like.rollout.sglang.http import Deadline

SHAPE = RouteShape(layers=3, with_experts=(0, 1, 2), chosen=2, experts=8)
PROMPTS = [[5 + (i * 7 + j * 3) % 20 for j in range(4 + 5 * i)] for i in range(4)]
LENGTH = 100

pytestmark = [pytest.mark.long, pytest.mark.covers("router replay", "updates in flight")]


class Replaying:
    """A network whose routers choose the experts of `routes`, by the place of the tokens that it reads."""

    def __init__(self, told: ToldModel, routes: Routes | None) -> None:
        self.told, self.routes, self.device = told, routes, "cpu"

    def __call__(self, tokens: torch.Tensor, past_key_values: Any, use_cache: bool) -> Any:
        start = past_key_values.get_seq_length()
        rows = None if self.routes is None else self.routes[start : start + tokens.shape[1]].astype(np.int64)
        self.told._rows = None if rows is None else list(torch.from_numpy(rows).unbind(1))
        return self.told.model(tokens, past_key_values=past_key_values, use_cache=use_cache)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server, models by version, and the same models as they are told experts."""
    folder = tmp_path_factory.mktemp("noisy")
    config = load(DEMO, OVERRIDES).config
    assert config.actor.init_model.num_hidden_layers == SHAPE.layers
    write_init_model(config.actor.init_model, folder / "small", seed=0)
    models = [real.peaked_model(folder / "small", folder / str(seed), seed) for seed in range(3)]
    with server_on_cpu(config, models[0], folder, launcher="noisy_forgetful_launcher", routes=True) as server:
        yield server, models, [ToldModel(model) for model in models]


async def update(pool: ServerPool, model: Path, version: int, time_shared: bool) -> None:
    """Bring other weights to the servers, also as in a trainer's time slice, in which they have no memory."""
    if time_shared:
        await pool.hold(Deadline(HUNG_S))
        await pool.take_weights_back(Deadline(HUNG_S))
    await real.serve(pool, model, version)
    if time_shared:
        await pool.release_hold(Deadline(HUNG_S))


def responses(server: RunningServer, models: list[Path], first: int, time_shared: bool) -> list[Response]:
    """Responses to PROMPTS that are generated while weights change, from version `first` on."""

    async def run() -> list[Response]:
        async with ServerPool([server.url], server.token, HUNG_S) as pool:
            await real.serve(pool, models[0], first)
            sampling = Sampling(LENGTH, ignore_eos=True, columns={ROUTES: SHAPE})
            asking = asyncio.gather(*(pool.generate([prompt], sampling) for prompt in PROMPTS))
            for number, model in enumerate(models[1:], 1):
                await working(pool)
                await update(pool, model, first + number, time_shared)
            return [response for (response,) in await asking]

    return asyncio.run(run())


@pytest.mark.parametrize("time_shared", [False, True])
def test_the_returned_experts_reproduce_every_pass_of_each_version(served, time_shared: bool) -> None:
    server, models, told = served
    first = 10 * time_shared
    made = responses(server, models, first, time_shared)
    assert any(len(set(response.versions.tolist())) > 1 for response in made), "no response was interrupted"
    for prompt, response in zip(PROMPTS, made, strict=True):
        assert len(response.inputs[ROUTES]) == len(prompt) + LENGTH - 1
        response.versions = response.versions - first

        def distance(routes: Routes | None, response: Response = response, prompt: list[int] = prompt) -> float:
            networks = {version: Replaying(each, routes) for version, each in enumerate(told)}
            scored = real.recomputed_logprobs(networks, prompt, response)
            return float(np.abs(scored - response.logprobs).mean())

        replayed, own = distance(response.inputs[ROUTES]), distance(None)
        print(f"versions {sorted(set(response.versions.tolist()))}: {replayed:.1e} with routes, {own:.1e} without")
        assert replayed <= rounding(depth=BACKWARD)
        assert own > 1e-2
