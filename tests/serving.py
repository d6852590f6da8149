"""The session's SGLang server as a pool, models whose log-probs say something, and transformers' opinion of them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from areal_like.rollout.http import Deadline
from areal_like.rollout.pool import Requests, Response, ServerPool


@asynccontextmanager
async def pool_on(server: Any, requests: Requests = "in_place") -> AsyncIterator[ServerPool]:
    """A closed pool on the `sglang_server` fixture, whose own weights are back when the block ends."""
    async with ServerPool([server.url], server.token, timeout_s=600, requests=requests) as pool:
        try:
            yield pool
        finally:
            await load_from_disk(pool, server.model, "default")
            # version names come again in the next test: nothing may be found under them
            # (this waits for a pass that has answered and not ended, of which an update's own flush kills the server)
            flush = f"{server.url}/flush_cache?timeout=600"
            async with aiohttp.ClientSession(headers=server.headers) as session, session.post(flush) as answer:
                assert answer.status == 200, await answer.text()


async def load_from_disk(pool: ServerPool, model: Path, version: int | str) -> None:
    """Make the pool's servers load a Hugging Face directory."""
    for server in pool.servers:
        await server.load(str(model), version, 600)


async def serve(pool: ServerPool, model: Path, version: int) -> None:
    """Interrupt generation, and go on with another model as `version`."""
    async with pool.interrupt(version, Deadline(600)):
        await load_from_disk(pool, model, version)


def peaked_model(source: Path, target: Path, seed: int) -> Path:
    """A copy with other weights that are far enough from 0 to prefer some tokens clearly."""
    shutil.copytree(source, target)
    rng = np.random.default_rng(seed)
    weights = load_file(source / "model.safetensors")
    for name, value in weights.items():
        if "norm" not in name:
            weights[name] = (rng.standard_normal(value.shape) * 0.12).astype(np.float32)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def transformers_logprobs(
    model: Path, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> NDArray[np.float64]:
    """log p(token | what precedes it) of each response token, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logits = network(tokens).logits[0, len(prompt) - 1 : -1].double()
    scores = torch.log_softmax(logits / temperature, -1)
    return scores[range(len(response)), tokens[0, len(prompt) :]].numpy()


def recomputed_logprobs(
    networks: Mapping[int, Any], prompt: Sequence[int], response: Response, prefilled: Sequence[tuple[int, int]] = ()
) -> NDArray[np.float64]:
    """log p of each response token, by transformers, if the pass that made it ran with the weights of its version.

    A pass reads the token before the one that it makes and adds its keys and values to those that the passes before
    have left, of whichever version. The first reads the prompt; `prefilled`, pairs of length and version, says which
    parts of the prompt others had read before it.
    """
    import torch
    from transformers import DynamicCache

    device = networks[int(response.versions[0])].device
    inputs, cache, done = torch.tensor([[*prompt, *response.tokens]], device=device), DynamicCache(), 0
    scores: list[float] = []

    def read(version: int, end: int) -> Any:
        nonlocal done
        tokens, done = inputs[:, done:end], end
        with torch.no_grad():
            return networks[version](tokens, past_key_values=cache, use_cache=True).logits[0].double()

    for length, version in prefilled:
        read(version, done + length)
    for end in [*(np.flatnonzero(np.diff(response.versions)) + 1), len(response.versions)]:  # passes of one version
        logits = read(int(response.versions[end - 1]), len(prompt) + end - 1)[len(scores) - end :]
        made = inputs[0, len(prompt) + len(scores) : len(prompt) + end]
        scores += torch.log_softmax(logits, -1)[range(len(made)), made].tolist()
    return np.array(scores)


def load_networks(*models: Path, device: str = "cpu") -> dict[int, Any]:
    """Hugging Face directories in float32, numbered as versions."""
    import torch
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    return {version: load(model, dtype=torch.float32).to(device) for version, model in enumerate(models)}
