"""As `test_versions.py`, on servers of their own: tensor-parallel ranks, and prompts that are prefilled in chunks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving as real
from test_versions import EXACT, PROMPTS, crossing, distance

from allocation import ParallelSizes
from areal_like.cluster.lifetime import run_lifetime
from areal_like.config.load import load
from areal_like.demo.init_model import write_init_model
from areal_like.rollout.pool import Response, Sampling, ServerPool
from areal_like.rollout.server import ServerSpec
from areal_like.rollout.sglang.options import server_arguments
from areal_like.rollout.sglang.process import SGLangServer

pytestmark = pytest.mark.long

DEMO = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
CHUNK = 16  # tokens of a prompt that are prefilled at once


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    write_init_model(load(DEMO).config.actor.init_model, folder / "source", seed=0)
    return [real.peaked_model(folder / "source", folder / str(seed), seed) for seed in range(3)]


@asynccontextmanager
async def pool_on(model: Path, folder: Path, sizes: ParallelSizes, *overrides: str) -> AsyncIterator[ServerPool]:
    config = load(DEMO, ["sglang.context_length=128", *overrides]).config
    token = secrets.token_hex(8)
    arguments = server_arguments(config, model, sizes, "cpu")
    server = SGLangServer(ServerSpec("server", arguments, folder / "server.log", token, None, 600), "127.0.0.1")
    async with ServerPool([await server.start()], token, 600) as pool:
        yield pool
    await server.end()


def test_every_token_has_its_version_on_two_tensor_parallel_ranks(models: list[Path]) -> None:
    async def run(folder: Path) -> list[Response]:
        async with pool_on(models[0], folder, ParallelSizes(tp=2)) as pool:
            return await crossing(pool, models)

    with run_lifetime(secrets.token_hex(6)) as folder:
        responses = asyncio.run(run(folder))
    networks = real.load_networks(*models)
    assert any(len(set(response.versions)) > 1 for response in responses)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert distance(networks, prompt, response) < EXACT


def test_chunks_that_were_prefilled_before_an_update_stay_as_they_are(models: list[Path]) -> None:
    """Prompts that an update finds half read: tokens are the new version's, on the old one's keys and values."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 25, 7 * CHUNK).tolist() for _ in range(12)]

    async def run(folder: Path) -> list[tuple[int, list[int], Response]]:
        options = [f"sglang.extra_args.chunked_prefill_size={CHUNK}"]
        async with pool_on(models[0], folder, ParallelSizes(), *options) as pool:
            await real.serve(pool, models[0], 0)
            await pool.sample(prompts[0][::-1], Sampling(2, ignore_eos=True))
            made: list[Any] = []
            for version, prompt in enumerate(prompts, 1):
                asking = asyncio.create_task(pool.sample(prompt, Sampling(4, ignore_eos=True)))
                await asyncio.sleep(0.01 * (version % 4 + 1))
                await real.serve(pool, models[version % 2], version)
                made.append((version, prompt, await asking))
            return made

    with run_lifetime(secrets.token_hex(6)) as folder:
        made = asyncio.run(run(folder))
    networks = real.load_networks(*models[:2])
    halves = 0
    for version, prompt, response in made:
        by_version = {version - 1: networks[(version - 1) % 2], version: networks[version % 2]}
        apart = [
            distance(by_version, prompt, response, prefilled=[(chunks * CHUNK, version - 1)] if chunks else [])
            for chunks in range(7)
        ]
        assert min(apart) < EXACT, (version, apart)
        halves += int(np.argmin(apart) > 0 and response.versions[0] == version)
    assert halves, "no update found a prompt half read"
