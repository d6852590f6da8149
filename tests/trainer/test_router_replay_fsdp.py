"""transformers' routers under FSDP choose the experts that a batch has for them, and have their gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from replay_jobs import Replayed, reference_log_probs, replayed_step, with_routes
from test_router_replay import assembled, told
from tolerance import THOUSAND, assert_close, assert_gradient, rounding
from trainer_jobs import THOUSANDFOLD, Setting, make_batch, make_groups

from allocation import ParallelSizes

sys.path.append(str(Path(__file__).parents[1] / "models"))
from tiny_models import VARIANTS, write_tiny

FAMILIES = ("qwen3_moe", "qwen3_moe-raw", "qwen3_moe-mlp-only", "qwen2_moe", "mixtral", "olmoe", "olmoe-normalised")
CHECKPOINTING = {"gradient_checkpointing": True}
CASES = [
    ("qwen3_moe", ParallelSizes(cp=2, edp=2), {"fsdp": CHECKPOINTING, "share_prompts": True}),
    ("mixtral", ParallelSizes(dp=2, edp=2), {"fsdp": CHECKPOINTING}),
    ("qwen2_moe", ParallelSizes(dp=2, edp=2), {"share_prompts": True}),
    ("olmoe", ParallelSizes(), {}),
    *(pytest.param(name, ParallelSizes(), {}, marks=pytest.mark.long) for name in FAMILIES if name != "olmoe"),
]


def check(ranks, path: Path, sizes: ParallelSizes, options: dict) -> None:
    """Compare log-probs and router gradients with those of an unpacked model that is told the same experts."""
    groups = bool(options.get("share_prompts"))
    batch, ranks_needed = make_groups() if groups else make_batch(), sizes.dp * sizes.cp
    layers = 1 if "mlp-only" in path.name else 2
    expected, gradients = told(path, with_routes(batch, layers=layers))
    setting = Setting(path, sizes, backend="fsdp", optimizer=THOUSANDFOLD, **options)
    outcomes: list[Replayed] = ranks.run(replayed_step, ranks_needed, setting, groups, layers)
    without, replayed, own = (
        assembled([getattr(each, name) for each in outcomes], batch) for name in ("without", "replayed", "own")
    )
    assert_close(replayed, expected)
    assert np.nanmean(np.abs(replayed - expected)) <= rounding()
    assert np.nanmean(np.abs(without - expected)) >= 1e-2
    np.testing.assert_array_equal(own, without)
    before, after = outcomes[0].before, outcomes[0].after
    moved = [
        before[name] - after[name] for name in sorted(before) if name.endswith((".mlp.gate.weight", "moe.gate.weight"))
    ]
    assert len(moved) == len(gradients) == layers
    for found, gradient in zip(moved, gradients.values(), strict=True):
        assert_gradient(found, gradient, is_update=True)
        assert np.abs(found).max() > 1e-3 * THOUSAND


@pytest.mark.parametrize(("name", "sizes", "options"), CASES, ids=lambda x: str(x).removeprefix("ParallelSizes"))
def test_a_family_replays_routes_as_an_unpacked_model_that_is_told_them(ranks, tmp_path, name, sizes, options):
    write_tiny(VARIANTS[name], tmp_path / name)
    check(ranks, tmp_path / name, sizes, options)


def test_routes_of_other_layers_are_refused_and_a_reference_chooses_its_own(ranks, models):
    ((without, routed),) = ranks.run(reference_log_probs, 1, Setting(models["moe"], backend="fsdp"))
    np.testing.assert_array_equal(without[1], routed[1])
    with pytest.raises(Exception, match=r"routes are those of 3 layers, and the model \(qwen3_moe\) has 4"):
        ranks.run(replayed_step, 1, Setting(models["moe"], backend="fsdp"), False, 3)
