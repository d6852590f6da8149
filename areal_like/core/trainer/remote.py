"""The controller's handle of a trainer, whose ranks are Ray actors, and the reference policy, which is one."""

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from areal_like.core.config.schema import ReferenceConfig
from areal_like.core.errors import CheckpointError
from areal_like.core.trainer.engine import PARTS, Part
from areal_like.core.types import Batch, Floats, LossSpec

CHECKPOINT = "checkpoint"  # the phase's name in errors
SAVED_POLL_S = 0.2


class Ranks(Protocol):
    """The processes of a trainer, one for each rank; the first failure ends a call."""

    @property
    def role(self) -> str:
        """The trainer's name, such as `actor`."""

    async def call_all(
        self, method: str, *arguments: Any, phase: str, timeout: float | None = None, cancels: bool = False
    ) -> list[Any]:
        """Call a method in every process; return the results in rank order."""


class Trainer:
    """All ranks of one trainer. Every rank receives the same call; their results are assembled here.

    With the name of an `adapter`, calls use this one of the trainer's adapters. `trained` counts the optimizer steps.
    """

    def __init__(self, ranks: Ranks, adapter: str | None = None) -> None:
        self._ranks, self._adapter, self.trained = ranks, adapter, 0
        self._saving: Path | None = None

    def using(self, adapter: str) -> "Trainer":
        """Return this trainer, with calls that use one of its adapters."""
        return Trainer(self._ranks, adapter)

    async def _call(self, method: str, *arguments: Any, phase: str, timeout: float | None = None) -> list[Any]:
        """Call a method of every rank's engine."""
        if self._adapter is not None:
            return await self._ranks.call_all(
                "use_adapter", self._adapter, method, *arguments, phase=phase, timeout=timeout
            )
        return await self._ranks.call_all("engine", method, *arguments, phase=phase, timeout=timeout)

    @property
    def ranks(self) -> Ranks:
        """The processes of this trainer."""
        return self._ranks

    async def log_probs(self, batch: Batch, temperature: float, *, adapted: bool = True) -> Floats:
        """Return log-probs of the batch's tokens with the current weights, `[tokens]`, 0 where `loss_mask` is 0.

        With `adapted`, the model includes its adapters, if it has any.
        """
        return await self._per_token("log_probs", batch, temperature, adapted, phase="log-probs")

    async def values(self, batch: Batch) -> Floats:
        """Return a critic's values, `[tokens]`, each computed from earlier tokens; 0 at a sequence's first token."""
        return await self._per_token("values", batch, phase="values")

    async def _per_token(self, method: str, batch: Batch, *arguments: Any, phase: str) -> Floats:
        parts = await self._call(method, batch, *arguments, phase=phase)
        result = np.zeros(len(batch.tokens), np.float32)
        for indices, values in filter(None, parts):
            result[indices] = values
        return result

    async def train(
        self, batch: Batch, loss: LossSpec, temperature: float, learning_rate: float | None = None
    ) -> dict[str, float]:
        """Make one optimizer step on the whole batch; return loss, grad_norm, lr and the loss's own statistics."""
        arguments = (batch, loss, temperature, learning_rate)
        self.trained += 1
        return (await self._call("train", *arguments, phase="training"))[0]

    async def apply(self, function: Callable[..., Any], *arguments: Any, phase: str) -> list[Any]:
        """Call a module's function with each rank's engine and the arguments; return the results in rank order."""
        return await self._ranks.call_all("apply", function, *arguments, phase=phase)

    async def warm_up(self, batch: Batch) -> None:
        """Compile a training step's kernels in a step that changes nothing; `batch` needs only a `loss_mask`."""
        await self._ranks.call_all("engine", "warm_up", batch, phase="warm-up step")

    async def save_hf(self, path: Path, *, phase: str = "saving", timeout_s: float | None = None) -> None:
        """Write a Hugging Face checkpoint that transformers loads."""
        await self._call("save_hf", path, phase=phase, timeout=timeout_s)

    async def save_adapters(self, path: Path, *, phase: str = "saving", timeout_s: float | None = None) -> None:
        """Write the adapters in PEFT's format."""
        await self._call("save_adapters", path, phase=phase, timeout=timeout_s)

    async def load_hf(self, path: Path, decay: float) -> None:
        """Average the current weights, with the share `decay`, and a Hugging Face checkpoint's."""
        await self._ranks.call_all("engine", "load_hf", path, decay, phase="loading")

    async def save(self, path: Path) -> None:
        """Copy model, optimizer and schedule to host memory; the ranks then write them to the directory `path`."""
        self._saving = path
        await self._ranks.call_all("engine", "save", path, phase=CHECKPOINT)

    async def finish_save(self, timeout_s: float) -> None:
        """Wait until the checkpoint of `save` is on disk, without blocking other calls.

        Raises CheckpointError if ranks have not written their shares after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while late := [rank for rank, saved in enumerate(await self._wait_saved()) if not saved]:
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, late))
                raise CheckpointError(
                    f"{self._saving} is not written: {self._ranks.role} rank {ranks} did not end within the time of "
                    "recover.timeout_s. Its file system hangs, or is too slow; earlier checkpoints are complete. Raise "
                    "recover.timeout_s if a write may take longer"
                )
            await asyncio.sleep(SAVED_POLL_S)
        await self._ranks.call_all("engine", "finish_save", phase=CHECKPOINT)

    async def _wait_saved(self) -> list[bool]:
        return await self._ranks.call_all("engine", "is_saved", phase=CHECKPOINT)

    async def load(self, path: Path) -> None:
        """Load a checkpoint of `save`, written in any layout."""
        await self._ranks.call_all("engine", "load", path, phase="loading the checkpoint")

    async def offload(self, parts: Sequence[Part] = PARTS) -> None:
        """Free the device memory of the parts on every rank; they move to host memory."""
        await self._ranks.call_all("engine", "offload", parts, phase="offload")

    async def onload(self, parts: Sequence[Part] = PARTS) -> None:
        """Move the parts back to the device on every rank."""
        await self._ranks.call_all("engine", "onload", parts, phase="onload")

    async def checksums(self, *, timeout_s: float) -> dict[str, int]:
        """Return the checksum of each weight under its Hugging Face name."""
        phase = "weight update (checksums)"
        return (await self._ranks.call_all("checksums", phase=phase, timeout=timeout_s))[0]

    async def transfer(self, step: str, *arguments: Any, timeout_s: float) -> Any:
        """Run one step of the transport's sender on every rank; return rank 0's answer.

        Raises WorkerError, which names the ranks that exceeded the time limit.
        """
        return (await self.transfers(step, *arguments, timeout_s=timeout_s))[0]

    async def transfers(self, step: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """Run a step as `transfer` does; return each rank's answer, in rank order."""
        phase = f"weight update ({step})"
        return await self._ranks.call_all("transfer", step, *arguments, phase=phase, timeout=timeout_s, cancels=True)


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
