"""The model that a run trains, as far as its files tell without loading a weight."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allocation.diagnostics import Finding
from areal_like.config.load import LoadedConfig
from areal_like.config.schema import InitModelConfig
from areal_like.data.init_model import make_tokenizer, model_config
from areal_like.data.tokenizer import Tokenizer, TokenizerError


@dataclass(frozen=True)
class Model:
    """`config` is the model's config.json; `tokenizer` is None where a finding says why."""

    config: Mapping[str, Any]
    tokenizer: Tokenizer | None

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model was made for, in tokens."""
        return self.config.get("max_position_embeddings")


def find_model(loaded: LoadedConfig) -> tuple[Model | None, list[Finding]]:
    """Look at `actor.path`, or at the shape of `actor.init_model`; exactly one of them has to be set."""
    actor, origins = loaded.config.actor, loaded.origins
    if (actor.path is None) == (actor.init_model is None):
        which = "neither is set" if actor.path is None else "both are set"
        help = "set actor.path=null or actor.init_model=null" if actor.path else "name a model directory"
        return None, [origins.finding("RUN-MODEL", "actor.path", f"the model is path or init_model, and {which}", help)]
    if actor.init_model is not None:
        findings = list(_shape(loaded, actor.init_model))
        config = model_config(actor.init_model, actor.dtype)
        tokenizer: Tokenizer | None = make_tokenizer(actor.init_model.tokenizer)
        if loaded.config.tokenizer_path is not None:
            tokenizer, problems = _tokenizer(loaded, loaded.config.tokenizer_path)
            findings += problems
        return Model(config, tokenizer), findings
    path = str(actor.path)
    config, findings = _read_config(loaded, path)
    if config is None:
        return None, findings
    tokenizer, findings = _tokenizer(loaded, loaded.config.tokenizer_path or path)
    return Model(config, tokenizer), findings


def is_local(path: str) -> bool:
    """Whether a model path means a directory rather than a name on the Hugging Face hub (`owner/name`)."""
    return Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") != 1


def _tokenizer(loaded: LoadedConfig, path: str) -> tuple[Tokenizer | None, list[Finding]]:
    key = "actor.path" if loaded.config.tokenizer_path is None else "tokenizer_path"
    try:
        return Tokenizer.load(path), []
    except TokenizerError as error:
        return None, [loaded.origins.finding("RUN-TOKENIZER", key, str(error))]


def _read_config(loaded: LoadedConfig, path: str) -> tuple[dict[str, Any] | None, list[Finding]]:
    origins = loaded.origins
    try:
        file = Path(path) / "config.json" if is_local(path) else _download_config(path)
        config = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        message = f"{path} is not a model directory: it has no config.json"
        return None, [origins.finding("RUN-MODEL", "actor.path", message, "name a directory in Hugging Face form")]
    except (OSError, ValueError) as error:
        message = f"the config.json of {path} cannot be read: {str(error).strip().splitlines()[0]}"
        return None, [
            origins.finding("RUN-MODEL", "actor.path", message, "name a model directory, or a model on the hub")
        ]
    if not isinstance(config, dict):
        return None, [origins.finding("RUN-MODEL", "actor.path", f"the config.json of {path} is not an object")]
    return config, []


def _download_config(name: str) -> Path:
    """config.json of a model on the hub or in its cache; raises OSError or ValueError, as the hub's errors are."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, "config.json"))


def _shape(loaded: LoadedConfig, shape: InitModelConfig) -> Iterator[Finding]:
    """What the sizes of a Qwen3 model owe each other."""
    origins, key = loaded.origins, "actor.init_model"
    if shape.num_attention_heads % shape.num_key_value_heads:
        message = f"{shape.num_attention_heads} query heads do not divide among {shape.num_key_value_heads} key heads"
        yield origins.finding("RUN-MODEL", f"{key}.num_key_value_heads", message)
    if shape.head_dim % 2:
        yield origins.finding("RUN-MODEL", f"{key}.head_dim", "rotary embeddings need an even head_dim")
    if shape.num_experts is not None and shape.num_experts_per_tok > shape.num_experts:
        message = f"{shape.num_experts_per_tok} experts per token, but only {shape.num_experts} experts"
        yield origins.finding("RUN-MODEL", f"{key}.num_experts_per_tok", message)
    entries = make_tokenizer(shape.tokenizer).vocab_size
    if shape.vocab_size is not None and shape.vocab_size < entries:
        message = f"{shape.vocab_size} rows cannot hold the tokenizer's {entries} entries"
        yield origins.finding("RUN-MODEL", f"{key}.vocab_size", message, f"use at least {entries}, or null")
