"""Means over all tokens that a step trained on, known to every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def means(parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, float]:
    """From each micro-batch's sums to global means; `parts` is [] except on the last pipeline stage.

    Every part has `loss_tokens`, the number of tokens behind its sums. Raises ValueError when that is 0 everywhere.
    """
    result: list[dict[str, float] | None] = [None]
    if parts:
        names = list(parts[0])
        sums = torch.stack([sum(part[name] for part in parts).double() for name in names]).to(device)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        totals = dict(zip(names, sums.tolist(), strict=True))
        count = totals.pop("loss_tokens")
        result = [{name: total / max(count, 1) for name, total in totals.items()} | {"loss_tokens": count}]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(result, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    assert result[0] is not None
    if result[0]["loss_tokens"] == 0:
        raise ValueError("no token of the batch is trained on: loss_mask is 0 wherever a token can be predicted")
    return result[0]
