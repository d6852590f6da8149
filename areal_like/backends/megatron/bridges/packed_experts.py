"""Experts of a layer as a checkpoint of Qwen3-VL packs them: transposed, in one tensor; bridges have each by itself."""

import re
from collections.abc import Iterable, Iterator

from torch import Tensor

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


def unpacked_names(packed: str, experts: int) -> Iterator[str]:
    """Yield the names of each expert's matrices in a packed tensor."""
    before, _, name = packed.rpartition(".")
    for number in range(experts):
        for part in ("gate", "up") if name == _GATE_UP else ("down",):
            yield f"{before}.{number}.{part}_proj.weight"


def find_packed(name: str) -> tuple[str, int, str] | None:
    """Return the packed tensor, the number and the part (gate, up or down) of an expert's matrix; None for others."""
    if (found := _EXPERT.fullmatch(name)) is None:
        return None
    before, number, part = found.groups()
    return f"{before}.{_DOWN if part == 'down' else _GATE_UP}", int(number), part


def part_of(matrix: Tensor, part: str) -> Tensor:
    """Return a part of an expert's packed matrix `[in, out]`; gate and up are its halves. Shares its memory."""
    return matrix if part == "down" else matrix.chunk(2, dim=-1)[part == "up"]


def pack(weights: Iterable[tuple[str, Tensor]], experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in order, and a layer's `experts` as one tensor when all of them have arrived."""
    partial: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for name, weight in weights:
        found = find_packed(name)
        if found is None:
            yield name, weight
            continue
        packed, number, part = found
        if packed not in partial:
            halves = 1 if part == "down" else 2
            partial[packed] = weight.new_empty(experts, weight.shape[1], halves * weight.shape[0])
            missing[packed] = halves * experts
        part_of(partial[packed][number], part).copy_(weight.T)
        missing[packed] -= 1
        if not missing[packed]:
            yield packed, partial.pop(packed)
