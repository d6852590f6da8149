"""Means over all tokens that a step trained on."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def global_means(
    parts: Sequence[Mapping[str, Tensor]], device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Return means over a group's trained tokens from sums of each micro-batch.

    Every part has `loss_tokens`, the number of tokens behind its sums, which is not 0 everywhere.
    """
    names = list(parts[0])
    sums = torch.stack([sum(part[name] for part in parts).double() for name in names]).to(device)
    dist.all_reduce(sums, group=group)
    totals = dict(zip(names, sums.tolist(), strict=True))
    count = totals.pop("loss_tokens")
    return {name: total / count for name, total in totals.items()} | {"loss_tokens": count}
