"""The model that a run trains, as far as its files tell without loading a weight."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from allocation import Finding, ParallelSizes, Plan, Severity, Source
from allocation.families import FAMILIES
from allocation.model_spec import ModelError, ModelSpec, from_config, load_model
from areal_like.config.findings import ConfigError, finding, missing_package
from areal_like.config.schema import InitModelConfig, RunConfig
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.demo.init_model import model_config
from areal_like.preflight.start import check_start
from areal_like.preflight.weights import check_weights
from areal_like.trainer.fsdp.support import (
    WITHOUT_MODEL,
    WITHOUT_SERVER,
    has_causal_model,
    has_plain_attention,
    looks_ahead,
    rope_of_lengths,
)
from areal_like.trainer.megatron.bridges.support import architecture_of, bridge_problems

_MOST_HEADS = 1024  # that a suggestion has: a number of the user's may be any


def find_model(config: RunConfig) -> tuple[ModelSpec | None, Tokenizer | None, list[Finding]]:
    """Look at `actor.path`, or at the shape of `actor.init_model`; exactly one of them has to be set.

    The spec or the tokenizer is None where a finding says why.
    """
    actor = config.actor
    if actor.path is not None and actor.init_model is None:
        starts_elsewhere = actor.megatron.use_dist_checkpointing
        spec, findings = find_spec(actor.path, "actor.path", weights=not starts_elsewhere)
    elif actor.path is None and actor.init_model is not None:
        findings = list(_shape(actor.init_model))
        spec, problems = _make_spec(actor.init_model) if not findings else (None, [])
        findings += problems
    else:
        neither = actor.path is None
        message = f"the model comes from path or init_model, and {'neither is' if neither else 'both are'} set"
        help = "name a model directory" if neither else "set one to null"
        spec, findings = None, [finding("RUN-MODEL-SOURCE", "actor.path", message, help)]
    tokenizer, problems = _find_tokenizer(config, spec)
    return spec, tokenizer, findings + problems


def _make_spec(shape: InitModelConfig) -> tuple[ModelSpec | None, list[Finding]]:
    """Return the spec of `actor.init_model`, the same for any dtype, or why it is not a model."""
    try:
        return from_config(model_config(shape, "float32"), "actor.init_model"), []
    except ModelError as error:
        message = str(error).partition(": ")[2]
        return None, [finding("RUN-MODEL-SIZE", "actor.init_model", message, "write a smaller number")]


def check_model(config: RunConfig, spec: ModelSpec | None, plan: Plan | None) -> Iterator[Finding]:
    """Models that the bridge does not compute or export as the servers do."""
    if spec is None or plan is None:
        return
    actor = config.actor
    yield from check_start(actor.megatron, spec, plan.engine("actor").backend)
    if actor.init_model is not None:
        model = model_config(actor.init_model, "float32")
    elif (file := Path(str(actor.path), "config.json")).is_file():
        model = json.loads(file.read_text())
    else:  # a name on the hub, which the trainer looks at once it is downloaded
        return
    if not model.get("architectures"):
        message = "config.json has no architectures, by which the servers choose the model's code"
        help = f'add "architectures": ["{architecture_of(spec.family)}"] to it'
        yield finding("RUN-MODEL-ARCHITECTURES", "actor.path", message, help)
    if plan.engine("actor").backend == "fsdp":
        yield from _under_fsdp(spec, model, plan.engine("actor").sizes, shares=actor.mb_spec.share_prompts)
        return
    model = {**model, **model.get("text_config", {})}
    for problem in bridge_problems(actor.megatron.bridge_type, model, plan.engine("actor").sizes):
        key, message, help = problem.field, problem.message, problem.remedy
        if actor.init_model is not None and key in InitModelConfig.model_fields:
            key = f"actor.init_model.{key}"
            help = f"write {key}={problem.value}"
        elif not key.startswith("actor."):
            key, message = "actor.path", f"config.json, {key}: {message}"
        yield finding(problem.code, key, message, help)
    if spec.mtp_layers:
        message = (
            f"the model's layers for multi-token prediction ({spec.mtp_layers}) are left out: nothing trains, sends or "
        )
        message += "saves them, and checkpoints of this run say that there are none"
        yield finding("RUN-MTP", "actor.path", message, severity=Severity.NOTE)


def _under_fsdp(spec: ModelSpec, model: Mapping[str, Any], sizes: ParallelSizes, *, shares: bool) -> Iterator[Finding]:
    """transformers computes any model, but it joins experts to tensors that have other names in a checkpoint.

    Sequences are shared, and prompts with them, in attention that the trainer computes itself.
    """
    if spec.experts:
        message = "the FSDP trainer has no names for a mixture of experts' weights"
        yield finding(
            "RUN-FSDP-EXPERTS", "actor.path", message, "write actor.backend=megatron:…, or take a dense model"
        )
    elif "text_config" in model or spec.family in WITHOUT_MODEL:
        kind = "is a model of text and images" if "text_config" in model else f"is a {spec.family}"
        message = f"the model {kind}; the FSDP trainer needs a language model of transformers' own"
        yield finding("RUN-FSDP-LANGUAGE-MODEL", "actor.path", message, "take a model of text alone, such as a qwen3")
    if spec.family in WITHOUT_SERVER:
        message = f"the pinned SGLang cannot serve an {spec.family}: it does not start with the family's rope"
        yield finding("RUN-FSDP-SERVER", "actor.path", message, "take a model of another family, such as a qwen3")
    model = {**FAMILIES[spec.family].defaults, **model} if spec.known_family else model
    if looks_ahead(model):
        message = "with use_bidirectional_attention tokens attend to later ones, and servers generate one at a time"
        yield finding(
            "RUN-FSDP-BIDIRECTIONAL", "actor.path", message, "take a model without use_bidirectional_attention"
        )
    elif not has_plain_attention(model):
        what = "of a model whose attention has caps, chunks or states"
        if sizes.cp > 1:
            message = f"the FSDP trainer cannot share sequences {what}"
            help = f"write fsdp:d{sizes.dp * sizes.cp} as its layout"
            yield finding("RUN-FSDP-CONTEXT", "actor.path", message, help)
        if shares:
            key, message = "actor.mb_spec.share_prompts", f"the FSDP trainer cannot share prompts {what}"
            yield finding("RUN-SHARED-PROMPTS-FSDP", key, message, f"write {key}=false")
    if rope := rope_of_lengths(model):
        message = (
            f"the model's rope ({rope}) is another for long sequences, and the FSDP trainer packs short ones with them"
        )
        yield finding("RUN-FSDP-ROPE", "actor.path", message, "take a model whose rope is the same for all lengths")
    if spec.quantization:
        message = f"the checkpoint is quantized ({spec.quantization}), and the FSDP trainer trains weights that are not"
        yield finding("RUN-FSDP-QUANTIZED", "actor.path", message, "dequantize the checkpoint")
    if not spec.known_family and not has_causal_model(spec.family):
        message = f"the installed transformers has no language model for model_type {spec.family}"
        yield finding("RUN-FSDP-FAMILY", "actor.path", message, "use a model of a family that transformers has")


def is_local(path: str) -> bool:
    """Whether a model path means a directory rather than a name on the Hugging Face hub (`owner/name`)."""
    return Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") != 1


def _find_tokenizer(config: RunConfig, spec: ModelSpec | None) -> tuple[Tokenizer | None, list[Finding]]:
    """The tokenizer of `tokenizer_path`, or else the model's own."""
    actor, named = config.actor, config.tokenizer_path
    if named is not None:
        return _tokenizer("tokenizer_path", named, spec)
    if actor.path is not None:
        return _tokenizer("actor.path", actor.path, spec) if spec else (None, [])
    return (Tokenizer.make(actor.init_model.tokenizer) if actor.init_model else None), []


