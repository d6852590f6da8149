"""The command line of a server: which options of SGLang a run sets, and which of them a user may.

Names, types and choices are read from SGLang's source, so that a config is checked in a moment, without importing it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from areal_like.config.annotations import (
    call_keywords,
    class_source,
    constants,
    describe,
    field_annotations,
    fits,
    literal,
)
from areal_like.config.findings import nearest_words
from areal_like.config.schema import RunConfig

if TYPE_CHECKING:
    from allocation import ParallelSizes

_OWNED = frozenset(
    {
        *("model_path", "tokenizer_path", "skip_tokenizer_init", "json_model_override_args", "dtype", "is_embedding"),
        *("context_length", "max_running_requests", "mem_fraction_static", "attention_backend"),
        *("device", "base_gpu_id", "gpu_id_step", "use_ray", "nnodes", "node_rank", "dist_init_addr", "nccl_port"),
        *("tp_size", "pp_size", "dp_size", "ep_size", "dcp_size", "attn_cp_size", "moe_dp_size", "dwdp_size"),
        *("host", "port", "api_key", "admin_api_key", "fastapi_root_path", "grpc_mode", "smg_grpc_mode", "sidecar"),
        *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password"),
        *("weight_version", "random_seed", "enable_deterministic_inference", "preferred_sampling_params"),
        *("disaggregation_mode", "encoder_only", "language_only", "config"),
    }
)
_OWNED_ON_CPU = frozenset({"max_total_tokens"})
_POSITIVE = frozenset(  # the server divides by these, or stops
    {
        *("page_size", "max_total_tokens", "stream_interval", "decode_log_interval", "mamba_track_interval"),
        *("tokenizer_worker_num", "detokenizer_worker_num"),
    }
)


MOST_SEQUENCES_ON_CPU = 1024  # that the KV cache has room for; more would wait anyway


@dataclass(frozen=True)
class Option:
    """A command-line option: the field of ServerArgs that it sets; its type and choices where the source is plain."""

    field: str
    annotation: ast.expr | None = None
    choices: tuple[str, ...] = ()


@functools.cache
def server_options() -> dict[str, Option]:
    """All options of the installed SGLang's server, aliases included, by name with underscores; none without SGLang."""
    spec = importlib.util.find_spec("sglang")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    options: dict[str, Option] = {}
    for file in (Path(root, "srt/server_args.py") for root in roots):
        values = constants(file)
        for name, annotation in field_annotations(file, "ServerArgs").items():
            options |= dict(_declared(name, annotation, values))
        if (source := class_source(file, "ServerArgs")) is not None:
            options |= dict(_registered(source, values))
    return options


def check_server_options(
    options: Mapping[str, object], *, device: Literal["cpu", "cuda"] | None
) -> Iterator[tuple[str, str, list[str]]]:
    """Name, problem and nearest right spellings of each entry of `sglang.extra_args` that cannot be set."""
    known = server_options()
    for name, value in options.items():
        spelling = name.replace("-", "_")
        option = known.get(spelling, Option(spelling))
        if option.field in _OWNED:
            yield name, f"{name} is set by the run itself", []
        elif device == "cpu" and option.field in _OWNED_ON_CPU:
            yield name, f"{name} is set by the run itself on CPU", []
        elif known and spelling not in known:
            settable = [other for other, its in known.items() if its.field not in _OWNED]
            yield name, f"SGLang's server has no option {name}", nearest_words(spelling, settable)
        elif expected := _expected(option, value):
            yield name, f"{value!r} should be {expected}", nearest_words(value, option.choices)


def _expected(option: Option, value: object) -> str | None:
    """What the option's value should be, in a user's words; None where it is that."""
    if option.annotation is not None and not _takes(option.annotation, value):
        return describe(option.annotation)
    if option.choices and str(value) not in option.choices:
        return f"one of {', '.join(option.choices)}"
    if option.field in _POSITIVE and re.fullmatch(r"0|-\d+", str(value)):
        return "positive"
    return None


