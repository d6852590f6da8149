"""The reference policy: log-probs of a model that is frozen, or slowly follows the actor."""

import asyncio
import shutil
from pathlib import Path

from areal_like.core.config.schema import ReferenceConfig
from areal_like.core.trainer.remote import Trainer
from areal_like.core.types import Batch, Floats


class Reference:
    """A trainer without optimizer that receives weights from the actor's trainer, in any two layouts.

    The weights are sent as a checkpoint below `directory`, which every host can read. If `trainer` is the actor's, the
    reference is the actor without its adapters, which never changes.
    """

    def __init__(self, config: ReferenceConfig, trainer: Trainer, actor: Trainer, directory: Path) -> None:
        self._config, self._trainer, self._actor = config, trainer, actor
        self._path = directory / "reference"

    async def log_probs(self, batch: Batch, temperature: float) -> Floats:
        """Return log-probs of the batch's tokens, `[tokens]`, 0 where `loss_mask` is 0."""
        own = batch.drop("input")
        if self._trainer is self._actor:
            return await self._actor.log_probs(own, temperature, adapted=False)
        return await self._trainer.log_probs(own, temperature)

    def due(self, step: int) -> bool:
        """Return whether the reference is updated after this training step, counted from 1."""
        every = self._config.update_every_steps
        return every is not None and step % every == 0

    async def update(self, *, decay: float | None = None) -> None:
        """Average the reference with the actor; `decay` is the reference's share, by default `ref.ema_decay`."""
        await self._actor.save_hf(self._path, phase="saving for the reference")
        await self._trainer.load_hf(self._path, self._config.ema_decay if decay is None else decay)
        await asyncio.to_thread(shutil.rmtree, self._path)
