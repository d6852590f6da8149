from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allocation import ParallelSizes
from areal_like.backends.megatron.options import TABLE, check_overrides, transformer_options
from areal_like.backends.options import read_options
from areal_like.backends.training.environment import (
    DETERMINISTIC,
    apply_environment,
    attention_environment,
    local_interface,
    rank_environment,
)
from areal_like.core.config.schema import ActorConfig, EngineConfig, MegatronConfig, OptimizerConfig
from areal_like.core.trainer.engine import EngineSpec


def problems(overrides, device="cpu"):
    return {problem.name: problem.message for problem in check_overrides(overrides, device=device)}


def test_checking_names_imports_neither_torch_nor_megatron():
    code = (
        "import sys; from areal_like.backends.megatron.options import check_overrides as c;"
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
        ("quant_recipe", "x", "is a Python object, which YAML cannot express"),
        ("moe_z_loss_coeff", "abc", "'abc' should be a number or null"),
        ("attention_softmax_in_fp32", 1, "1 should be true or false"),
        ("tp_comm_bootstrap_backend", "tcp", "'tcp' should be one of nccl, mpi, gloo"),
        ("moe_expert_capacity_factor", 1.5, "another model"),
        ("moe_input_jitter_eps", 0.1, "another model"),
        ("moe_router_load_balancing_type", "sinkhorn", "sinkhorn is not one of none, aux_loss, global_aux_loss"),
        ("moe_router_load_balancing_type", "seq_aux_loss", "would equal aux_loss"),
        ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"], "quantile_balancing is not one of"),
        ("cuda_graph_modules", ["attn"], "packed micro-batches have different shapes"),
        ("enable_cuda_graph", True, "packed micro-batches have different shapes"),
        ("cuda_graph_scope", ["attn"], "packed micro-batches have different shapes"),
        ("delay_wgrad_compute", True, "without the trainer's output layer"),
        ("overlap_moe_expert_parallel_comm", True, "without the trainer's output layer"),
        ("moe_permute_fusion", True, "needs a GPU"),
        ("moe_router_fusion", True, "needs a GPU"),
        ("recompute_modules", ["mlp"], "is set by actor.megatron.recompute_modules"),
        ("overlap_grad_reduce", True, "is set by actor.megatron.overlap_grad_reduce"),
        ("fp8_param", True, "the weights in actor.dtype"),
        ("tensor_model_parallel_size", 2, "follows from the allocation"),
        ("bf16", True, "actor.dtype"),
        ("variable_seq_lengths", False, "fixed by the trainer"),
        ("overlap_p2p_comm", True, "fixed by the trainer"),  # as the layout has it: Megatron-core needs virtual stages
        ("gradient_accumulation_fusion", True, "needs a GPU"),
        ("fp8", "hybrid", "needs a GPU"),
        ("cpu_offloading", True, "needs a GPU"),
        ("cross_entropy_loss_fusion", True, "no effect: the trainer computes log-probs itself"),
        ("inference_rng_tracker", True, "no effect: SGLang generates"),
        ("account_for_loss_in_pipeline_split", True, "the layout's checks do not count embedding"),
        ("moe_aux_loss_coeff", 0.01, "has no effect: moe_router_load_balancing_type"),
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


def test_a_fused_auxiliary_loss_which_counts_padding_is_refused():
    loss = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    assert "counts padding" in problems({**loss, "moe_router_fusion": True}, "cuda")["moe_router_fusion"]
    assert problems({**loss, "moe_router_fusion": False}, "cuda") == problems({"moe_router_fusion": True}, "cuda") == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_of_a_gpu_are_on_by_default_where_they_are_quicker(device):
    options = transformer_options(ActorConfig(), device=device, pipelined=False, interleaved=False)
    assert options["moe_permute_fusion"] is (device == "cuda")
    assert options["moe_grouped_gemm"] is True
    assert not options.get("moe_router_fusion")  # it cannot replay experts


def test_a_fusion_is_fine_where_there_is_a_gpu():
    assert problems({"gradient_accumulation_fusion": True}, "cuda") == {}


def test_the_attention_backend_is_chosen_by_name():
    from megatron.core.transformer.enums import AttnBackend

    assert "flash, fused" in problems({"attention_backend": "flush"}, "cuda")["attention_backend"]
    for backend in AttnBackend:
        actor = ActorConfig(megatron=MegatronConfig(override_transformer_config={"attention_backend": backend.name}))
        options = transformer_options(actor, device="cuda", pipelined=False, interleaved=False)
        assert options["attention_backend"] is backend


def spec(sizes=ParallelSizes(), device="cuda", role="actor", backend="megatron", **keys) -> EngineSpec:  # noqa: B008
    optimizer = None if role == "ref" else OptimizerConfig()
    return EngineSpec(role, EngineConfig(**keys), optimizer, Path(), sizes, device, seed=1, backend=backend)


DP2 = ParallelSizes(dp=2, edp=2)


@pytest.mark.parametrize(
    ("made", "variables"),
    [
        (spec(megatron=MegatronConfig(use_deterministic_algorithms=True)), DETERMINISTIC),
        (spec(DP2), {"NVTE_BWD_LAYERNORM_SM_MARGIN": "16"}),
        (spec(DP2, megatron=MegatronConfig(overlap_grad_reduce=False)), {"NVTE_BWD_LAYERNORM_SM_MARGIN": None}),
        (spec(DP2, role="ref"), {"NVTE_BWD_LAYERNORM_SM_MARGIN": None}),
        (spec(DP2, backend="fsdp"), {"NVTE_TORCH_COMPILE": None, "NVTE_FLASH_ATTN": None}),
        (spec(), {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "1"}),
        (
            spec(megatron=MegatronConfig(override_transformer_config={"attention_backend": "flash"})),
            {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
        ),
        (spec(env_vars={"NVTE_TORCH_COMPILE": "1", "MINE": "x"}), {"NVTE_TORCH_COMPILE": "1", "MINE": "x"}),
        (spec(device="cpu", env_vars={"OMP_NUM_THREADS": "3"}), {"OMP_NUM_THREADS": "3"}),
    ],
)
def test_variables_follow_from_layout_and_keys(made, variables):
    found = rank_environment(made)
    assert {name: found.get(name) for name in variables} == variables


def test_environment_of_a_rank(monkeypatch):
    assert rank_environment(spec(device="cpu"))["OMP_NUM_THREADS"] == "1"
    one = rank_environment(spec())
    assert one.keys() == {"NCCL_CUMEM_ENABLE", "NVTE_TORCH_COMPILE", *attention_environment("auto")}
    assert one["NVTE_TORCH_COMPILE"] == "0"
    assert rank_environment(spec(ParallelSizes(tp=2, etp=2)))["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"

    own = {"OMP_NUM_THREADS": "2", "TORCHDYNAMO_DISABLE": "0"}
    monkeypatch.setattr(os, "environ", dict(own))
    apply_environment(spec(device="cpu", env_vars={"TORCHDYNAMO_DISABLE": "1", "MINE": "x"}), "127.0.0.1")
    interface = local_interface("127.0.0.1")
    assert os.environ == {
        **own,
        "TORCHDYNAMO_DISABLE": "1",
        "MINE": "x",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_variables_are_there_before_torch_is(backend):
    """Transformer Engine reads NVTE_TORCH_COMPILE when it is imported."""
    code = f"""
import os, sys
from test_megatron_options import spec
from areal_like.core.trainer.engine import Rendezvous
from areal_like.backends.training.rank import make_engine

class Seen:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("NVTE_TORCH_COMPILE"), os.environ["MINE"])
            sys.exit()

sys.meta_path.insert(0, Seen())
make_engine(spec(backend="{backend}", env_vars={{"MINE": "x"}}), Rendezvous(0, 1, "127.0.0.1", 1, 1.0, None))
"""
    where = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | where, capture_output=True, text=True)
    assert done.stdout == ("0 x\n" if backend == "megatron" else "None x\n"), done.stderr
