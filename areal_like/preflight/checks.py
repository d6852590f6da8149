"""Everything about a run that can be known before a process starts, checked at once. Imports no torch.

Each check is one small generator of findings; `preflight` runs them all, so that the first never hides the rest. A
check ends where it asks for a setting that is not known, because its key was refused.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from allocation import Plan
from allocation.diagnostics import Finding, Severity, has_errors
from areal_like.cluster.ray_cluster import address_problem
from areal_like.config.findings import missing_package
from areal_like.config.load import LoadedConfig
from areal_like.config.schema import SERVER_RESERVE, DatasetConfig
from areal_like.config.unknown import known, known_findings
from areal_like.data.dataset import DatasetError, load_prompts, read_problems, training_steps
from areal_like.data.tokenizer import Tokenizer, TokenizerError
from areal_like.demo.init_model import model_config
from areal_like.preflight.layout import check_layout
from areal_like.preflight.model import Model, find_model
from areal_like.preflight.unused import check_unused
from areal_like.rollout.sglang.options import check_server_options
from areal_like.trainer.megatron.bridges.support import bridge_problems
from areal_like.trainer.megatron.options import check_overrides
from areal_like.trainer.packing import sequence_alignment
from areal_like.types import Prompt

CONFIG_FILE = "config.yaml"  # of a run's directory: the resolved configuration, written first

_DETERMINISTIC_ATTENTION = ("fa3", "flashinfer", "triton")  # SGLang's, on NVIDIA GPUs


@dataclass(frozen=True)
class Preflight:
    """What the checks found and what they made on the way; all parts are there when `ok`."""

    findings: tuple[Finding, ...]
    device: Literal["cpu", "cuda"] | None
    plan: Plan | None
    tokenizer: Tokenizer | None
    train_prompts: tuple[Prompt, ...]
    valid_prompts: tuple[Prompt, ...]
    steps: int

    @property
    def ok(self) -> bool:
        """Whether the run may start: there may be warnings, but no errors."""
        return not has_errors(self.findings)


def preflight(loaded: LoadedConfig, *, dry_run: bool = False) -> Preflight:
    """Check a configuration against the machine, the model and the data; starts nothing and writes nothing.

    The findings of `loaded` come first. What would follow from them is not said again. A dry run is only warned where
    the environment names no cluster, as it may be made in another one than the run's.
    """
    config = loaded.config
    model, problems = find_model(loaded)
    findings = [*loaded.findings, *problems]
    layout, plan = known(check_layout, loaded, model.spec) or ([], None)
    findings += layout
    datasets = {
        "train_dataset": known(lambda: config.train_dataset),
        "valid_dataset": known(lambda: config.valid_dataset),
    }
    prompts: dict[str, list[Prompt]] = {}
    for key, dataset in datasets.items():
        prompts[key], problems = known(_prompts, loaded, key, dataset, model.tokenizer) or ([], [])
        findings += problems
    n_train = len(prompts["train_dataset"])
    for check in (
        _packages,
        _fileroot,
        _run_directory,
        _cpu,
        _overrides,
        _server_arguments,
        _sampling,
        _batches,
        _held_out,
    ):
        findings += known_findings(check(loaded))
    findings += known_findings(_bridge(loaded, plan, model))
    findings += known_findings(_tied_experts(loaded, model))
    findings += known_findings(_machine(loaded, plan, dry_run))
    findings += known_findings(_ports(loaded, plan))
    findings += known_findings(_context(loaded, model))
    findings += known_findings(_steps(loaded, n_train))
    findings += check_unused(loaded, known(device_of, loaded))
    for key, its_prompts in prompts.items():
        findings += known_findings(_warm_start(loaded, key, its_prompts, model.tokenizer, plan))
    return Preflight(
        findings=tuple(findings),
        device=known(device_of, loaded),
        plan=plan,
        tokenizer=model.tokenizer,
        train_prompts=tuple(prompts["train_dataset"]),
        valid_prompts=tuple(prompts["valid_dataset"]),
        steps=known(training_steps, config, n_train) or 0,
    )


def device_of(loaded: LoadedConfig) -> Literal["cpu", "cuda"]:
    """What `device: auto` means here: CUDA where this host has an NVIDIA GPU."""
    if loaded.config.device == "auto":
        return "cuda" if _gpu_count() else "cpu"
    return loaded.config.device


def _gpu_count() -> int:
    """NVIDIA GPUs that a process of this host would see; CUDA reads its list up to the first entry that is no GPU."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len(list(takewhile(_names_gpu, visible.split(",")))))


