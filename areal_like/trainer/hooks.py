"""The moments of an engine at which capabilities act: `engine.py` of a folder has a function `make_engine_hook`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_like.algorithms.losses import LossInputs
from areal_like.registry import find_modules
from areal_like.trainer.device_batch import DeviceBatch
from areal_like.trainer.engine import EngineSpec
from areal_like.types import Batch


@dataclass(frozen=True)
class BuiltModel:
    """A rank's model with its weights: `models` are its parts, of which a virtual pipeline has several."""

    spec: EngineSpec
    models: Sequence[torch.nn.Module]
    device: torch.device


class EngineHook:
    """A part of an engine that a capability adds; it overrides what it needs. Every rank makes the same calls."""

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return a batch before it is packed; raise ValueError for one that the model cannot compute."""
        return batch

    def during_pass(self) -> AbstractContextManager[None]:
        """Return the context of all micro-batches of a batch, forward and backward."""
        return nullcontext()

    def prepare_forward(self, model: torch.nn.Module, micro_batch: DeviceBatch, *, trains: bool) -> None:
        """Act before one of `models` computes a micro-batch; `trains`: a backward pass follows."""

    def loss_terms(self, inputs: LossInputs, micro_batch: DeviceBatch) -> Mapping[str, Tensor]:
        """Return further terms of the loss `[n]` of a micro-batch's tokens, by the names of their statistics."""
        return {}


class EngineHooks:
    """All hooks of an engine."""

    def __init__(self, built: BuiltModel) -> None:
        made = (module.make_engine_hook(built) for _, module in find_modules("engine"))
        self._hooks: list[EngineHook] = [hook for hook in made if hook is not None]

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return a batch as all hooks prepare it."""
        for hook in self._hooks:
            batch = hook.prepare_batch(batch)
        return batch

    @contextmanager
    def during_pass(self) -> Iterator[None]:
        """Enter the context of every hook."""
        with ExitStack() as stack:
            for hook in self._hooks:
                stack.enter_context(hook.during_pass())
            yield

    def prepare_forward(self, model: torch.nn.Module, micro_batch: DeviceBatch, *, trains: bool) -> None:
        """Prepare every hook for a micro-batch."""
        for hook in self._hooks:
            hook.prepare_forward(model, micro_batch, trains=trains)

    def loss_terms(self, inputs: LossInputs, micro_batch: DeviceBatch) -> dict[str, Tensor]:
        """Return the terms of all hooks."""
        return {name: term for hook in self._hooks for name, term in hook.loss_terms(inputs, micro_batch).items()}
