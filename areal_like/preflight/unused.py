"""Keys that a run would accept and never read, as another key decides: said as warnings."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from allocation import Plan
from allocation.diagnostics import Finding
from areal_like.algorithms.settings import KEYS, PRESETS, Settings, settings_of
from areal_like.config.findings import unused
from areal_like.config.schema import (
    PRECISIONS,
    ArithmeticConfig,
    EpisodeConfig,
    FSDPConfig,
    MegatronConfig,
    RecoverConfig,
    RunConfig,
    Section,
    SourceConfig,
    TrainerRole,
)
from areal_like.preflight.rewards import judges
from areal_like.types import Device


@dataclass(frozen=True)
class Rule:
    """Keys of a configuration, or of a section, that nothing reads while `unread` holds of that, and why."""

    keys: tuple[str, ...]
    unread: Callable[[Any], bool]
    why: str


def check_unused(config: RunConfig, device: Device, plan: Plan | None) -> Iterator[Finding]:
    """A warning for each key that does nothing, unless it has its default, as all keys of a resolved configuration."""
    for rule in (*RULES, *(_ON_CPU if device == "cpu" else ()), *(rules_of(plan, device) if plan else ())):
        for key in rule.keys:
            if _is_set(config, key) and rule.unread(config):
                yield unused(key, rule.why)
    if device == "cuda":
        yield from _hidden_gpus(config)
    for place, data in _sets(config).items():
        for of_set in _OF_SETS:
            for key in of_set.keys:
                if _is_set(data, key) and of_set.unread(data):
                    yield unused(f"{place}.{key}", of_set.why)


def _hidden_gpus(config: RunConfig) -> Iterator[Finding]:
    """CUDA has read which GPUs a rank sees when its role's own variables are set."""
    own = {role: section.env_vars or {} for role, section in config.further_roles.items()}
    for role, variables in {"actor": config.actor.env_vars, **own}.items():
        if "CUDA_VISIBLE_DEVICES" in variables:
            why = "a rank sees the GPU of its place in the layout"
            yield unused(f"{role}.env_vars.CUDA_VISIBLE_DEVICES", why, "name GPUs with `@` in the layout")


def _is_set(config: Section, key: str) -> bool:
    """Whether a key is there, with another value than its default."""
    *sections, name = key.split(".")
    section: Any = config
    for part in sections:
        section = getattr(section, part, None)
    return section is not None and bool(getattr(section, name) != type(section).model_fields[name].default)


def _in(section: str, unread: Callable[[Any], bool]) -> Callable[[RunConfig], bool]:
    """Whether a section is such; it is there, as a key of it is set."""
    return lambda run: unread(getattr(run, section))


def _sets(run: RunConfig) -> Mapping[str, SourceConfig]:
    """Each set of prompts by its key."""
    further = {f"train_dataset.mixture.{name}": data for name, data in run.train_dataset.mixture.items()}
    held_out = {f"evaluator.datasets.{name}": data for name, data in run.evaluator.datasets.items()}
    valid = {"valid_dataset": run.valid_dataset} if run.valid_dataset else {}
    return {"train_dataset": run.train_dataset, **valid, **further, **held_out}


def _is_file(data: SourceConfig) -> bool:
    return data.path.endswith((".jsonl", ".parquet")) or ":" in data.path  # or an object: my_data.py:rows


def _is_made(data: SourceConfig) -> bool:
    return data.path == "arithmetic"


def _only_models(run: RunConfig) -> bool:
    return all(judge.function is None and judge.type == "model" for judge in judges(run.reward).values())


def _has_experts(run: RunConfig) -> bool:
    return run.actor.init_model is not None and run.actor.init_model.num_experts is not None


def _further(role: str) -> Iterator[Rule]:
    """What places a role that has no layout of its own, or one with GPU ids."""
    why = "backend is not set, or names its GPUs with `@`"
    key = f"{role}.scheduling_strategy"
    yield Rule((f"{key}.type",), _in(role, lambda it: it.backend is None or "@" in it.backend), why)
    separate = _in(role, lambda it: it.scheduling_strategy.type == "separation")
    yield Rule((f"{key}.target",), separate, "it has GPUs of its own (type: separation)")


def _offloaded(role: TrainerRole) -> Rule:
    """Parts that are offloaded with the whole."""
    keys = tuple(f"{role}.{name}" for name in _OFFLOADS[:3])
    return Rule(keys, lambda run: role in run.roles and run.roles[role].offload, f"{role}.offload covers it")


def _of_checkpoint(role: TrainerRole) -> Rule:
    """A Megatron checkpoint that is named and not asked for."""
    unread = _in(role, lambda section: not section.megatron.use_dist_checkpointing)
    key = f"{role}.megatron"
    return Rule((f"{key}.dist_checkpointing_path",), unread, f"the start is another ({key}.use_dist_checkpointing)")


