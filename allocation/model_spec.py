"""The few numbers of a model that the rules need, read from a Hugging Face `config.json`.

A model is named by a path, by a name of the table `models.json` (no network), or by a name that the Hugging Face
cache or hub knows.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
    `shared_ffn` is the width of all shared experts of a layer together, `dense_layers` are the layers of a model with
    experts that have none. `qk_norm` is `head` (one norm's weights for all heads), `full` (of their own) or empty.
    What begins with `linear_` belongs to gated-delta-net layers (Qwen3-Next), ranks and `qk_nope`, `qk_rope` to latent
    attention (`q_rank` 0: queries are not compressed), `index_` to the indexer of sparse attention (DeepSeek-V3.2).
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
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    linear_kernel: int = 0
    linear_layers: tuple[int, ...] = ()
    dense_layers: tuple[int, ...] = ()
    head_dim: int = 0
    qk_norm: str = ""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norms: int = 2
    q_rank: int = 0
    kv_rank: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    value_dim: int = 0
    index_heads: int = 0
    index_dim: int = 0
    shared_gate: bool = False

    @property
    def query_width(self) -> int:
        """Columns of all query heads together."""
        return self.heads * (self.qk_nope + self.qk_rope if self.latent_attention else self.head_dim)


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's config calls its experts; `experts` is empty for a dense one.

    `bias` are the attention projections that `attention_bias` means, `norms` the norms of a layer, `defaults` the
    values that transformers' configuration class gives keys which a config leaves out.
    """

    experts: str = ""
    expert_ffn: str = ""
    shared_ffn: str = ""
    shared_experts: str = ""
    expert_bias: bool = False
    latent_attention: bool = False
    linear_attention: bool = False
    qk_norm: str = ""
    bias: str = ""
    norms: int = 2
    defaults: Mapping[str, Any] = field(default_factory=dict)


_BIAS = {"attention_bias": True}
_MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK = Family(
    "n_routed_experts", "moe_intermediate_size", "", "n_shared_experts", latent_attention=True, bias="qkvo",
    defaults=_MLA | {"first_k_dense_replace": 3},
)  # fmt: skip
_SPARSE = replace(_DEEPSEEK, defaults={**_DEEPSEEK.defaults, "index_n_heads": 64, "index_head_dim": 128})
_GLM = Family(bias="qkv", defaults={"head_dim": 128})
_QWEN2 = Family(bias="qkv", defaults=_BIAS)
_QWEN3 = Family(bias="qkvo", qk_norm="head", defaults={"head_dim": 128})
_EVERY_LAYER = {"decoder_sparse_step": 1}
_QWEN3_MOE = Family("num_experts", "moe_intermediate_size", bias="qkvo", qk_norm="head", defaults=_EVERY_LAYER)
_QWEN_SHARED = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
_GEMMA = Family(bias="qkvo", defaults={"head_dim": 256, "tie_word_embeddings": True})
FAMILIES: dict[str, Family] = {
    "llama": Family(bias="qkvo"),
    "mistral": Family(),
    **dict.fromkeys(("qwen2", "mimo", "qwen2_vl_text", "qwen2_5_vl_text"), _QWEN2),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), _QWEN3),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4),
    "gemma3_text": replace(_GEMMA, norms=4, qk_norm="head"),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "olmo2": Family(bias="qkvo", qk_norm="full"),
    "phi3": Family(),
    "exaone4": Family(qk_norm="head"),
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _QWEN3_MOE,
    "qwen2_moe": Family(*_QWEN_SHARED, bias="qkv", defaults=_BIAS | _EVERY_LAYER),
    "qwen3_next": Family(
        *_QWEN_SHARED, linear_attention=True, bias="qkvo", qk_norm="head",
        defaults={**_EVERY_LAYER, "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                  "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    ),
    "olmoe": Family("num_experts", "intermediate_size", bias="qkvo", qk_norm="full"),
    "mixtral": Family("num_local_experts", "intermediate_size"),
    "minimax_m2": Family("num_local_experts", "intermediate_size", qk_norm="full", defaults={"head_dim": 128}),
    "gpt_oss": Family("num_local_experts", "intermediate_size", expert_bias=True, bias="qkvo",
                      defaults=_BIAS | {"head_dim": 64}),
    "deepseek_v2": replace(_DEEPSEEK, defaults=_MLA | {"first_k_dense_replace": 0}),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _SPARSE,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": Family("n_routed_experts", "moe_intermediate_size", "", "n_shared_experts", bias="qkv", qk_norm="head",
                       defaults={"first_k_dense_replace": 1, "head_dim": 128}),
}  # fmt: skip
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
    "linear_key_dim": "linear_key_head_dim", "linear_value_dim": "linear_value_head_dim",
    "linear_kernel": "linear_conv_kernel_dim", "head_dim": "head_dim", "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank", "qk_nope": "qk_nope_head_dim", "qk_rope": "qk_rope_head_dim",
    "value_dim": "v_head_dim", "index_heads": "index_n_heads", "index_dim": "index_head_dim",
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
    config = {**family.defaults, **config}
    problems = list(_problems(config, family))
    if problems:
        raise ModelError(f"{name}: " + "; ".join(problems))
    sizes = {field: config[key] for field, key in _REQUIRED.items()}
    sizes |= {"kv_heads": sizes["heads"], "head_dim": sizes["hidden_size"] // sizes["heads"]}
    sizes |= {f: config[key] for f, key in _OPTIONAL.items() if config.get(key)}
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
        linear_layers=tuple(_linear_layers(config)) if family.linear_attention else (),
        dense_layers=tuple(_dense_layers(config, family)) if family.experts else (),
        qk_norm=family.qk_norm if config.get("use_qk_norm", family_name != "glm4_moe") else "",
        qkv_bias=bool(config.get("attention_bias")) and "q" in family.bias,
        output_bias=bool(config.get("attention_bias")) and "o" in family.bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        norms=family.norms,
        shared_gate=family.shared_ffn != "",
    )


