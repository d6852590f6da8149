"""Routers choose the experts that a batch has for them, in every layout, and their gradients are those of these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from replay_jobs import Replayed, reference_log_probs, replayed_step, with_routes
from told_experts import ToldModel
from tolerance import THOUSAND, assert_close, assert_gradient, rounding
from trainer_jobs import THOUSANDFOLD, Setting, make_batch, make_groups

from allocation import ParallelSizes
from areal_like.capabilities.router_replay.columns import ROUTES
from areal_like.core.types import Batch

pytestmark = pytest.mark.covers("router replay")

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS_ANEW = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}

LAYOUTS = [
    (ParallelSizes(), {"megatron": EXPERTS_ANEW}),
    (ParallelSizes(tp=2, cp=2, ep=4), {}),  # (attn:d1t2c2|ffn:e4)
    (ParallelSizes(pp=2, vpp=2), {"megatron": FULL}),
]
MORE_LAYOUTS = [
    (ParallelSizes(), {"share_prompts": True}),
    (ParallelSizes(), {"bridge": "megatron-bridge", "megatron": FULL}),
    (ParallelSizes(dp=2, edp=2), {}),
    (ParallelSizes(dp=2, ep=2), {"share_prompts": True, "megatron": EXPERTS_ANEW}),
    (ParallelSizes(cp=2, edp=2), {}),
    (ParallelSizes(pp=2), {"megatron": EXPERTS_ANEW}),
    (ParallelSizes(tp=2, dp=2, ep=2, etp=2), {}),
    (ParallelSizes(tp=2, dp=2, ep=2, etp=2), {"bridge": "megatron-bridge", "megatron": EXPERTS_ANEW}),
    (ParallelSizes(dp=2, etp=2), {"bridge": "megatron-bridge"}),
    (ParallelSizes(pp=2, cp=2, ep=2), {"bridge": "megatron-bridge"}),
    (ParallelSizes(pp=2, vpp=2, dp=2, ep=2), {"megatron": EXPERTS_ANEW}),
    (ParallelSizes(tp=2, cp=2, ep=4), {"megatron": FULL}),
    (ParallelSizes(tp=2, pp=2, cp=2, ep=4), {"megatron": EXPERTS_ANEW}),
    (ParallelSizes(tp=2, pp=2, dp=2, ep=2, etp=2), {"share_prompts": True}),
]


def ranks_of(sizes: ParallelSizes) -> int:
    return sizes.tp * sizes.cp * sizes.dp * sizes.pp


def assembled(parts: list[Any], batch: Batch) -> np.ndarray:
    values = np.full(len(batch.tokens), np.nan)
    for places, part in filter(None, parts):
        values[places] = part
    return values


@pytest.fixture(scope="module")
def unpacked(models):
    """Log-probs and gradients of transformers' model, a sequence at a time, whose routers are told the experts."""
    known: dict[bool, tuple[np.ndarray, dict[str, np.ndarray]]] = {}

    def compute(groups: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        if groups not in known:
            known[groups] = told(models["moe"], with_routes(make_groups() if groups else make_batch()))
        return known[groups]

    return compute


def told(path: Any, batch: Batch) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    unpacked = ToldModel(path)
    found, starts = np.full(len(batch.tokens), np.nan), np.cumsum(batch.lengths) - batch.lengths
    trained = batch.fields["loss_mask"].copy()
    trained[starts] = 0
    for start, length in zip(starts, batch.lengths, strict=True):
        here = slice(start, start + length)
        log_probs = unpacked.log_probs(batch.tokens[here], batch.fields[ROUTES][here])
        found[start + 1 : start + length] = log_probs.detach()
        (-(log_probs * torch.from_numpy(trained[here][1:])).sum() / trained.sum()).backward()
    found[batch.fields["loss_mask"] == 0] = np.nan
    named = unpacked.model.named_parameters()
    return found, {name: p.grad.numpy() for name, p in named if name.endswith("mlp.gate.weight")}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [*LAYOUTS, *(pytest.param(*row, marks=pytest.mark.long) for row in MORE_LAYOUTS)],
    ids=lambda x: str(x).removeprefix("ParallelSizes"),
)
def test_a_layout_replays_routes_as_an_unpacked_model_that_is_told_them(ranks, models, unpacked, sizes, options):
    groups = bool(options.get("share_prompts"))
    batch = make_groups() if groups else make_batch()
    setting = Setting(models["moe"], sizes, optimizer=THOUSANDFOLD, **options)
    outcomes: list[Replayed] = ranks.run(replayed_step, ranks_of(sizes), setting, groups)
    expected, gradients = unpacked(groups)
    without, replayed, own = (
        assembled([getattr(each, name) for each in outcomes], batch) for name in ("without", "replayed", "own")
    )
    assert_close(replayed, expected)
    assert np.nanmean(np.abs(replayed - expected)) <= rounding()
    assert np.nanmax(np.abs(without - expected)) >= 1e-2
    assert np.nanmean(np.abs(without - expected)) >= 1e-2
    np.testing.assert_array_equal(own, without)
    names = [name for name in outcomes[0].before if name.endswith("mlp.gate.weight")]
    assert sorted(names) == sorted(gradients)
    for name in names:
        moved = outcomes[0].before[name] - outcomes[0].after[name]
        assert_gradient(moved, gradients[name], is_update=True, err_msg=name)
        assert np.abs(moved).max() > 1e-3 * THOUSAND


def test_a_reference_chooses_its_own_experts(ranks, models):
    ((without, routed),) = ranks.run(reference_log_probs, 1, Setting(models["moe"]))
    np.testing.assert_array_equal(without[1], routed[1])


def test_routes_of_other_layers_are_refused(ranks, models):
    with pytest.raises(Exception, match="routes are those of 3 layers, and the model has 4 with experts"):
        ranks.run(replayed_step, 1, Setting(models["moe"]), False, 3)
