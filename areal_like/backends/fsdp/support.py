"""Parts of a model that the FSDP trainer computes itself, or cannot, by its `config.json`. No torch, for preflight."""

from collections.abc import Iterable, Mapping
from typing import Any

from allocation.families import FAMILIES, families_with
from areal_like.data.processor import SEES_WHOLE_IMAGES

# Families without a language model of their own in transformers (`AutoModelForCausalLM`).
WITHOUT_MODEL = frozenset(families_with(lambda family: not family.fsdp.has_model))
WITHOUT_SERVER = frozenset(families_with(lambda family: not family.server.starts))
ALWAYS_TIED = frozenset(families_with(lambda family: family.server.tied))
# Families whose sliding windows SGLang 0.5.17 computes on GPUs; others attend to all tokens there.
WINDOW_SERVED = frozenset(families_with(lambda family: family.server.windows))
# Families that are computed otherwise in a pack than alone, as the probe at the start finds (`fsdp/probe.py`), and
# families whose faults it cannot see.
_STATES = "its layers carry a state or a convolution from one packed sequence to the next"
_STATEFUL = (
    *("bamba", "falcon_h1", "falcon_mamba", "jamba", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h"),
    *("olmo_hybrid", "recurrent_gemma", "zamba", "zamba2"),
)
NOT_PACKED = {
    **{name: family.fsdp.not_packed for name, family in FAMILIES.items() if family.fsdp.not_packed},
    "glm_moe_dsa": "its sparse attention selects keys of other sequences in a pack",
    "phimoe": "its routers draw experts at random while they train",
    "gemma4_text": "its log-probs in a pack are up to 4e-4 apart from those alone, for a reason that is unknown",
    **dict.fromkeys(_STATEFUL, _STATES),
}
# Families of vision-language models that the FSDP trainer computes as transformers does, and SGLang serves.
WITH_IMAGES = frozenset(name.removesuffix("_text") for name in families_with(lambda family: family.fsdp.sees_images))
# Families whose matrices ranks can split by transformers' plan (`fsdp/tensor_parallel.py`).
SPLIT = frozenset(families_with(lambda family: family.fsdp.splits))
PROCESSOR = "preprocessor_config.json"
_BY_LENGTH = {"dynamic", "longrope"}
_ATTENTION, _LINEAR = {"full_attention", "sliding_attention"}, {"linear_attention"}
# Families whose linear attention is a gated delta net, which packs (`fsdp/model.py`)
_DELTA_NETS = frozenset(families_with(lambda family: family.linear_attention))


def has_plain_attention(config: Mapping[str, Any]) -> bool:
    """Return whether every layer with attention attends to all tokens before, or to the last of them.

    Its scores may have a soft cap. Others may be gated delta nets.
    """
    if config.get("model_type") in SEES_WHOLE_IMAGES:
        return False
    config = config.get("text_config") or config
    known = _ATTENTION | (_LINEAR if config.get("model_type") in _DELTA_NETS else set())
    return not looks_ahead(config) and set(config.get("layer_types") or _ATTENTION) <= known


def has_states(config: Mapping[str, Any]) -> bool:
    """Return whether layers carry a state along a sequence, which neither ranks nor sequences can share."""
    config = config.get("text_config") or config
    return bool(_LINEAR & set(config.get("layer_types") or ()))


def looks_ahead(config: Mapping[str, Any]) -> bool:
    """Return whether tokens attend to those after them, so that nothing can be generated one token at a time."""
    return bool(config.get("use_bidirectional_attention"))


def rope_of_lengths(config: Mapping[str, Any]) -> str | None:
    """Return the kind of the model's rope, if transformers chooses it by the longest sequence of its input.

    For a pack it may choose another one than servers do, where each sequence is alone.
    """
    config = config.get("text_config") or config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    each = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]  # or one for each type of layers
    kinds = (part.get("rope_type", part.get("type")) for part in each)
    return next((str(kind) for kind in kinds if kind in _BY_LENGTH), None)


def field_apart(config: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """Return a field of config.json with which transformers and SGLang differ, its value, and how they differ."""
    if config.get("model_type") == "qwen3_vl_moe":
        return _experts_apart(config.get("text_config") or {})
    if config.get("model_type") != "deepseek_v2":
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        return "rope_type", kind, "transformers leaves the rope's mscale out of the scale of attention, SGLang does not"
    if config.get("topk_method", "greedy") != "greedy":
        return "topk_method", config["topk_method"], "transformers 5.12 cannot select groups of experts"
    if config.get("norm_topk_prob"):
        return "norm_topk_prob", True, "transformers ignores it, SGLang does not"
    return None


def _experts_apart(text: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """Return `field_apart` of a Qwen3-VL with experts, whose files have the experts' matrices transposed.

    transformers transposes only matrices of another shape than its own, SGLang all.
    """
    if text.get("norm_topk_prob") is False:
        return "norm_topk_prob", False, "transformers ignores it, SGLang does not"
    hidden, expert = text.get("hidden_size"), text.get("moe_intermediate_size")
    if isinstance(expert, int) and hidden in (expert, 2 * expert):
        return "moe_intermediate_size", expert, "transformers does not transpose the square matrices of experts"
    return None


def find_undivided(family: str, heads: Iterable[int], t: int) -> str | None:
    """Return why `t` ranks cannot split the matrices of a model with these numbers of query and key heads, or None."""
    if family not in SPLIT:
        return f"the FSDP trainer supports no tensor-parallel plan for {family}"
    undivided = next((number for number in heads if number % t), None)
    return None if undivided is None else f"{undivided} heads are not divisible by {t}"
