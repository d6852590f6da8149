"""A teacher that follows the policy: every few steps its servers load the weights of the actor or the reference."""

import asyncio
import shutil
from pathlib import Path

from areal_like.config.schema import RunConfig
from areal_like.rollout.teacher import Teacher
from areal_like.trainer.remote import Trainer


class MovingTeacher:
    """Updates the servers of `teacher` from a trainer, through a checkpoint below `directory`, which every host sees.

    `every` is the number of training steps between updates.
    """

    def __init__(self, config: RunConfig, every: int, teacher: Teacher, trainer: Trainer, directory: Path) -> None:
        self._timeout_s, self._every = config.weight_update.timeout_s, every
        self._teacher, self._trainer, self._path = teacher, trainer, directory / "teacher"

    def due(self, step: int) -> bool:
        """Return whether the teacher is updated after this training step, counted from 1."""
        return step % self._every == 0

    async def follow(self, step: int) -> None:
        """Update the teacher if it is due after this training step."""
        if self.due(step):
            await self.update()

    async def update(self) -> None:
        """Give the teacher the trainer's weights."""
        try:
            await self._trainer.save_hf(self._path, phase="saving for the teacher")
            await self._teacher.load(self._path, self._timeout_s)
        finally:
            await asyncio.to_thread(shutil.rmtree, self._path, ignore_errors=True)