def rules_of(plan: Plan, device: Device) -> Iterator[Rule]:
    """Keys of the backend that a role has not, of FSDP that do nothing there, and of restarts where none can be."""
    servers = len(plan.engine("rollout").servers)
    yield Rule(
        ("rollout.max_restarts",),
        lambda run: servers <= run.rollout.min_servers and (run.rollout.max_servers or 0) <= servers,
        "too few servers are left to go on when one dies (rollout.min_servers, rollout.backend)",
    )
    for engine in plan.engines:
        if who := _WHO.get(engine.role):
            other, keys = ("megatron", _OF_MEGATRON) if engine.backend == "fsdp" else ("fsdp", FSDPConfig.model_fields)
            words = {"fsdp": "FSDP", "megatron": "Megatron"}[engine.backend]
            names = tuple(f"{engine.role}.{other}.{name}" for name in keys)
            yield Rule(names, lambda _: True, f"{who} is {words} ({engine.role}.backend)")
        if engine.role == "ref" and engine.backend == "fsdp":
            yield Rule(("ref.fsdp.gradient_checkpointing",), lambda _: True, "a reference has no backward pass")
    if plan.engine("actor").backend == "fsdp":
        why = "fsdp.offload_params keeps everything in host memory"
        yield Rule(("actor.offload",), lambda run: run.actor.fsdp.offload_params, why)
        everything = ("actor.fsdp.offload_params",) if device == "cpu" else ()
        yield Rule(everything, lambda _: True, "on CPU everything is in host memory")


_WHO = {"actor": "the trainer", "ref": "the reference", "critic": "the critic"}
_OF_MEGATRON = [name for name in MegatronConfig.model_fields if name != "use_deterministic_algorithms"]  # FSDP's too
_TRAINED = (
    *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "grad_offload", "optimizer_offload"),
    *("use_precision_aware_optimizer", *PRECISIONS),
)
_OFFLOADS = ("megatron.param_offload", "megatron.grad_offload", "megatron.optimizer_offload", "offload")


def _while(unread: Callable[[RunConfig, Settings], bool]) -> Callable[[RunConfig], bool]:
    """Whether a preset's settings are such; nobody knows what a user's own algorithm reads."""

    def holds(run: RunConfig) -> bool:
        preset = PRESETS.get(run.algorithm)
        return preset is not None and unread(run, settings_of(preset, run.actor))

    return holds


