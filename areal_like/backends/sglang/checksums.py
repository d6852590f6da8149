"""Checksums of a server's tensors: of received ones as they come into `load_weights`, over any transport, or of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from areal_like.backends.transports.checksum import checksum, numbers


def note(model: Any, adapter: Mapping[str, Tensor]) -> None:
    """Store the present checksums of a model's parameters and of its `adapter`."""
    tensors = {**dict(model.named_parameters()), **adapter}
    model.noted = numbers({name: checksum(tensor) for name, tensor in tensors.items()})


def compare_noted(model: Any, adapter: Mapping[str, Tensor]) -> None:
    """Raise ValueError if parameters or the `adapter` have changed since `note`."""
    before = model.noted
    note(model, adapter)
    if changed := [name for name, value in model.noted.items() if before.get(name) != value]:
        names = ", ".join(changed[:3])
        raise ValueError(f"{len(changed)} of {len(before)} tensors differ from the trainer's: {names}")


def watch(model: Any) -> None:
    """Record the checksum of all tensors that a model loads from now on."""
    load = model.load_weights if not hasattr(model, "received") else model.load_weights.__wrapped__
    received: dict[str, Tensor] = {}

    def note(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            received[name] = checksum(tensor)
            yield name, tensor

    def load_weights(weights: Iterable[tuple[str, Tensor]], *arguments: Any, **options: Any) -> Any:
        return load(note(weights), *arguments, **options)

    load_weights.__wrapped__ = load  # type: ignore[attr-defined]
    model.load_weights, model.received = load_weights, received


def compare(model: Any, expected: Mapping[str, int]) -> None:
    """Raise ValueError if a watched model did not receive exactly these tensors."""
    received = numbers(model.received)
    wrong = [name for name in expected if received.get(name) != expected[name]]
    wrong += [name for name in received if name not in expected]
    if wrong:
        names = ", ".join(wrong[:3])
        raise ValueError(f"{len(wrong)} of {len(expected)} received tensors differ from the sent ones: {names}")
