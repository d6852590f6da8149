"""Checkpoints of model, optimizer and schedule that any other layout can load (Megatron's dist_checkpointing)."""

import queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

# saves are synchronous: Megatron's own queue is a process of 600 MB per rank, which outlives a rank that is killed
filesystem_async.get_write_results_queue = queue.Queue


def save_checkpoint(
    path: Path, models: list[torch.nn.Module], optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
) -> None:
    """Writes the state of all ranks to the directory `path`, which must be empty or new."""
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded_state(models, optimizer, is_loading=False)
    dist_checkpointing.save(state | {"scheduler": scheduler.state_dict()}, str(path))


def load_checkpoint(
    path: Path, models: list[torch.nn.Module], optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler
) -> None:
    """Loads what `save_checkpoint` wrote in any layout. Raises FileNotFoundError when it is not there."""
    if not (path / "metadata.json").exists():
        raise FileNotFoundError(f"{path} holds no trainer checkpoint (it has no metadata.json)")
    state = dist_checkpointing.load(_sharded_state(models, optimizer, is_loading=True), str(path))
    for name, model in zip(_chunk_names(models), models, strict=True):
        model.load_state_dict(state[name], strict=False)  # TE's extra state may be absent
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])


def _sharded_state(models: list[torch.nn.Module], optimizer: MegatronOptimizer, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    reshardable = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    metadata = ensure_metadata_has_dp_cp_group(reshardable)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.init_state_fn(part.optimizer, part.config)  # for a run whose steps were all skipped there is none yet
    for name, model in zip(_chunk_names(models), models, strict=True):
        state[name] = model.sharded_state_dict(metadata=metadata)
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


_gather_state = DistributedOptimizer.get_parameter_state_dp_zero


def _gather_state_with_gaps(self: DistributedOptimizer, **kwargs: Any) -> Any:
    """The distributed optimizer's state with the padding that ends each bucket.

    megatron-core 0.19.2 leaves it out but then looks for parameters where they are with it, so that everything behind
    a bucket of odd length, such as a tied embedding's, is saved shifted (`get_parameter_state_dp_zero`,
    `sharded_param_state_fully_reshardable`).
    """
    state = _gather_state(self, **kwargs)
    for number, buffer in enumerate(self.buffers):
        for tensors in state[number].values():
            for name in [name for name, value in tensors.items() if torch.is_tensor(value)]:
                padded, at = torch.zeros(buffer.numel), 0
                for bucket in buffer.buckets:
                    end = at + bucket.numel_unpadded
                    padded[bucket.offset : bucket.offset + bucket.numel_unpadded] = tensors[name][at:end]
                    at = end
                tensors[name] = padded
    return state


DistributedOptimizer.get_parameter_state_dp_zero = _gather_state_with_gaps


def _chunk_names(models: list[torch.nn.Module]) -> list[str]:
    return ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