_ALGORITHM = (
    Rule(
        tuple(f"actor.{key}" for key in KEYS),
        lambda run: run.algorithm in ("dpo", "sft"),
        "the algorithm has a loss of its own",
    ),
    Rule(
        ("reward.timeout_s", "reward.workers", "reward.memory_mb"),
        _only_models,
        "the reward model's own reward.model.timeout_s does it",
    ),
    Rule(("actor.dpo_beta",), lambda run: run.algorithm in (*PRESETS, "sft"), "the algorithm is not dpo"),
    Rule(
        ("actor.eps_clip", "actor.eps_clip_higher", "actor.c_clip"),
        _while(lambda run, settings: settings.use_decoupled_loss and run.actor.ppo_n_minibatches == 1),
        "with one mini-batch the policy is its own proximal policy, and the ratio that is clipped is 1",
    ),
    Rule(
        ("actor.c_clip",),
        _while(lambda run, settings: settings.cispo),
        "cispo clips the ratio of every advantage",
    ),
    Rule(
        ("actor.behave_imp_weight_mode", "actor.behave_imp_weight_cap"),
        _while(lambda run, settings: not settings.use_decoupled_loss),
        "the behaviour weight is of the decoupled loss (use_decoupled_loss)",
    ),
    Rule(
        ("actor.behave_imp_weight_cap",),
        _while(lambda run, settings: settings.behave_imp_weight_mode == "disabled"),
        "there is no behaviour weight (behave_imp_weight_mode)",
    ),
    Rule(
        ("actor.kl_estimator",),
        _while(lambda run, settings: not settings.kl_ctl and not settings.kl_loss_coef),
        "no KL divergence is estimated (kl_ctl, kl_loss_coef)",
    ),
    Rule(("actor.gae_lambda",), _while(lambda run, settings: not settings.critic), "there are no values of a critic"),
    Rule(
        ("actor.overlong_tokens",),
        _while(lambda run, settings: not settings.overlong_penalty_factor),
        "overlong responses are not penalised (overlong_penalty_factor)",
    ),
    Rule(
        ("actor.max_dropped_groups",),
        _while(lambda run, settings: not settings.dynamic_sampling),
        "no group is dropped (dynamic_sampling)",
    ),
    Rule(
        ("actor.skip_zero_advantages",),
        _while(lambda run, settings: not settings.only_advantages),
        "a response without advantages counts too (critic, entropy_coeff, kl_loss_coef)",
    ),
)
_OF_SETS = (
    Rule(("split",), _is_file, "a file has no splits"),
    Rule(("name",), lambda data: _is_file(data) or _is_made(data), "only datasets of the hub have configurations"),
    Rule(
        tuple(f"arithmetic.{name}" for name in ArithmeticConfig.model_fields),
        lambda data: not _is_made(data),
        "path is not arithmetic",
    ),
)
_EVALUATOR_KEYS = tuple(f"evaluator.{name}" for name in ("n_samples", "temperature", "max_new_tokens", "pass_reward"))
_EXPERT_KEYS = ("actor.init_model.num_experts_per_tok", "actor.init_model.moe_intermediate_size")
RULES = (
    Rule(
        tuple(f"recover.{name}" for name in RecoverConfig.model_fields if name != "mode"),
        lambda run: run.recover.mode == "off",
        "no checkpoints are written (recover.mode: off)",
    ),
    Rule(("scheduler.address",), lambda run: run.scheduler.type == "local", "a private cluster (type: local) has none"),
    Rule(
        ("actor.optimizer.min_lr_ratio",),
        lambda run: run.actor.optimizer.lr_scheduler_type == "constant",
        "a constant learning rate does not fall",
    ),
    *_ALGORITHM,
    Rule(
        tuple(f"episode.{name}" for name in EpisodeConfig.model_fields),
        lambda run: not run.workflows,
        "only episodes of a workflow of your own have limits (workflow)",
    ),
    Rule(
        ("saver.merge_lora", *(f"actor.{name}" for name in ("lora_rank", "lora_alpha", "target_modules"))),
        lambda run: not run.actor.use_lora,
        "there are no adapters (actor.use_lora)",
    ),
    Rule(("train_dataset.weight",), lambda run: not run.train_dataset.mixture, "there is one set only (mixture)"),
    Rule(("reward.function", "reward.type"), lambda run: bool(run.reward.parts), "reward.parts say what judges"),
    Rule(("reward.type",), lambda run: run.reward.function is not None, "reward.function judges"),
    *(_of_checkpoint(role) for role in ("actor", "ref", "critic")),
    Rule(_EXPERT_KEYS, lambda run: not _has_experts(run), "the model has no experts (num_experts)"),
    Rule(("actor.init_model.intermediate_size",), _has_experts, "all layers are of experts (moe_intermediate_size)"),
    Rule(
        ("critic.optimizer.min_lr_ratio",),
        _in("critic", lambda critic: critic.optimizer.lr_scheduler_type == "constant"),
        "a constant learning rate does not fall",
    ),
    Rule(
        ("ref.ema_decay",),
        _in("ref", lambda ref: ref.update_every_steps is None),
        "the reference is fixed (update_every_steps)",
    ),
    Rule(
        tuple(f"ref.megatron.{name}" for name in MegatronConfig.model_fields if "recompute" in name),
        lambda _: True,
        "a reference has no backward pass",
    ),
    Rule(tuple(f"ref.megatron.{name}" for name in _TRAINED), lambda _: True, "a reference has no optimizer"),
    *(_offloaded(role) for role in ("actor", "ref", "critic")),
    *_further("ref"),
    *_further("critic"),
    Rule(
        ("rollout.max_restarts",),
        lambda run: run.rollout.alternates,
        "a server that died in the trainer's turn finds no memory to start again in (rollout.sharing: alternate)",
    ),
    Rule(
        ("weight_update.bucket_mb", "weight_update.prefetch_mb"),
        lambda run: run.weight_update.mode == "disk",
        "weights go through files",
    ),
    Rule(
        ("weight_update.requests",),
        lambda run: run.rollout.max_head_offpolicyness == 0,
        "training is synchronous (rollout.max_head_offpolicyness=0), so no request runs during a weight update",
    ),
    Rule(
        ("weight_update.bucket_mb",),
        lambda run: run.weight_update.mode == "ipc" and run.weight_update.bucket_mb <= run.weight_update.prefetch_mb,
        "what is lent at once is weight_update.prefetch_mb",
    ),
    Rule(
        tuple(f"stats_logger.wandb.{name}" for name in ("project", "entity", "group")),
        lambda run: run.stats_logger.wandb.mode == "disabled",
        "stats_logger.wandb.mode is disabled",
    ),
    Rule(
        tuple(f"stats_logger.swanlab.{name}" for name in ("project", "workspace")),
        lambda run: run.stats_logger.swanlab.mode == "disabled",
        "stats_logger.swanlab.mode is disabled",
    ),
    Rule(
        ("stats_logger.mlflow.experiment_name",),
        lambda run: run.stats_logger.mlflow.tracking_uri is None,
        "stats_logger.mlflow.tracking_uri names no server",
    ),
    Rule(("stats_logger.console_samples",), lambda run: run.stats_logger.samples == 0, "no samples are kept"),
    Rule(("stats_logger.console_samples",), lambda run: not run.stats_logger.console, "nothing is printed (console)"),
    Rule(_EVALUATOR_KEYS, lambda run: not run.evaluates, "nothing is evaluated"),
)
_ON_CPU = (
    Rule(
        tuple(f"{role}.{name}" for role in ("actor", "ref", "critic") for name in _OFFLOADS),
        lambda _: True,
        "on CPU everything is in host memory",
    ),
    Rule(("sglang.mem_fraction_static",), lambda _: True, "on CPU the KV cache holds what the run can have in flight"),
)
