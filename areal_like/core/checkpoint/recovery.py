"""Recovery: the same command resumes a run by a journal of its steps, and checkpoints during training."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from areal_like.core.checkpoint.files import call_disk
from areal_like.core.checkpoint.journal import Journal, RunState, Step
from areal_like.core.checkpoint.store import Store
from areal_like.core.config.schema import RecoverConfig, TrainerRole
from areal_like.core.errors import CheckpointError


class Saves(Protocol):
    """The methods of a trainer that recovery needs; see areal_like/backends/training/remote.py."""

    async def save(self, path: Path) -> None: ...

    async def finish_save(self, timeout_s: float) -> None: ...


@dataclass(eq=False, kw_only=True)
class Recovery:
    """Saves the state of a run; `trained` are its trainers by role, `version` is the run's first version.

    One checkpoint is written at a time. A checkpoint that falls due meanwhile starts after the next step, and `warn`
    reports the delay. A write that takes longer than `recover.timeout_s` ends the run with a CheckpointError.
    """

    config: RecoverConfig
    store: Store
    journal: Journal
    trained: Mapping[TrainerRole, Saves]
    version: int
    warn: Callable[[str], None]
    _began: float = field(default_factory=time.monotonic, init=False)
    _warned: tuple[int, float] | None = field(default=None, init=False)  # step and time of the last warning
    _writing: asyncio.Task[None] | None = field(default=None, init=False)
    _calls: set[asyncio.Task[Any]] = field(default_factory=set, init=False)  # in threads, which cannot be cancelled

    async def note(self, step: Step) -> None:
        """Record a completed training step."""
        async with self._limit(f"the journal's line of step {step.version}", self.config.timeout_s):
            await self._call(self.journal.append, step)

    async def keep(
        self,
        state: RunState,
        tasks: asyncio.TaskGroup,
        *,
        now: bool = False,
        evaluating: asyncio.Task[None] | None,
        record: Callable[[int], Mapping[str, Any]],
    ) -> None:
        """Save a checkpoint of `state` if one is due, or `now`; returns when training may continue.

        A task of `tasks` writes it, after the step's evaluation, so that the Record's own state (`record`) includes the
        result.
        """
        if not (now or self._is_due(state.version, self.version, self._began)):
            return
        if self._writing is not None and state.version == self.version:
            return  # it has its checkpoint, or will have it
        if self._writing is not None and not self._writing.done():
            if not now:
                self._warn_of_skipping(state.version)
                return
            await self._writing
        self._began, self.version, self._warned = time.monotonic(), state.version, None
        start = time.perf_counter()
        async with self._limit(f"the checkpoint of step {state.version}", self._time_left()):
            partial = await self._call(self.store.begin, state.version)
        for role, trainer in self.trained.items():
            await trainer.save(partial / role)
        stood_still = time.perf_counter() - start

        async def write() -> None:
            for trainer in self.trained.values():
                await trainer.finish_save(self._time_left())
            seconds = {"standstill": stood_still, "written": time.perf_counter() - start}
            left = self._time_left()
            if evaluating is not None:
                await asyncio.wait([evaluating])
                evaluating.result()
            async with self._limit(f"the checkpoint of step {state.version}", left):
                whole = replace(state, record=await self._call(record, state.version))
                await self._call(self.store.commit, partial, whole, seconds)

        self._writing = tasks.create_task(write(), name=f"checkpoint {state.version}")

    async def wait_for_write(self) -> None:
        """Wait until the checkpoint in progress is complete; raise CheckpointError if it fails."""
        if self._writing is not None:
            await self._writing

    async def settle(self) -> None:
        """Wait until cancelled calls have stopped writing; raise CheckpointError if one hangs."""
        async with self._limit("the last checkpoint or line of the journal", self.config.timeout_s):
            await asyncio.gather(*self._calls, return_exceptions=True)

    async def _call[T](self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread; when the caller is cancelled, `settle` still waits for it."""
        call = asyncio.ensure_future(call_disk(function, *arguments))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.shield(call)

    def _time_left(self) -> float:
        """Return the seconds that the checkpoint in progress may still take."""
        return max(0.0, self._began + self.config.timeout_s - time.monotonic())

    @asynccontextmanager
    async def _limit(self, what: str, seconds: float) -> AsyncIterator[None]:
        """End the run if the body, which writes `what`, hangs."""
        try:
            async with asyncio.timeout(seconds) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise CheckpointError(late(what, self.store.directory, self.config.timeout_s)) from error

    def _warn_of_skipping(self, version: int) -> None:
        """Report a checkpoint that is due during the write of another, once per due date."""
        if self._is_due(version, *(self._warned or (self.version, self._began))):
            self._warned = version, time.monotonic()
            seconds = time.monotonic() - self._began
            self.warn(
                f"step {version} has no checkpoint: the one of step {self.version} is still being written, for "
                f"{seconds:.0f} s so far; after {self.config.timeout_s:g} s (recover.timeout_s) the run ends"
            )

    def _is_due(self, version: int, since: int, began: float) -> bool:
        steps, seconds = self.config.freq_steps, self.config.freq_secs
        return (steps is not None and version - since >= steps) or (
            seconds is not None and time.monotonic() - began >= seconds
        )


def late(what: str, path: Path, limit_s: float) -> str:
    """Return the message about a write that exceeds its limit."""
    return (
        f"{what} was not written to {path} within {limit_s:g} s (recover.timeout_s): its file system hangs, or is too "
        "slow. Earlier checkpoints are complete. Raise recover.timeout_s if a write may take longer"
    )
