"""A key of actor.megatron reaches the object of Megatron's that it is named after, and changes no figure."""

from __future__ import annotations

import pytest
import torch
from test_layouts import same_training
from tolerance import BACKWARD, rounding
from trainer_jobs import (
    Setting,
    norms_by_trained_tokens,
    reached,
    three_steps,
    three_steps_of_small_buckets,
    train_first,
)

from allocation import ParallelSizes
from areal_like.backends.megatron.options import transformer_options
from areal_like.core.config.schema import EngineConfig, MegatronConfig, OptimizerConfig

DP2 = ParallelSizes(dp=2, edp=2)
EXPERTS = ParallelSizes(dp=2, ep=2)

REACHED = [
    ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, "model", {"recompute_modules": ["mlp"]}),
    ({"moe_layer_recompute": True}, "model", {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    ({"moe_token_dispatcher_type": "alltoall"}, "model", {"moe_token_dispatcher_type": "alltoall"}),
    ({"moe_grouped_gemm": False, "bridge_type": "megatron-bridge"}, "modules", {"SequentialMLP": True}),
    ({"moe_grouped_gemm": True, "bridge_type": "megatron-bridge"}, "modules", {"TEGroupedMLP": True}),
    ({"overlap_grad_reduce": True}, "ddp", {"overlap_grad_reduce": True}),
    ({"overlap_grad_reduce": True, "overlap_param_gather": True}, "ddp", {"overlap_param_gather": True}),
    ({"overlap_grad_reduce": True, "overlap_param_gather": True}, "optimizer", {"overlap_param_gather": True}),
    ({"use_distributed_optimizer": False}, "ddp", {"use_distributed_optimizer": False}),
    ({"use_deterministic_algorithms": True}, "model", {"deterministic_mode": True}),
    ({"override_transformer_config": {"moe_z_loss_coeff": 0.5}}, "model", {"moe_z_loss_coeff": 0.5}),
]


def _named(x: object) -> str | None:
    return "-".join(x) if isinstance(x, dict) else None


@pytest.mark.parametrize(("keys", "where", "fields"), REACHED, ids=_named)
def test_a_key_reaches_megatrons_object(ranks, models, keys, where, fields):
    bridge, *_ = [keys.get("bridge_type", "mbridge")]
    settings = {name: value for name, value in keys.items() if name != "bridge_type"}
    for seen in ranks.once(reached, 2, Setting(models["moe"], EXPERTS, bridge=bridge, megatron=settings)):
        assert seen[where].items() >= fields.items()


@pytest.mark.parametrize(
    ("model", "sizes", "megatron"),
    [
        ("tied", DP2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
        ("moe", EXPERTS, {"moe_layer_recompute": True}),
        pytest.param("moe", EXPERTS, {"moe_grouped_gemm": False}, marks=pytest.mark.long),
        ("moe", EXPERTS, {"optimizer_offload": True, "param_offload": True, "grad_offload": True}),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ("tied", DP2, {"overlap_grad_reduce": True}),
                ("untied", DP2, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
                ("moe", EXPERTS, {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}),
            )
        ),
    ],
    ids=_named,
)
def test_it_is_computed_otherwise_and_the_same(ranks, models, model, sizes, megatron):
    bridge = "megatron-bridge" if "moe_grouped_gemm" in megatron else "mbridge"
    (expected,) = ranks.once(three_steps, 1, Setting(models[model], bridge=bridge))
    setting = Setting(models[model], sizes, bridge=bridge, megatron=megatron)
    same_training(ranks.run(three_steps_of_small_buckets, 2, setting), expected)


@pytest.mark.parametrize("sizes", [ParallelSizes(), EXPERTS], ids=["one rank", "experts spread"])
def test_an_auxiliary_loss_does_not_depend_on_how_many_tokens_are_trained_on(ranks, models, sizes):
    loss = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    setting = Setting(models["moe"], sizes, megatron={"override_transformer_config": loss}, max_tokens_per_mb=100)
    for most, *others in ranks.run(norms_by_trained_tokens, sizes.dp, setting):
        assert most > 0.01
        assert others == pytest.approx([most] * len(others), rel=rounding(depth=BACKWARD), abs=0)


def test_an_engine_reads_where_another_has_trained(ranks, models):
    ranks.run(train_first, 1, Setting(models["moe"]))
    ranks.run(three_steps, 1, Setting(models["moe"]))


def test_the_precision_aware_optimizers_keys_are_fields_of_its_config():
    """Transformer Engine's Adam alone has them, so that Megatron's object cannot be made without a GPU."""
    from megatron.core.optimizer import OptimizerConfig as MegatronsOptimizer

    from areal_like.backends.megatron.optimizer import optimizer_options

    dtypes = {"main_params_dtype": "float16", "main_grads_dtype": "bfloat16", "exp_avg_sq_dtype": "float16"}
    megatron = MegatronConfig(use_precision_aware_optimizer=True, exp_avg_dtype="bfloat16", **dtypes)
    options = optimizer_options(EngineConfig(megatron=megatron), OptimizerConfig())
    assert options["use_precision_aware_optimizer"] is True
    assert options["exp_avg_dtype"] is torch.bfloat16
    assert {name: options[name] for name in dtypes} == {name: getattr(torch, dtype) for name, dtype in dtypes.items()}
    assert options.keys() <= MegatronsOptimizer.__dataclass_fields__.keys()


@pytest.mark.parametrize(
    ("settings", "granularity", "modules"),
    [
        ({}, None, None),
        ({"moe_layer_recompute": True}, "selective", ["moe"]),
        ({"recompute_granularity": "selective"}, "selective", None),
        ({"recompute_granularity": "selective", "moe_layer_recompute": True}, "selective", ["core_attn", "moe"]),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "moe_layer_recompute": True},
            "selective",
            ["mlp", "moe"],
        ),
    ],
)
def test_what_is_recomputed(settings, granularity, modules):
    engine = EngineConfig(megatron=MegatronConfig(**settings))
    options = transformer_options(engine, device="cpu", pipelined=False, interleaved=False)
    assert (options["recompute_granularity"], options["recompute_modules"]) == (granularity, modules)
