"""What a training backend does for one rank, and how a rank gets one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_like.trainer.rendezvous import Rendezvous
from areal_like.types import Batch, Floats, LossSpec

if TYPE_CHECKING:
    from torch import Tensor

    from allocation import ParallelSizes
    from areal_like.config.schema import ActorConfig


class TrainEngine(Protocol):
    """One rank of a model that is trained.

    Every rank calls every method, in the same order and with the same arguments, and finds its own share of a batch.
    """

    def log_probs(self, batch: Batch, temperature: float = 1.0) -> tuple[NDArray[np.int64], Floats] | None:
        """Log-probs of all tokens but each sequence's first: places in `batch.tokens` and values, `[tokens]`.

        None where another rank gives the same. Together the results cover the batch.
        """

    def train(
        self, batch: Batch, loss: LossSpec, *, temperature: float = 1.0, learning_rate: float | None = None
    ) -> dict[str, float]:
        """One optimizer step on the loss's mean over the tokens of the whole batch whose `loss_mask` is 1.

        Returns `loss`, `grad_norm`, `lr`, `loss_tokens` and the mean of each statistic of the loss, the same on every
        rank. `learning_rate` replaces the schedule's, in which the step then does not count.
        """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, whole, under their Hugging Face names, in the same order on every rank; rank 0's values count.

        Tensors may share the model's memory: use each before the next training step.
        """

    def save_hf(self, path: Path) -> None:
        """Write a Hugging Face checkpoint that transformers loads; it appears when it is complete."""

    def save(self, path: Path) -> None:
        """Write model, optimizer and schedule to the directory `path`; any layout can load it."""

    def load(self, path: Path) -> None:
        """Continue from what `save` wrote. Raises FileNotFoundError when nothing is there."""

    def shutdown(self) -> None:
        """Leave the other ranks."""


@dataclass(frozen=True)
class EngineSpec:
    """Everything about an engine that all of its ranks have in common.

    `path` is the model in Hugging Face form, `tokenizer` and `scratch` are `write_checkpoint`'s directories;
    `total_steps` is the number of optimizer steps that the learning-rate schedule spans.
    """

    backend: str
    actor: ActorConfig
    path: Path
    tokenizer: Path | None
    scratch: Path | None
    sizes: ParallelSizes
    device: Literal["cpu", "cuda"]
    seed: int
    total_steps: int | None


def make_engine(spec: EngineSpec, rendezvous: Rendezvous, listener: socket | None) -> TrainEngine:
    """Join the other ranks and build this rank's part; `listener` is rank 0's socket at the rendezvous.

    Raises ValueError for a backend that nobody wrote.
    """
    if spec.backend != "megatron":
        raise ValueError(f"no trainer runs on {spec.backend}; megatron is the one there is")
    from areal_like.trainer.megatron.engine import MegatronEngine

    return MegatronEngine(
        spec.actor,
        spec.path,
        spec.sizes,
        rendezvous,
        device=spec.device,
        seed=spec.seed,
        total_steps=spec.total_steps,
        tokenizer=spec.tokenizer,
        scratch=spec.scratch,
        listener=listener,
    )
