"""A server gives back its memory under running requests, gets other weights, and goes on as if nothing had been.

`forgetful_launcher` loses on CPU what a GPU's memory would lose; transformers computes every log-prob again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import serving as real
import torch
from limits import HUNG_S
from test_versions import EXACT, PROMPTS, distance, working
from tolerance import assert_close

from allocation import ParallelSizes
from areal_like.cluster.lifetime import run_lifetime
from areal_like.config.load import load
from areal_like.demo.init_model import write_init_model
from areal_like.rollout.http import Deadline
from areal_like.rollout.pool import Requests, Response, Sampling, ServerPool
from areal_like.rollout.server import ServerSpec
from areal_like.rollout.sglang import process
from areal_like.rollout.sglang.options import server_arguments
from areal_like.rollout.sglang.patches.inside.memory import as_if_idle, keep
from areal_like.rollout.sglang.process import SGLangServer

DEMO = Path(__file__).parents[2] / "examples/math/gsm8k_grpo_cpu.yaml"
LENGTH = 90


async def taking_turns(pool: ServerPool, models: list[Path]) -> list[Response]:
    """Responses that two turns of a trainer interrupt, each of which brings other weights."""
    asking = None
    for version, model in enumerate(models):
        await pool.hold(Deadline(HUNG_S))
        await pool.take_weights_back(Deadline(HUNG_S))
        await real.serve(pool, model, version)
        await pool.release_hold(Deadline(HUNG_S))
        if asking is None:
            asking = asyncio.gather(*(pool.generate([prompt], Sampling(LENGTH, ignore_eos=True)) for prompt in PROMPTS))
        await working(pool)
    return [response for (response,) in await asking]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each contract gives on one server, and the models by version."""
    folder = tmp_path_factory.mktemp("models")
    config = load(DEMO, ["sglang.context_length=128"]).config
    write_init_model(config.actor.init_model, folder / "model", seed=0)
    models = [real.peaked_model(folder / "model", folder / str(seed), seed) for seed in range(3)]

    async def run(tmp: Path) -> dict[Requests, list[Response]]:
        token, responses = secrets.token_hex(8), {}
        arguments = server_arguments(config, folder / "model", ParallelSizes(), "cpu")
        spec = ServerSpec("server", arguments, tmp / "server.log", token, None, HUNG_S)
        url = await SGLangServer(spec, "127.0.0.1").start()
        for requests in ("in_place", "recompute"):
            async with ServerPool([url], token, HUNG_S, requests=requests) as pool:
                responses[requests] = await taking_turns(pool, models)
                await asyncio.sleep(0.5)  # SGLang ends a server that is idle and has lost track of its slots
                await pool.sample(PROMPTS[0], Sampling(4))
        return responses

    with pytest.MonkeyPatch.context() as patch, run_lifetime(secrets.token_hex(6)) as tmp:
        patch.setattr(process, "LAUNCHER", "forgetful_launcher")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        return asyncio.run(run(tmp)), models


@pytest.mark.long
def test_keys_and_values_wait_in_host_memory(served):
    responses, models = served[0]["in_place"], served[1]
    networks = real.load_networks(*models)
    assert any(len(set(response.versions)) > 1 for response in responses), "no response was interrupted"
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert len(response.tokens) == LENGTH
        assert distance(networks, prompt, response) < EXACT


@pytest.mark.long
def test_or_are_made_anew_by_the_new_weights(served):
    responses, models = served[0]["recompute"], served[1]
    assert any(len(set(response.versions)) > 1 for response in responses), "no response was interrupted"
    for prompt, response in zip(PROMPTS, responses, strict=True):
        by_version = [real.transformers_logprobs(model, prompt, response.tokens) for model in models]
        expected = [by_version[version][place] for place, version in enumerate(response.versions)]
        assert_close(response.logprobs, expected)


def test_a_cache_of_another_form_is_told_with_what_helps():
    """That of models with sliding windows has a tree that knows no single size."""

    def evictable_size() -> int:
        raise NotImplementedError

    scheduler = SimpleNamespace(
        waiting_queue=[],
        flush_cache=lambda: False,
        tree_cache=SimpleNamespace(evict=print, evictable_size=evictable_size),
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=SimpleNamespace),
        req_to_token_pool=SimpleNamespace(req_to_token=None),
    )
    with pytest.raises(NotImplementedError, match=r"write weight_update\.requests=recompute"):
        keep(scheduler)


def test_memory_is_released_once_the_device_is_idle(monkeypatch):
    """SGLang unmaps it at once, while kernels of a busy GPU may still read it."""
    done: list[str] = []
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: SimpleNamespace(synchronize=lambda: done.append(f"{device} is idle"))
    )
    updater = SimpleNamespace(scheduler=SimpleNamespace(device="cuda"), is_fully_idle=bool, flush_cache=bool)
    with as_if_idle(updater):
        done.append("released")
    assert done == ["cuda is idle", "released"]