def _linear_layers(config: Mapping[str, Any]) -> Iterator[int]:
    """Layers with linear attention: `layer_types`, or all but every fourth (transformers' Qwen3NextConfig)."""
    types = config.get("layer_types")
    for layer in range(config["num_hidden_layers"]):
        if types[layer] == "linear_attention" if types else (layer + 1) % config["full_attention_interval"]:
            yield layer


def _dense_layers(config: Mapping[str, Any], family: Family) -> Iterable[int]:
    """Layers without experts: the first ones (DeepSeek, GLM), or those that `decoder_sparse_step` leaves out (Qwen)."""
    layers = range(config["num_hidden_layers"])
    if "first_k_dense_replace" in family.defaults:
        return layers[: config["first_k_dense_replace"]]
    if "decoder_sparse_step" not in family.defaults:
        return ()
    step, named = config["decoder_sparse_step"], config.get("mlp_only_layers") or ()
    return (layer for layer in layers if (layer + 1) % step or layer in named)


def _problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """One sentence for every field that is missing or is no positive integer, or no list where it should be one."""
    required = list(dict.fromkeys([*_REQUIRED.values(), *filter(None, (family.experts, family.expert_ffn))]))
    required += [name for name in ("decoder_sparse_step", "full_attention_interval") if name in family.defaults]
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
    first = config.get("first_k_dense_replace", 0)
    if not isinstance(first, int) or first < 0:
        yield f"first_k_dense_replace must be a number of layers, not {first!r}"
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list):
        yield f"mlp_only_layers must be a list of layers, not {named!r}"
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if family.linear_attention and types and not (isinstance(types, list) and len(types) == layers):
        yield f"layer_types must be a list of {layers} kinds of layers"


_HUB_NAME = re.compile(r"(?!.*\.json$)\w[\w.-]*/\w[\w.-]*")  # ORGANISATION/NAME, not a file's path


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
    if not _HUB_NAME.fullmatch(name) or path.is_dir():
        close = get_close_matches(name.lower(), {known.rpartition("/")[2].lower(): 0 for known in table}, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ModelError(f"{name}: no such file, and not a model's name{hint}")
    cached = _cached(name)
    return _from_file(cached, name) if cached else from_config(_download(name), name)


def _from_file(file: Path, name: str) -> ModelSpec:
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
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
    from http.client import HTTPException
    from urllib.request import urlopen

    url = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/{name}/resolve/main/config.json"
    try:
        with urlopen(url, timeout=HUB_TIMEOUT_S) as reply:
            return json.loads(reply.read(1 << 22))
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        raise ModelError(f"{name}: not in the offline table or the cache, and {url} gave no config: {error}") from error
