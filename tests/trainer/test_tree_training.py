"""Sequences that share prefixes, packed as trees: the gradients of every weight are those of flat packing."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from replay_jobs import with_routes
from test_layouts import world
from tolerance import assert_close, rounding
from trainer_jobs import (
    Outcome,
    Setting,
    likely_and_sure,
    make_supported,
    make_trees,
    squared,
    step_with_trees,
    weighted,
)
from transformers import AutoModelForCausalLM

from allocation import ParallelSizes
from areal_like.backends.fsdp import attention
from areal_like.core.config.schema import MicroBatchConfig
from areal_like.core.trainer.device_batch import to_device
from areal_like.core.trainer.packing import packs
from areal_like.core.types import Batch, LossSpec

pytestmark = pytest.mark.covers("shared prompts")

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS_ANEW = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}

BATCHES = {
    "plain": make_trees,
    "sampling masks": lambda: make_supported(batch=make_trees()),
    "routes": lambda: with_routes(make_trees()),
    "routes and sampling masks": lambda: with_routes(make_supported(batch=make_trees())),
}

LAYOUTS = [
    ("untied", ParallelSizes(), "plain", {}),
    ("moe", ParallelSizes(pp=2, vpp=2), "routes", {"megatron": EXPERTS_ANEW}),
    ("tied", ParallelSizes(cp=2, edp=2), "plain", {"backend": "fsdp"}),
    ("moe", ParallelSizes(cp=2, ep=2), "routes and sampling masks", {}),
]
MORE_LAYOUTS = [
    ("tied", ParallelSizes(tp=2, etp=2), "sampling masks", {}),
    ("tied", ParallelSizes(), "plain", {"bridge": "megatron-bridge"}),
    ("untied", ParallelSizes(), "plain", {"role": "critic"}),
    ("tied", ParallelSizes(dp=2, edp=2), "sampling masks", {}),
    ("tied", ParallelSizes(pp=2), "plain", {"megatron": CORE}),
    ("tied", ParallelSizes(pp=4), "plain", {}),
    ("tied", ParallelSizes(pp=2, vpp=2), "plain", {"megatron": RECOMPUTED}),
    ("untied", ParallelSizes(tp=2, pp=2, etp=2), "sampling masks", {"megatron": RECOMPUTED}),
    ("tied", ParallelSizes(tp=2, pp=2, vpp=2, etp=2), "plain", {"bridge": "megatron-bridge"}),
    ("untied", ParallelSizes(tp=2, dp=2, etp=2, edp=2), "plain", {"role": "critic"}),
    ("tied", ParallelSizes(tp=2, pp=2, dp=2, etp=2, edp=2), "plain", {}),
    ("moe", ParallelSizes(), "routes", {"megatron": RECOMPUTED}),
    ("untied", ParallelSizes(cp=4, edp=4), "plain", {}),
    ("tied", ParallelSizes(cp=2, edp=2), "sampling masks", {}),
    ("untied", ParallelSizes(cp=2, dp=2, edp=4), "plain", {"role": "critic"}),
    ("untied", ParallelSizes(tp=2, cp=2, etp=2, edp=2), "plain", {"megatron": CORE}),
    ("tied", ParallelSizes(pp=2, cp=2, edp=2), "plain", {"megatron": RECOMPUTED}),
    ("moe", ParallelSizes(cp=2, ep=2), "routes", {"bridge": "megatron-bridge"}),
    ("moe", ParallelSizes(tp=2, cp=2, ep=4), "routes", {}),
    ("moe", ParallelSizes(dp=2, ep=2), "plain", {}),
    ("moe", ParallelSizes(dp=2, ep=2), "routes", {"bridge": "megatron-bridge"}),
    ("moe", ParallelSizes(dp=2, etp=2), "plain", {"bridge": "megatron-bridge"}),
    ("moe", ParallelSizes(tp=2, edp=2), "routes", {"bridge": "megatron-bridge"}),
    ("moe", ParallelSizes(tp=2, dp=2, ep=2, etp=2), "sampling masks", {"megatron": EXPERTS_ANEW}),
    ("moe", ParallelSizes(tp=2, dp=2, ep=4), "routes", {}),
    ("moe", ParallelSizes(dp=4, ep=4), "plain", {}),
    ("moe", ParallelSizes(pp=2, vpp=2, dp=2, ep=2), "routes", {"megatron": RECOMPUTED}),
    ("moe", ParallelSizes(tp=2, pp=2, dp=2, ep=2, etp=2), "routes", {}),
    ("moe", ParallelSizes(tp=2, pp=2, vpp=2, dp=2, ep=4), "plain", {}),
    ("tied", ParallelSizes(), "sampling masks", {"backend": "fsdp"}),
    ("untied", ParallelSizes(dp=2, edp=2), "plain", {"backend": "fsdp", "role": "critic"}),
    ("sliding", ParallelSizes(dp=2, edp=2), "plain", {"backend": "fsdp", "fsdp": {"gradient_checkpointing": True}}),
    ("tied", ParallelSizes(dp=2, cp=2, edp=4), "sampling masks", {"backend": "fsdp"}),
    ("moe", ParallelSizes(dp=2, edp=2), "plain", {"backend": "fsdp"}),
]


@pytest.mark.parametrize(
    ("model", "sizes", "kind", "more"),
    [*LAYOUTS, *(pytest.param(*row, marks=pytest.mark.long) for row in MORE_LAYOUTS)],
    ids=lambda x: str(x).removeprefix("ParallelSizes"),
)
def test_trees_train_as_flat_packing_does(ranks, models, model, sizes, kind, more):
    batch = BATCHES[kind]()
    critic = more.get("role") == "critic"
    loss = LossSpec(squared) if critic else LossSpec(likely_and_sure) if "masks" in kind else LossSpec(weighted)
    flat, tree = (
        ranks.run(
            step_with_trees,
            world(sizes),
            Setting(models[model], sizes, max_tokens_per_mb=128, share_prompts=shares, **more),
            batch,
            loss,
        )
        for shares in (False, True)
    )
    expected = by_place(flat, batch)
    assert np.isfinite(expected[batch.fields["loss_mask"] > 0]).all()
    assert_close(by_place(tree, batch), expected)
    assert tree[0].steps[0]["loss_tokens"] == flat[0].steps[0]["loss_tokens"]
    assert tree[0].weights.keys() == flat[0].weights.keys()
    size = np.sqrt(sum((gradient**2).sum() for gradient in flat[0].weights.values()))
    for name, gradient in flat[0].weights.items():
        distance = np.linalg.norm(tree[0].weights[name] - gradient)
        assert distance <= rounding(size), name
        assert distance <= 5e-5 * np.linalg.norm(gradient), name  # a small one has more of float32's rounding


def by_place(outcomes: list[Outcome], batch: Batch) -> np.ndarray:
    values = np.full(len(batch.tokens), np.nan)
    for places, part in (outcome.log_probs for outcome in outcomes if outcome.log_probs is not None):
        values[places] = part
    return values


@pytest.mark.parametrize("name", ["tied", "sliding"])
def test_gradients_are_the_same_but_for_the_last_bits_of_float64(models, name):
    attention.register()
    loaded = load_model(models[name], torch.float64)
    (flat, flat_tokens), (tree, tree_tokens) = (gradients_of(loaded, shares) for shares in (False, True))
    assert tree_tokens < 0.5 * flat_tokens
    for parameter, gradient in flat.items():
        assert (tree[parameter] - gradient).norm() <= 1e-12 * gradient.norm(), parameter


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_in_float32_trees_are_as_exact_as_flat_packing(models, name):
    """Worst leaf's distance from the gradients in float64: 2e-6 to 3e-6 of its norm, flat or as a tree.

    Activations are rounded to 6e-8 of themselves, and where terms cancel out, a gradient is smaller than its terms.
    So flat packing itself is up to 3e-6 away from the exact gradients, in any order of its sequences, and 1e-6
    between two ways to compute them cannot be asked of float32. A tree has other shapes of products, thus other
    rounding, and adds up what sequences share once: it is as near, not nearer.
    """
    attention.register()
    batch, order = make_trees(), np.random.default_rng(1).permutation(len(make_trees().lengths))
    exact, _ = gradients_of(load_model(models[name], torch.float64), False)
    model = load_model(models[name], torch.float32)
    made = {
        "flat": gradients_of(model, False)[0],
        "shuffled": gradients_of(model, False, reordered(batch, order))[0],
        "tree": gradients_of(model, True)[0],
    }
    away = {
        kind: max(float((own[leaf].double() - exact[leaf]).norm() / exact[leaf].norm()) for leaf in exact)
        for kind, own in made.items()
    }
    print(f"{name}: {away}")
    assert min(away["flat"], away["shuffled"]) > 3e-7
    assert away["tree"] <= 1.5 * max(away["flat"], away["shuffled"])


def reordered(batch: Batch, order: np.ndarray) -> Batch:
    """The same sequences in another order."""
    ends = np.cumsum(batch.lengths)
    places = np.concatenate([np.arange(ends[i] - batch.lengths[i], ends[i]) for i in order])
    fields = {name: values[places] for name, values in batch.fields.items()}
    return Batch(batch.lengths[order], batch.tokens[places], fields)


def load_model(path: Any, dtype: torch.dtype) -> torch.nn.Module:
    """A model whose norms compute in its own data type: those of transformers round to float32."""
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention.NAME)
    for module in loaded.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(root_mean_square_norm, module)
    return loaded


def root_mean_square_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)


def gradients_of(
    model: torch.nn.Module, shares: bool, batch: Batch | None = None
) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of weighted log-probs, and how many tokens were computed."""
    batch, tokens = batch or make_trees(), 0
    section = MicroBatchConfig(max_tokens_per_mb=128, share_prompts=shares)
    count, pack = packs(batch, section, dp=1, dp_rank=0, alignment=1)
    model.zero_grad()
    for i in range(count):
        micro_batch = to_device(pack(i), batch, batch.fields["loss_mask"] > 0, torch.device("cpu"))
        logits = model(
            input_ids=micro_batch.tokens,
            position_ids=micro_batch.positions,
            use_cache=False,
            logits_to_keep=micro_batch.rows,
            **attention.arguments(micro_batch, None),
        ).logits[0]
        log_probs = torch.log_softmax(logits, -1).gather(1, micro_batch.labels[:, None])[:, 0]
        (micro_batch.of_tokens(log_probs) * torch.exp(micro_batch.fields["advantages"])).sum().backward()
        tokens += len(pack(i).tokens)
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}, tokens
