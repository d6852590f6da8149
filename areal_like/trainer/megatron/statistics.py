"""Means over all tokens that a step trained on, known to every rank."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def means(parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, float]:
    """From each micro-batch's sums to global means; `parts` is [] except on the last pipeline stage.

    Every part has `loss_tokens`, the number of tokens behind its sums, which is not 0 everywhere.
    """
    result: list[dict[str, float]] = [{}]
    if parts:
        names = list(parts[0])
        sums = torch.stack([sum(part[name] for part in parts).double() for name in names]).to(device)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        totals = dict(zip(names, sums.tolist(), strict=True))
        count = totals.pop("loss_tokens")
        result = [{name: total / count for name, total in totals.items()} | {"loss_tokens": count}]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(result, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return result[0]
