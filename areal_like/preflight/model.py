"""The model that a run trains, as far as its files tell without loading a weight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from allocation import Finding, Plan
from allocation.model_spec import ModelError, ModelSpec, from_config, load_model
from areal_like.config.findings import finding, missing_package
from areal_like.config.schema import ActorConfig, InitModelConfig, RunConfig
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.demo.init_model import model_config
from areal_like.preflight.weights import WeightsError, check_weights
from areal_like.trainer.megatron.bridges.support import bridge_problems


def find_model(config: RunConfig) -> tuple[ModelSpec | None, Tokenizer | None, list[Finding]]:
    """Look at `actor.path`, or at the shape of `actor.init_model`; exactly one of them has to be set.

    The spec or the tokenizer is None where a finding says why.
    """
    spec, findings = _find_spec(config.actor)
    tokenizer, problems = _find_tokenizer(config, spec)
    return spec, tokenizer, findings + problems


def check_model(config: RunConfig, spec: ModelSpec | None, plan: Plan | None) -> Iterator[Finding]:
    """Models that the bridge cannot carry between trainer and servers, or that SGLang computes in another way."""
    if spec is None:
        return
    if plan is not None:
        yield from _bridge(config.actor, plan)


def _bridge(actor: ActorConfig, plan: Plan) -> Iterator[Finding]:
    """What the bridge does not compute or export as the servers do."""
    if actor.init_model is not None:
        model = model_config(actor.init_model, "float32")
    elif (file := Path(str(actor.path), "config.json")).is_file():
        model = json.loads(file.read_text())
    else:  # a name on the hub, which the trainer looks at once it is downloaded
        return
    model = {**model, **model.get("text_config", {})}
    for problem in bridge_problems(actor.megatron.bridge_type, model, plan.engine("actor").sizes):
        key, message, help = problem.field, problem.message, problem.remedy
        if actor.init_model is not None and key in InitModelConfig.model_fields:
            key = f"actor.init_model.{key}"
            help = f"write {key}={problem.value}"
        elif not key.startswith("actor."):
            key, message = "actor.path", f"config.json, {key}: {message}"
        yield finding("RUN-BRIDGE", key, message, help)


def _find_spec(actor: ActorConfig) -> tuple[ModelSpec | None, list[Finding]]:
    path, shape = actor.path, actor.init_model
    if path is None and shape is not None:
        if findings := list(_shape(shape)):
            return None, findings
        return from_config(model_config(shape, "float32"), "actor.init_model"), []  # the same for any dtype
    if path is None or shape is not None:
        which, help = (
            ("neither is set", "name a model directory") if path is None else ("both are set", "set one to null")
        )
        message = f"the model comes from path or init_model, and {which}"
        return None, [finding("RUN-MODEL", "actor.path", message, help)]
    spec, findings = _spec(path)
    if spec is not None and is_local(path):
        findings += _weights(Path(path), spec)
    return spec, findings


def _find_tokenizer(config: RunConfig, spec: ModelSpec | None) -> tuple[Tokenizer | None, list[Finding]]:
    """The tokenizer of `tokenizer_path`, or else the model's own."""
    actor, named = config.actor, config.tokenizer_path
    if named is not None:
        return _tokenizer("tokenizer_path", named, spec)
    if actor.path is not None:
        return _tokenizer("actor.path", actor.path, spec) if spec else (None, [])
    return (Tokenizer.make(actor.init_model.tokenizer) if actor.init_model else None), []


def is_local(path: str) -> bool:
    """Whether a model path means a directory rather than a name on the Hugging Face hub (`owner/name`)."""
    return Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") != 1


def _spec(path: str) -> tuple[ModelSpec | None, list[Finding]]:
    if is_local(path) and not Path(path, "config.json").is_file():
        message, help = (
            f"{path} is not a model directory: it has no config.json",
            "name a directory in Hugging Face form",
        )
        return None, [finding("RUN-MODEL", "actor.path", message, help)]
    try:
        return load_model(path), []
    except ModelError as error:
        return None, [finding("RUN-MODEL", "actor.path", str(error))]


def _weights(directory: Path, spec: ModelSpec) -> Iterator[Finding]:
    try:
        check_weights(directory, spec)
    except WeightsError as error:
        yield finding("RUN-MODEL", "actor.path", error.problem, error.remedy)


def _tokenizer(key: str, path: str, model: ModelSpec | None) -> tuple[Tokenizer | None, list[Finding]]:
    try:
        tokenizer = Tokenizer.load(path)
        tokenizer.encode_prompt("1 + 1 = ?")  # once here: a template that fails would fail for every row of the data
    except TokenizerError as error:
        return None, [finding("RUN-TOKENIZER", key, str(error))]
    except ModuleNotFoundError as error:
        return None, [missing_package(key, error.name)]
    rows = model.vocab_size if model else 0
    if 0 < rows < tokenizer.vocab_size:
        message = f"the tokenizer has {tokenizer.vocab_size} entries, the model's embedding {rows} rows"
        return tokenizer, [finding("RUN-TOKENIZER", key, message, "use the model's own tokenizer")]
    return tokenizer, []


def _shape(shape: InitModelConfig) -> Iterator[Finding]:
    """What the sizes of a Qwen3 model owe each other."""
    section, entries = "actor.init_model", Tokenizer.make(shape.tokenizer).vocab_size
    if shape.num_attention_heads % shape.num_key_value_heads:
        message = f"{shape.num_attention_heads} query heads do not divide among {shape.num_key_value_heads} key heads"
        fitting = max(n for n in range(1, shape.num_key_value_heads) if shape.num_attention_heads % n == 0)
        key = f"{section}.num_key_value_heads"
        yield finding("RUN-MODEL", key, message, f"write {key}={fitting}")
    if shape.head_dim % 2:
        key = f"{section}.head_dim"
        yield finding("RUN-MODEL", key, "rotary embeddings need an even head_dim", f"write {key}={shape.head_dim + 1}")
    if shape.num_experts is not None and shape.num_experts_per_tok > shape.num_experts:
        message = f"{shape.num_experts_per_tok} experts per token, but only {shape.num_experts} experts"
        key = f"{section}.num_experts_per_tok"
        yield finding("RUN-MODEL", key, message, f"write {key}={shape.num_experts} or less")
    if shape.vocab_size is not None and shape.vocab_size < entries:
        message = f"{shape.vocab_size} rows cannot hold the tokenizer's {entries} entries"
        key = f"{section}.vocab_size"
        yield finding("RUN-MODEL", key, message, f"write {key}={entries} or more, or null")
