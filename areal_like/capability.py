"""Capabilities of a run: their checks, and their hooks in the training loop."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from allocation.diagnostics import Finding
from areal_like.core.checkpoint.recovery import Recovery
from areal_like.core.columns import Form
from areal_like.core.config.schema import RunConfig, TrainerRole
from areal_like.core.hooks import Hook
from areal_like.core.registry import find_modules
from areal_like.core.rollout.pool import ServerPool
from areal_like.core.rollout.single_turn import MakesWorkflows, SingleTurns
from areal_like.core.rollout.stream import PromptStream
from areal_like.core.trainer.remote import Trainer
from areal_like.core.types import Score
from areal_like.core.weights import WeightSync
from areal_like.exclusions import Exclusion, find_excluded
from areal_like.job import Job
from areal_like.known import Known
from areal_like.metrics.listener import Listener
from areal_like.metrics.record import Record
from areal_like.rewards.teacher import Teacher


@dataclass(frozen=True, kw_only=True)
class Started:
    """A run whose processes have started, as hooks see it.

    `jobs` and `policies` are the parts and trainers of adapters by name, or of the run under "". Every host reads
    `shared_dir`. `on_nodes` calls a function on each node of an existing cluster, with the ids of the run's Ray workers
    there. `resumed` is the version of the checkpoint that the run resumes from, None for a new run.
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
    on_nodes: Callable[[Callable[[list[int]], Any]], Awaitable[list[Any]]]
    resumed: int | None
    say: Callable[[str], None]


type OpenWorkflows = Callable[[Job, ServerPool, Score], AbstractAsyncContextManager[MakesWorkflows]]
"""Return the workflows of a run, or of one of several adapters."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    """A folder of `areal_like/capabilities/`: `checks` before the start, and functions for a run.

    `excludes` are rows of the exclusion table.

    `hook` makes the object that the loop calls, and `stream` the prompts in their order, each None where the run has
    none of it. `listeners` receive the records of the run.
    `workflows` makes the workflows of a run while its context is open, given a function for messages and the directory
    of logs; the first capability that has them replaces the built-in workflow. `scores_episodes` tells whether a
    workflow's episodes, named as in the configuration, are scored by the section `reward` too. `uses_reference` tells
    whether a run needs the section `ref` for it. `served` are the forms of the columns that servers return for it,
    `describe` lines of the startup report.
    """

    checks: Sequence[Callable[[Known], Iterable[Finding]]] = ()
    excludes: Sequence[Exclusion[Known]] = ()
    hook: Callable[[Started], Hook | None] = lambda started: None
    listeners: Callable[[Job], Iterable[Listener]] = lambda job: ()
    stream: Callable[[Job], PromptStream | None] = lambda job: None
    workflows: Callable[[Job, Callable[[str], None], Path], AbstractAsyncContextManager[OpenWorkflows] | None] = (
        lambda job, say, logs: None
    )
    scores_episodes: Callable[[RunConfig, str], bool] = lambda config, workflow: False
    uses_reference: Callable[[RunConfig], bool] = lambda config: False
    served: Callable[[Known], Mapping[str, Form]] = lambda known: {}
    describe: Callable[[Job], Iterable[str]] = lambda job: ()


@cache
def capabilities() -> tuple[Capability, ...]:
    """Return every capability, in the order of their names."""
    return tuple(module.CAPABILITY for _, module in find_modules("capability"))


def check_capabilities(known: Known) -> list[Finding]:
    """Return the findings of every capability."""
    checked = [found for each in capabilities() for check in each.checks for found in check(known)]
    return [*checked, *find_excluded((row for each in capabilities() for row in each.excludes), known)]


def make_hooks(started: Started) -> list[Hook]:
    """Return the hooks of a run."""
    return [hook for each in capabilities() if (hook := each.hook(started)) is not None]


def make_listeners(job: Job) -> list[Listener]:
    """Return the listeners of a run's record. Raises RecordError."""
    return [listener for each in capabilities() for listener in each.listeners(job)]


def make_stream(job: Job) -> PromptStream | None:
    """Return the stream of prompts that a capability makes, None where none does."""
    return next((stream for each in capabilities() if (stream := each.stream(job)) is not None), None)


def open_workflows(job: Job, say: Callable[[str], None], logs: Path) -> AbstractAsyncContextManager[OpenWorkflows]:
    """Return the factory of a run's workflows as a context, which holds their processes."""
    found = (each.workflows(job, say, logs) for each in capabilities())
    return next((own for own in found if own is not None), nullcontext(_single_turns))


def _single_turns(job: Job, pool: ServerPool, score: Score) -> AbstractAsyncContextManager[MakesWorkflows]:
    return nullcontext(SingleTurns(pool, score))


def scores_episodes(config: RunConfig, workflow: str) -> bool:
    """Return whether the section `reward` scores episodes of a workflow."""
    return any(each.scores_episodes(config, workflow) for each in capabilities())


def uses_reference(config: RunConfig) -> bool:
    """Return whether a capability uses the reference of a run."""
    return any(each.uses_reference(config) for each in capabilities())


def served_forms(known: Known) -> dict[str, Form]:
    """Return the forms of the columns that servers return, by their names."""
    return {name: form for each in capabilities() for name, form in each.served(known).items()}


def describe_capabilities(job: Job) -> list[str]:
    """Return the lines of the startup report about capabilities."""
    return [line for each in capabilities() for line in each.describe(job)]
