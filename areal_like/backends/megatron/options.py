"""The fields of Megatron-core's TransformerConfig that a run sets, and the ones that a user may set."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from allocation.plan import ParallelSizes
from areal_like.backends.options import OptionProblem, read_options, read_rules
from areal_like.core.config.findings import KeyOf, actor_key, nearest_words
from areal_like.core.config.schema import EngineConfig, MegatronConfig

TABLE = Path(__file__).with_name("options.json")
_SECTION = "megatron.override_transformer_config"

_RULES = read_rules(TABLE)
# Keys of the same name and meaning as Megatron's fields.
_SAME_NAME = (
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm"),
)
_BY_KEY = {
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "dtype"),
    "deterministic_mode": "megatron.use_deterministic_algorithms",
    **{name: f"megatron.{name}" for name in MegatronConfig.model_fields},
}
_BALANCING, _BALANCED = "moe_router_load_balancing_type", ("none", "aux_loss", "global_aux_loss")
_GPU_ONLY = (*_RULES["fused_on_gpu"], *_RULES["gpu_only"])


def check_overrides(overrides: Mapping[str, Any], *, device: str, key: KeyOf = actor_key) -> Iterator[OptionProblem]:
    """Yield problems of `megatron.override_transformer_config`; `key` returns the key of a role's setting."""
    for name, value in overrides.items():
        if problem := _problem(name, value, device, key):
            yield problem
    if "moe_aux_loss_coeff" in overrides and "moe_router_load_balancing_type" not in overrides:
        message = "has no effect: moe_router_load_balancing_type defaults to none"
        help = f"write {key(_SECTION)}.moe_router_load_balancing_type=aux_loss as well"
        yield OptionProblem("RUN-MEGATRON-BALANCING", "moe_aux_loss_coeff", message, help)
    if overrides.get("moe_router_fusion") is True and overrides.get("moe_aux_loss_coeff"):
        message = "the fused auxiliary loss counts padding as tokens"
        help = f"write {_SECTION}.moe_router_fusion=false"
        yield OptionProblem("RUN-MEGATRON-BALANCING", "moe_router_fusion", message, help)


def _problem(name: str, value: Any, device: str, key: KeyOf) -> OptionProblem | None:
    options = read_options(TABLE)
    if value not in (False, None) and name in _RULES["in_its_type"]:
        message = f"servers and checkpoints receive the weights in {key('dtype')}"
        return OptionProblem("RUN-MEGATRON-OPTION", name, message, f"leave out {name}")
    if value not in (False, None) and name in _RULES["as_layers"]:
        message = "the layout's checks do not count embedding and output layer as layers"
        ends = "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        help = f"write {ends}, or pipeline_model_parallel_layout, instead"
        return OptionProblem("RUN-MEGATRON-OPTION", name, message, help)
    of_schedule = next((why for start, why in _RULES["other_schedule"].items() if name.startswith(start)), None)
    if of_schedule and name in options and value not in (False, None, "none"):
        return OptionProblem("RUN-MEGATRON-OPTION", name, of_schedule, f"leave out {name}")
    if reason := _decided_elsewhere(name, key):
        return OptionProblem("RUN-MEGATRON-OPTION", name, reason, f"leave out {name}")
    if name not in options:
        near = nearest_words(name, (other for other in options if not _decided_elsewhere(other, key)))
        message = f"Megatron-core's configuration has no field {name}"
        return OptionProblem("RUN-MEGATRON-OPTION", name, message, names=tuple(near))
    option = options[name]
    for kind, why in {"a function": "which the trainer sets", "a Python object": "which YAML cannot express"}.items():
        if kind in option.types:
            message = f"{name} is {kind}, {why}"
            return OptionProblem("RUN-MEGATRON-OPTION", name, message, f"leave out {name}")
    if expected := option.mismatch(value):
        message = f"{value!r} should be {expected}"
        return OptionProblem("RUN-MEGATRON-OPTION", name, message, values=option.nearest(value))
    if device == "cpu" and name in _GPU_ONLY and value not in (False, None, "none"):
        help = f"leave out {name}, or write device=cuda"
        return OptionProblem("RUN-CPU", name, f"{name} needs a GPU", help)
    return _balancing_problem(value, key(_SECTION)) if name == _BALANCING else None


