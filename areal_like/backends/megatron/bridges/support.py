"""The models that each bridge trains as Hugging Face and SGLang compute them. No torch.

An allow-list: families, rotary embeddings and field values that the table of `tests/models` proves equal, less those
that SGLang 0.5.17 computes differently. Everything else is rejected before the start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_like.backends.megatron.bridges.proven import (
    ALLOWED,
    EXPERTS,
    FAMILIES,
    FIXED_HEAD_DIM,
    LATENT,
    ONE_TENSOR_PARALLEL_RANK,
    ROPE_FIELDS,
    ROPE_TYPES,
    SEVERAL_EXPERTS_PER_TOKEN,
    SHARED_EXPERTS,
    STATES,
    UNUSABLE,
    WINDOWS,
)
from areal_like.core.config.findings import KeyOf, actor_key

if TYPE_CHECKING:
    from allocation.plan import ParallelSizes

BRIDGES = ("mbridge", "megatron-bridge")
_BRIDGE = "megatron.bridge_type"


@dataclass(frozen=True)
class BridgeProblem:
    """A problem of a model with a bridge: the field of config.json or the run's key, a remedy.

    `value` is a supported value of the field as JSON, if one is known. `is_key`: `field` is a key of the run.
    """

    field: str
    message: str
    remedy: str
    value: str | None = None
    is_key: bool = False


def bridge_problems(
    bridge_type: str, config: Mapping[str, Any], sizes: ParallelSizes, key: KeyOf = actor_key
) -> Iterator[BridgeProblem]:
    """Yield all problems of a model and a layout with a bridge; `config` is config.json, a `text_config` unwrapped.

    `key` returns the dotted key of a role's setting.
    """
    if bridge_type not in BRIDGES:
        message = f"{bridge_type!r} is not a bridge"
        yield BridgeProblem(key(_BRIDGE), message, f"use {_or(BRIDGES)}", is_key=True)
        return
    if problem := _family_problem(bridge_type, config, key):
        yield problem
        return
    family = config["model_type"]
    experts = family in EXPERTS
    if bridge_type == "mbridge" and experts and sizes.etp != sizes.tp and 1 in (sizes.ep, sizes.tp):
        others = [other for other in BRIDGES if other != bridge_type and not _family_problem(other, config, key)]
        yield BridgeProblem(
            key(_BRIDGE),
            f"mbridge cannot export experts whose tensor parallel size ({sizes.etp}) differs from attention's "
            f"({sizes.tp}) {'without expert parallelism' if sizes.ep == 1 else 'while attention is not split'}",
            f"write {key(_BRIDGE)}={others[0]}"
            if others
            else f"write t{sizes.tp} for the experts{', or add an e' if sizes.tp > 1 else ''}",
            is_key=True,
        )
    if family in ONE_TENSOR_PARALLEL_RANK and sizes.tp > 1:
        message = f"{bridge_type} computes a {family} incorrectly on {sizes.tp} tensor-parallel ranks"
        yield BridgeProblem(key("backend"), message, "write t1 for attention", is_key=True)
    config = {**_families()[family]["defaults"], **config}
    slides = family in WINDOWS and config["sliding_window"] and config.get("use_sliding_window", True)
    sinks = family == "gpt_oss"  # computed by torch's kernel for whole sequences
    if sizes.cp > 1 and (slides or sinks) and not config.get("attn_logit_softcapping"):  # caps: attention of our own
        what = "sinks and sliding windows" if sinks else "sliding windows"
        message = f"the attention of {sizes.cp} context-parallel ranks has no {what}"
        yield BridgeProblem(key("backend"), message, "write c1 for attention", is_key=True)
    yield from _field_problems(family, config)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(name), Mapping):
            yield from _rope_problems(family, name, rope)


def converting_bridges(config: Mapping[str, Any]) -> list[str]:
    """Return the bridges that hold the tensors of a model, regardless of its other fields."""
    return [name for name in BRIDGES if config.get("model_type") in _check_served(name)]


def _family_problem(bridge_type: str, config: Mapping[str, Any], key: KeyOf) -> BridgeProblem | None:
    family = config.get("model_type")
    field, remedy = "model_type", f"use a model of one of {', '.join(_check_served(bridge_type))}"
    if family not in _check_served(bridge_type):
        if others := [other for other in BRIDGES if family in _check_served(other)]:
            field, remedy = key(_BRIDGE), f"write {key(_BRIDGE)}={others[0]}"
        message = f"the model is a {family}, for which {_missing(bridge_type, str(family))}"
        return BridgeProblem(field, message, remedy, is_key=bool(others))
    architecture, given = _families()[family]["architecture"], config.get("architectures")
    if given and list(given) != [architecture]:
        message = f"a {family} is trained as {architecture}, but this checkpoint is {', '.join(given)}"
        return BridgeProblem("architectures", message, f"use a checkpoint of {architecture}")
    return None


def _missing(bridge_type: str, family: str) -> str:
    """Return the missing part for training a family on a bridge: a conversion of its tensors, or a test."""
    if family not in _registered_families(bridge_type):
        version = _registry()["versions"].get(bridge_type, "")
        return f"{bridge_type} {version} has no conversion to Megatron".replace("  ", " ")
    return f"no test shows that {bridge_type} computes what transformers does"


def _field_problems(family: str, config: Mapping[str, Any]) -> Iterator[BridgeProblem]:
    for name in sorted({line.rpartition(".")[2] for line in ALLOWED}):
        allowed = ALLOWED.get(f"{family}.{name}", ALLOWED.get(name))
        if allowed and name in config and config[name] not in allowed:
            yield _refuse(family, name, config[name], allowed[0])
    kinds, known = set(config.get("layer_types") or ()), {"full_attention"}
    known |= {"sliding_attention"} if family in WINDOWS else {"linear_attention"} if family in STATES else set()
    if kinds - known:
        yield _refuse(family, "layer_types", sorted(kinds), ["full_attention"])
    divided = config["hidden_size"] // config["num_attention_heads"]
    if family == "olmoe" and config["num_key_value_heads"] != config["num_attention_heads"]:
        yield _refuse(family, "num_key_value_heads", config["num_key_value_heads"], config["num_attention_heads"])
    if family in LATENT:
        yield from _latent_problems(family, config)
    if family in FIXED_HEAD_DIM and config.get("head_dim") not in (None, divided):
        yield _refuse(family, "head_dim", config["head_dim"], divided)
    yield from _expert_problems(family, config)


def _latent_problems(family: str, config: Mapping[str, Any]) -> Iterator[BridgeProblem]:
    if not config.get("q_lora_rank"):
        yield _refuse(family, "q_lora_rank", config.get("q_lora_rank"), config["hidden_size"] // 4)
    wide, values = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    if values > wide:
        message = f"values have {values} dimensions, and Megatron-core truncates them to the {wide} of queries"
        remedy = f"use a model whose config.json has v_head_dim = {wide}"
        yield BridgeProblem("v_head_dim", message, remedy, str(wide))
    if family == "glm4_moe_lite" and (kinds := config.get("mlp_layer_types")):
        usual = ["dense", *["sparse"] * (config["num_hidden_layers"] - 1)]  # bridges ignore the field
        if kinds != usual:
            yield _refuse(family, "mlp_layer_types", kinds, usual)


def _expert_problems(family: str, config: Mapping[str, Any]) -> Iterator[BridgeProblem]:
    """Return how tokens are routed; Hugging Face ranks groups by their two best, Megatron by k // topk_group."""
    each, shared = config.get("num_experts_per_tok"), SHARED_EXPERTS.get(family, "")
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    normalised = family == "qwen2_moe" and config.get("norm_topk_prob")
    if each == 1 and (family in SEVERAL_EXPERTS_PER_TOKEN or normalised):
        yield _refuse(family, "num_experts_per_tok", each, 2)
    elif isinstance(each, int) and groups > 1 and each // chosen != 2:
        yield _refuse(family, "num_experts_per_tok", each, 2 * chosen)
    if shared in config and not config[shared]:
        yield _refuse(family, shared, config[shared], 1)


