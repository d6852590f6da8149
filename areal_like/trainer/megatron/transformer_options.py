"""Which fields of Megatron-core's TransformerConfig a run sets, and which of them a user may.

The names are read from Megatron-core's source, so that a config can be checked in a moment, without torch.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allocation import ParallelSizes

_SOURCES = ("core/model_parallel_config.py", "core/transformer/transformer_config.py")
_CLASSES = ("ModelParallelConfig", "TransformerConfig")

_FROM_ALLOCATION = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
_FROM_ENGINE = {
    "params_dtype": "actor.dtype",
    "pipeline_dtype": "actor.dtype",
    "bf16": "actor.dtype",
    "fp16": "actor.dtype",
    "deterministic_mode": "actor.megatron.use_deterministic_algorithms",
    "recompute_granularity": "actor.megatron.recompute_granularity",
    "recompute_method": "actor.megatron.recompute_method",
    "recompute_num_layers": "actor.megatron.recompute_num_layers",
    "calculate_per_token_loss": None,
    "variable_seq_lengths": None,
    "hidden_dropout": None,
    "attention_dropout": None,
}
_GPU_ONLY = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cuda_graph_impl",
    "enable_cuda_graph",
    "external_cuda_graph",
    "fp4",
    "fp8",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_enable_deepep",
    "moe_permute_fusion",
    "moe_router_fusion",
    "persist_layer_norm",
    "tp_comm_overlap",
    "use_te_rng_tracker",
)


@functools.cache
def transformer_fields() -> frozenset[str]:
    """Names of all fields of the installed Megatron-core's TransformerConfig."""
    spec = importlib.util.find_spec("megatron")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    names: set[str] = set()
    for root in roots:
        for source in _SOURCES:
            path = Path(root, source)
            if path.exists():
                classes = (n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef))
                for node in (n for c in classes if c.name in _CLASSES for n in c.body):
                    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                        names.add(node.target.id)
    return frozenset(names)


def check_overrides(overrides: Mapping[str, Any], *, device: str) -> dict[str, str]:
    """For each name in `actor.megatron.override_transformer_config` that cannot be set, a sentence that says why."""
    problems = {}
    for name, value in overrides.items():
        if name in _FROM_ALLOCATION:
            problems[name] = (
                f"{name} follows from the allocation; change the layout in actor.backend or allocation_mode"
            )
        elif name in _FROM_ENGINE:
            key = _FROM_ENGINE[name]
            problems[name] = f"{name} is set by {key}" if key else f"{name} is fixed by the trainer"
        elif name not in transformer_fields():
            near = difflib.get_close_matches(name, transformer_fields(), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems[name] = f"Megatron-core's TransformerConfig has no field {name}{hint}"
        elif device == "cpu" and name in _GPU_ONLY and value not in (False, None, "none"):
            problems[name] = f"{name} needs a GPU"
    return problems


def check_bridge(bridge_type: str, sizes: ParallelSizes, *, experts: bool) -> str | None:
    """Why this bridge cannot serve this layout, or None."""
    if bridge_type == "mbridge" and experts and sizes.ep == 1 and sizes.etp != sizes.tp:
        return (
            f"mbridge cannot export experts whose tensor parallel size ({sizes.etp}) differs from attention's "
            f"({sizes.tp}) without expert parallelism; set actor.megatron.bridge_type to megatron-bridge"
        )
    return None


def transformer_options(actor: Any, *, device: str, pipelined: bool, interleaved: bool) -> dict[str, Any]:
    """Fields of TransformerConfig that the trainer sets for any model, the user's overrides last.

    `actor` is the config's ActorConfig. Parallel sizes and data types are the bridge's to set. Raises ValueError for
    overrides that `check_overrides` refuses.
    """
    megatron = actor.megatron
    overrides = megatron.override_transformer_config
    if problems := check_overrides(overrides, device=device):
        raise ValueError("actor.megatron.override_transformer_config: " + "; ".join(problems.values()))
    on_gpu = device == "cuda"
    options = {
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": interleaved,
        "deallocate_pipeline_outputs": pipelined,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "deterministic_mode": megatron.use_deterministic_algorithms,
        "recompute_granularity": megatron.recompute_granularity,
        "recompute_method": megatron.recompute_method,
        "recompute_num_layers": megatron.recompute_num_layers,
        "use_cpu_initialization": not on_gpu,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": on_gpu,
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        "apply_rope_fusion": on_gpu,
        "persist_layer_norm": on_gpu,
        "moe_permute_fusion": on_gpu,
    }
    return options | dict(overrides)
