"""Groups whose responses branch on a real server: the trainer has the servers' log-probs, and computes a tree once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from serving import pool_on, serve
from test_masks_served import distances
from tolerance import rounding
from trainer_jobs import Setting

from areal_like.algorithms.batch import batch_of
from areal_like.capabilities.agents.branching import Branching
from areal_like.capabilities.agents.schema import BranchConfig
from areal_like.config.schema import MicroBatchConfig
from areal_like.rollout.pool import Sampling
from areal_like.trainer.packing import packs
from areal_like.types import Prompt, Reward, Trajectory, generated_in

pytestmark = pytest.mark.covers("shared prompts")
TEMPERATURE = 0.9


def branched(server: Any, model: Path) -> tuple[list[Trajectory], int]:
    """Two groups of 8 samples that branch twice, and how many tokens the server generated."""

    async def score(prompt: Prompt, responses: Sequence[Any]) -> list[Reward]:
        return [Reward(float(i)) for i in range(len(responses))]

    async def run() -> tuple[list[Trajectory], int]:
        async with pool_on(server) as pool:
            await serve(pool, model, 0)
            sampling = Sampling(30, TEMPERATURE, ignore_eos=True)
            workflow = Branching(pool, cast(Any, score), sampling, 8, BranchConfig(after=[10, 20]))
            groups = await asyncio.gather(*(workflow(Prompt(i, list(range(5, 25 + i))), i) for i in range(2)))
            return [item for group in groups for item in group], pool.tokens_generated

    return asyncio.run(run())


def test_a_tree_is_generated_once_and_computed_once(sglang_server, ranks):
    model = sglang_server.model
    items, generated = branched(sglang_server, model)
    assert len(items) == 2 * 8
    assert generated == generated_in(items) == 2 * (2 * 10 + 4 * 10 + 8 * 10)
    batch = batch_of(items, 0)
    lengths = {}
    for shares in (False, True):
        setting = Setting(model, max_tokens_per_mb=2048, share_prompts=shares)
        distance = distances(ranks, setting, 1, batch, TEMPERATURE)
        print(f"share_prompts={shares}: largest {distance.max():.1e}")
        assert distance.max() <= rounding()
        section = MicroBatchConfig(max_tokens_per_mb=2048, share_prompts=shares)
        _, pack = packs(batch, section, dp=1, dp_rank=0, alignment=1)
        lengths[shares] = int((pack(0).places >= 0).sum())
    assert lengths[False] == sum(len(item.tokens) for item in items)
    beginnings = {tuple(item.tokens[:size]) for item in items for size in range(1, len(item.tokens) + 1)}
    assert lengths[True] == len(beginnings) <= 21 + generated  # fewer where two branches happen to go on alike
    wrong = replace(batch, tokens=np.roll(batch.tokens, 1))
    assert distances(ranks, Setting(model, max_tokens_per_mb=2048), 1, wrong, TEMPERATURE).mean() > 0.01