def _balancing_problem(value: str | list[str], section: str) -> OptionProblem | None:
    """Return the problem of a load-balancing type that moves tokens to other experts or has a misleading name."""
    if "seq_aux_loss" in value:
        message = "a packed micro-batch is one sequence to Megatron-core, so seq_aux_loss would equal aux_loss"
        return OptionProblem("RUN-MEGATRON-BALANCING", _BALANCING, message, f"write {section}.{_BALANCING}=aux_loss")
    if others := [kind for kind in ([value] if isinstance(value, str) else value) if kind not in _BALANCED]:
        message = f"{others[0]} is not one of {', '.join(_BALANCED)}, which route tokens as the servers do"
        return OptionProblem("RUN-MEGATRON-BALANCING", _BALANCING, message, f"write {section}.{_BALANCING}=aux_loss")
    return None


def _decided_elsewhere(name: str, key: KeyOf) -> str | None:
    """Return the reason if the user must not set a field."""
    if name in _RULES["from_allocation"]:
        return f"{name} follows from the allocation; change the layout in {key('backend')} or allocation_mode"
    if name in _BY_KEY:
        return f"{name} is set by {key(_BY_KEY[name])}"
    if name in _RULES["fixed"]:
        return f"{name} is fixed by the trainer"
    if name in _RULES["other_model"]:
        return f"{name} makes the trainer compute another model than the servers"
    if name in _RULES["from_model"] or name.startswith(tuple(_RULES["from_model_prefixes"])):
        return f"{name} follows from the model's config.json, which the servers read as well"
    why = next((why for start, why in _RULES["without_effect"].items() if name.startswith(start)), None)
    return f"{name} has no effect: {why}" if why else None


def row_multiple(overrides: Mapping[str, Any]) -> int:
    """Return the multiple that FP8 needs of a product's rows (`megatron/core/fp8_utils.py`); 0 without FP8."""
    if overrides.get("fp8") is None and overrides.get("fp4") is None:
        return 0
    return 32 if overrides.get("fp8_recipe") == "mxfp8" or overrides.get("fp4") is not None else 16


def recompute_modules(megatron: MegatronConfig) -> dict[str, Any]:
    """Return the recomputed modules that `moe_layer_recompute` adds, {} if it is not set.

    Megatron's own option of that name is deprecated, and also recomputes attention.
    """
    if not megatron.moe_layer_recompute or megatron.recompute_granularity == "full":  # "full" includes experts
        return {}
    present = megatron.recompute_modules
    if present is None:
        present = ["core_attn"] if megatron.recompute_granularity == "selective" else []
    return {"recompute_granularity": "selective", "recompute_modules": list(dict.fromkeys([*present, "moe"]))}


def _not_overlapped(megatron: MegatronConfig) -> dict[str, Any]:
    """Return an override that disables overlapped shared experts, which bridges set for some models, if recomputed."""
    return {"moe_shared_expert_overlap": False} if "shared_experts" in (megatron.recompute_modules or ()) else {}


def layout_options(sizes: ParallelSizes, dtype: Any) -> dict[str, Any]:
    """Return the fields of TransformerConfig that follow from the layout and from torch's data type of the weights."""
    import torch

    return {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
        "context_parallel_size": sizes.cp,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.etp,
        "sequence_parallel": sizes.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }


def transformer_options(engine: EngineConfig, *, device: str, pipelined: bool, interleaved: bool) -> dict[str, Any]:
    """Return the fields of TransformerConfig that the trainer sets for any model, the user's overrides last.

    The bridge sets parallel sizes and data types. Raises ValueError for overrides that `check_overrides` rejects.
    """
    megatron = engine.megatron
    overrides = megatron.override_transformer_config
    if problems := list(check_overrides(overrides, device=device)):
        raise ValueError("; ".join(f"{actor_key(_SECTION)}.{problem.name}: {problem.message}" for problem in problems))
    on_gpu = device == "cuda"
    options: dict[str, Any] = {
        "variable_seq_lengths": True,
        "calculate_per_token_loss": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": interleaved,
        "deallocate_pipeline_outputs": pipelined,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,  # bridges and Megatron-core default to 1e-3 for any loss
        "moe_router_dtype": "fp32",
        "deterministic_mode": megatron.use_deterministic_algorithms,
        "use_cpu_initialization": not on_gpu,
        **{name: getattr(megatron, name) for name in _SAME_NAME},
        **recompute_modules(megatron),
        **_not_overlapped(megatron),
        **dict.fromkeys(_RULES["fused_on_gpu"], on_gpu),
        "bias_dropout_fusion": False,  # without dropout it is an addition, and compiled code needs more host time
        **overrides,
        "gradient_accumulation_fusion": False,  # Megatron's own layers need Apex; `wrap_models` sets the others
    }
    if "attention_backend" in overrides:
        from megatron.core.transformer.enums import AttnBackend

        options["attention_backend"] = AttnBackend[overrides["attention_backend"]]
    return options
