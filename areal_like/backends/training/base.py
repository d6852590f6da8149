"""The parts of a TrainEngine that are the same for every backend."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from areal_like.backends.training.hf_checkpoint import save_together
from areal_like.backends.training.lora import Adapter, pause, save_adapters_together
from areal_like.backends.training.offload import DeviceMemory, memory_of
from areal_like.backends.training.process import prepare_process
from areal_like.backends.training.saving import Saving
from areal_like.core.algorithms.losses import LossInputs, Sequences, of_tokens
from areal_like.core.trainer.device_batch import DeviceBatch, DeviceBatches, find_generated
from areal_like.core.trainer.engine import PARTS, EngineSpec, NonFiniteError, Part, RoleError
from areal_like.core.trainer.hooks import BuiltModel, EngineHooks
from areal_like.core.types import TEACHER_IDS, Batch, Floats, LossSpec


def _anything(inputs: LossInputs, parameters: None) -> tuple[Tensor, dict[str, Tensor]]:
    return inputs.logprobs if inputs.values is None else inputs.values, {}


ANYTHING = LossSpec(_anything)  # a loss without fields, for an actor and a critic


def remember_buffers(models: Iterable[torch.nn.Module]) -> Callable[[], None]:
    """Return a function that restores the counters in model buffers (experts' loads and biases)."""
    before = [(buffer, buffer.detach().clone()) for model in models for buffer in model.buffers()]

    @torch.no_grad()
    def put_back() -> None:
        for buffer, value in before:
            buffer.copy_(value)

    return put_back


@contextmanager
def keep_state(models: Iterable[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """Restore torch's random state and the counters in models' buffers after the body."""
    put_back = remember_buffers(models)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    put_back()


LEAST_LOSS_SCALE = 1.0


class BaseEngine(ABC):
    """A TrainEngine without its model: the rules of roles, the order of a training step, memory and checkpoints.

    A backend sets `_models` and, for a trained role, `_optimizer`; then it calls `_add_hooks` and `_manage_memory`.
    """

    _models: list[torch.nn.Module]
    _optimizer: Any = None
    _saving: Saving

    def __init__(self, spec: EngineSpec) -> None:
        self._spec, self._is_critic = spec, spec.role == "critic"
        self.device = prepare_process(spec)
        self._skipped = 0  # steps in a row

    def _add_hooks(self, models: Sequence[torch.nn.Module]) -> None:
        """Make the hooks of capabilities for the modules that compute micro-batches."""
        self._hooks = EngineHooks(BuiltModel(self._spec, models, self.device))

    def _manage_memory(self, tensors: Mapping[Part, Callable[[], Iterable[Tensor]]]) -> None:
        self._memory = DeviceMemory(self.device, tensors, resting=self._spec.resting)
        self._saving_group = dist.new_group(backend="gloo")  # of its own: it is used while others train

    def log_probs(
        self, batch: Batch, temperature: float = 1.0, adapted: bool = True
    ) -> tuple[NDArray[np.int64], Floats] | None:
        if self._is_critic:
            raise RoleError("a critic has values, not log-probs")
        batch = batch if adapted else batch.drop("input")  # as of a reference
        with pause(self._adapted_layers(), not adapted):
            return self._read(batch, find_generated(batch), temperature)

    def values(self, batch: Batch) -> tuple[NDArray[np.int64], Floats] | None:
        if not self._is_critic:
            raise RoleError(f"a critic has values, the {self._spec.role} has log-probs")
        return self._read(batch, np.ones(len(batch.tokens), bool))

    def train(
        self, batch: Batch, loss: LossSpec, temperature: float = 1.0, learning_rate: float | None = None
    ) -> dict[str, float]:
        if self._spec.optimizer is None:
            raise RoleError(f"the {self._spec.role} has no optimizer")
        with self._memory.hold("params", "grads"), self._computing():
            put_back = remember_buffers(self._models)  # with gradients Megatron moves the routers' biases
            parts = self._gradients(batch, loss, temperature)
            with self._memory.hold("optimizer"):
                step = self._step(self._spec.optimizer.max_skipped_steps, learning_rate, put_back)
            return {**self._means(parts), **step}  # read before the step, they would leave the device idle

    def warm_up(self, batch: Batch) -> None:
        with keep_state(self._models, self.device):
            self.values(batch) if self._is_critic else self.log_probs(batch)
            if self._spec.optimizer is not None:
                with self._memory.hold("params", "grads"), self._computing():
                    self._gradients(batch, ANYTHING, 1.0)
                    self._optimizer.zero_grad()

    def save_hf(self, path: Path) -> None:
        save_together(path, self.weights(), self._spec)

    def select(self, adapter: str) -> None:
        if adapter not in self._spec.adapters:
            raise RoleError(f"the {self._spec.role} has no adapter {adapter}")
        with self._memory.hold("params", "optimizer"):
            self._skipped = self._exchange(adapter, self._skipped)

    def save_adapters(self, path: Path) -> None:
        if self._spec.lora is None:
            raise RoleError(f"the {self._spec.role} has no adapters")
        with self._memory.hold("params"), self._computing():
            save_adapters_together(path, self._adapters(), self._spec, self._spec.lora)

    def load_hf(self, path: Path, decay: float) -> None:
        if self._spec.optimizer is not None:
            raise RoleError(f"the {self._spec.role} has an optimizer")
        with self._memory.hold("params"), self._computing():
            self._take_weights(path, decay)

    def is_saved(self) -> bool:
        return self._saving.is_written()

    def finish_save(self) -> None:
        self._saving.finish()
        del self._saving

    def offload(self, parts: Collection[Part] = PARTS) -> None:
        self._memory.offload(parts)

    def onload(self, parts: Collection[Part] = PARTS) -> None:
        self._memory.onload(parts)

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """This rank's parts of the model."""
        return self._models

    @contextmanager
    def state(self) -> Iterator[Mapping[Part, Sequence[Tensor]]]:
        """Yield this rank's tensors of weights and optimizer state; tensors that share weights' memory are left out."""
        with self._memory.hold("params", "optimizer"), self._computing():
            self._complete_weights()
            params, states = (list(self._memory.tensors(part)) for part in ("params", "optimizer"))
            known = {memory_of(tensor) for tensor in params}
            yield {"params": params, "optimizer": [each for each in states if memory_of(each) not in known]}

    def _exchange(self, adapter: str, skipped: int) -> int:
        """Switch to another adapter; set and return the number of consecutive skipped steps."""
        raise RoleError(f"the {self._spec.role} has a single policy")

    def _each_adapter(self) -> Iterator[str]:
        """Yield each of several adapters while it is in use, "" for a single policy."""
        for name in self._spec.adapters:
            self.select(name)
            yield name
        if not self._spec.adapters:
            yield ""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, as TrainEngine does."""

    @abstractmethod
    def _computing(self) -> AbstractContextManager[None]:
        """Return the context of the backend's calls of torch."""

    @abstractmethod
    def _complete_weights(self) -> None:
        """Wait for weights that ranks still gather after a step."""

    @abstractmethod
    def _adapted_layers(self) -> Iterable[torch.nn.Module]:
        """Return this rank's layers with an adapter."""

    @abstractmethod
    def _adapters(self) -> Iterator[tuple[str, Adapter]]:
        """Return all adapters, whole on every rank."""

    @abstractmethod
    def _take_weights(self, path: Path, decay: float) -> None:
        """Take the weights of a Hugging Face checkpoint, with the share `decay` of the present ones."""

    @abstractmethod
    def _micro_batches(self, batch: Batch, wanted: NDArray[np.bool]) -> DeviceBatches:
        """Return this rank's micro-batches, the same in every pass."""

    @abstractmethod
    def _outputs(self, micro_batches: DeviceBatches, temperature: float) -> Sequence[Tensor] | None:
        """Return log-probs or a critic's values of each micro-batch, without gradients; None on ranks without them."""

    @abstractmethod
    def _backward(
        self, micro_batches: DeviceBatches, batch: Batch, loss: LossSpec, temperature: float, trained: int
    ) -> Sequence[Mapping[str, Tensor]]:
        """Compute gradients of the loss over so many trained tokens of the batch; return each micro-batch's sums."""

    @abstractmethod
    def _sum_over_context(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks that share a sequence, with gradient."""

    @abstractmethod
    def _means(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Return the means of loss and statistics over all trained tokens, the same on every rank."""

    @abstractmethod
    def _update(self) -> float:
        """Update the weights if the gradient is finite; return its norm, the same on every rank."""

    @abstractmethod
    def _loss_scale(self) -> float | None:
        """Return the loss scale of the next step, None for data types without one."""

    @abstractmethod
    def _advance_schedule(self) -> None:
        """Set the learning rate of the next step."""

    def _prepare(self, batch: Batch) -> Batch:
        """Return a batch as the model takes it. Only an actor has the columns of inputs, such as images' marks."""
        return self._hooks.prepare_batch(batch if self._spec.role == "actor" else batch.drop("input"))

    def _read(
        self, batch: Batch, wanted: NDArray[np.bool], temperature: float = 1.0
    ) -> tuple[NDArray[np.int64], Floats] | None:
        """Return the log-probs or values of the wanted tokens, without gradients."""
        micro_batches = self._micro_batches(batch, wanted)
        with self._memory.hold("params"), self._computing():
            outputs = self._outputs(micro_batches, temperature)
            return None if outputs is None else (micro_batches.targets, torch.cat(list(outputs)).cpu().numpy())

    def _gradients(self, batch: Batch, loss: LossSpec, temperature: float) -> Sequence[Mapping[str, Tensor]]:
        """Compute gradients of the batch's loss; return sums of each micro-batch for `_means`."""
        trained = batch.fields["loss_mask"] > 0
        trained[np.cumsum(batch.lengths) - batch.lengths] = False  # nothing predicts a sequence's first token
        if not (count := int(trained.sum())):
            raise ValueError("no token of the batch is trained on: loss_mask is 0 wherever a token can be predicted")
        return self._backward(self._micro_batches(batch, trained), batch, loss, temperature, count)

    def _loss(
        self, loss: LossSpec, batch: Batch, micro_batch: DeviceBatch, outputs: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss sum of a micro-batch, and the sums that `_means` needs.

        `outputs` are log-probs and entropies, each `[rows]`, and log-probs of choices `[rows, k]`; or a critic's
        values.
        """
        sequences = Sequences(micro_batch.sequences, len(batch.lengths), self._sum_over_context)
        nothing = outputs[0].new_empty(0)
        inputs = (nothing, nothing) if self._is_critic else (outputs[0], outputs[1])
        values = outputs[0] if self._is_critic else None
        choices = outputs[2] if TEACHER_IDS in micro_batch.of_labels and not self._is_critic else None
        of_loss = LossInputs(*inputs, micro_batch.fields, sequences, values, choices)
        per_token, stats = of_tokens(loss, of_loss)
        for name, term in self._hooks.loss_terms(of_loss, micro_batch).items():
            per_token, stats = per_token + term, {**stats, name: term}
        weights = micro_batch.fields.get("loss_weights")
        total = (per_token if weights is None else per_token * weights).sum()
        sums = {"loss": total.detach(), **{name: value.detach().sum() for name, value in stats.items()}}
        return total, {"loss_tokens": micro_batch.count, **sums}

    def _step(self, limit: int, learning_rate: float | None, put_back: Callable[[], None]) -> dict[str, float]:
        """Update the weights and return the metrics of the step; all ranks have the same numbers and decide alike."""
        groups = self._optimizer.param_groups
        scheduled = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] if learning_rate is None else learning_rate
        lr, scale = float(groups[0]["lr"]), self._loss_scale()
        grad_norm = self._update()
        self._optimizer.zero_grad()
        for group, rate in zip(groups, scheduled, strict=True):
            group["lr"] = rate
        if not (finite := math.isfinite(grad_norm)):
            put_back()
        elif learning_rate is None:
            self._advance_schedule()
        may_pass = (self._loss_scale() or LEAST_LOSS_SCALE) > LEAST_LOSS_SCALE  # at a smaller scale
        self._skipped = 0 if finite or may_pass else self._skipped + 1
        if self._skipped > limit:
            raise NonFiniteError(
                f"the gradient norm is {grad_norm}; more than {limit} steps in a row were skipped "
                f"({self._spec.role}.optimizer.max_skipped_steps)"
            )
        scaled = {} if scale is None else {"loss_scale": scale}
        return {"grad_norm": grad_norm, "lr": lr, "skipped": float(not finite), **scaled}