def find_spec(path: str, key: str, *, weights: bool = True) -> tuple[ModelSpec | None, list[Finding]]:
    """The shape of a model that lies somewhere, and what is wrong with its files; it may have no weights else."""
    if is_local(path) and not Path(path, "config.json").is_file():
        message = f"{path} is not a model directory: it has no config.json"
        return None, [finding("RUN-MODEL-DIRECTORY", key, message, "name a directory in Hugging Face form")]
    try:
        spec = load_model(path)
    except ModelError as error:
        return None, [finding("RUN-MODEL-CONFIG", key, str(error))]
    try:
        if weights and is_local(path):
            check_weights(Path(path), spec)
    except ConfigError as error:
        return spec, [replace(found, source=Source("", key)) for found in error.findings]
    return spec, []


def _tokenizer(key: str, path: str, model: ModelSpec | None) -> tuple[Tokenizer | None, list[Finding]]:
    try:
        tokenizer = Tokenizer.load(path)
    except TokenizerError as error:
        return None, [finding("RUN-TOKENIZER-FILES", key, str(error))]
    except ModuleNotFoundError as error:
        return None, [missing_package(key, error.name)]
    try:
        tokenizer.encode_prompt("1 + 1 = ?")  # once here: a template that fails would fail for every row of the data
    except TokenizerError as error:
        return None, [finding("RUN-TOKENIZER-TEMPLATE", key, str(error))]
    except ModuleNotFoundError as error:
        return None, [missing_package(key, error.name)]
    rows = model.vocab_size if model else 0
    if 0 < rows < tokenizer.vocab_size:
        message = f"the tokenizer has {tokenizer.vocab_size} entries, the model's embedding {rows} rows"
        return tokenizer, [finding("RUN-TOKENIZER-VOCABULARY", key, message, "use the model's own tokenizer")]
    return tokenizer, []


def _shape(shape: InitModelConfig) -> Iterator[Finding]:
    """Check how the sizes of a Qwen3 model depend on each other."""

    def wrong(code: str, name: str, message: str, right: object) -> Finding:
        return finding(code, f"actor.init_model.{name}", message, f"write actor.init_model.{name}={right}")

    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    if heads % groups:
        fitting = max(n for n in range(1, min(heads, groups - 1, _MOST_HEADS) + 1) if heads % n == 0)
        message = f"{heads} query heads do not divide among {groups} key heads"
        yield wrong("RUN-MODEL-KEY-HEADS", "num_key_value_heads", message, fitting)
    if shape.head_dim % 2:
        message = "rotary embeddings need an even head_dim"
        yield wrong("RUN-MODEL-HEAD-DIM", "head_dim", message, shape.head_dim + 1)
    experts, each = shape.num_experts, shape.num_experts_per_tok
    if experts is not None and each > experts:
        message = f"{each} experts per token, but only {experts} experts"
        yield wrong("RUN-MODEL-EXPERTS", "num_experts_per_tok", message, f"{experts} or less")
    rows, entries = shape.vocab_size, Tokenizer.make(shape.tokenizer).vocab_size
    if rows is not None and rows < entries:
        message = f"{rows} rows cannot hold the tokenizer's {entries} entries"
        yield wrong("RUN-MODEL-VOCABULARY", "vocab_size", message, f"{entries} or more, or null")
