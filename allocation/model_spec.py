"""The dimensions of a model that the rules need, read from a Hugging Face `config.json`.

A model is named by a path, by a name in the table `models.json` (no network), or by a name in the Hugging Face cache or
on the hub.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from allocation.families import FAMILIES, USUAL, Family
from allocation.vision import Tower, read_tower

# The config's name of each field; an optional one that is missing, null or 0 keeps the default of `ModelSpec`.
REQUIRED = {
    "hidden_size": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "ffn": "intermediate_size", "vocab_size": "vocab_size",
}  # fmt: skip
OPTIONAL = {
    "kv_heads": "num_key_value_heads", "max_positions": "max_position_embeddings",
    "experts_per_token": "num_experts_per_tok", "router_groups": "n_group", "mtp_layers": "num_nextn_predict_layers",
    "linear_key_heads": "linear_num_key_heads", "linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim", "linear_value_dim": "linear_value_head_dim",
    "linear_kernel": "linear_conv_kernel_dim", "head_dim": "head_dim", "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank", "qk_nope": "qk_nope_head_dim", "qk_rope": "qk_rope_head_dim",
    "value_dim": "v_head_dim", "index_heads": "index_n_heads", "index_dim": "index_head_dim",
}  # fmt: skip
_BOOLEANS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "use_qk_norm", "norm_topk_prob",
)  # fmt: skip
_OBJECTS = ("rope_parameters", "rope_scaling", "quantization_config", "text_config")
_COUNTS = ("sliding_window", "topk_group")
_LARGEST = 10**9
_MISSPELT = 0.93  # similarity: some configs have fields of their own, such as swa_num_key_value_heads
_MOST_LAYERS = 10_000  # rules and memory look at each


def problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield one sentence for every wrong field, by its name; relations only between fields that are right by
    themselves."""
    found = [*_wrong_fields(config, family), *_wrong_kinds(config), *_misspelt(config)]
    yield from found or _contradictions(config, family)


def _wrong_fields(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    required = list(dict.fromkeys([*REQUIRED.values(), *filter(None, (family.experts, family.expert_ffn))]))
    required += [name for name in ("decoder_sparse_step", "full_attention_interval") if name in family.defaults]
    if family.linear_attention:
        required += ["linear_num_key_heads", "linear_num_value_heads"]
    for name in required:
        if name not in config:
            close = get_close_matches(name, [key for key in config if key not in required], n=1, cutoff=0.85)
            yield f"{name} is missing" + (f" (is {close[0]!r} meant?)" if close else "")
    for name in (*required, *OPTIONAL.values(), *filter(None, (family.shared_ffn, family.shared_experts))):
        value = config.get(name)
        if name in config and not (value is None and name not in required):
            yield from _wrong_number(name, value, 1 if name in required else 0)
    first = config.get("first_k_dense_replace", 0)
    if not isinstance(first, int) or first < 0:
        yield f"first_k_dense_replace must be a number of layers, not {_show(first)}"
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list):
        yield f"mlp_only_layers must be a list of layers, not {_show(named)}"
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if types and not (_is_list_of_names(types) and len(types) == layers):
        number = f", not {len(types)}" if isinstance(types, list) and len(types) != layers else ""
        yield f"layer_types must be a list of {_show(layers)} kinds of layers{number}"


