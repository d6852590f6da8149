"""The interface of a training backend on one rank, and its specification. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_like.core.config.schema.actor import ALL_LINEAR
from areal_like.core.types import Batch, Floats, LossSpec

if TYPE_CHECKING:
    from torch import Tensor

    from allocation.model_spec import ModelSpec
    from allocation.plan import ParallelSizes
    from areal_like.core.config.schema.trainer import EngineConfig, OptimizerConfig, TrainerRole


type Part = Literal["params", "grads", "optimizer"]
PARTS: tuple[Part, ...] = ("params", "grads", "optimizer")


class NonFiniteError(ArithmeticError):
    """Loss or gradient norm was inf or nan in too many steps in a row; the weights come from the last good one."""


class RoleError(ValueError):
    """The engine's role does not support the call, such as the values of an actor."""


class TrainEngine(Protocol):
    """One rank of an actor, a critic or a reference.

    Every rank calls every method, in the same order and with the same arguments, and finds its own share of a batch.
    """

    def log_probs(
        self, batch: Batch, temperature: float = 1.0, adapted: bool = True
    ) -> tuple[NDArray[np.int64], Floats] | None:
        """Return places in `batch.tokens` and the log-probs there: of tokens with `loss_mask` 1, or without it of all.

        The batch's columns of labels and sampling describe the probabilities (`columns.Use`).

        A sequence's first token has no log-prob. Returns None on ranks whose results another rank returns; together the
        results cover the batch. `adapted=False` computes the model without its adapters. Raises RoleError for a critic.
        """

    def values(self, batch: Batch) -> tuple[NDArray[np.int64], Floats] | None:
        """Return a critic's values of all tokens, as `log_probs` does: the one at t is made before t, from t - 1.

        Raises RoleError for other roles.
        """

    def train(
        self, batch: Batch, loss: LossSpec, temperature: float = 1.0, learning_rate: float | None = None
    ) -> dict[str, float]:
        """Make one optimizer step on the batch, the loss averaged over tokens with `loss_mask` 1 (`loss_weights`).

        Returns `loss`, `grad_norm`, `lr`, `loss_tokens`, `skipped` and the mean of each statistic of the loss, the same
        on every rank. `learning_rate` replaces the schedule's for this step, which then does not count in the schedule.
        A step whose gradient norm is inf or nan is skipped: `skipped` is 1, weights, optimizer and schedule
        stay as they are. The loss gets an actor's log-probs or a critic's values. Raises RoleError for a reference,
        ValueError when no token is trained on, and NonFiniteError when more than `max_skipped_steps` of the role's
        optimizer in a row are skipped.
        """

    def warm_up(self, batch: Batch) -> None:
        """Run the passes of a training step without its update, so that its kernels are compiled.

        `batch` needs a `loss_mask` alone. Nothing is changed: steps that follow give the same to the last bit.
        """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return all weights, whole on every rank, under their Hugging Face names and in the same order.

        Tensors may share the model's memory: use each before the next training step.
        """

    def save_hf(self, path: Path) -> None:
        """Write a Hugging Face checkpoint that transformers loads; it appears when it is complete.

        It is the whole model, an adapter added to the weight that it adapts.
        """

    def select(self, adapter: str) -> None:
        """Use this adapter of `spec.adapters` in all later calls, with its own optimizer state and schedule.

        Raises RoleError for an engine without it. `save` and `load` include all of them.
        """

    def save_adapters(self, path: Path) -> None:
        """Write the adapters as PEFT does; they appear when they are complete. Raises RoleError without adapters."""

    def load_hf(self, path: Path, decay: float) -> None:
        """Load the weights of a Hugging Face checkpoint; the present weights keep the share `decay`.

        Raises RoleError for a role with an optimizer, which would continue from the present ones.
        """

    def save(self, path: Path) -> None:
        """Start writing model, optimizer and schedule to the directory `path`; any layout can load them.

        The state is in host memory or on disk when this returns; training may continue. A reference has weights only.
        """

    def is_saved(self) -> bool:
        """Return whether this rank has written its share. Raises OSError if writing failed, as on a full disk."""

    def finish_save(self) -> None:
        """Wait for all ranks' shares and complete the checkpoint. Raises OSError as `is_saved`."""

    def load(self, path: Path) -> None:
        """Load a checkpoint of `save`. Raises FileNotFoundError if `path` has no checkpoint."""

    def offload(self, parts: Collection[Part] = PARTS) -> None:
        """Move parts of the engine from its device to host memory; gradients, which no call leaves behind, are freed.

        A call that needs an offloaded part has it on the device until it returns, `weights` until its iterator ends.
        """

    def onload(self, parts: Collection[Part] = PARTS) -> None:
        """Move parts back to the device, except parts that stay in host memory between calls (`spec.resting`)."""

    def shutdown(self) -> None:
        """Leave the other ranks; the engine cannot be used afterwards."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters: the only parameters that are trained, in the linear layers `targets` (`actor.target_modules`).

    A layer W becomes W + alpha / rank * B A, with A `[rank, in]` and B `[out, rank]` (Hu et al., arXiv 2106.09685).
    """

    rank: int
    alpha: int
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.alpha / self.rank

    def adapts(self, layer: str) -> bool:
        """Return whether a linear layer, by its Hugging Face name, gets an adapter."""
        return ALL_LINEAR in self.targets or layer.rpartition(".")[2] in self.targets


@dataclass(frozen=True)
class EngineSpec:
    """Everything about an engine that all of its ranks have in common.

    `config` is the section of `role`, complete; without an `optimizer` nothing is trained, and no memory is taken for
    it; with `lora` its adapters alone are trained, with `adapters` one independent set of them for each of these names.
    `path` is the model in Hugging Face form, `tokenizer` and `scratch` are `write_checkpoint`'s directories;
    `total_steps` is the number of optimizer steps that the learning-rate schedule spans; `weights` is a Megatron
    checkpoint that has the weights in the place of `path`; `shape` is the model's, by which micro-batches are balanced,
    None where its files were not there before the start. `copy_bytes` limit the copy that
    a checkpoint is written from, None: they do not.
    """

    role: TrainerRole
    config: EngineConfig
    optimizer: OptimizerConfig | None
    path: Path
    sizes: ParallelSizes
    device: Literal["cpu", "cuda"]
    seed: int
    total_steps: int | None = None
    tokenizer: Path | None = None
    scratch: Path | None = None
    backend: str = "megatron"
    lora: LoRA | None = None
    weights: Path | None = None
    adapters: tuple[str, ...] = ()
    shape: ModelSpec | None = None
    copy_bytes: int | None = None

    @property
    def resting(self) -> tuple[Part, ...]:
        """The parts that stay in host memory between calls that need them."""
        megatron, by_part = self.config.megatron, self.backend == "megatron"
        keys = (megatron.param_offload, megatron.grad_offload, megatron.optimizer_offload)
        chosen = (part for part, key in zip(PARTS, keys, strict=True) if self.config.offload or (key and by_part))
        return tuple(part for part in chosen if part == "params" or self.optimizer is not None)

    @property
    def trains_mtp(self) -> bool:
        """Whether the layer for multi-token prediction is part of the model."""
        return self.role == "actor" and self.backend == "megatron" and self.config.megatron.train_mtp_layers


@dataclass(frozen=True)
class Rendezvous:
    """Meeting point of an engine's ranks: rank 0 serves a store at (address, port); all calls end within `timeout_s`.

    `listener` is rank 0's socket there, where no other process listens (`runtime.ports.listen`).
    """

    rank: int
    world_size: int
    address: str
    port: int
    timeout_s: float = 600.0
    listener: socket | None = None