def _rope_problems(family: str, name: str, rope: Mapping[str, Any]) -> Iterator[BridgeProblem]:
    of_layers = {kind: part for kind, part in rope.items() if isinstance(part, Mapping)}
    if family == "gemma3_text" and of_layers.keys() == {"full_attention", "sliding_attention"}:
        for layers, part in of_layers.items():
            yield from _rope_problems(family, f"{name}.{layers}", part)
        return
    kind = rope.get("rope_type", rope.get("type", "default"))
    types = ROPE_TYPES.get(family, tuple(ROPE_FIELDS))
    if kind not in types or any(isinstance(value, Mapping) for value in rope.values()):
        yield _refuse(family, f"{name}.rope_type", kind, _or(types))
        return
    for field in ROPE_FIELDS[kind]:
        if not isinstance(rope.get(field), int | float):
            message = f"a rotary embedding of type {kind} needs the number {field}, not {rope.get(field)!r}"
            remedy = "write the value with which the model was trained"
            yield BridgeProblem(f"{name}.{field}", message, remedy)
    partial = ALLOWED.get(f"{family}.partial_rotary_factor", ALLOWED["partial_rotary_factor"])
    if rope.get("partial_rotary_factor") not in partial:
        yield _refuse(family, f"{name}.partial_rotary_factor", rope["partial_rotary_factor"], partial[-1])
    unread = ("attention_factor", "attn_factor", "extrapolation_factor")  # by SGLang, or by Hugging Face
    for field in [field for field in unread if kind == "yarn" and rope.get(field) is not None]:
        yield _refuse(family, f"{name}.{field}", rope[field], None)
    if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
        message = "Hugging Face and SGLang interpret mscale without mscale_all_dim differently"
        yield BridgeProblem(f"{name}.mscale", message, "write both or neither")
    elif (
        family in LATENT
        and kind == "yarn"
        and not (rope.get("mscale") and rope["mscale"] == rope.get("mscale_all_dim"))
    ):
        message = "Megatron-core scales all of latent attention's scores, so mscale and mscale_all_dim have to be equal"
        yield BridgeProblem(f"{name}.mscale", message, "use a model that has the same for both")


