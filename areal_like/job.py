"""The decisions about a run before its first process started, known to every part of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.algorithms.types import Algorithm
from areal_like.columns import Form
from areal_like.config.schema import RunConfig, TrainerRole
from areal_like.data.tokenizer import Tokenizer
from areal_like.types import Device, Prompt


@dataclass(frozen=True)
class Job:
    """A run that may start: all that was decided before its first process; `steps` is the number of training steps."""

    config: RunConfig
    device: Device
    plan: Plan
    algorithm: Algorithm
    tokenizer: Tokenizer
    train_prompts: Sequence[Prompt]
    evaluated: Mapping[str, Sequence[Prompt]]  # by the names of `config.evaluations`
    steps: int
    warnings: Sequence[Finding] = ()
    sharing: str | None = None  # how trainer and servers share GPUs, in words
    models: Mapping[TrainerRole, ModelSpec] = field(default_factory=dict)  # as far as their files are here
    served: Mapping[str, Form] = field(default_factory=dict)  # of columns that servers return for capabilities
    step_time: str | None = None  # the predicted training step, in words, of a dry run
    adapter: str | None = None  # its name, if this is the part of one of several adapters
    adapters: "Sequence[Job]" = ()  # the parts of several adapters (`adapters`), with their own data and algorithms
    layouts: "Sequence[Job]" = ()  # the same run in each of `recover.layouts`, for a trainer that has lost hosts

    @property
    def valid_prompts(self) -> Sequence[Prompt]:
        """Prompts of `valid_dataset`."""
        return self.evaluated.get("valid_dataset", ())

    def __str__(self) -> str:
        engines = ", ".join(f"{engine.role} {engine.text}" for engine in self.plan.engines)
        return f"{engines} on {len(self.plan.devices)} {'GPUs' if self.device == 'cuda' else 'CPU slots'}"