def _wrong_kinds(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield fields of the wrong JSON type; null is an absent field."""
    given = {name: value for name, value in config.items() if value is not None}
    for name in [name for name in _BOOLEANS if name in given and given[name] not in (True, False)]:
        yield f"{name} must be true or false, not {_show(given[name])}"
    for name in [name for name in _OBJECTS if name in given and not isinstance(given[name], Mapping)]:
        yield f"{name} must be an object, not {_show(given[name])}"
    if not _is_list_of_names(given.get("architectures", [])):
        yield f"architectures must be a list of names, not {_show(given['architectures'])}"
    for name in [name for name in _COUNTS if name in given and given[name] is not False]:
        yield from _wrong_number(name, given[name], 0)
    theta = given.get("rope_theta", 1)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        yield f"rope_theta must be a positive number, not {_show(theta)}"


def _misspelt(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield unknown fields of a known family that resemble an optional one, which would be left at its default."""
    absent = [name for name in OPTIONAL.values() if name not in config]
    for name in config if config.get("model_type") in FAMILIES else ():
        close = get_close_matches(name, absent, n=1, cutoff=_MISSPELT)
        if close and name not in (*REQUIRED.values(), *OPTIONAL.values()):
            yield f"{name} is an unknown field (is {close[0]!r} meant?)"


def _wrong_number(name: str, value: object, smallest: int) -> Iterator[str]:
    largest = _MOST_LAYERS if name == "num_hidden_layers" else _LARGEST
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        yield f"{name} must be a positive integer, not {_show(value)}"
    elif value > largest:
        yield f"{name} must be at most {largest:,}, not {_show(value)}"


def _contradictions(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield fields that cannot be true together."""
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    if groups and not family.latent_attention and heads % groups:
        yield f"num_key_value_heads = {groups} does not divide num_attention_heads = {heads}"
    if not config.get("head_dim") and not family.latent_attention and config["hidden_size"] < heads:
        yield f"num_attention_heads = {heads} is more than hidden_size = {config['hidden_size']}, and head_dim is missing"
    kinds = [rope.get("rope_type", rope.get("type")) for rope in _ropes(config)]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        yield f"rope_parameters ({_show(kinds[0])}) and rope_scaling ({_show(kinds[1])}) have different types"
    experts, chosen = config[family.experts] if family.experts else 0, config.get("num_experts_per_tok") or 0
    if experts and chosen > experts:
        yield f"num_experts_per_tok = {chosen} is more than {family.experts} = {experts}"


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary embeddings that a config describes under either name, unless each kind of layers has its own."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope and not any(isinstance(part, Mapping) for part in rope.values()):
            yield rope


def _show(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST:
        return f"{value:.0e}" if abs(value) < 10**300 else "a number of more than 300 digits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


__all__ = [
    "FAMILIES", "Counted", "ModelError", "ModelSpec", "from_config", "from_counted", "known_models", "load_model",
    "read_config", "sliding_layers",
]  # fmt: skip
HUB_TIMEOUT_S = 10


class ModelError(ValueError):
    """Raised for an unreadable model; the message names the file, and the fields that are missing or wrong."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Parameters of a model as its own library builds it.

    `layers` counts all decoder layers, `largest` the largest one, `experts` the part of `layers` that is
    split among experts. `linear` has for each name of a linear layer the inputs and outputs of all layers of this name.
    """

    total: int
    layers: int
    largest: int
    experts: int = 0
    linear: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape of a decoder-only model. FFN sizes are per expert; `experts` 0 is a dense model.

    `vocab_size` and `max_positions` are 0 if unknown. `shared_ffn` is the total width of a layer's shared experts,
    `dense_layers` are the layers without experts in a model with experts. `qk_norm` is `head` (one norm's weights for
    all heads), `full` (separate weights) or empty.

    Fields with the prefix `linear_` belong to gated-delta-net layers (Qwen3-Next), ranks and `qk_nope`, `qk_rope` to
    latent attention (`q_rank` 0: queries are not compressed), `index_` to the indexer of sparse attention
    (DeepSeek-V3.2). `sliding_layers` attend to `window` tokens. `quantization` is the quantization method of the
    checkpoint, if any. `capped_attention` bounds attention scores, which needs them as a whole (Gemma 2). A model with
    `known_family` False is counted as a dense model with the usual layers, unless it was `counted` otherwise. A `tower`
    computes images.
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
    capped_attention: bool = False
    sliding_layers: tuple[int, ...] = ()
    window: int = 0
    quantization: str = ""
    known_family: bool = True
    counted: Counted | None = None
    tower: Tower | None = None

    @property
    def query_width(self) -> int:
        """Columns of all query heads together."""
        return self.heads * (self.qk_nope + self.qk_rope if self.latent_attention else self.head_dim)


# Fields of layers that a dense model does not have
_UNUSUAL = re.compile(r"expert|moe|lora|mamba|ssm|linear_|conv|state_size|rnn|encoder|hybrid|mlp_type|per_layer")
# transformers 5 writes some families' number of experts by another family's name.
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def from_config(config: Mapping[str, Any], name: str = "config.json") -> ModelSpec:
    """Return the spec of a Hugging Face config. Raises `ModelError` that lists every wrong field."""
    if not isinstance(config, Mapping):
        raise ModelError(f"{name}: a config must be a JSON object, not {type(config).__name__}")
    try:
        tower = read_tower(config)
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from error
    config = _text_part(config)
    family = _family(config, name)
    config = _complete(config, family, name)
    sizes = {field: config[key] for field, key in REQUIRED.items()}
    sizes |= {"kv_heads": sizes["heads"], "head_dim": sizes["hidden_size"] // sizes["heads"]}
    sizes |= {f: config[key] for f, key in OPTIONAL.items() if config.get(key)}
    expert_ffn = config[family.expert_ffn] if family.experts else 0
    shared = config.get(family.shared_ffn) or (config.get(family.shared_experts) or 0) * expert_ffn
    biased = bool(config.get("attention_bias"))
    return ModelSpec(
        name=name,
        family=config["model_type"],
        **sizes,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        experts=config[family.experts] if family.experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared,
        expert_bias=family.expert_bias,
        latent_attention=family.latent_attention,
        linear_layers=tuple(_linear_layers(config)) if family.linear_attention else (),
        dense_layers=tuple(_dense_layers(config, family)) if family.experts else (),
        sliding_layers=tuple(_sliding_layers(config, family)),
        window=_window(config),
        qk_norm=family.qk_norm if config.get("use_qk_norm", config["model_type"] != "glm4_moe") else "",
        qkv_bias=biased and "q" in family.bias,
        output_bias=(biased and "o" in family.bias) or bool(config.get("attention_out_bias")),
        mlp_bias=bool(config.get("mlp_bias", False)),
        norms=family.norms,
        shared_gate=family.shared_ffn != "",
        capped_attention=bool(config.get("attn_logit_softcapping")),
        quantization=_quantization(config),
        known_family=config["model_type"] in FAMILIES,
        tower=tower,
    )


def _complete(config: Mapping[str, Any], family: Family, name: str) -> dict[str, Any]:
    """Return the config with the number of experts under its own name, and defaults. Raises `ModelError`."""
    counts = {name: config[name] for name in _EXPERT_COUNTS if config.get(name) is not None}
    if family.experts and len({json.dumps(count) for count in counts.values()}) > 1:
        contrary = " and ".join(f"{key} = {count!r}" for key, count in counts.items())
        raise ModelError(f"{name}: {contrary} contradict each other: each is the number of experts per layer")
    written = next((other for other in (family.experts, *_EXPERT_COUNTS) if other in config), None)
    if family.experts and written:
        config = {**config, family.experts: config[written]}
    config = {**family.defaults, **config}
    if wrong := list(problems(config, family)):
        raise ModelError(f"{name}: " + "; ".join(wrong))
    return config


def from_counted(config: Mapping[str, Any], name: str, shape: Mapping[str, Any], counted: Counted) -> ModelSpec:
    """Return the spec of a family without an entry here, whose sizes (`shape`, fields of the spec) were counted."""
    return ModelSpec(
        name=name,
        family=config["model_type"],
        **shape,
        sliding_layers=sliding_layers({**config, "num_hidden_layers": shape["layers"]}),
        window=_window(config),
        capped_attention=bool(config.get("attn_logit_softcapping")),
        quantization=_quantization(config),
        known_family=False,
        counted=counted,
    )


def sliding_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers that attend to a window, for a family of any kind."""
    return tuple(_sliding_layers(config, FAMILIES.get(str(config.get("model_type")), USUAL)))


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a multimodal model's text part; whether the output layer is tied comes from the outer
    config. Published Qwen2.5-VL have the fields of the text part beside `vision_config`."""
    if not isinstance(text := config.get("text_config"), Mapping):
        family = f"{config.get('model_type')}_text"
        return {**config, "model_type": family} if "vision_config" in config and family in FAMILIES else config
    of_all = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if config.get(key) is not None}
    return {**text, **of_all}


def _family(config: Mapping[str, Any], name: str) -> Family:
    """Return the family of a config: a known one, or `USUAL` for a dense model. Raises
    `ModelError`."""
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    if isinstance(kind, str) and _looks_dense(config):
        return USUAL
    close = get_close_matches(str(kind), FAMILIES, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"the known types are {', '.join(sorted(FAMILIES))}"
    raise ModelError(f"{name}: unknown model_type {kind!r}; {hint}")


def _looks_dense(config: Mapping[str, Any]) -> bool:
    """Return whether a config of an unknown family has the fields of a dense model, and none of other kinds of
    layers."""
    kinds = config.get("layer_types")
    plain = not kinds or (isinstance(kinds, list) and {*map(str, kinds)} <= {"full_attention", "sliding_attention"})
    usual = (*REQUIRED.values(), "num_key_value_heads")
    return plain and all(key in config for key in usual) and not any(_UNUSUAL.search(str(key)) for key in config)


def _window(config: Mapping[str, Any]) -> int:
    """Return the size of the sliding window in tokens; 0 without one."""
    window = config.get("sliding_window")
    return window if isinstance(window, int) and config.get("use_sliding_window") is not False else 0


def _sliding_layers(config: Mapping[str, Any], family: Family) -> Iterator[int]:
    """Yield layers that attend to a window: `layer_types`, or the family's pattern (transformers' configuration
    classes)."""
    if not _window(config):
        return
    layers, types = config["num_hidden_layers"], config.get("layer_types")
    every = config.get("sliding_window_pattern") or family.full_every
    every = every if isinstance(every, int) else family.full_every
    for number in range(layers):
        if isinstance(types, list) and len(types) == layers:
            slides = types[number] == "sliding_attention"
        elif every:
            slides = every == 1 or bool((number + 1) % every)
        else:
            slides = bool(config.get("use_sliding_window")) and number >= (config.get("max_window_layers") or 0)
        if slides:
            yield number


def _quantization(config: Mapping[str, Any]) -> str:
    """Return the quantization method that the config names; empty for an unquantized model."""
    of_config = config.get("quantization_config") or {}
    return str(of_config.get("quant_method", "unknown")) if isinstance(of_config, Mapping) and of_config else ""


def _linear_layers(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield layers with linear attention: `layer_types`, or all but every fourth (transformers' Qwen3NextConfig)."""
    types = config.get("layer_types")
    for layer in range(config["num_hidden_layers"]):
        if types[layer] == "linear_attention" if types else (layer + 1) % config["full_attention_interval"]:
            yield layer


def _dense_layers(config: Mapping[str, Any], family: Family) -> Iterable[int]:
    """Return layers without experts: the first ones (DeepSeek, GLM), or all that `decoder_sparse_step` leaves out
    (Qwen)."""
    layers = range(config["num_hidden_layers"])
    if "first_k_dense_replace" in family.defaults:
        return layers[: config["first_k_dense_replace"]]
    if "decoder_sparse_step" not in family.defaults:
        return ()
    step, named = config["decoder_sparse_step"], config.get("mlp_only_layers") or ()
    return (layer for layer in layers if (layer + 1) % step or layer in named)


_HUB_NAME = re.compile(r"(?!.*\.json$)\w[\w.-]*/\w[\w.-]*")  # ORGANISATION/NAME, not a file's path


def known_models() -> dict[str, dict[str, Any]]:
    """Return the offline table: name to the fields of its config."""
    table: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text())
    return table


