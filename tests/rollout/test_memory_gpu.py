"""What `test_memory.py` says of the CPU, with torch_memory_saver, CUDA graphs and lent weights; needs one GPU."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serving as real
import torch
from limits import HUNG_S
from test_versions_gpu import EXAMPLE, LENGTH, PROMPTS, SHAPE, Lenders, check_labels, peaked

from allocation import ParallelSizes
from areal_like.backends.ray.lifetime import run_lifetime
from areal_like.backends.sglang.options import server_arguments
from areal_like.backends.sglang.process import SGLangServer
from areal_like.core.config.load import load
from areal_like.core.rollout.pool import Response, Sampling, ServerPool
from areal_like.core.rollout.server import ServerSpec
from areal_like.core.weights import SyncSpec, make_sync, publish
from areal_like.run.gpu_sharing import Alternate

pytestmark = pytest.mark.gpu

TURNS = 3
SHARE = 0.3  # of the GPU, for the server's weights and KV cache


def free_gib() -> float:
    return torch.cuda.mem_get_info(0)[0] / 2**30


@contextmanager
def phase(name: str) -> Iterator[None]:
    before, start = free_gib(), time.perf_counter()
    yield
    print(f"  {name}: {time.perf_counter() - start:.2f} s, free {before:.1f} -> {free_gib():.1f} GiB", flush=True)


async def taking_turns(config: Any, folder: Path, models: list[Path]) -> tuple[list[Response], float]:
    """Responses that turns of a trainer interrupt, and the least memory that one of these had more than a server's."""
    token, asking, freed = secrets.token_hex(8), None, []
    arguments = server_arguments(config, models[0], ParallelSizes(), "cuda")
    spec = ServerSpec("server", arguments, folder / "server.log", token, None, HUNG_S)
    url = await SGLangServer(spec, "127.0.0.1").start()
    trainer = Lenders(models[0], 1)
    async with ServerPool([url], token, HUNG_S, requests=config.weight_update.requests) as pool:
        sync = make_sync("ipc", trainer, pool, SyncSpec(HUNG_S, folder, 1, "gloo", bucket_mb=16))
        turns = Alternate(sync, [], pool, HUNG_S, phase)
        for version in range(TURNS):
            before = free_gib()
            await turns.to_trainer(None)
            freed.append(free_gib() - before)
            trainer.model = models[version % 2]
            if not version:
                await turns.connect()
            with phase("weights"):
                await publish(turns, version, HUNG_S)
            await turns.to_servers()
            if asking is None:
                await pool.sample(PROMPTS[0], Sampling(LENGTH, ignore_eos=True))  # kernels are compiled
                asking = asyncio.gather(*(pool.sample(prompt, Sampling(LENGTH, ignore_eos=True)) for prompt in PROMPTS))
            await asyncio.sleep(0.15)
        return await asking, min(freed)


@pytest.mark.parametrize("requests", ["in_place", "recompute"])
def test_requests_outlive_the_memory_that_they_are_in(tmp_path: Path, requests: str) -> None:
    overrides = [
        "rollout.sharing=alternate",
        f"weight_update.requests={requests}",
        f"sglang.mem_fraction_static={SHARE}",
    ]
    config = load(EXAMPLE, [*SHAPE, *overrides]).config
    models = [peaked(config, tmp_path, seed) for seed in range(2)]
    print(f"\n{requests}:")
    with run_lifetime(secrets.token_hex(6)) as folder:
        try:
            responses, freed = asyncio.run(taking_turns(config, folder, models))
        except BaseException:
            print((folder / "server.log").read_text()[-6000:])
            raise
    total = torch.cuda.mem_get_info(0)[1] / 2**30
    print(f"  at least {freed:.1f} of {SHARE * total:.1f} GiB were free in each turn")
    assert freed > 0.9 * SHARE * total
    assert any(len(set(response.versions)) > 1 for response in responses)
    if requests == "in_place":
        check_labels("turns, in place", models, responses)
        return
    networks = real.load_networks(*models, device="cuda")
    for prompt, response in zip(PROMPTS, responses, strict=True):
        anew = np.zeros(len(response.tokens))
        for version in set(response.versions.tolist()):
            whole = Response(response.tokens, response.logprobs, np.full_like(response.versions, version))
            scores = real.recomputed_logprobs({version: networks[version % 2]}, prompt, whole)
            anew = np.where(response.versions == version, scores, anew)
        assert np.abs(anew - response.logprobs).mean() < 0.1
