"""Compare other memory estimators with ours, against the peaks that benchmarks/memory.py measured.

python -m benchmarks.estimators [--megatron-lm CHECKOUT] [--mbridge CHECKOUT]

- Megatron-LM: `megatron/training/theoretical_memory_usage.py` of a checkout of NVIDIA/Megatron-LM; no package has it.
- Megatron Bridge: `training/utils/theoretical_memory_utils.py` of the installed package.
- mbridge: `memory_estimator/` of a checkout of ISEEKYAN/mbridge; its package does not have it.
verl has no estimator of its own; its Megatron trainer builds models with one of these two bridges.

Each estimator receives every option of a case that it supports, with a rank's micro-batch as one sequence. Without
recomputation, Megatron-LM receives `selective`: its two formulas support only that or nothing, and flash attention
keeps no scores either. Two kinds of cases are excluded: cases with adapters, which only ours supports, and cases in
which the trainer holds logits once, which the others count twice. Nothing runs on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest.mock import MagicMock

import typer

from allocation.parameters import vocabulary
from benchmarks.memory import described, measured, predicted, sequences
from benchmarks.report import save

PHASE = "forward and backward"
Case = Mapping[str, Any]
Estimate = Callable[[Case], float]


def main(
    megatron_lm: Annotated[Path | None, typer.Option(exists=True, help="checkout of NVIDIA/Megatron-LM")] = None,
    mbridge: Annotated[Path | None, typer.Option(exists=True, help="checkout of ISEEKYAN/mbridge")] = None,
) -> None:
    estimators: dict[str, tuple[str, Estimate]] = {"ours": ("", lambda case: predicted(case)[PHASE])}
    for name, folder, load in (("Megatron-LM", megatron_lm, of_megatron_lm), ("mbridge", mbridge, of_mbridge)):
        if folder is None:
            print(f"{name}: left out, as no checkout was given")
        else:
            estimators[name] = revision(folder), load(folder)
    estimators["Megatron Bridge"] = version("megatron-bridge"), of_megatron_bridge()
    cases = [estimated(case, estimators) for case in compared()]
    for name, (made, _) in estimators.items():
        errors = {case["name"]: case["bytes"][name] / case["measured"] - 1 for case in cases}
        each = ", ".join(f"{case} {error:+.1%}" for case, error in errors.items())
        print(f"{name} {made}: median {median(map(abs, errors.values())):.1%}: {each}")
    revisions = {name: made for name, (made, _) in estimators.items() if made}
    save("estimators", {"phase": PHASE, "revisions": revisions, "unit": "bytes", "cases": cases})


def compared() -> list[dict[str, Any]]:
    """The measured cases of which all of them know."""
    return [case for case in measured() if not case.get("lora_rank") and "trained" not in case]


def estimated(case: Case, estimators: Mapping[str, tuple[str, Estimate]]) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):  # they print whole models
        said = {name: round(estimate(case)) for name, (_, estimate) in estimators.items()}
    return {"name": case["name"], "layout": case["layout"], "measured": case["phases"][PHASE]["peak"], "bytes": said}


def revision(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%H"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def arguments(case: Case) -> dict[str, Any]:
    """The case in Megatron's words, as its arguments and its configurations have them."""
    model, sizes = described(case)
    return {
        "num_layers": model.layers, "hidden_size": model.hidden_size, "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads, "num_query_groups": model.kv_heads, "kv_channels": model.head_dim,
        "normalization": "RMSNorm", "add_bias_linear": False, "multi_latent_attention": False,
        "moe_ffn_hidden_size": model.expert_ffn or None, "moe_router_topk": model.experts_per_token or 2,
        "tensor_model_parallel_size": sizes.tp, "pipeline_model_parallel_size": sizes.pp,
        "context_parallel_size": sizes.cp, "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp, "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": sizes.tp > 1, "mtp_num_layers": None,
    }  # fmt: skip


def run(case: Case) -> dict[str, Any]:
    """What Megatron's arguments have and its configuration of a transformer has not."""
    model, sizes = described(case)
    return {
        "micro_batch_size": 1, "seq_length": case["tokens"], "num_experts": model.experts or None,
        "padded_vocab_size": vocabulary(model, sizes.tp) // model.hidden_size,
        "use_distributed_optimizer": True, "data_parallel_size": sizes.dp, "world_size": sizes.dp * sizes.per_replica,
        "max_position_embeddings": model.max_positions,
    }  # fmt: skip


def micro_batches(case: Case) -> int:
    return sequences(case) // described(case)[1].dp * case["length"] // case["tokens"]