def _names_gpu(entry: str) -> bool:
    return entry.strip() != "" and not entry.strip().startswith("-")


def _prompts(
    loaded: LoadedConfig, key: str, dataset: DatasetConfig | None, tokenizer: Tokenizer | None
) -> tuple[list[Prompt], list[Finding]]:
    if dataset is None:
        return [], []
    try:
        if tokenizer is None:
            read_problems(dataset)
            return [], []
        train_on_answers = known(lambda: loaded.config.warm_start) is not None
        return load_prompts(dataset, tokenizer, train_on_answers=train_on_answers), []
    except DatasetError as error:
        where = f"{key}.{error.field}"
        return [], [loaded.origins.finding("RUN-DATASET", where, error.problem, error.remedy)]
    except ModuleNotFoundError as error:
        return [], [missing_package(loaded.origins, f"{key}.path", error.name)]


def _packages(loaded: LoadedConfig) -> Iterator[Finding]:
    """Only what this run imports has to be there."""
    config = loaded.config
    needed = [
        ("scheduler.type", "ray", "ray"),
        ("actor.backend", "torch", "torch"),
        ("actor.backend", "megatron.core", "megatron-core"),
        ("rollout.backend", "sglang", "sglang"),
        ("reward.type", "math_verify", "math-verify"),
        ("stats_logger", "matplotlib", "matplotlib"),
    ]
    if bridge := known(lambda: config.actor.megatron.bridge_type):
        needed.append(("actor.megatron.bridge_type", bridge.replace("-", "."), bridge))
    if known(lambda: config.stats_logger.tensorboard):
        needed.append(("stats_logger.tensorboard", "tensorboard", "tensorboard"))
    if known(device_of, loaded) == "cuda" and _gpu_count():  # a controller without GPUs has no need of it
        needed.append(("device", "transformer_engine", "transformer-engine"))
    for key, module, package in needed:
        if not _installed(module):
            yield missing_package(loaded.origins, key, package)


def _installed(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or _installed(parent)) and importlib.util.find_spec(module) is not None


def _run_directory(loaded: LoadedConfig) -> Iterator[Finding]:
    """A run writes into a directory of its own and never over another's files."""
    directory = loaded.config.run_dir
    if directory.is_dir():
        if (directory / CONFIG_FILE).exists():
            message = f"{directory} holds the results of another run"
        elif any(directory.iterdir()):
            message = f"{directory} holds files that are no run's"
        else:
            return
        yield loaded.origins.finding("RUN-DIRECTORY", "trial_name", message, "choose another trial_name")


def _fileroot(loaded: LoadedConfig) -> Iterator[Finding]:
    """The run's directory can be made; of a run without a name, the one of all runs."""
    directory = known(lambda: loaded.config.run_dir) or Path(loaded.config.cluster.fileroot)
    if directory.is_dir():
        return
    above = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        message = f"{directory} cannot be made: {above} is not a directory that may be written to"
        yield loaded.origins.finding("RUN-DIRECTORY", "cluster.fileroot", message, "choose another fileroot")


def _ports(loaded: LoadedConfig, plan: Plan | None) -> Iterator[Finding]:
    """Only this host can be asked; the servers of other nodes find out when they start."""
    first, origins = loaded.config.sglang.port, loaded.origins
    if first is None or plan is None or loaded.config.scheduler.type != "local":
        return
    help = "choose another port, or null for free ones"
    for port in range(first, first + plan.engine("rollout").sizes.dp):
        if problem := _port_problem(port):
            yield origins.finding("RUN-PORT", "sglang.port", f"port {port} cannot be used here: {problem}", help)


def _port_problem(port: int) -> str | None:
    if port > 65535:
        return "the largest port is 65535"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was closed a moment ago is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror
    return None


def _machine(loaded: LoadedConfig, plan: Plan | None, dry_run: bool) -> Iterator[Finding]:
    """A private cluster is this host alone; an existing one answers."""
    config, origins = loaded.config, loaded.origins
    if config.scheduler.type == "ray":
        if problem := address_problem(config.scheduler.address):
            severity = Severity.WARNING if dry_run and config.scheduler.address == "auto" else Severity.ERROR
            yield origins.finding("RUN-MACHINE", "scheduler.address", *problem, severity=severity)
        return
    if config.cluster.n_nodes > 1:
        message = f"a private cluster is this host alone, not {config.cluster.n_nodes} nodes"
        yield origins.finding(
            "RUN-MACHINE", "cluster.n_nodes", message, "write scheduler.type=ray, or cluster.n_nodes=1"
        )
    elif device_of(loaded) == "cuda" and plan is not None and plan.n_gpus > (present := _gpu_count()):
        key = "allocation_mode" if config.allocation_mode else "actor.backend + rollout.backend"
        message = f"{plan.n_gpus} GPUs are asked for, this host has {present}"
        yield origins.finding("RUN-MACHINE", key, message, "use a smaller layout" if present else "write device=cpu")


