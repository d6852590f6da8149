"""Capabilities of a run: their checks, and their hooks in the training loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from allocation.plan import Plan
from areal_like.algorithms.types import Algorithm
from areal_like.checkpoint.recovery import Recovery
from areal_like.config.schema import RunConfig, TrainerRole
from areal_like.data.stream import PromptStream
from areal_like.data.tokenizer import Tokenizer
from areal_like.hooks import Hook
from areal_like.job import Job
from areal_like.metrics.record import Record
from areal_like.registry import find_modules
from areal_like.rollout.pool import ServerPool
from areal_like.rollout.teacher import Teacher
from areal_like.trainer.remote import Trainer
from areal_like.types import Device, Prompt
from areal_like.weights.sync import WeightSync


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


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run whose processes have started, as hooks see it.

    `jobs` and `policies` are the parts and trainers of adapters by name, or of the run under "". Every host reads
    `shared_dir`. `resumed` is the version of the checkpoint that the run resumes from, None for a new run.
    """

    job: Job
    jobs: Mapping[str, Job]
    policies: Mapping[str, Trainer]
    trainers: Mapping[TrainerRole, Trainer]
    pool: ServerPool
    sync: WeightSync
    teacher: Teacher | None
    record: Record
    recovery: Recovery | None
    shared_dir: Path
    resumed: int | None
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Capability:
    """A folder of `areal_like/capabilities/`: `checks` before the start, and functions for a run.

    `hook` makes the object that the loop calls, and `stream` the prompts in their order, each None where the run has
    none of it.
    `uses_reference` tells whether a run needs the section `ref` for it.
    """

    checks: Sequence[Callable[[Known], Iterable[Finding]]] = ()
    hook: Callable[[Started], Hook | None] = lambda started: None
    stream: Callable[[Job], PromptStream | None] = lambda job: None
    uses_reference: Callable[[RunConfig], bool] = lambda config: False


@cache
def capabilities() -> tuple[Capability, ...]:
    """Return every capability, in the order of their names."""
    return tuple(module.CAPABILITY for _, module in find_modules("capability"))


def check_capabilities(known: Known) -> list[Finding]:
    """Return the findings of every capability."""
    return [found for each in capabilities() for check in each.checks for found in check(known)]


def make_hooks(started: Started) -> list[Hook]:
    """Return the hooks of a run."""
    return [hook for each in capabilities() if (hook := each.hook(started)) is not None]


def make_stream(job: Job) -> PromptStream | None:
    """Return the stream of prompts that a capability makes, None where none does."""
    return next((stream for each in capabilities() if (stream := each.stream(job)) is not None), None)


def uses_reference(config: RunConfig) -> bool:
    """Return whether a capability uses the reference of a run."""
    return any(each.uses_reference(config) for each in capabilities())
