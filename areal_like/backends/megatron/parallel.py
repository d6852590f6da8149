"""The process group and Megatron's parallel state of one rank."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from areal_like.backends.training.means import global_means
from areal_like.backends.training.process import join
from areal_like.core.trainer.engine import Rendezvous

if TYPE_CHECKING:
    from allocation.plan import ParallelSizes

ORDER = "tp-cp-ep-dp-pp"


def initialize(rendezvous: Rendezvous, sizes: ParallelSizes, device: torch.device, seed: int) -> None:
    """Join the process group and build Megatron's grids: dense over tp, cp, dp, pp; experts over etp, ep, edp, pp.

    Raises ValueError if the number of ranks does not fit `sizes`, and torch.distributed's errors, which name the rank,
    if a rank does not join in time.
    """
    world_size = sizes.tp * sizes.cp * sizes.dp * sizes.pp
    if rendezvous.world_size != world_size:
        raise ValueError(f"the layout takes {world_size} ranks, but {rendezvous.world_size} were started")
    join(rendezvous, device)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        order=ORDER,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(rendezvous.timeout_s / 60)),
    )
    torch.manual_seed(seed)  # Megatron seeds the generators of GPUs alone
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def shutdown() -> None:
    """Destroy all process groups; gloo's threads end with the last reference to a group, so release models first."""
    parallel_state.destroy_model_parallel()
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # not reset by Megatron
    destroy_moe_metrics_tracker()  # refers to groups, too
    RotaryEmbedding.forward.cache_clear()
    dist.destroy_process_group()
    gc.collect()


def forget_last_pass(models: Iterable[torch.nn.Module]) -> None:
    """Free the experts' data of their last forward pass.

    Its autograd graph is invisible to Python's collector, and keeps the model and its process groups alive through
    hooks of parameters.
    """
    for module in (module for model in models for module in model.modules() if isinstance(module, MoELayer)):
        vars(module.token_dispatcher).clear()


def wait_for_weights(layer: torch.nn.Module) -> None:
    """Wait for a layer's weights if ranks still gather them (`overlap_param_gather`), like a call of the layer.

    Megatron-core 0.19 waits in hooks before a module's `forward` (`core/distributed/distributed_data_parallel.py`).
    """
    for hook in layer._forward_pre_hooks.values():
        hook(layer, ())


def is_data_source() -> bool:
    """Return whether this rank's outputs count: the last pipeline stage's first tensor-parallel rank."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def sum_over_context(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks that share each sequence, differentiable; all of them must call it."""
    group = parallel_state.get_context_parallel_group()
    return all_reduce(tensor, group=group) if group.size() > 1 else tensor


def means(parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, float]:
    """Return the means over all trained tokens of a step on every rank; `parts` is [] except on the last stage."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    result = [global_means(parts, device, group) if parts else {}]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(result, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return result[0]
