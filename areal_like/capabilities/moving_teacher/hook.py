"""Sends the weights of the policy or the reference to the servers of the teacher."""

import asyncio
import shutil
from pathlib import Path

from areal_like.capabilities.moving_teacher.schema import MovingKeys
from areal_like.capability import Started
from areal_like.core.config.keys import with_keys
from areal_like.core.config.schema import RunConfig
from areal_like.core.hooks import Hook, TrainingStep
from areal_like.core.trainer.remote import Trainer
from areal_like.metrics.record import Record
from areal_like.rewards.teacher import Teacher


class MovingTeacher(Hook):
    """Updates the teacher through a checkpoint below `directory`, which every host sees, every `every` steps.

    A checkpoint of the run does not hold the teacher, so a resumed run begins with an update.
    """

    def __init__(
        self,
        config: RunConfig,
        every: int,
        teacher: Teacher,
        trainer: Trainer,
        directory: Path,
        record: Record,
        *,
        resumed: bool,
    ) -> None:
        self._timeout_s, self._every = config.weight_update.timeout_s, every
        self._teacher, self._trainer, self._path = teacher, trainer, directory / "teacher"
        self._record, self._resumed = record, resumed

    async def start(self) -> None:
        """Give the teacher of a resumed run the trainer's weights."""
        if self._resumed:
            await self.update()

    async def after_publish(self, step: TrainingStep) -> None:
        """Update the teacher if it is due after this step."""
        if step.done % self._every == 0:
            with self._record.phase("teacher update"):
                await self.update()

    async def update(self) -> None:
        """Give the teacher the trainer's weights."""
        try:
            await self._trainer.save_hf(self._path, phase="saving for the teacher")
            await self._teacher.load(self._path, self._timeout_s)
        finally:
            await asyncio.to_thread(shutil.rmtree, self._path, ignore_errors=True)


def make_hook(run: Started) -> MovingTeacher | None:
    """Return the hook that updates the teacher, None if the teacher is fixed, or is the policy itself."""
    section = run.job.config.teacher
    if run.teacher is None or section is None or not section.is_served:
        return None
    keys = with_keys(section, MovingKeys)
    if keys.update_every_steps is None:
        return None
    trainer, resumed = run.trainers[keys.follows], run.resumed is not None
    about = (run.job.config, keys.update_every_steps, run.teacher, trainer, run.shared_dir, run.record)
    return MovingTeacher(*about, resumed=resumed)