def _refuse(family: str, field: str, value: Any, would_do: Any) -> BridgeProblem:
    message = (
        f"no test shows that trainer and servers compute the same for a {family} with {field} = {json.dumps(value)}"
    )
    text = would_do if isinstance(would_do, str) else json.dumps(would_do)
    remedy = f"use a model whose config.json has {field} = {text}"
    return BridgeProblem(field, message, remedy, text)


def _check_served(bridge_type: str) -> list[str]:
    """Return the proven families that a bridge registers."""
    registered = _registered_families(bridge_type)
    return [family for family in FAMILIES if family in registered and bridge_type not in UNUSABLE[family]]


def _registered_families(bridge_type: str) -> set[str]:
    """Return the families that a bridge registers: Megatron Bridge by architecture, mbridge by model type."""
    registered = _registry()[bridge_type]
    return {name for name, family in _families().items() if name in registered or family["architecture"] in registered}


def architecture_of(family: str) -> str:
    """Return the class that transformers has for a family's language models."""
    return str(_families().get(family, {}).get("architecture", "…ForCausalLM"))


def _families() -> dict[str, Any]:
    families: dict[str, Any] = _registry()["families"]
    return families


@cache
def _registry() -> dict[str, Any]:
    registry: dict[str, Any] = json.loads(Path(__file__).with_name("registry.json").read_text())
    return registry


def _or(names: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
