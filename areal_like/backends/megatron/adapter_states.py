"""Several adapters of one model: the values, optimizer state and schedule of each, one of them in use at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, UntypedStorage

from areal_like.backends.megatron import optimizer as megatron_optimizer
from areal_like.backends.megatron.checkpoint import create_state
from areal_like.backends.megatron.optimizer import gather_weights, loss_scale, parts, set_loss_scale
from areal_like.backends.training.offload import bytes_of


@dataclass
class _Adapter:
    """State of an adapter while another one is in use: the bytes that training changes, and its counts."""

    params: list[Tensor]
    states: list[Tensor]
    steps: list[int | None]  # of the optimizer's groups; None before the first one
    scheduled: int
    scale: Mapping[str, Any] | None
    skipped: int = 0  # steps in a row


class MegatronAdapterStates:
    """The adapters of an engine by name, which all begin with the present values of its trained parameters.

    The adapter in use is in the model, the optimizer, its schedule and the loss scale; `select` exchanges it.
    """

    def __init__(
        self,
        names: Sequence[str],
        models: list[torch.nn.Module],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self._models, self._optimizer, self._scheduler = models, optimizer, scheduler
        for part in parts(optimizer):
            create_state(part)
        self._in_use, *others = names
        self._others = {name: self._copy() for name in others}

    def select(self, name: str, skipped: int) -> int:
        """Use another adapter; take and return the steps that each has skipped in a row. Raises KeyError."""
        if name == self._in_use:
            return skipped
        gather_weights(self._models)
        coming, (params, states) = self._others.pop(name), self._storages()
        leaving = _Adapter(coming.params, coming.states, *self._counts(), skipped)
        for storage, values in zip([*params, *states], [*coming.params, *coming.states], strict=True):
            before = bytes_of(storage).clone()
            bytes_of(storage).copy_(values)
            values.copy_(before)  # the memory of the adapter that leaves
        self._others[self._in_use], self._in_use = leaving, name
        for group, steps in zip(self._groups(), coming.steps, strict=True):
            group.pop("step", None)
            group |= {} if steps is None else {"step": steps}
        self._scheduler.num_steps = 0
        self._scheduler.step(coming.scheduled)
        if coming.scale is not None:
            set_loss_scale(self._optimizer, coming.scale)
        return coming.skipped

    def params(self) -> Iterator[Tensor]:
        """Return the values of the adapters that are not in use."""
        return (values for other in self._others.values() for values in other.params)

    def states(self) -> Iterator[Tensor]:
        """Return the optimizer state of the adapters that are not in use."""
        return (values for other in self._others.values() for values in other.states)

    def _copy(self) -> _Adapter:
        params, states = ([bytes_of(storage).clone() for storage in storages] for storages in self._storages())
        return _Adapter(params, states, *self._counts())

    def _counts(self) -> tuple[list[int | None], int, Mapping[str, Any] | None]:
        """Return the steps of the optimizer and of the schedule, and the loss scale."""
        return [group.get("step") for group in self._groups()], self._scheduler.num_steps, loss_scale(self._optimizer)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in parts(self._optimizer) for group in part.optimizer.param_groups]

    def _storages(self) -> tuple[list[UntypedStorage], list[UntypedStorage]]:
        """Return the memory of the trained parameters, and the optimizer's beside it."""
        trained = (p for model in self._models for p in model.parameters() if p.requires_grad)
        params = dict.fromkeys(tensor.untyped_storage() for tensor in trained)
        tensors = megatron_optimizer.tensors(self._models, self._optimizer)["optimizer"]()
        states = dict.fromkeys(tensor.untyped_storage() for tensor in tensors)
        return list(params), [storage for storage in states if storage not in params]
