"""Checks that several adapters of one run (`adapters`) set none of the keys that they share."""

from collections.abc import Iterator

from allocation.diagnostics import Finding
from areal_like.config.findings import finding
from areal_like.config.schema import ActorConfig, EngineConfig, RunConfig

_SHARED = {*EngineConfig.model_fields, "init_model", "optimizer", "use_lora", "peft_type", "lora_rank", "lora_alpha"}
_SHARED |= {"target_modules", "ppo_n_minibatches"}  # of all adapters: their settings of `actor` are the other ones


def check_several_adapters(config: RunConfig) -> Iterator[Finding]:
    """Find settings of one adapter that all adapters share."""
    for name, adapter in config.adapters.items():
        for setting in adapter.actor:
            if setting in _SHARED and setting in ActorConfig.model_fields:
                key, message = f"adapters.{name}.actor.{setting}", f"all adapters share actor.{setting}"
                yield finding("RUN-SEVERAL", key, message, f"set `actor.{setting}`, or remove this key")