def _takes(annotation: ast.expr, value: object) -> bool:
    """Whether the option's type takes a value that the command line passes on as one word."""
    return fits(annotation, value) or (
        not isinstance(value, bool) and any(fits(annotation, other) for other in (str(value), [value], [str(value)]))
    )


def _choices(arguments: Mapping[str, ast.expr], values: Mapping[str, Any]) -> tuple[str, ...]:
    """The choices among an option's arguments, as the command line spells them; none where they are computed."""
    found = literal(arguments["choices"], values) if "choices" in arguments else None
    return tuple(map(str, sorted(found) if isinstance(found, set) else found or ()))


def _declared(field: str, annotation: ast.expr, values: Mapping[str, Any]) -> Iterator[tuple[str, Option]]:
    """The options of a field that is declared as `A[type, Arg(...)]` or `A[type, "help"]`."""
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.slice, ast.Tuple):
        return
    type_, *metadata = annotation.slice.elts
    arguments = next(call_keywords(annotation, "Arg"), {})
    told = arguments or any(not ast.unparse(part).startswith("NS(") for part in metadata)
    if not told or "no_cli" in arguments:
        return
    plain = not {"type_parser", "action"} & arguments.keys()
    option = Option(field, type_, _choices(arguments, values)) if plain else Option(field)
    names = [literal(arguments["cli_name"], values) if "cli_name" in arguments else field]
    names += literal(arguments["aliases"], values) if "aliases" in arguments else []
    if "action" in arguments and ast.unparse(arguments["action"]).endswith("BooleanOptionalAction"):
        names += [f"no_{_field_name(name)}" for name in names]
    for name in names:
        yield _field_name(name), option


def _registered(source: ast.ClassDef, values: Mapping[str, Any]) -> Iterator[tuple[str, Option]]:
    """The options that ServerArgs adds to its parser one by one."""
    for call in ast.walk(source):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "parser.add_argument":
            names = [_field_name(ast.literal_eval(argument)) for argument in call.args]
            arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            field = ast.literal_eval(arguments["dest"]) if "dest" in arguments else names[0]
            for name in names:
                yield name, Option(field, choices=_choices(arguments, values))


def _field_name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def server_arguments(
    config: RunConfig, model: Path, sizes: ParallelSizes, device: str, index: int = 0
) -> tuple[str, ...]:
    """SGLang's arguments for server `index` of the run; each draws its own random numbers."""
    sglang, context_length = config.sglang, config.context_length
    options: dict[str, object] = {
        "model-path": model,
        "dtype": config.actor.dtype,
        "context-length": context_length,
        "tp-size": sizes.tp,
        "pp-size": sizes.pp,
        "ep-size": sizes.ep,
        "random-seed": np.random.SeedSequence([config.seed, index]).generate_state(1)[0],
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "grammar-backend": "none",
        "sampling-backend": "pytorch",
        "max-running-requests": sglang.max_running_requests,
        "attention-backend": sglang.attention_backend,
        "enable-deterministic-inference": sglang.deterministic,
    }
    if device == "cpu":
        in_flight = (
            config.train_dataset.batch_size * config.gconfig.n_samples * (1 + config.rollout.max_head_offpolicyness)
        )
        options |= {
            "device": "cpu",
            "attention-backend": "torch_native",
            "disable-cuda-graph": True,
            "disable-overlap-schedule": True,  # it hides the scheduler's work behind a GPU; here both take the same core
            "sleep-on-idle": True,  # else the scheduler takes a whole core from the trainer while it waits
            "max-total-tokens": context_length * min(in_flight, MOST_SEQUENCES_ON_CPU),
        }
    else:
        options |= {"mem-fraction-static": sglang.mem_fraction_static}
    options |= {name.replace("_", "-"): value for name, value in sglang.extra_args.items()}
    flags: list[str] = []
    for name, value in options.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is not None and value is not False:
            flags += [f"--{name}", str(value)]
    return tuple(flags)
