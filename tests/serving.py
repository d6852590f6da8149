"""The session's SGLang server as a pool, models whose log-probs say something, and transformers' opinion of them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from areal_like.rollout.pool import ServerPool
from areal_like.rollout.sglang.http import Deadline


@asynccontextmanager
async def pool_on(server: Any) -> AsyncIterator[ServerPool]:
    """A closed pool on the `sglang_server` fixture, whose own weights are back when the block ends."""
    async with ServerPool([server.url], server.token, timeout_s=600) as pool:
        try:
            yield pool
        finally:
            await load_from_disk(pool, server.model, "default")


async def load_from_disk(pool: ServerPool, model: Path, version: int | str) -> None:
    """Make the pool's servers load a Hugging Face directory."""
    body = {"model_path": str(model), "weight_version": str(version), "flush_cache": True}
    for server in pool.servers:
        await server.update("/update_weights_from_disk", body, 600)


async def serve(pool: ServerPool, model: Path, version: int) -> None:
    """Interrupt generation, and go on with another model as `version`."""
    async with pool.interrupted(version, Deadline(600)):
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