def of_megatron_lm(checkout: Path) -> Estimate:
    """It knows no context parallelism, so its sequence is what a rank has of it; of recomputation only `selective`."""
    sys.modules["megatron_lm.utils"] = MagicMock(is_hybrid_model=lambda _: False)  # what the file has from beside it
    module = loaded("megatron_lm.memory", checkout / "megatron/training/theoretical_memory_usage.py")

    def estimate(case: Case) -> float:
        model, sizes = described(case)
        known = {
            "group_query_attention": True, "swiglu": True, "moe_layer_freq": 1, "moe_latent_size": None,
            "moe_shared_expert_intermediate_size": None, "untie_embeddings_and_output_weights": not model.tied_embeddings,
            "recompute_granularity": case["recompute"].get("recompute_granularity", "selective"),
        }  # fmt: skip
        told = Namespace(**arguments(case) | run(case) | known)
        told.seq_length //= sizes.cp
        return module.report_theoretical_memory(told, num_microbatches=micro_batches(case))[2] * 2**20

    return estimate


def of_megatron_bridge() -> Estimate:
    """Its activations are always those of sequence parallelism and `selective`."""
    import torch

    for name in ("training.config", "utils.vocab_utils"):  # they want packages that only training needs
        sys.modules[f"megatron.bridge.{name}"] = MagicMock()
    package = importlib.util.find_spec("megatron.bridge")
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent / "training/utils/theoretical_memory_utils.py"
    module = loaded("theoretical_memory_utils", file)

    def estimate(case: Case) -> float:
        model, _ = described(case)
        told = run(case)
        shape = Namespace(
            **arguments(case), num_moe_experts=model.experts or None, gated_linear_unit=True,
            activation_func=torch.nn.functional.silu, vocab_size=told["padded_vocab_size"], should_pad_vocab=False,
            seq_length=told["seq_length"], share_embeddings_and_output_weights=model.tied_embeddings,
        )  # fmt: skip
        config = Namespace(model=shape, train=Namespace(**told), optimizer=Namespace(**told), **told)
        return module.estimate_training_memory(config, micro_batches(case)).total_memory_bytes

    return estimate


def of_mbridge(checkout: Path) -> Estimate:
    """It is written for megatron-core 0.13 and Megatron-LM's training loop: what it wants of them is given to it.

    It does not know tied embeddings, and gives GiB to two digits.
    """
    training = ("training", "training.arguments", "training.initialize", "training.utils", "training.yaml_arguments")
    sys.modules |= {f"megatron.{name}": MagicMock() for name in training}
    sys.modules["termcolor"] = MagicMock(colored=lambda text, _: text)
    sys.path.insert(0, str(checkout / "memory_estimator"))
    estimator = importlib.import_module("estimate_013")
    estimator.ModelType = MagicMock()
    estimator.get_gpt_decoder_block_spec = lambda config, **_: block(config)
    estimator._get_transformer_layer_spec = lambda _, config: block(config)

    def estimate(case: Case) -> float:
        reports, _ = estimator.estimate_from_config(transformer_config(case), Namespace(**run(case)))
        return max(report["total_gb"] for report in reports) * 2**30

    return estimate


def transformer_config(case: Case) -> Any:
    import torch
    from megatron.core.transformer import TransformerConfig

    model, _ = described(case)
    known = {name: value for name, value in arguments(case).items() if name != "multi_latent_attention"}
    config = TransformerConfig(
        **known, num_moe_experts=model.experts or None, gated_linear_unit=True, qk_layernorm=True, bf16=True,
        activation_func=torch.nn.functional.silu, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        hidden_dropout=0.0, attention_dropout=0.0, **case["recompute"],
    )  # fmt: skip
    config.moe_extended_tp = False  # gone since 0.13
    return config


def block(config: Any) -> Any:
    """A pipeline stage of mbridge's stand-ins for modules, put together as megatron-core 0.13 does."""
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    of = importlib.import_module("moe_mem_estimator.layers")

    def made(module: Any, **parts: Any) -> Any:
        return ModuleSpec(module, submodules=Namespace(**parts))

    column, row, none, add = of.ColumnParallelLinear, of.RowParallelLinear, of.IdentityOp, of.GetBiasDropoutAdd
    grouped = {"linear_fc1": of.TEColumnParallelGroupedLinear, "linear_fc2": of.TERowParallelGroupedLinear}
    experts = made(of.MoELayer, experts=made(of.TEGroupedMLP, **grouped), shared_experts=None)
    attention = made(of.SelfAttention, linear_qkv=column, core_attention=of.TEDotProductAttention, linear_proj=row,
                     q_layernorm=of.RMSNorm, k_layernorm=of.RMSNorm)  # fmt: skip
    attention.params = {"attn_mask_type": None}
    layer = made(
        of.TransformerLayer, input_layernorm=none, self_attention=attention, self_attn_bda=add, mlp_bda=add,
        pre_cross_attn_layernorm=none, cross_attention=none, cross_attn_bda=none,
        pre_mlp_layernorm=of.RMSNorm if config.num_moe_experts else none,
        mlp=experts if config.num_moe_experts else made(of.MLP, linear_fc1=column, linear_fc2=row),
    )  # fmt: skip
    layers = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=of.RMSNorm)


def loaded(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    typer.run(main)
