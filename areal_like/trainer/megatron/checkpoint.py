"""Checkpoints of model, optimizer and schedule that any other layout can load (Megatron's dist_checkpointing)."""

import queue
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from megatron.core.utils import unwrap_model

from areal_like.trainer.megatron import lora

# Megatron's own queue is a process of 600 MB per rank, which outlives a rank that is killed; threads do without it
filesystem_async.get_write_results_queue = queue.Queue


class Saving:
    """A checkpoint on its way to the directory `path`, which must be empty or new.

    When the constructor returns, this rank's share is in host memory and training may go on; threads write it. A rank
    whose `is_written` is true, or raises the OSError that writing met, waits for the others in `finish`.
    """

    def __init__(
        self,
        path: Path,
        models: list[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
    ) -> None:
        self._path = path
        if dist.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        state = sharded_state(models, optimizer, is_loading=False)
        if scheduler is not None:
            state["scheduler"] = scheduler.state_dict()
        request = dist_checkpointing.save(state, str(path), async_sharded_save=True, async_strategy="mcore")
        self._finalize, self._results, buckets = request.finalize_fns, None, []
        if request.preload_fn is not None:  # this rank has something to write
            transforms, (_, live, self._results) = request.async_fn.args[0], request.async_fn_args
            buckets = _own_copies(live, request.preload_fn())
            write = partial(_write, transforms)
        self._threads = ThreadPoolExecutor(max(1, len(buckets)), thread_name_prefix="checkpoint")
        self._parts = [self._threads.submit(write, number, bucket) for number, bucket in enumerate(buckets)]

    def is_written(self) -> bool:
        """Whether this rank's share is on disk. Raises OSError where it cannot be."""
        done = [part for part in self._parts if part.done()]
        try:
            for part in done:
                part.result()
        except (OSError, RuntimeError) as error:  # torch makes the latter of some of the former
            raise OSError(f"{self._path} cannot be written: {error}") from error
        return len(done) == len(self._parts)

    def finish(self) -> None:
        """Complete the checkpoint when all ranks have written; every rank calls it. Raises OSError."""
        if self._results is not None:
            self._results.put({number: part.result() for number, part in enumerate(self._parts)})
        self._threads.shutdown()
        for function in self._finalize:
            function()


def _own_copies(live: list[Any], loaded: list[Any]) -> list[Any]:
    """Megatron's buckets with tensors that training does not change; those from a GPU are copies already."""
    return [
        (
            file,
            key,
            (
                texts,
                [
                    (item, copy.clone() if tensor.device.type == "cpu" else copy)
                    for (item, copy), (_, tensor) in zip(copies, tensors, strict=True)
                ],
            ),
        )
        for (file, key, (texts, copies)), (_, _, (_, tensors)) in zip(loaded, live, strict=True)
    ]


def _write(transforms: list[Any], number: int, bucket: Any) -> list[Any]:
    """Write a bucket to its file, to disk; Megatron's caller of this drops the cause of a failure."""
    write = filesystem_async.FileSystemWriterAsync.write_preloaded_data
    _, results = write(transforms, number, bucket, None, None, use_fsync=True)
    if isinstance(results, Exception):
        raise results
    return results


def load_checkpoint(
    path: Path,
    models: list[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
) -> None:
    """Loads what `Saving` wrote in any layout. Raises FileNotFoundError when it is not there.

    The place in the learning-rate schedule is loaded, and its shape is the configuration's.
    """
    if not (path / "metadata.json").exists():
        raise FileNotFoundError(f"{path} holds no trainer checkpoint (it has no metadata.json)")
    state = dist_checkpointing.load(sharded_state(models, optimizer, is_loading=True), str(path))
    for name, model in zip(chunk_names(models), models, strict=True):
        _changing(model).load_state_dict(state[name], strict=False)  # TE's extra state may be absent
    if optimizer is None or scheduler is None:  # a reference
        return
    optimizer.load_state_dict(state["optimizer"])
    scheduler.num_steps = 0
    scheduler.step(state["scheduler"]["num_steps"])


def sharded_state(
    models: list[torch.nn.Module], optimizer: MegatronOptimizer | None, is_loading: bool
) -> dict[str, Any]:
    """What of this rank's chunks and optimizer goes into a checkpoint, each tensor with its place in the whole one."""
    state: dict[str, Any] = {}
    reshardable = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    metadata = ensure_metadata_has_dp_cp_group(reshardable)
    for part in getattr(optimizer, "chained_optimizers", [optimizer] if optimizer else []):
        part.init_state_fn(part.optimizer, part.config)  # for a run whose steps were all skipped there is none yet
    for name, model in zip(chunk_names(models), models, strict=True):
        state[name] = _changing(model).sharded_state_dict(metadata=metadata)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def _changing(model: torch.nn.Module) -> torch.nn.Module:
    """The part of a wrapped chunk that training changes: its adapters, where it has any."""
    return getattr(unwrap_model(model), lora.NAME, model)


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


def chunk_names(models: list[torch.nn.Module]) -> list[str]:
    """Where the state of each chunk is in `sharded_state`."""
    return ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
