"""Means over all trained tokens of a step, equal on every rank."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from areal_like.backends.training.means import global_means


def means(parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, float]:
    """Return the means of `global_means` on every rank; `parts` is [] except on the last pipeline stage."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    result = [global_means(parts, device, group) if parts else {}]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(result, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return result[0]