def _cpu(loaded: LoadedConfig) -> Iterator[Finding]:
    """Options that servers on CPU cannot honour."""
    config, origins = loaded.config, loaded.origins
    if device_of(loaded) == "cuda":
        return
    if config.sglang.attention_backend not in (None, "torch_native"):
        message = f"SGLang has no {config.sglang.attention_backend} attention on CPU"
        yield origins.finding("RUN-CPU", "sglang.attention_backend", message, nearest=["torch_native"])
    if config.sglang.deterministic:
        message = "SGLang has no deterministic inference on CPU"
        yield origins.finding("RUN-CPU", "sglang.deterministic", message, nearest=["false"])


def _overrides(loaded: LoadedConfig) -> Iterator[Finding]:
    """Names that Megatron-core knows, less those that the run decides."""
    key = "actor.megatron.override_transformer_config"
    overrides = loaded.config.actor.megatron.override_transformer_config
    for name, problem in check_overrides(overrides, device=device_of(loaded)).items():
        yield loaded.origins.finding("RUN-MEGATRON", f"{key}.{name}", problem)


def _bridge(loaded: LoadedConfig, plan: Plan | None, model: Model) -> Iterator[Finding]:
    """Models and layouts that the chosen bridge does not compute or export as the servers do."""
    actor = loaded.config.actor
    if plan is None or model.spec is None:
        return
    if actor.init_model is not None:
        config = model_config(actor.init_model, "float32")
    elif (file := Path(str(actor.path), "config.json")).is_file():
        config = json.loads(file.read_text())
    else:  # a name on the hub, which the trainer looks at once it is downloaded
        return
    config = {**config, **config.get("text_config", {})}
    for problem in bridge_problems(actor.megatron.bridge_type, config, plan.engine("actor").sizes):
        key, message = problem.field, problem.message
        if not key.startswith("actor."):
            key, message = "actor.init_model" if actor.init_model else "actor.path", f"config.json, {key}: {message}"
        yield loaded.origins.finding("RUN-BRIDGE", key, message, problem.remedy)


def _tied_experts(loaded: LoadedConfig, model: Model) -> Iterator[Finding]:
    """SGLang's mixture-of-experts models never look for shared embeddings and would use an output layer of noise."""
    if model.spec is not None and model.spec.experts > 0 and model.spec.tied_embeddings:
        key = "actor.init_model.tie_word_embeddings" if loaded.config.actor.init_model else "actor.path"
        message = "SGLang does not share embeddings with the output layer in models with experts (tie_word_embeddings)"
        yield loaded.origins.finding("RUN-MODEL", key, message, "use a model with an output layer of its own")


def _server_arguments(loaded: LoadedConfig) -> Iterator[Finding]:
    sglang = loaded.config.sglang
    unfit = sglang.attention_backend not in (None, *_DETERMINISTIC_ATTENTION)
    if sglang.deterministic and unfit and device_of(loaded) == "cuda":
        message = f"SGLang's {sglang.attention_backend} attention is not deterministic"
        yield loaded.origins.finding(
            "RUN-SGLANG", "sglang.attention_backend", message, nearest=_DETERMINISTIC_ATTENTION
        )
    for name, problem, nearest in check_server_options(sglang.extra_args, device=known(device_of, loaded)):
        yield loaded.origins.finding("RUN-SGLANG", f"sglang.extra_args.{name}", problem, nearest=nearest)


def _sampling(loaded: LoadedConfig) -> Iterator[Finding]:
    """Behaviour log-probs have to be those of the distribution that was sampled from (sglang/srt/layers/sampler.py)."""
    if loaded.config.gconfig.top_p != 1:
        message = "SGLang gives log-probs from before the nucleus is cut, so that the behaviour weights would be wrong"
        yield loaded.origins.finding("RUN-SAMPLING", "gconfig.top_p", message, "write gconfig.top_p=1.0")


