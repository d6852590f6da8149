"""What a real server samples from some of its vocabulary is what the trainer computes, over the same ids."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import peaked_model, pool_on, serve
from trainer_jobs import Setting, engine

from allocation import ParallelSizes
from areal_like.core.algorithms.batch import batch_of
from areal_like.core.rollout.joining import as_response, join_parts
from areal_like.core.rollout.pool import Sampling
from areal_like.core.sampling_masks import KEPT
from areal_like.core.types import Batch, Prompt, Reward, Trajectory

PROMPTS = [[5, 6, 7, 8], [9, 4], [11, 3, 8, 8, 6]]
CUTS: list[dict[str, Any]] = [{"top_p": 0.8, "top_k": 9}, {"top_k": 3}, {"min_p": 0.2, "top_k": 12}, {}]


def sampled(server: Any, model: Path, tokens: int, temperature: float) -> list[Trajectory]:
    """Responses of a server to each prompt, cut in each way, all in its batches together."""

    async def run() -> list[Trajectory]:
        async with pool_on(server) as pool:
            await serve(pool, model, 0)
            plain = Sampling(tokens, temperature, ignore_eos=True)
            asked = [(prompt, replace(plain, **cut)) for prompt in PROMPTS for cut in CUTS]
            made = await asyncio.gather(*(pool.sample(prompt, sampling) for prompt, sampling in asked))
        parts = zip(asked, made, strict=True)
        return [
            join_parts(Prompt(0, prompt), i // len(CUTS), [as_response(prompt), response], Reward(1.0), i % len(CUTS))
            for i, ((prompt, _), response) in enumerate(parts)
        ]

    return asyncio.run(run())


def log_probs(rendezvous: Any, listener: Any, setting: Setting, batch: Batch, temperature: float) -> Any:
    with engine(rendezvous, listener, setting) as made:
        return made.log_probs(batch, temperature)


def distances(ranks: Any, setting: Setting, n: int, batch: Batch, temperature: float) -> np.ndarray:
    """Distances of the trainer's log-probs from the servers', of every generated token."""
    result = np.full(len(batch.tokens), np.nan)
    for places, values in filter(None, ranks.run(log_probs, n, setting, batch, temperature)):
        result[places] = values
    distance = np.abs(result - batch.fields["behaviour_logprobs"])[batch.fields["loss_mask"] > 0]
    assert np.isfinite(distance).all()
    return distance


def check(
    ranks: Any, batch: Batch, temperature: float, settings: dict[int, list[Setting]], largest: float = 1e-6
) -> None:
    for n, each in settings.items():
        for setting in each:
            distance = distances(ranks, setting, n, batch, temperature)
            print(f"{setting.backend} {setting.sizes}: mean {distance.mean():.1e}, largest {distance.max():.1e}")
            assert distance.max() <= largest
    first = next(iter(settings.values()))[0]
    assert distances(ranks, first, 1, batch.with_field(KEPT, None), temperature).mean() > 0.1


def test_one_rank_computes_what_the_server_sampled_from(sglang_server, ranks):
    model, temperature = sglang_server.model, 0.9
    items = sampled(sglang_server, model, 12, temperature)
    for i, item in enumerate(items):
        counts, cut = (
            (item.columns[KEPT].counts if KEPT in item.columns else np.zeros(len(item.tokens)))[item.generated],
            CUTS[i % len(CUTS)],
        )
        assert (counts >= 1).all() and counts.max() <= cut["top_k"] if cut else not counts.any()
    check(ranks, batch_of(items, 0), temperature, {1: [Setting(model)]})


@pytest.mark.long
@pytest.mark.parametrize("is_peaked", [False, True])  # log-probs far from 0, where float32 has larger steps
def test_every_engine_computes_what_the_server_sampled_from(sglang_server, ranks, tmp_path, is_peaked):
    own, temperature = sglang_server.model, 0.7
    model = peaked_model(own, tmp_path / "peaked", seed=4) if is_peaked else own
    batch = batch_of(sampled(sglang_server, model, 60, temperature), 0)
    settings = {
        1: [Setting(model, max_tokens_per_mb=256), Setting(model, backend="fsdp", max_tokens_per_mb=256)],
        2: [
            Setting(model, ParallelSizes(tp=2, etp=2), max_tokens_per_mb=256, share_prompts=True),
            Setting(model, ParallelSizes(cp=2, edp=2), max_tokens_per_mb=256),
            Setting(model, ParallelSizes(cp=2, edp=2), backend="fsdp", max_tokens_per_mb=256, share_prompts=True),
        ],
    }
    check(ranks, batch, temperature, settings, 2e-5 if is_peaked else 1e-6)
