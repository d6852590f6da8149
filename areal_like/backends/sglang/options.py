"""The command line of a server: which options of SGLang a run sets, and which of them a user may."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from areal_like.backends.options import OptionProblem, read_options, read_rules
from areal_like.backends.sglang.architectures import read_config
from areal_like.backends.sglang.decode_graphs import graph_options
from areal_like.backends.sglang.patch import SCORE, all_patches
from areal_like.core.config.findings import nearest_words
from areal_like.core.config.schema import ChatJudgeConfig, RewardModelConfig, RunConfig, TeacherConfig

if TYPE_CHECKING:
    from allocation.plan import ParallelSizes

TABLE = Path(__file__).with_name("options.json")
DETERMINISTIC_ATTENTION = ("fa3", "flashinfer", "triton")  # on NVIDIA GPUs
MOST_SEQUENCES_ON_CPU = 1024  # that the KV cache has room for; more would wait anyway
TOKENS_OF_SCORER_ON_CPU = 2**16
PARTS, PART = (8, 32), 256  # fewest and most parts of a sequence that triton attends to side by side, and their tokens

_RULES = read_rules(TABLE)
ALLOWED = frozenset(_RULES["allowed"])
_OWNED, _OWNED_ON_CPU = frozenset(_RULES["owned"]), frozenset(_RULES["owned_on_cpu"])


def check_server_options(options: Mapping[str, object], *, device: Literal["cpu", "cuda"]) -> Iterator[OptionProblem]:
    """Yield problems of the entries of `sglang.extra_args`."""
    known = read_options(TABLE)
    for name, value in options.items():
        spelling = name.replace("-", "_")
        option = known.get(spelling)
        if option is None:
            names = nearest_words(spelling, (other for other, its in known.items() if its.field in ALLOWED))
            yield OptionProblem("RUN-SGLANG-OPTION", name, f"SGLang's server has no option {name}", names=tuple(names))
        elif option.field in _OWNED or (device == "cpu" and option.field in _OWNED_ON_CPU):
            where = "" if option.field in _OWNED else " on CPU"
            yield OptionProblem(
                "RUN-SGLANG-OPTION", name, f"{name} is set by the run itself{where}", f"leave out {name}"
            )
        elif option.field not in ALLOWED:
            why = next((f": {why}" for start, why in _RULES["refused"].items() if option.field.startswith(start)), "")
            message = f"{name} is not supported with weight updates{why}"
            yield OptionProblem("RUN-SGLANG-OPTION", name, message, f"leave out {name}")
        elif option.field in _RULES["positive"] and re.fullmatch(r"0|-\d+", str(value)):
            help = f"write sglang.extra_args.{name}=1 or more"
            message = f"{value!r} should be positive"
            yield OptionProblem("RUN-SGLANG-OPTION", name, message, help, values=option.nearest(value))
        elif expected := option.mismatch(value):
            message = f"{value!r} should be {expected}"
            yield OptionProblem("RUN-SGLANG-OPTION", name, message, values=option.nearest(value))


def tool_call_parsers() -> list[str]:
    """Return the names of the parsers of model families' tool calls."""
    return [name for name in read_options(TABLE)["tool_call_parser"].choices if name != "auto"]


def is_on(options: Mapping[str, object], field: str) -> bool:
    """Return whether `sglang.extra_args` switch on a flag, in whichever spelling."""
    known = read_options(TABLE)
    named = (known.get(name.replace("-", "_")) for name, value in options.items() if value is True)
    return any(option is not None and option.field == field for option in named)


def server_arguments(
    config: RunConfig,
    model: Path,
    sizes: ParallelSizes,
    device: str,
    index: int = 0,
    columns: Collection[str] = (),
    form: Mapping[str, object] | None = None,
) -> tuple[str, ...]:
    """Return SGLang's arguments for server `index` of the run, whose answers have `columns` beside tokens.

    Each server draws its own random numbers. `form` are options for another form of weights.
    """
    sglang, context_length = config.sglang, config.context_length
    # SGLang fuses by itself on some GPUs, where servers of some models never come up and numbers change
    fuses = any("flashinfer_allreduce_fusion" in name.replace("-", "_") for name in sglang.extra_args)
    options: dict[str, object] = {
        "model-path": model,
        "load-format": "dummy" if config.actor.megatron.use_dist_checkpointing else None,  # the first update has them
        "dtype": config.actor.dtype,
        "enable-fp32-lm-head": config.actor.fp32_head,
        "context-length": context_length,
        "tp-size": sizes.tp,
        "pp-size": sizes.pp,
        "ep-size": sizes.ep,
        "random-seed": np.random.SeedSequence([config.seed, index]).generate_state(1)[0],
        "skip-tokenizer-init": True,
        "skip-server-warmup": True,
        "incremental-streaming-output": True,  # each chunk of an answer holds only new tokens
        **_UNGUIDED,
        "max-running-requests": sglang.max_running_requests,
        "attention-backend": sglang.attention_backend,
        "enable-deterministic-inference": sglang.deterministic,
        "enforce-disable-flashinfer-allreduce-fusion": not fuses,
        **(form or {}),
    }
    for patch in all_patches():
        options |= patch.options(config, columns)
    if device == "cpu":
        options |= _ON_CPU
        options |= {"max-total-tokens": cached_tokens_on_cpu(config)}
    else:
        options |= {"mem-fraction-static": sglang.mem_fraction_static}
        options |= {"enable-memory-saver": config.rollout.alternates}
        options |= graph_options(config, sizes.dp, read_config(model))
        options |= {"triton-attention-num-kv-splits": _parts(context_length)}
    return _command(options | {name.replace("_", "-"): value for name, value in sglang.extra_args.items()})