def _batches(loaded: LoadedConfig) -> Iterator[Finding]:
    """Batch arithmetic beyond the allocation's."""
    config, origins = loaded.config, loaded.origins
    samples = config.gconfig.n_samples
    if samples < 2:
        message = "one sample per prompt has advantage 0: a group is compared with itself"
        yield origins.finding("RUN-BATCH", "gconfig.n_samples", message, "sample at least 2")
    in_flight = config.rollout.max_concurrent_rollouts
    if in_flight is not None and in_flight < samples:
        message = f"{in_flight} samples in flight cannot hold one group of {samples} (gconfig.n_samples)"
        yield origins.finding("RUN-BATCH", "rollout.max_concurrent_rollouts", message, f"allow at least {samples}")


def _held_out(loaded: LoadedConfig) -> Iterator[Finding]:
    """What is measured on held-out prompts needs some."""
    config = loaded.config
    if config.valid_dataset is not None:
        return
    asked = {
        "warm_start": known(lambda: config.warm_start),
        "evaluator.freq_steps": known(lambda: config.evaluator.freq_steps),
    }
    for key, value in asked.items():
        if value is not None:
            yield loaded.origins.finding("RUN-HELD-OUT", key, "needs held-out prompts", "set valid_dataset")


def _warm_start(
    loaded: LoadedConfig, key: str, prompts: Sequence[Prompt], tokenizer: Tokenizer | None, plan: Plan | None
) -> Iterator[Finding]:
    """An example of the warm start is a prompt with its reference answer, and has to fit in a micro-batch."""
    limit = loaded.config.actor.mb_spec.max_tokens_per_mb
    if loaded.config.warm_start is None or tokenizer is None or plan is None or not prompts:
        return
    sizes = plan.engine("actor").sizes
    alignment = sequence_alignment(sizes.tp, sizes.cp)
    try:
        longest, row = max((len(p.tokens) + len(tokenizer.encode_response(p.answer)), p.sample_id) for p in prompts)
    except TokenizerError as error:
        yield loaded.origins.finding("RUN-WARM-START", f"{key}.path", f"an answer is no text to imitate: {error}")
        return
    longest = -(-longest // alignment) * alignment
    if longest > limit:
        message = f"{key}, row {row + 1} has {longest} tokens with its answer; a micro-batch holds {limit}"
        help = f"allow at least {longest}, or leave that row out"
        yield loaded.origins.finding("RUN-WARM-START", "actor.mb_spec.max_tokens_per_mb", message, help)


def _context(loaded: LoadedConfig, model: Model) -> Iterator[Finding]:
    """A server's context holds the longest prompt and response, and the model's positions hold the context."""
    config, origins = loaded.config, loaded.origins
    longest, context = config.longest_sequence, config.context_length
    positions = model.spec.max_positions if model.spec else 0
    if context < longest + SERVER_RESERVE:
        message = f"{context} tokens do not hold max_prompt_length + gconfig.max_new_tokens = {longest}"
        help = f"use at least {longest + SERVER_RESERVE}: SGLang keeps {SERVER_RESERVE}"
        yield origins.finding("RUN-CONTEXT", "sglang.context_length", message, help)
    if longest <= positions < context:
        message = f"a server's context of {context} tokens exceeds the model's {positions} positions"
        key = "gconfig.max_new_tokens" if config.sglang.context_length is None else "sglang.context_length"
        yield origins.finding("RUN-CONTEXT", key, message)


def _steps(loaded: LoadedConfig, n_prompts: int) -> Iterator[Finding]:
    if n_prompts == 0:  # why, another finding says
        return
    config, origins = loaded.config, loaded.origins
    steps = training_steps(config, n_prompts)
    if steps < 1:
        message = f"{n_prompts} prompts do not fill one batch of {config.train_dataset.batch_size}"
        yield origins.finding("RUN-STEPS", "train_dataset.batch_size", message, "lower it or raise total_train_epochs")
    elif config.total_train_steps is not None and steps < config.total_train_steps:
        message = f"total_train_epochs ends the run after {steps} steps, before total_train_steps"
        yield origins.finding("RUN-STEPS", "total_train_steps", message, severity=Severity.WARNING)
    updates = steps * config.actor.ppo_n_minibatches
    if 0 < updates <= config.actor.optimizer.warmup_steps:
        message = f"the run has {updates} optimizer steps: the learning rate would never reach its peak"
        yield origins.finding("RUN-STEPS", "actor.optimizer.warmup_steps", message, f"use fewer than {updates}")
