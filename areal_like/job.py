"""A run that may start: its configuration and what the checks made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from allocation import Plan
from areal_like.config.schema import RunConfig
from areal_like.data.tokenizer import Tokenizer
from areal_like.preflight import Preflight
from areal_like.types import Prompt


@dataclass(frozen=True)
class Job:
    """Everything that was decided before the first process starts; `steps` is the number of training steps."""

    config: RunConfig
    device: Literal["cpu", "cuda"]
    plan: Plan
    tokenizer: Tokenizer
    train_prompts: Sequence[Prompt]
    valid_prompts: Sequence[Prompt]
    steps: int

    @classmethod
    def of(cls, config: RunConfig, checked: Preflight) -> Self:
        """From checks that found no errors; raises ValueError after others."""
        device, plan, tokenizer = checked.device, checked.plan, checked.tokenizer
        if not checked.ok or device is None or plan is None or tokenizer is None:
            raise ValueError("the configuration did not pass the checks")
        return cls(config, device, plan, tokenizer, checked.train_prompts, checked.valid_prompts, checked.steps)

    def __str__(self) -> str:
        engines = ", ".join(f"{engine.role} {engine.text}" for engine in self.plan.engines)
        return f"{engines} on {len(self.plan.devices)} {'GPUs' if self.device == 'cuda' else 'CPU slots'}"
