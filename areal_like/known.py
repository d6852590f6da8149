"""Facts about a run that are known before its start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.core.algorithms.types import Algorithm
from areal_like.core.config.schema import RunConfig, TrainerRole
from areal_like.core.types import Device, Prompt
from areal_like.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Known:
    """Everything that is known before the start; None, or an empty value, where another finding has the reason.

    `algorithms` and `prompts` stand by adapter, or under "" for a run with one policy.
    """

    config: RunConfig
    device: Device
    plan: Plan | None
    models: Mapping[TrainerRole, ModelSpec | None]
    tokenizer: Tokenizer | None
    algorithms: Mapping[str, Algorithm | None]
    prompts: Mapping[str, Sequence[Prompt]]
    steps: int
    dry_run: bool = False

    @property
    def model(self) -> ModelSpec | None:
        """The actor's model."""
        return self.models["actor"]
