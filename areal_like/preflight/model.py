"""Checks of the model that a run trains, by its files, without loading a weight."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from allocation.diagnostics import Finding, Severity
from allocation.families import FAMILIES
from allocation.model_spec import ModelError, ModelSpec, from_config, read_config
from allocation.plan import EnginePlan, ParallelSizes
from areal_like.config.findings import ConfigError, finding, missing_package
from areal_like.config.schema import InitModelConfig, RunConfig
from areal_like.data.end_tokens import describe_end_tokens
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.demo.init_model import model_config
from areal_like.preflight.counted import find_shape
from areal_like.preflight.images import check_images
from areal_like.preflight.mtp import check_mtp
from areal_like.preflight.start import check_start
from areal_like.preflight.view import RoleView
from areal_like.preflight.weights import check_tensors, check_weights, is_local
from areal_like.rollout.backends import find_backend
from areal_like.trainer.fsdp.support import (
    ALWAYS_TIED,
    NOT_PACKED,
    WINDOW_SERVED,
    WITHOUT_MODEL,
    WITHOUT_SERVER,
    field_apart,
    find_undivided,
    has_plain_attention,
    has_states,
    looks_ahead,
    rope_of_lengths,
)
from areal_like.trainer.megatron.bridges.language_part import language_part
from areal_like.trainer.megatron.bridges.support import architecture_of, bridge_problems

DEQUANTIZED = ("fp8", "mxfp4")  # that `areal-like dequantize` undoes
_CONFIG_HELP = "correct config.json, or copy it again from the model's source"
_MOST_HEADS = 1024  # that a suggestion has: a number of the user's may be any


def find_model(config: RunConfig) -> tuple[ModelSpec | None, Tokenizer | None, list[Finding]]:
    """Look at `actor.path`, or at the shape of `actor.init_model`; exactly one of them has to be set.

    The spec or the tokenizer is None where a finding has the reason.
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
        message = f"{'neither' if neither else 'both'} of actor.path and actor.init_model are set; exactly one names the model"
        help = "set actor.path to a model directory" if neither else "set one of them to null"
        spec, findings = None, [finding("RUN-MODEL-SOURCE", "actor.path", message, help)]
    tokenizer, problems = _find_tokenizer(config, spec)
    if tokenizer and (stops := config.gconfig.stop_token_ids):
        tokenizer.add_end_tokens(stops, "gconfig.stop_token_ids")
        problems += _check_stops(stops, tokenizer)
    if tokenizer:
        problems += _check_turn_end(config, tokenizer)
    return spec, tokenizer, findings + problems


def _check_stops(stops: list[int], tokenizer: Tokenizer) -> list[Finding]:
    """Check that the ids that end a response are tokens."""
    unknown = [str(token) for token in stops if tokenizer.backend.id_to_token(token) is None]
    if not unknown:
        return []
    message = f"the tokenizer has no token {', '.join(unknown)}, so no response ends with it"
    return [finding("RUN-STOP-TOKEN", "gconfig.stop_token_ids", message, "leave it out, or write the id of a token")]


