from __future__ import annotations

import os
import subprocess
import sys

import pytest

from areal_like.config.options import read_options
from areal_like.config.schema import ActorConfig, MegatronConfig
from areal_like.trainer.environment import apply_environment, local_interface, rank_environment
from areal_like.trainer.megatron.options import (
    TABLE,
    check_overrides,
    transformer_options,
)


def problems(overrides, device="cpu"):
    return {problem.name: problem.message for problem in check_overrides(overrides, device=device)}


def test_checking_names_imports_neither_torch_nor_megatron():
    code = (
        "import sys; from areal_like.trainer.megatron.options import check_overrides as c;"
        "list(c({'x': 1}, device='cpu')); print([m for m in ('torch', 'megatron.core') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("moe_z_loss_coef", 2, "has no field moe_z_loss_coef"),
        ("num_layers", 1, "the model's config.json"),
        ("hidden_size", 64, "the model's config.json"),
        ("layernorm_epsilon", "abc", "the model's config.json"),
        ("mtp_num_layers", 1, "the model's config.json"),
        ("grad_scale_func", 1, "is a function, which the trainer sets"),
        ("timers", None, "is a function, which the trainer sets"),
        ("quant_recipe", "x", "is a Python object, which no YAML holds"),
        ("moe_z_loss_coeff", "abc", "'abc' should be a number or null"),
        ("moe_pad_expert_input_to_capacity", 1, "1 should be true or false"),
        ("moe_token_drop_policy", "first", "'first' should be one of probs, position"),
        ("recompute_modules", "mlp", "'mlp' should be a list of texts or null"),
        ("tensor_model_parallel_size", 2, "follows from the allocation"),
        ("bf16", True, "actor.dtype"),
        ("variable_seq_lengths", False, "fixed by the trainer"),
        ("gradient_accumulation_fusion", True, "needs a GPU"),
        ("fp8", "hybrid", "needs a GPU"),
        ("cpu_offloading", True, "needs a GPU"),
        ("cross_entropy_loss_fusion", True, "no effect: the trainer computes log-probs itself"),
        ("inference_rng_tracker", True, "no effect: SGLang generates"),
        ("moe_aux_loss_coeff", 0.01, "no effect alone"),
    ],
)
def test_overrides_that_cannot_be_set_say_why(name, value, words):
    assert words in problems({name: value})[name]
    actor = ActorConfig(megatron=MegatronConfig(override_transformer_config={name: value}))
    with pytest.raises(ValueError, match="override_transformer_config"):
        transformer_options(actor, device="cpu", pipelined=False, interleaved=False)


def test_overrides_come_last():
    overrides = {
        "moe_z_loss_coeff": 1e-3,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "fp8": None,
    }
    assert problems(overrides) == {}
    actor = ActorConfig(megatron=MegatronConfig(override_transformer_config=overrides))
    options = transformer_options(actor, device="cpu", pipelined=False, interleaved=False)
    assert options.items() >= overrides.items()
    assert options.keys() <= read_options(TABLE).keys()


def test_a_fusion_is_fine_where_there_is_a_gpu():
    assert problems({"gradient_accumulation_fusion": True}, "cuda") == {}


def test_the_attention_backend_is_chosen_by_name():
    from megatron.core.transformer.enums import AttnBackend

    assert "flash, fused" in problems({"attention_backend": "flush"}, "cuda")["attention_backend"]
    for backend in AttnBackend:
        actor = ActorConfig(megatron=MegatronConfig(override_transformer_config={"attention_backend": backend.name}))
        options = transformer_options(actor, device="cuda", pipelined=False, interleaved=False)
        assert options["attention_backend"] is backend


def test_environment_of_a_rank(monkeypatch):
    assert rank_environment(device="cpu")["OMP_NUM_THREADS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in rank_environment(device="cuda")
    variables = rank_environment(device="cuda", deterministic=True, model_parallel=True)
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert variables["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"

    monkeypatch.setenv("A_USERS_OWN", "kept")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    apply_environment({"A_USERS_OWN": "replaced"}, "127.0.0.1")
    assert os.environ["A_USERS_OWN"] == "kept"
    assert os.environ["GLOO_SOCKET_IFNAME"] == local_interface("127.0.0.1")
