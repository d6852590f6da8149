"""What a run does so that the same command can go on with it: a journal of its steps, checkpoints beside training."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from areal_like.checkpoint.journal import Journal, Step
from areal_like.checkpoint.state import RunState
from areal_like.checkpoint.store import Store
from areal_like.config.schema import RecoverConfig, TrainerRole


class Saves(Protocol):
    """A trainer, as far as this is concerned; see areal_like/trainer/remote.py."""

    async def save(self, path: Path) -> None: ...

    async def finish_save(self) -> None: ...


@dataclass(eq=False, kw_only=True)
class Recovery:
    """Keeps a run's place; `trained` are its trainers by role, `version` the one that the run begins with.

    One checkpoint is written at a time: one that is due meanwhile is begun after the next step.
    """

    config: RecoverConfig
    store: Store
    journal: Journal
    trained: Mapping[TrainerRole, Saves]
    version: int
    _began: float = field(default_factory=time.monotonic, init=False)
    _writing: asyncio.Task[None] | None = field(default=None, init=False)

    async def note(self, step: Step) -> None:
        """A training step was made."""
        await asyncio.to_thread(self.journal.append, step)

    async def keep(
        self,
        state: RunState,
        tasks: asyncio.TaskGroup,
        *,
        now: bool = False,
        evaluating: asyncio.Task[None] | None,
        record: Callable[[int], Mapping[str, Any]],
    ) -> None:
        """Make a checkpoint of `state` if one is due, or `now`; returns when training may go on.

        A task of `tasks` writes it. It waits for the step's evaluation, so that the Record's own state (`record`) has
        its result.
        """
        if not (now or self._is_due(state.version)):
            return
        if self._writing is not None and not self._writing.done():
            if not now:
                return
            await self._writing
        self._began, self.version = time.monotonic(), state.version
        start = time.perf_counter()
        partial = await asyncio.to_thread(self.store.begin, state.version)
        for role, trainer in self.trained.items():
            await trainer.save(partial / role)
        stood_still = time.perf_counter() - start

        async def write() -> None:
            for trainer in self.trained.values():
                await trainer.finish_save()
            seconds = {"standstill": stood_still, "written": time.perf_counter() - start}
            if evaluating is not None:
                await asyncio.wait([evaluating])
                evaluating.result()
            whole = replace(state, record=record(state.version))
            await asyncio.to_thread(self.store.commit, partial, whole, seconds)

        self._writing = tasks.create_task(write(), name=f"checkpoint {state.version}")

    def _is_due(self, version: int) -> bool:
        steps, seconds = self.config.freq_steps, self.config.freq_secs
        return (steps is not None and version - self.version >= steps) or (
            seconds is not None and time.monotonic() - self._began >= seconds
        )