def load_model(model: str | os.PathLike[str]) -> ModelSpec:
    """Return the spec of a path (a folder or a config.json) or of a model's name. Raises `ModelError`."""
    return from_config(*read_config(model))


def read_config(model: str | os.PathLike[str], *, download: bool = True) -> tuple[Any, str]:
    """Return the config of a path or of a model's name, as it was read, and the model's name. Raises `ModelError`.

    The offline table holds only the fields that change a model's size.
    """
    path = Path(os.path.expanduser(model))
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return _from_file(file), str(model)
    name = str(model)
    table = known_models()
    for known, config in table.items():
        if name.lower() in (known.lower(), known.rpartition("/")[2].lower()):
            return config, known
    if not _HUB_NAME.fullmatch(name) or path.is_dir():
        close = get_close_matches(name.lower(), {known.rpartition("/")[2].lower(): 0 for known in table}, n=2)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ModelError(f"{name} is neither a file nor the name of a model{hint}")
    if cached := _find_cached(name):
        return _from_file(cached), name
    if not download:
        raise ModelError(f"{name} is neither in the offline table nor in the Hugging Face cache")
    return _download(name), name


def _from_file(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}") from error


def _find_cached(name: str) -> Path | None:
    """Return the newest config.json of `name` in the Hugging Face cache."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    files = sorted(
        (cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"),
        key=lambda file: file.stat().st_mtime,
    )
    return files[-1] if files else None


def _download(name: str) -> Any:
    """Return the config.json of `name` from the hub, unless HF_HUB_OFFLINE is set."""
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        raise ModelError(f"{name} is neither in the offline table nor in the cache, and HF_HUB_OFFLINE is set")
    from http.client import HTTPException
    from urllib.request import urlopen

    url = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/{name}/resolve/main/config.json"
    try:
        with urlopen(url, timeout=HUB_TIMEOUT_S) as reply:
            return json.loads(reply.read(1 << 22))
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        raise ModelError(
            f"{name} is neither in the offline table nor in the cache, and {url} returned no config: {error}"
        ) from error
