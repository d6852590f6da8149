"""Preserves the state before the first step during a warm-up step."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from areal_like.core.algorithms.losses import LossInputs
from areal_like.core.types import LossSpec


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
