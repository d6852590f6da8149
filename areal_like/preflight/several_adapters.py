"""Checks the requirements of several adapters in one run (`adapters`)."""

from collections.abc import Iterator, Sequence

from allocation.diagnostics import Finding
from areal_like.core.algorithms.types import Algorithm
from areal_like.core.config.findings import finding
from areal_like.core.config.schema import ActorConfig, EngineConfig, RunConfig

_KEY = "adapters"
_SHARED = {*EngineConfig.model_fields, "init_model", "optimizer", "use_lora", "peft_type", "lora_rank", "lora_alpha"}
_SHARED |= {"target_modules", "ppo_n_minibatches"}  # of all adapters: their settings of `actor` are the other ones


def check_several_adapters(config: RunConfig, algorithms: Sequence[Algorithm | None]) -> Iterator[Finding]:
    """Check that the servers hold several adapters, and that each of the run's parts knows them."""
    if not config.adapters:
        return
    if not config.actor.use_lora:
        message = "several adapters need LoRA, but actor.use_lora is false"
        yield finding("RUN-SEVERAL-LORA", _KEY, message, "write actor.use_lora=true, or remove adapters")
    if not config.weight_update.adapters:
        message = "servers that receive merged weights hold one adapter; several adapters need weight_update.adapters"
        yield finding("RUN-SEVERAL-SERVED", _KEY, message, "write weight_update={adapters: true, mode: disk}")
    for name, adapter in config.adapters.items():
        for setting in adapter.actor:
            if setting in _SHARED and setting in ActorConfig.model_fields:
                key, message = f"adapters.{name}.actor.{setting}", f"all adapters share actor.{setting}"
                yield finding("RUN-SEVERAL-SHARED", key, message, f"write actor.{setting}, or remove this key")
    yield from _of_one_policy(config, algorithms)


def _of_one_policy(config: RunConfig, algorithms: Sequence[Algorithm | None]) -> Iterator[Finding]:
    """Find parts of the run that belong to a single policy."""
    values = any(algorithm is not None and "baselines" in algorithm.needs for algorithm in algorithms)
    each = config.adapted.values()
    parts = {
        "critic": (config.critic is not None, "use an algorithm without critic, such as grpo"),
        "teacher": (config.teacher is not None, "remove teacher"),
        "warm_start": (config.warm_start is not None, "remove warm_start"),
        "ref": (config.ref is not None and not config.base_is_reference, "write ref={}: the base without adapters"),
        "reward.model": (any(own.reward.model for own in each), "use a reward function"),
        "reward.judge": (any(own.reward.judge for own in each), "use a reward function"),
        "algorithm": (values, "use another algorithm than single_rollout"),
    }
    for key, (is_set, help) in parts.items():
        if is_set:
            yield from refuse_with_several(config, key, help)


def refuse_with_several(config: RunConfig, key: str, help: str) -> Iterator[Finding]:
    """Find a part that belongs to a single policy, in a run with several adapters."""
    message = f"{key} belongs to a single policy, and this run has {len(config.adapters)} adapters"
    yield finding("RUN-SEVERAL-PARTS", key, message, help)
