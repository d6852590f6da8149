"""Checkpoints of model, optimizer and schedule that any other layout can load (Megatron's dist_checkpointing)."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_items_iter, nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import unwrap_model
from torch.distributed import checkpoint

from areal_like.backends.megatron import lora, optimizer_shards
from areal_like.backends.megatron.optimizer import loss_scale, parts, set_loss_scale
from areal_like.backends.training.host_copies import HostCopies
from areal_like.backends.training.saving import Saving

optimizer_shards.install()


type Written = dict[str, list[ShardedTensor | ShardedObject]]


def make_copies(adapters: Iterable[str], limit: int | None) -> dict[str, HostCopies]:
    """Return memory for the copies that `save_checkpoint` writes, of each of several adapters, or of `""` alone.

    The `limit` holds for a single policy: of several adapters each one takes the place of another one in the model.
    """
    return {name: HostCopies() for name in adapters} or {"": HostCopies(limit)}


def save_checkpoint(
    path: Path,
    models: list[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    *,
    copies: Mapping[str, HostCopies],
    adapters: Iterable[str] = ("",),
    group: dist.ProcessGroup | None = None,
) -> Saving:
    """Start a checkpoint in the directory `path`, which must be empty or new; every rank calls this function.

    On return, this rank's share is in `copies` or on disk, and training may continue. During the write, the ranks
    communicate in `group`, of gloo. The result equals the files of `dist_checkpointing.save` (megatron-core
    0.19.2), which makes training wait for planning and completion. The checkpoint has the state of each of several
    `adapters` below its name; iterating `adapters` puts each one to use.
    """
    written: Written = {}
    common: dict[str, Any] = {}
    for name in adapters:
        state = sharded_state(models, optimizer, is_loading=False)
        if scheduler is not None:
            state["scheduler"] = scheduler.state_dict()
        if optimizer is not None and (scale := loss_scale(optimizer)):
            state["loss_scale"] = scale
        state = _put_below(name, state)
        sharded, own = save_preprocess(state, validate_access_integrity=False)  # torch checks its own plan
        written |= _written_here(sharded, copies[name])
        common |= own
    found = ShardedObject("common_state", common, (1,), (0,), replica_id=dist.get_rank())
    if is_main_replica(found.replica_id):
        written[found.unique_key] = [found]
    saving = Saving(path, partial(_write, path, mcore_to_pyt_state_dict(written), group))
    if not all(each.complete for each in copies.values()):
        saving.wait()
    return saving


def _put_below(adapter: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of one of several adapters below its name; of a single policy, `""`, as it is."""
    if not adapter:
        return state
    add_prefix_for_sharding(state, f"{adapter}.")
    return {adapter: state}


def _written_here(state: dict[str, Any], copies: HostCopies) -> Written:
    """Return this rank's items to write by name, with copies instead of tensors."""
    written: Written = defaultdict(list)
    for value in nested_values(state):
        if is_main_replica(value.replica_id):
            written[value.unique_key if isinstance(value, ShardedObject) else value.key].append(value)
    tensors = [value for values in written.values() for value in values if isinstance(value, ShardedTensor)]
    copied = copies.take({(tensor.key, tensor.global_offset): tensor.data for tensor in tensors})
    for tensor in tensors:
        tensor.data = copied[tensor.key, tensor.global_offset]
    return written


def _write(path: Path, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    planner = MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    checkpoint.save(state, checkpoint_id=path, planner=planner, process_group=group)
    if dist.get_rank() == 0:
        save_config(CheckpointingConfig("torch_dist"), str(path))  # last


def load_checkpoint(
    path: Path,
    models: list[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    scheduler: OptimizerParamScheduler | None,
    adapter: str = "",
) -> None:
    """Load a checkpoint of `save_checkpoint`, written in any layout. Raises FileNotFoundError if it is missing.

    The position in the learning-rate schedule is loaded; its shape comes from the configuration. `adapter` names the
    one of several adapters that is in use.
    """
    if not (path / "metadata.json").exists():
        raise FileNotFoundError(f"{path} is not a trainer checkpoint (it has no metadata.json)")
    state = dist_checkpointing.load(_put_below(adapter, sharded_state(models, optimizer, is_loading=True)), str(path))
    state = state[adapter] if adapter else state
    for name, model in zip(chunk_names(models), models, strict=True):
        _changing(model).load_state_dict(state[name], strict=False)  # TE's extra state may be absent
    if optimizer is None or scheduler is None:  # a reference
        return
    _load_optimizer(optimizer, state["optimizer"])
    if "loss_scale" in state and loss_scale(optimizer):
        set_loss_scale(optimizer, state["loss_scale"])
    scheduler.num_steps = 0
    scheduler.step(state["scheduler"]["num_steps"])


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Load the tensors and the number of steps; everything else comes from the configuration.

    With expert parallelism there are two optimizers, otherwise one: the loaded state has tensors in their new places,
    and settings in the places of the saved layout.
    """
    step = {key: value for _, key, value in nested_items_iter(state) if key == "step"}  # one; none before a step
    all_parts = parts(optimizer)
    states = [state] if len(all_parts) == 1 else [state[i] for i in range(len(all_parts))]
    for part, loaded in zip(all_parts, states, strict=True):
        settings = [
            {key: value for key, value in group.items() if key not in ("params", "step")} | step
            for group in part.optimizer.param_groups
        ]
        if isinstance(part, DistributedOptimizer):
            loaded |= {"optimizer": {"param_groups": settings}, "param_state_sharding_type": "fully_reshardable"}
        else:
            for group, own in zip(loaded.get("optimizer", loaded)["param_groups"], settings, strict=True):
                group |= own
        part.load_state_dict(loaded)


def sharded_state(
    models: list[torch.nn.Module], optimizer: MegatronOptimizer | None, is_loading: bool
) -> dict[str, Any]:
    """Return the checkpoint state of this rank's chunks and optimizer, each tensor with its position in the whole."""
    state: dict[str, Any] = {}
    metadata = ensure_metadata_has_dp_cp_group({"chained_optim_avoid_prefix": True})
    for part in parts(optimizer):
        create_state(part)
    for name, model in zip(chunk_names(models), models, strict=True):
        state[name] = _changing(model).sharded_state_dict(metadata=metadata)
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def create_state(part: MegatronOptimizer) -> None:
    """Create the optimizer state if no step has created it: before a load, or after skipped steps only.

    Megatron's `init_state_fn` (0.19.2) leaves out an argument of Transformer Engine's low-precision Adam (2.16).
    """
    if isinstance(part, DistributedOptimizer):
        optimizer_shards.mend_places(part)
    if not part.config.use_precision_aware_optimizer:
        part.init_state_fn(part.optimizer, part.config)
        return
    adam = part.optimizer
    for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
        if not adam.state[parameter]:
            adam.initialize_state(parameter, adam.store_param_remainders and parameter.dtype == torch.bfloat16)


def _changing(model: torch.nn.Module) -> torch.nn.Module:
    """Return the part of a wrapped chunk that training changes: its adapters, if it has any."""
    return getattr(unwrap_model(model), lora.NAME, model)


def chunk_names(models: list[torch.nn.Module]) -> list[str]:
    """Return the key of each chunk's state in `sharded_state`."""
    return ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
