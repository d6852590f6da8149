"""Checkpoints of model, optimizer and schedule that any other layout can load (Megatron's dist_checkpointing)."""

import queue
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import unwrap_model

from areal_like.trainer.host_copies import HostCopies
from areal_like.trainer.megatron import lora, optimizer_shards

optimizer_shards.install()
# Megatron's own queue is a process of 600 MB per rank, which outlives a rank that is killed; threads do without it
filesystem_async.get_write_results_queue = queue.Queue


class Saving:
    """A checkpoint on its way to the directory `path`, which must be empty or new.

    When the constructor returns, this rank's share is in host memory, some of it in `copies`, and training may go on;
    threads write it. A rank whose `is_written` is true, or raises the OSError that writing met, waits for the others in
    `finish`.
    """

    def __init__(
        self,
        path: Path,
        models: list[torch.nn.Module],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
        copies: HostCopies,
    ) -> None:
        self._path = path
        if dist.get_rank() == 0:
            path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        state = sharded_state(models, optimizer, is_loading=False)
        if scheduler is not None:
            state["scheduler"] = scheduler.state_dict()
        _have_copies(state, copies)
        request = dist_checkpointing.save(  # torch checks later that nothing is missing and nothing written twice
            state, str(path), validate_access_integrity=False, async_sharded_save=True, async_strategy="mcore"
        )
        self._finalize, self._results, buckets = request.finalize_fns, None, []
        if request.preload_fn is not None:  # this rank has something to write
            transforms, (_, _, self._results) = request.async_fn.args[0], request.async_fn_args
            buckets, write = request.preload_fn(), partial(_write, transforms)
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


def _have_copies(state: dict[str, Any], copies: HostCopies) -> None:
    """Put copies in place of what this rank writes from host memory; Megatron copies what is on a GPU."""
    apply_factories(state)
    tensors = [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
    written = [tensor for tensor in tensors if is_main_replica(tensor.replica_id) and tensor.data.device.type == "cpu"]
    for tensor, copy in zip(written, copies.of([tensor.data for tensor in written]), strict=True):
        tensor.data = copy


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
    metadata = ensure_metadata_has_dp_cp_group({"chained_optim_avoid_prefix": True})
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


def chunk_names(models: list[torch.nn.Module]) -> list[str]:
    """Where the state of each chunk is in `sharded_state`."""
    return ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
