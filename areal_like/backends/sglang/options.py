"""The command line of a server: which options of SGLang a run sets, and which of them a user may."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from areal_like.backends.options import OptionProblem, read_options
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

# Fields of ServerArgs that only decide when, how fast and how loudly a server computes the same: all that is known to
# work with weights that change under it.
ALLOWED = frozenset(
    {
        *("chunked_prefill_size", "max_prefill_tokens", "max_total_tokens", "prefill_max_requests", "page_size"),
        *("schedule_policy", "schedule_conservativeness", "retraction_policy", "swa_full_tokens_ratio"),
        *("disable_radix_cache", "radix_eviction_policy", "disable_chunked_prefix_cache", "disable_hybrid_swa_memory"),
        *("disable_overlap_schedule", "enable_mixed_chunk", "scheduler_recv_interval"),
        *("enable_prefill_delayer", "prefill_delayer_queue_min_ratio", "prefill_delayer_max_delay_passes"),
        *("prefill_delayer_max_delay_ms", "prefill_delayer_token_usage_low_watermark", "min_free_slots_delay"),
        *("sleep_on_idle",),
        *("disable_cuda_graph", "disable_cuda_graph_padding", "disable_prefill_cuda_graph", "enable_cudagraph_gc"),
        *("disable_decode_cuda_graph", "cuda_graph_max_bs_decode", "cuda_graph_bs_decode"),
        *("cuda_graph_max_bs_prefill", "cuda_graph_bs_prefill"),
        *("triton_attention_num_kv_splits", "triton_attention_split_tile_size", "mm_attention_backend"),
        *("disable_custom_all_reduce", "enable_mscclpp", "enable_torch_symm_mem", "enable_nccl_nvls"),
        *("enable_symm_mem", "pre_warm_nccl", "enable_p2p_check", "dist_timeout"),
        *("enforce_disable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend"),
        *("enable_flashinfer_allreduce_fusion", "disable_flashinfer_autotune", "disable_shared_experts_fusion"),
        *("weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints", "weight_loader_prefetch_num_threads"),
        *("watchdog_timeout", "soft_watchdog_timeout", "numa_node", "gc_threshold", "gc_warning_threshold_secs"),
        *("log_level", "log_level_http", "log_requests", "log_requests_level", "log_requests_format"),
        *("decode_log_interval", "enable_metrics", "enable_mfu_metrics", "enable_metrics_for_all_schedulers"),
        *("enable_cache_report", "enable_request_time_stats_logging", "show_time_cost", "crash_dump_folder"),
        *("enable_layerwise_nvtx_marker", "enable_profile_cuda_graph"),
    }
)
_OWNED = frozenset(  # the run's own
    {
        *("model_path", "tokenizer_path", "skip_tokenizer_init", "json_model_override_args", "dtype", "is_embedding"),
        *("context_length", "max_running_requests", "mem_fraction_static", "attention_backend", "sampling_backend"),
        *("device", "base_gpu_id", "gpu_id_step", "use_ray", "nnodes", "node_rank", "dist_init_addr", "nccl_port"),
        *("tp_size", "pp_size", "dp_size", "ep_size", "dcp_size", "attn_cp_size", "moe_dp_size", "dwdp_size"),
        *("host", "port", "api_key", "admin_api_key", "fastapi_root_path", "grpc_mode", "smg_grpc_mode", "sidecar"),
        *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password", "skip_server_warmup"),
        *(
            "stream_interval",
            "incremental_streaming_output",
            "weight_version",
            "random_seed",
            "enable_deterministic_inference",
            "enable_fp32_lm_head",
            "enable_memory_saver",
            "preferred_sampling_params",
            "enable_return_routed_experts",
        ),
        *("disaggregation_mode", "encoder_only", "language_only", "config", "grammar_backend"),
    }
)
_OWNED_ON_CPU = frozenset({"max_total_tokens", "mm_attention_backend"})
_POSITIVE = frozenset(  # the server divides by these, or stops
    {"page_size", "max_total_tokens", "decode_log_interval"}
)
_WHY = {  # how a field begins, and why a server that gets new weights cannot have it
    ("num_continuous_decode_steps", "triton_attention_reduce_in_fp32"): "SGLang 0.5.17 ignores it",
    ("quantiz", "modelopt", "torchao", "rl_quant"): "weight updates are not quantized",
    ("kv_cache_dtype",): "a rounded cache changes the log-probs",
    ("speculative",): "weight updates do not reach the draft model",
    ("enable_hierarchical_cache", "hicache"): "its cache outside the GPU was computed with older weights",
    ("enable_lora", "lora"): "weight updates already contain the adapters (actor.use_lora)",
}


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
            why = next((f": {why}" for starts, why in _WHY.items() if option.field.startswith(starts)), "")
            message = f"{name} is not supported with weight updates{why}"
            yield OptionProblem("RUN-SGLANG-OPTION", name, message, f"leave out {name}")
        elif option.field in _POSITIVE and re.fullmatch(r"0|-\d+", str(value)):
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
    config: RunConfig,
    dtype: str | None,
    directory: Path,
    sizes: ParallelSizes,
    device: str,
    own: Mapping[str, object],
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
