"""The part in trainer ranks: digests of weights and optimizer state, and the seed. `digests.py` has the same sums.

The controller imports this to name the functions, so torch is imported inside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_like.capabilities.replay.digests import CHUNK, Digest, digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from areal_like.backends.training.base import BaseEngine


def describe_state(engine: BaseEngine) -> dict[str, Any]:
    """Return the seed of a rank, and the digests of its shares of weights and optimizer state, tensor by tensor."""
    import torch

    with engine.state() as state:
        return {"seed": torch.initial_seed(), "parts": {part: digests(tensors) for part, tensors in state.items()}}


def digests(tensors: Sequence[Tensor]) -> list[Digest]:
    """Return the digests of tensors; NumPy is the quicker one in host memory."""
    words = [_words(tensor) for tensor in tensors]
    if all(each.device.type == "cpu" for each in words):
        return [digest(each.numpy()) for each in words]
    return _as_numbers([digest_tensor(each) for each in words])


def name_weights(engine: BaseEngine) -> list[str]:
    """Return the names of the weights, in the order of `describe_state`."""
    return [name for model in engine.models for name, _ in model.named_parameters()]


def digest_tensor(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the two sums of a tensor's bits, on its device, and the number of its words."""
    import torch

    words = _words(tensor)
    mask = (1 << 8 * words.element_size()) - 1
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK].to(torch.int64) & mask
        places = torch.arange(start + 1, start + 1 + len(part), device=words.device)
        sums += torch.stack((part.sum(), (part * places).sum()))
    return sums, len(words)


def _words(tensor: Tensor) -> Tensor:
    import torch
    from torch.distributed.tensor import DTensor

    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().view(-1).view(signed[local.element_size()])


def _as_numbers(found: list[tuple[Tensor, int]]) -> list[Digest]:
    """Return digests as numbers."""
    import torch

    if not found:
        return []
    host = torch.stack([sums.cpu() for sums, _ in found])
    return [Digest(int(sums[0]), int(sums[1]), words) for sums, (_, words) in zip(host, found, strict=True)]
