"""Checksums of the weights that a server received, against the trainer's (`weight_update.checksum`).

Both sides add up the tensors under their Hugging Face names, each on the device that it is on: a server as they come
into SGLang's `load_weights`, over any transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_AT_ONCE = 1 << 24  # numbers; sums are made of them as 64-bit integers
_PERIOD = 65521  # after which weights of the sum recur; a prime, so that rows of a matrix do not change places unseen


def checksum(tensor: Tensor) -> Tensor:
    """Return a sum of a tensor's bits, each place with its own weight, as a 64-bit integer on its device."""
    numbers = tensor.detach().contiguous().flatten()
    bits = numbers.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _AT_ONCE):
        part = bits[start : start + _AT_ONCE].long()
        places = torch.arange(start, start + len(part), device=bits.device) % _PERIOD + 1
        total += (part * places).sum()
    return total


def numbers(checksums: Mapping[str, Tensor]) -> dict[str, int]:
    """Return checksums on the host, waiting for a device once."""
    values = torch.stack(list(checksums.values())).tolist() if checksums else []
    return dict(zip(checksums, values, strict=True))


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
