"""Several adapters of one model: the values, optimizer state and schedule of each, one of them in use at a time."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from areal_like.backends.fsdp import optimizer


@dataclass
class _ShardedAdapter:
    """State of an adapter while another one is in use; `values` are this rank's shards of its matrices."""

    values: Sequence[Tensor]
    optimizer: defaultdict[Tensor, dict[str, Any]]
    schedule: dict[str, Any]
    scale: dict[str, Any]
    skipped: int = 0  # steps in a row


@dataclass(eq=False)
class FSDPAdapterStates:
    """The adapters of an engine by name, which all begin with the present values of its trained parameters.

    The adapter in use is in the parameters, the optimizer, its schedule and the loss scale; `select` exchanges it.
    """

    names: Sequence[str]
    parameters: Sequence[torch.nn.Parameter]
    optimizer: AdamW
    schedule: LambdaLR
    scaler: GradScaler
    in_use: str = field(init=False)
    _others: dict[str, _ShardedAdapter] = field(init=False)

    def __post_init__(self) -> None:
        self.in_use, *others = self.names
        self._others = {
            name: _ShardedAdapter([shard.clone() for shard in self._shards()], defaultdict(dict), *self._place())
            for name in others
        }

    def select(self, name: str, skipped: int) -> int:
        """Switch to another adapter; set and return the number of consecutive skipped steps. Raises KeyError."""
        if name == self.in_use:
            return skipped
        coming = self._others.pop(name)
        self._others[self.in_use] = _ShardedAdapter(coming.values, self.optimizer.state, *self._place(), skipped)
        with torch.no_grad():
            for shard, value in zip(self._shards(), coming.values, strict=True):
                before = shard.clone()
                shard.copy_(value)
                value.copy_(before)  # the memory of the adapter that leaves
        self.in_use, self.optimizer.state = name, coming.optimizer
        self.schedule.load_state_dict({**coming.schedule, "lr_lambdas": [None] * len(self.optimizer.param_groups)})
        optimizer.set_rates(self.schedule)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(coming.scale)
        return coming.skipped

    def values(self) -> Iterator[Tensor]:
        """Return the matrices of the adapters that are not in use."""
        return (value for other in self._others.values() for value in other.values)

    def states(self) -> Iterator[dict[str, Any]]:
        """Return the optimizer state of each matrix of the adapters that are not in use."""
        return (state for other in self._others.values() for state in other.optimizer.values())

    def _place(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state of the schedule and of the loss scale."""
        schedule = {name: value for name, value in self.schedule.state_dict().items() if name != "lr_lambdas"}
        return schedule, self.scaler.state_dict()

    def _shards(self) -> list[Tensor]:
        with torch.no_grad():
            return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in self.parameters]
