"""The few numbers of a model that the rules need, read from a Hugging Face `config.json`.

A model is named by a path, by a name of the table `models.json` (no network), or by a name that the Hugging Face
cache or hub knows.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

HUB_TIMEOUT_S = 10


class ModelError(ValueError):
    """A model that cannot be read; the message names the file, and the fields that are missing or wrong."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape of a decoder-only model. FFN sizes are per expert; `experts` 0 is a dense model.

    `vocab_size` and `max_positions` are 0 where they are not known.
    `shared_ffn` is the width of all shared experts of a layer together. `linear_key_heads` and
    `linear_value_heads` belong to gated-delta-net layers (Qwen3-Next), 0 elsewhere.
    """

    name: str
    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab_size: int
    max_positions: int = 0
    tied_embeddings: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    router_groups: int = 1
    expert_bias: bool = False
    latent_attention: bool = False
    mtp_layers: int = 0
    linear_key_heads: int = 0
    linear_value_heads: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's config calls its experts; `experts` is empty for a dense one."""

    experts: str = ""
    expert_ffn: str = ""
    shared_ffn: str = ""
    shared_experts: str = ""
    expert_bias: bool = False
    latent_attention: bool = False
    linear_attention: bool = False


_DENSE = Family()
_DEEPSEEK = Family("n_routed_experts", "moe_intermediate_size", "", "n_shared_experts", latent_attention=True)
_QWEN_MOE = Family("num_experts", "moe_intermediate_size")
_QWEN_SHARED = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "glm", "glm4"), _DENSE),
    **dict.fromkeys(("mimo", "olmo2", "phi3", "exaone4", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text"), _DENSE),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe_text"), _QWEN_MOE),
    "qwen2_moe": Family(*_QWEN_SHARED),
    "qwen3_next": Family(*_QWEN_SHARED, linear_attention=True),
    "olmoe": Family("num_experts", "intermediate_size"),
    "mixtral": Family("num_local_experts", "intermediate_size"),
    "minimax_m2": Family("num_local_experts", "intermediate_size"),
    "gpt_oss": Family("num_local_experts", "intermediate_size", expert_bias=True),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), _DEEPSEEK),
    "glm4_moe": Family("n_routed_experts", "moe_intermediate_size", "", "n_shared_experts"),
}
# transformers 5 writes some families' number of experts by another family's name.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# The config's name of each field; an optional one that is missing, null or 0 keeps the default of `ModelSpec`.
_REQUIRED = {
    "hidden_size": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "ffn": "intermediate_size", "vocab_size": "vocab_size",
}  # fmt: skip
_OPTIONAL = {
    "kv_heads": "num_key_value_heads", "max_positions": "max_position_embeddings",
    "experts_per_token": "num_experts_per_tok", "router_groups": "n_group", "mtp_layers": "num_nextn_predict_layers",
    "linear_key_heads": "linear_num_key_heads", "linear_value_heads": "linear_num_value_heads",
}  # fmt: skip


def from_config(config: Mapping[str, Any], name: str = "config.json") -> ModelSpec:
    """The spec of a Hugging Face config. Raises `ModelError` that lists every wrong field."""
    if not isinstance(config, Mapping):
        raise ModelError(f"{name}: a config is a JSON object, not {type(config).__name__}")
    if isinstance(config.get("text_config"), Mapping):
        config = {"tie_word_embeddings": config.get("tie_word_embeddings", False), **config["text_config"]}
    family_name = config.get("model_type")
    if not isinstance(family_name, str) or family_name not in FAMILIES:
        close = get_close_matches(str(family_name), FAMILIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(FAMILIES))}"
        raise ModelError(f"{name}: unknown model_type {family_name!r}; {hint}")
    family = FAMILIES[family_name]
    written = next((other for other in (family.experts, *_EXPERT_COUNTS) if other in config), None)
    if family.experts and written:
        config = {**config, family.experts: config[written]}
    problems = list(_problems(config, family))
    if problems:
        raise ModelError(f"{name}: " + "; ".join(problems))
    sizes = {field: config[key] for field, key in _REQUIRED.items()}
    sizes |= {"kv_heads": sizes["heads"]} | {f: config[key] for f, key in _OPTIONAL.items() if config.get(key)}
    expert_ffn = config[family.expert_ffn] if family.experts else 0
    shared = config.get(family.shared_ffn) or (config.get(family.shared_experts) or 0) * expert_ffn
    return ModelSpec(
        name=name,
        family=family_name,
        **sizes,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        experts=config[family.experts] if family.experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared,
        expert_bias=family.expert_bias,
        latent_attention=family.latent_attention,
    )


def _problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """One sentence for every field that is missing or is no positive integer."""
    required = list(dict.fromkeys([*_REQUIRED.values(), *filter(None, (family.experts, family.expert_ffn))]))
    if family.linear_attention:
        required += ["linear_num_key_heads", "linear_num_value_heads"]
    for name in required:
        if name not in config:
            close = get_close_matches(name, [key for key in config if key not in required], n=1, cutoff=0.85)
            yield f"{name} is missing" + (f" (is {close[0]!r} meant?)" if close else "")
    for name in (*required, *_OPTIONAL.values(), *filter(None, (family.shared_ffn, family.shared_experts))):
        value = config.get(name)
        if name in config and not (value is None and name not in required):
            smallest = 1 if name in required else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                yield f"{name} must be a positive integer, not {value!r}"


def known_models() -> dict[str, dict[str, Any]]:
    """The offline table: name to the fields of its config."""
    table: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())
    return table


def load_model(model: str | os.PathLike[str]) -> ModelSpec:
    """The spec of a path (a folder or a config.json) or of a model's name. Raises `ModelError`."""
    path = Path(os.path.expanduser(model))
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _from_file(file, str(model))
    name = str(model)
    table = known_models()
    for known, config in table.items():
        if name.lower() in (known.lower(), known.rpartition("/")[2].lower()):
            return from_config(config, known)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or path.is_dir():
        close = get_close_matches(name.lower(), {known.rpartition("/")[2].lower(): 0 for known in table}, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ModelError(f"{name}: no such file, and not a model's name{hint}")
    cached = _cached(name)
    return _from_file(cached, name) if cached else from_config(_download(name), name)


def _from_file(file: Path, name: str) -> ModelSpec:
    try:
        config = json.loads(file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error
    return from_config(config, name)


def _cached(name: str) -> Path | None:
    """The newest config.json of `name` in the Hugging Face cache."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    files = sorted(
        (cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"),
        key=lambda file: file.stat().st_mtime,
    )
    return files[-1] if files else None


def _download(name: str) -> Any:
    """The config.json of `name` from the hub, unless HF_HUB_OFFLINE is set."""
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        raise ModelError(f"{name}: not in the offline table or the cache, and HF_HUB_OFFLINE is set")
    from urllib.error import URLError
    from urllib.request import urlopen

    url = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/{name}/resolve/main/config.json"
    try:
        with urlopen(url, timeout=HUB_TIMEOUT_S) as reply:
            return json.loads(reply.read(1 << 22))
    except (URLError, TimeoutError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{name}: not in the offline table or the cache, and {url} gave no config: {error}") from error
