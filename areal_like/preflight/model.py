"""The model that a run trains, as far as its files tell without loading a weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allocation import Finding
from allocation.model_spec import ModelError, ModelSpec, from_config, load_model
from areal_like.config.findings import missing_package
from areal_like.config.load import LoadedConfig
from areal_like.config.schema import InitModelConfig
from areal_like.config.unknown import known, known_findings
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.demo.init_model import model_config
from areal_like.preflight.weights import WeightsError, check_weights


@dataclass(frozen=True)
class Model:
    """What is known of the model; a part is None where a finding says why."""

    spec: ModelSpec | None
    tokenizer: Tokenizer | None


def find_model(loaded: LoadedConfig) -> tuple[Model, list[Finding]]:
    """Look at `actor.path`, or at the shape of `actor.init_model`; exactly one of them has to be set."""
    spec, findings = known(_find_spec, loaded) or (None, [])
    tokenizer, problems = known(_find_tokenizer, loaded, spec) or (None, [])
    return Model(spec, tokenizer), findings + problems


def _find_spec(loaded: LoadedConfig) -> tuple[ModelSpec | None, list[Finding]]:
    path, shape = loaded.config.actor.path, loaded.config.actor.init_model
    if path is None and shape is not None:
        spec = known(lambda: from_config(model_config(shape, "float32"), "actor.init_model"))  # the same for any dtype
        return spec, _shape(loaded, shape)
    if path is None or shape is not None:
        which, help = (
            ("neither is set", "name a model directory") if path is None else ("both are set", "set one to null")
        )
        message = f"the model comes from path or init_model, and {which}"
        return None, [loaded.origins.finding("RUN-MODEL", "actor.path", message, help)]
    spec, findings = _spec(loaded, path)
    if spec is not None and is_local(path):
        findings += _weights(loaded, Path(path), spec)
    return spec, findings


def _find_tokenizer(loaded: LoadedConfig, spec: ModelSpec | None) -> tuple[Tokenizer | None, list[Finding]]:
    """The tokenizer of `tokenizer_path`, or else the model's own."""
    actor, named = loaded.config.actor, loaded.config.tokenizer_path
    if named is not None:
        return _tokenizer(loaded, "tokenizer_path", named, spec)
    if actor.path is not None:
        return _tokenizer(loaded, "actor.path", actor.path, spec) if spec else (None, [])
    return (Tokenizer.make(actor.init_model.tokenizer) if actor.init_model else None), []


def is_local(path: str) -> bool:
    """Whether a model path means a directory rather than a name on the Hugging Face hub (`owner/name`)."""
    return Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") != 1


def _spec(loaded: LoadedConfig, path: str) -> tuple[ModelSpec | None, list[Finding]]:
    if is_local(path) and not Path(path, "config.json").is_file():
        message, help = (
            f"{path} is not a model directory: it has no config.json",
            "name a directory in Hugging Face form",
        )
        return None, [loaded.origins.finding("RUN-MODEL", "actor.path", message, help)]
    try:
        return load_model(path), []
    except ModelError as error:
        return None, [loaded.origins.finding("RUN-MODEL", "actor.path", str(error))]


def _weights(loaded: LoadedConfig, directory: Path, spec: ModelSpec) -> Iterator[Finding]:
    try:
        check_weights(directory, spec)
    except WeightsError as error:
        yield loaded.origins.finding("RUN-MODEL", "actor.path", error.problem, error.remedy)


def _tokenizer(
    loaded: LoadedConfig, key: str, path: str, model: ModelSpec | None
) -> tuple[Tokenizer | None, list[Finding]]:
    try:
        tokenizer = Tokenizer.load(path)
        tokenizer.encode_prompt("1 + 1 = ?")  # once here: a template that fails would fail for every row of the data
    except TokenizerError as error:
        return None, [loaded.origins.finding("RUN-TOKENIZER", key, str(error))]
    except ModuleNotFoundError as error:
        return None, [missing_package(loaded.origins, key, error.name)]
    rows = model.vocab_size if model else 0
    if 0 < rows < tokenizer.vocab_size:
        message = f"the tokenizer has {tokenizer.vocab_size} entries, the model's embedding {rows} rows"
        return tokenizer, [loaded.origins.finding("RUN-TOKENIZER", key, message, "use the model's own tokenizer")]
    return tokenizer, []


def _shape(loaded: LoadedConfig, shape: InitModelConfig) -> list[Finding]:
    """What the sizes of a Qwen3 model owe each other."""
    checks = (_heads, _head_dim, _experts, _rows)
    return [finding for check in checks for finding in known_findings(check(loaded, shape))]


def _heads(loaded: LoadedConfig, shape: InitModelConfig) -> Iterator[Finding]:
    if shape.num_attention_heads % shape.num_key_value_heads:
        message = f"{shape.num_attention_heads} query heads do not divide among {shape.num_key_value_heads} key heads"
        yield loaded.origins.finding("RUN-MODEL", "actor.init_model.num_key_value_heads", message)


def _head_dim(loaded: LoadedConfig, shape: InitModelConfig) -> Iterator[Finding]:
    if shape.head_dim % 2:
        message = "rotary embeddings need an even head_dim"
        yield loaded.origins.finding("RUN-MODEL", "actor.init_model.head_dim", message)


def _experts(loaded: LoadedConfig, shape: InitModelConfig) -> Iterator[Finding]:
    if shape.num_experts is not None and shape.num_experts_per_tok > shape.num_experts:
        message = f"{shape.num_experts_per_tok} experts per token, but only {shape.num_experts} experts"
        yield loaded.origins.finding("RUN-MODEL", "actor.init_model.num_experts_per_tok", message)


def _rows(loaded: LoadedConfig, shape: InitModelConfig) -> Iterator[Finding]:
    entries = Tokenizer.make(shape.tokenizer).vocab_size
    if shape.vocab_size is not None and shape.vocab_size < entries:
        message, help = (
            f"{shape.vocab_size} rows cannot hold the tokenizer's {entries} entries",
            f"use at least {entries}, or null",
        )
        yield loaded.origins.finding("RUN-MODEL", "actor.init_model.vocab_size", message, help)