def _check_turn_end(config: RunConfig, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Warn if the chat template ends an assistant's turn with a token at which no response would end."""
    if not tokenizer.has_chat_template:  # the plain template ends a turn with the end token
        return
    end = tokenizer.turn_end
    if end is None or end in tokenizer.end_tokens:
        return
    key = "actor.path" if config.tokenizer_path is None else "tokenizer_path"
    text, known = tokenizer.decode([end], special=True), describe_end_tokens(tokenizer.backend, tokenizer.end_tokens)
    message = f"the chat template ends an assistant's turn with {text} ({end}), and responses end only with {known}"
    stops = [*config.gconfig.stop_token_ids, end]
    help = f"set gconfig.stop_token_ids={stops}, or add {end} to eos_token_id in the model's generation_config.json"
    yield finding("RUN-TOKENIZER-TURN-END", key, message, help, severity=Severity.WARNING)


def _make_spec(shape: InitModelConfig) -> tuple[ModelSpec | None, list[Finding]]:
    """Return the spec of `actor.init_model`, the same for any dtype, or why it is not a model."""
    try:
        return from_config(model_config(shape, "float32"), "actor.init_model"), []
    except ModelError as error:
        return None, [finding("RUN-MODEL-SIZE", "actor.init_model", str(error), "write a smaller number")]


def check_model(view: RoleView) -> Iterator[Finding]:
    """Check that the bridge computes and exports a role's model as the servers do."""
    spec, layout = view.model, view.layout
    if spec is None or layout is None:
        return
    yield from check_start(view, spec)
    if view.init_model is not None:
        model = model_config(view.init_model, "float32")
    elif (file := Path(str(view.path), "config.json")).is_file():
        model = json.loads(file.read_text())
    else:  # a name on the hub, which the trainer looks at once it is downloaded
        return
    yield from check_config(view, spec, layout, model)


def check_config(view: RoleView, spec: ModelSpec, layout: EnginePlan, model: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that a role's trainer and the servers compute the model of a config.json, `model`, alike."""
    if not model.get("architectures"):
        message = "config.json has no architectures, from which the servers choose the model's code"
        help = f'add "architectures": ["{architecture_of(spec.family)}"] to it'
        yield finding("RUN-MODEL-ARCHITECTURES", view.key("path"), message, help)
    predicting = spec.mtp_layers or (model.get("text_config") or model).get("mtp_num_hidden_layers") or 0
    yield from check_mtp(view, spec, predicting)
    if spec.quantization:
        yield _find_quantization(view, spec)
        model = {**model, "quantization_config": None}
    yield from _window(view, spec)
    if model.get("text_config") or "vision_config" in model:
        found = list(check_images(view, model))
        yield from found
        if found and layout.backend != "fsdp":
            return
    if layout.backend == "fsdp":
        yield from _under_fsdp(view, spec, model, layout.sizes)
        return
    language = language_part(model)
    for problem in bridge_problems(view.engine.megatron.bridge_type, language, layout.sizes, view.key):
        key, message, help = problem.field, problem.message, problem.remedy
        if view.init_model is not None and key in InitModelConfig.model_fields:
            key = f"actor.init_model.{key}"
            help = f"write {key}={problem.value}"
        elif not problem.is_key:
            key, message = view.key("path"), f"config.json, {key}: {message}"
        yield finding(problem.code, key, message, help)


def _find_quantization(view: RoleView, spec: ModelSpec) -> Finding:
    """Return the finding about a quantized checkpoint, whose servers would take no unquantized weights either."""
    message = (
        f"the checkpoint is quantized (quantization_config: {spec.quantization}), and a run needs unquantized weights"
    )
    help = "use an unquantized checkpoint of the model"
    if spec.quantization in DEQUANTIZED:
        help = f"run `areal-like dequantize {view.path} DIRECTORY`, and write {view.key('path')}=DIRECTORY"
    return finding("RUN-MODEL-QUANTIZED", view.key("path"), message, help)


def _window(view: RoleView, spec: ModelSpec) -> Iterator[Finding]:
    """Find sequences beyond a window that the trainer has and SGLang's GPU servers do not; its CPU server has it."""
    longest = view.run.longest_sequence
    if view.device == "cuda" and spec.sliding_layers and spec.family not in WINDOW_SERVED and longest > spec.window:
        message = (
            f"SGLang's GPU servers compute a {spec.family} without its sliding window of {spec.window} tokens, and "
            f"sequences of the run may have {longest}"
        )
        help = f"limit prompts and responses to {spec.window} tokens together, or use a model without a window"
        yield finding("RUN-WINDOW-SERVER", view.key("path"), message, help)


def _under_fsdp(view: RoleView, spec: ModelSpec, model: Mapping[str, Any], sizes: ParallelSizes) -> Iterator[Finding]:
    """Check a model under FSDP; the ranks try at the start whether it can be packed (`fsdp/probe.py`).

    Sequences are shared, and prompts with them, in attention that the trainer computes itself.
    """
    path = view.key("path")
    yield from _families_of_fsdp(path, spec)
    model = {**FAMILIES[spec.family].defaults, **model} if spec.known_family else model
    if looks_ahead(model):
        message = "use_bidirectional_attention lets tokens attend to later ones, which servers have not generated yet"
        yield finding("RUN-FSDP-BIDIRECTIONAL", path, message, "use a model without use_bidirectional_attention")
    elif not has_plain_attention(model) or has_states(model):
        what = "of a model whose attention has chunks or states"
        if sizes.cp > 1:
            message = f"the FSDP trainer cannot share sequences {what}"
            help = f"write fsdp:d{sizes.dp * sizes.cp} as its layout"
            yield finding("RUN-FSDP-CONTEXT", path, message, help)
        if view.engine.mb_spec.share_prompts:
            key, message = view.key("mb_spec.share_prompts"), f"the FSDP trainer cannot share prompts {what}"
            yield finding("RUN-SHARED-PROMPTS-FSDP", key, message, f"write {key}=false")
    family = spec.family if spec.tower is None else str(model.get("model_type"))
    if sizes.tp > 1 and (why := find_undivided(family, (spec.heads, spec.kv_heads), sizes.tp)):
        message = f"t{sizes.tp} cannot split the matrices of this model: {why}"
        context = f"c{sizes.cp}" if sizes.cp > 1 else ""
        help = f"write fsdp:d{sizes.dp * sizes.tp}{context} as its layout, or train on Megatron"
        yield finding("RUN-FSDP-TENSOR", path, message, help)
    if apart := field_apart(model):
        name, value, why = apart
        message = f"config.json, {name} = {value}: with it the FSDP trainer and the servers differ: {why}"
        yield finding("RUN-FSDP-FIELD", path, message, "use a model without it")
    if rope := rope_of_lengths(model):
        message = f"the model's rope ({rope}) depends on the sequence length, and the FSDP trainer packs sequences of all lengths"
        yield finding("RUN-FSDP-ROPE", path, message, "use a model whose rope is the same for all lengths")
    if spec.counted is not None and view.role == "actor":
        yield from _without_server(path, spec, model)
    if not spec.known_family and spec.counted is None:
        message = f"the installed transformers has no language model for model_type {spec.family}"
        yield finding("RUN-FSDP-FAMILY", path, message, "use a model of a family that transformers has")


def _families_of_fsdp(path: str, spec: ModelSpec) -> Iterator[Finding]:
    """Find families that the FSDP trainer cannot train, or that SGLang cannot serve as it trains them."""
    if why := NOT_PACKED.get(spec.family):
        message = f"the FSDP trainer cannot train a {spec.family}: {why}"
        yield finding("RUN-FSDP-PACKING", path, message, "use a model of another family, such as a qwen3_moe")
    elif spec.tower is None and spec.family in WITHOUT_MODEL:
        message = f"the model is a {spec.family}; the FSDP trainer needs a language model of transformers' own"
        yield finding("RUN-FSDP-LANGUAGE-MODEL", path, message, "use a text-only model, such as a qwen3")
    if spec.family in WITHOUT_SERVER:
        message = f"the pinned SGLang cannot serve an {spec.family}: it does not start with the family's rope"
        yield finding("RUN-FSDP-SERVER", path, message, "use a model of another family, such as a qwen3")
    if spec.family in ALWAYS_TIED and not spec.tied_embeddings:
        message = f"SGLang uses the embedding as the output layer of a {spec.family}, and this model has "
        message += "tie_word_embeddings = false"
        help = "tie the checkpoint's embeddings, or use a model of another family, such as a qwen3"
        yield finding("RUN-FSDP-UNTIED", path, message, help)


def _without_server(path: str, spec: ModelSpec, model: Mapping[str, Any]) -> Iterator[Finding]:
    """Find a model of an unknown family for which the installed SGLang has no code."""
    served, named = find_backend().architectures(), model.get("architectures") or []
    if served and named and not {*named} & {*served}:
        message = f"the pinned SGLang cannot serve a {spec.family}: it has no {named[0]}"
        yield finding("RUN-FSDP-ARCHITECTURE", path, message, "use a model of another family, such as a qwen3")


def _find_tokenizer(config: RunConfig, spec: ModelSpec | None) -> tuple[Tokenizer | None, list[Finding]]:
    """Return the tokenizer of `tokenizer_path`, or else the model's own."""
    actor, named = config.actor, config.tokenizer_path
    if named is not None:
        return _tokenizer("tokenizer_path", named, spec)
    if actor.path is not None:
        return _tokenizer("actor.path", actor.path, spec) if spec else (None, [])
    return (_made_tokenizer(actor.init_model) if actor.init_model else None), []


def _made_tokenizer(shape: InitModelConfig) -> Tokenizer:
    return Tokenizer.make(shape.tokenizer, images=shape.sees_images)


def config_problem(key: str, error: ModelError, help: str | None = _CONFIG_HELP) -> Finding:
    """Return the finding about a config.json that cannot be read."""
    return finding("RUN-MODEL-CONFIG", key, str(error), help)


def find_spec(path: str, key: str, *, weights: bool = True) -> tuple[ModelSpec | None, list[Finding]]:
    """Return the shape of a model directory, and a finding about its files; weights are required only where asked."""
    if is_local(path) and not Path(path, "config.json").is_file():
        message = f"{path} is not a model directory: it has no config.json"
        return None, [finding("RUN-MODEL-DIRECTORY", key, message, "name a directory in Hugging Face form")]
    try:
        spec, counting = find_shape(*read_config(path))
    except ModelError as error:
        return None, [config_problem(key, error, _CONFIG_HELP if is_local(path) else None)]
    try:
        if weights and is_local(path) and counting is not None:
            check_tensors(Path(path), counting.tensors, counting.tied, counting.ignored, key)
        elif weights and is_local(path):
            check_weights(Path(path), spec, key)
    except ConfigError as error:
        return spec, list(error.findings)
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
        message = f"the tokenizer has {tokenizer.vocab_size} entries; the model's embedding has {rows} rows"
        return tokenizer, [finding("RUN-TOKENIZER-VOCABULARY", key, message, "use the model's own tokenizer")]
    return tokenizer, []


def _shape(shape: InitModelConfig) -> Iterator[Finding]:
    """Check how the sizes of a Qwen3 model depend on each other."""

    def wrong(code: str, name: str, message: str, right: object) -> Finding:
        return finding(code, f"actor.init_model.{name}", message, f"write actor.init_model.{name}={right}")

    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    if heads % groups:
        fitting = max(n for n in range(1, min(heads, groups - 1, _MOST_HEADS) + 1) if heads % n == 0)
        message = f"{heads} query heads are not divisible by {groups} key heads"
        yield wrong("RUN-MODEL-KEY-HEADS", "num_key_value_heads", message, fitting)
    if shape.head_dim % 2:
        message = f"rotary embeddings need an even head_dim; {shape.head_dim} is odd"
        yield wrong("RUN-MODEL-HEAD-DIM", "head_dim", message, shape.head_dim + 1)
    experts, each = shape.num_experts, shape.num_experts_per_tok
    if experts is not None and each > experts:
        message = f"{each} experts per token, but only {experts} experts"
        yield wrong("RUN-MODEL-EXPERTS", "num_experts_per_tok", message, f"{experts} or less")
    if experts is not None and shape.sees_images:
        message = "a made model has a vision tower or experts, not both"
        yield wrong("RUN-MODEL-VISION-EXPERTS", "num_experts", message, "null")
    rows, entries = shape.vocab_size, _made_tokenizer(shape).vocab_size
    if rows is not None and rows < entries:
        message = f"{rows} rows cannot hold the tokenizer's {entries} entries"
        yield wrong("RUN-MODEL-VOCABULARY", "vocab_size", message, f"{entries} or more, or null")