def cached_tokens_on_cpu(config: RunConfig) -> int:
    """Return the tokens of a CPU server's KV cache: of all sequences that run at once."""
    groups = config.prompts_per_step * (1 + config.rollout.max_head_offpolicyness)
    limits = (groups * config.gconfig.n_samples, MOST_SEQUENCES_ON_CPU, config.sglang.max_running_requests)
    return config.context_length * min(limit for limit in limits if limit)


def _parts(context_length: int) -> int:
    """Return the parts of the longest sequence that triton's attention computes in parallel.

    SGLang's own number is 8: with 0.6B on an H200 a token waits 0.3 ms for every 1,000 tokens before it (1.9 ms without
    any), whether one sequence runs or two. The longest responses set the pace of a run.
    """
    return min(max(PARTS[0], context_length // PART), PARTS[1])


def classifier_arguments(
    config: RunConfig, model: RewardModelConfig, directory: Path, sizes: ParallelSizes, device: str
) -> tuple[str, ...]:
    """Return SGLang's arguments for a server of the reward model."""
    options = {"is-embedding": True, "skip-tokenizer-init": True}
    return _scorer(config, model.dtype, directory, sizes, device, options)


def judge_arguments(
    config: RunConfig, judge: ChatJudgeConfig, directory: Path, sizes: ParallelSizes, device: str
) -> tuple[str, ...]:
    """Return SGLang's arguments for a server of the judge, which answers OpenAI's chat completions."""
    return _scorer(config, judge.dtype, directory, sizes, device, {"ep-size": sizes.ep, **_UNGUIDED})


def teacher_arguments(
    config: RunConfig, teacher: TeacherConfig, directory: Path, sizes: ParallelSizes, device: str
) -> tuple[str, ...]:
    """Return SGLang's arguments for a server of the teacher, which scores at the policy's temperature."""
    options: dict[str, object] = {
        "ep-size": sizes.ep,
        "skip-tokenizer-init": True,
        "disable-cuda-graph": True,  # which only generation would use
        **_UNGUIDED,
        SCORE.removeprefix("--"): config.gconfig.temperature,
    }
    return _scorer(config, teacher.dtype, directory, sizes, device, options)


def scorer_arguments(
    config: RunConfig,
    section: RewardModelConfig | ChatJudgeConfig | TeacherConfig,
    directory: Path,
    sizes: ParallelSizes,
    device: str,
) -> tuple[str, ...]:
    """Return SGLang's arguments for a server of the reward model, the judge or the teacher."""
    if isinstance(section, RewardModelConfig):
        return classifier_arguments(config, section, directory, sizes, device)
    if isinstance(section, TeacherConfig):
        return teacher_arguments(config, section, directory, sizes, device)
    return judge_arguments(config, section, directory, sizes, device)


def _scorer(
    config: RunConfig, dtype: str | None, directory: Path, sizes: ParallelSizes, device: str, own: Mapping[str, object]
) -> tuple[str, ...]:
    """Return the arguments of a server that scores responses: the common ones, and its `own`."""
    options: dict[str, object] = {
        "model-path": directory,
        "dtype": dtype or config.actor.dtype,
        "tp-size": sizes.tp,
        "skip-server-warmup": True,
        "attention-backend": config.sglang.attention_backend,
        "enforce-disable-flashinfer-allreduce-fusion": True,
        **own,
    }
    return _command(options | (_SCORER_ON_CPU if device == "cpu" else {}))


_UNGUIDED: dict[str, object] = {"grammar-backend": "none", "sampling-backend": "pytorch"}
_ON_CPU: dict[str, object] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "mm-attention-backend": "sdpa",
    "disable-cuda-graph": True,
    "disable-overlap-schedule": True,  # it hides the scheduler's work behind a GPU; here both take the same core
    "sleep-on-idle": True,  # else the scheduler takes a whole core from the trainer while it waits
}
_SCORER_ON_CPU = _ON_CPU | {"max-total-tokens": TOKENS_OF_SCORER_ON_CPU}


def _command(options: Mapping[str, object]) -> tuple[str, ...]:
    flags: list[str] = []
    for name, value in options.items():
        if value is True:
            flags.append(f"--{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None and value is not False:
            flags += [f"--{name}", str(value)]
    return tuple(flags)
