"""Checks of the model that a run trains, by its files, without loading a weight."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from allocation.diagnostics import Finding, Severity
from allocation.model_spec import ModelError, ModelSpec, from_config, read_config
from allocation.plan import EnginePlan
from areal_like.backends.fsdp.support import WINDOW_SERVED
from areal_like.backends.megatron.bridges.language_part import language_part
from areal_like.backends.megatron.bridges.support import architecture_of, bridge_problems
from areal_like.core.config.findings import ConfigError, finding, missing_package
from areal_like.core.config.schema import InitModelConfig, RunConfig
from areal_like.data.end_tokens import describe_end_tokens
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.demo.init_model import model_config
from areal_like.exclusions import find_excluded
from areal_like.preflight.counted import find_shape
from areal_like.preflight.images import check_images
from areal_like.preflight.role_exclusions import MODEL, PREDICTION
from areal_like.preflight.start import check_start
from areal_like.preflight.view import RoleView
from areal_like.preflight.weights import check_tensors, check_weights, count_layers, is_local

_SETTING = "megatron.train_mtp_layers"


def check_mtp(view: RoleView, spec: ModelSpec, layers: int) -> Iterator[Finding]:
    """Check that the actor's layer for multi-token prediction can be trained; note that others' layers are ignored.

    `layers` is the number of such layers that config.json names.
    """
    trains = view.role == "actor" and view.backend == "megatron" and view.engine.megatron.train_mtp_layers
    if trains and (missing := _find_missing(view, layers)):
        yield missing
    elif trains:
        yield from find_excluded(PREDICTION, view, view.key)
    if layers and not trains:
        message = f"the model's layers for multi-token prediction ({layers}) are ignored: they are not trained, "
        message += "sent to the servers or saved"
        yield finding("RUN-MTP", view.key("path"), message, severity=Severity.NOTE)


def _find_missing(view: RoleView, layers: int) -> Finding | None:
    """Return the finding that the model has no such layer, by its config.json or by its weights."""
    key, path = view.key(_SETTING), Path(str(view.path))
    message = None
    if not layers:
        message = "config.json of the model has no num_nextn_predict_layers"
    elif view.model is not None and any(path.glob("*.safetensors")) and count_layers(path) == view.model.layers:
        message = f"the weights in {path} have no layer for multi-token prediction, which config.json names"
    if message is None:
        return None
    message = f"{key}=true needs a model with a layer for multi-token prediction; {message}"
    return finding(
        "RUN-MTP-UNSUPPORTED", key, message, f"write {key}=false, or name another model in {view.key('path')}"
    )


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
    yield finding("RUN-TOKENIZER", key, message, help, severity=Severity.WARNING)


def _make_spec(shape: InitModelConfig) -> tuple[ModelSpec | None, list[Finding]]:
    """Return the spec of `actor.init_model`, the same for any dtype, or why it is not a model."""
    try:
        return from_config(model_config(shape, "float32"), "actor.init_model"), []
    except ModelError as error:
        return None, [finding("RUN-MODEL-SIZES", "actor.init_model", str(error), "write a smaller number")]


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
        described = replace(view, model=spec, layout=layout, description=model)
        yield from find_excluded(MODEL, described, view.key)
        return
    language = language_part(model)
    for problem in bridge_problems(view.engine.megatron.bridge_type, language, layout.sizes, view.key):
        key, message, help = problem.field, problem.message, problem.remedy
        if view.init_model is not None and key in InitModelConfig.model_fields:
            key = f"actor.init_model.{key}"
            help = f"write {key}={problem.value}"
        elif not problem.is_key:
            key, message = view.key("path"), f"config.json, {key}: {message}"
        yield finding("RUN-BRIDGE", key, message, help)


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
        return None, [finding("RUN-MODEL-CONFIG", key, message, "name a directory in Hugging Face form")]
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
        tokenizer.encode_prompt("1 + 1 = ?")  # once here: a template that fails would fail for every row of the data
    except TokenizerError as error:
        return None, [finding("RUN-TOKENIZER", key, str(error))]
    except ModuleNotFoundError as error:
        return None, [missing_package(key, error.name)]
    rows = model.vocab_size if model else 0
    if 0 < rows < tokenizer.vocab_size:
        message = f"the tokenizer has {tokenizer.vocab_size} entries; the model's embedding has {rows} rows"
        return tokenizer, [finding("RUN-TOKENIZER", key, message, "use the model's own tokenizer")]
    return tokenizer, []


def _shape(shape: InitModelConfig) -> Iterator[Finding]:
    """Check how the sizes of a Qwen3 model depend on each other."""

    def wrong(code: str, name: str, message: str, right: object) -> Finding:
        return finding(code, f"actor.init_model.{name}", message, f"write actor.init_model.{name}={right}")

    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    if heads % groups:
        fitting = max(n for n in range(1, min(heads, groups - 1, _MOST_HEADS) + 1) if heads % n == 0)
        message = f"{heads} query heads are not divisible by {groups} key heads"
        yield wrong("RUN-MODEL-SIZES", "num_key_value_heads", message, fitting)
    if shape.head_dim % 2:
        message = f"rotary embeddings need an even head_dim; {shape.head_dim} is odd"
        yield wrong("RUN-MODEL-SIZES", "head_dim", message, shape.head_dim + 1)
    experts, each = shape.num_experts, shape.num_experts_per_tok
    if experts is not None and each > experts:
        message = f"{each} experts per token, but only {experts} experts"
        yield wrong("RUN-MODEL-SIZES", "num_experts_per_tok", message, f"{experts} or less")
    if experts is not None and shape.sees_images:
        message = "a made model has a vision tower or experts, not both"
        yield wrong("RUN-MODEL-SIZES", "num_experts", message, "null")
    rows, entries = shape.vocab_size, _made_tokenizer(shape).vocab_size
    if rows is not None and rows < entries:
        message = f"{rows} rows cannot hold the tokenizer's {entries} entries"
        yield wrong("RUN-MODEL-SIZES", "vocab_size", message, f"{entries} or more, or null")
