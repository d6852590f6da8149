"""The weights of a model in a Megatron distributed checkpoint, which any layout can write and any other can read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor

from areal_like.backends.megatron.bridges.protocol import Bridge, ModelSource
from areal_like.backends.megatron.checkpoint import chunk_names, save_checkpoint, sharded_state
from areal_like.backends.megatron.distributed import Stored, read_weights
from areal_like.backends.training.host_copies import HostCopies
from areal_like.core.errors import CheckpointError

_HEAD, _EXTRA_PREDICTION = "output_layer.weight", "mtp."
_NAMED = 12  # names in a message; a missing layer has as many


class WeightsFrom:
    """A Bridge that loads the Megatron checkpoint `weights` instead of the model directory `source.path`."""

    def __init__(self, weights: Path, bridge: Bridge, source: ModelSource) -> None:
        self._weights, self._bridge, self._source = weights, bridge, source

    def build(self) -> list[torch.nn.Module]:
        return self._bridge.build()

    def load(self, models: list[torch.nn.Module], path: Path) -> None:
        """Load the weights; raise CheckpointError if the checkpoint belongs to another model."""
        if path == self._source.path:
            load_weights(self._weights, models, self._source.config.for_bridge.vocab_size)
        else:
            self._bridge.load(models, path)

    def export(self, models: list[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        return self._bridge.export(models)


def save_weights(path: Path, models: list[torch.nn.Module]) -> None:
    """Write the weights of this rank's chunks to the directory `path`, empty or new. Raises OSError."""
    saving = save_checkpoint(path, models, None, None, copies={"": HostCopies()})
    saving.finish()


def load_weights(path: Path, models: list[torch.nn.Module], vocab_size: int) -> None:
    """Load this rank's chunks from a checkpoint of any layout; a critic keeps its new head if none is stored.

    Raises CheckpointError with names unless model and checkpoint have the same tensors and shapes. Layers for
    multi-token prediction (`mtp`) are ignored by models without them.
    """
    weights = read_weights(path)
    state, wanted, stored = _state(models), _tensors(models), weights.tensors
    shapes: list[dict[str, tuple[int, ...]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, {name: tuple(tensor.global_shape) for name, tensor in wanted.items()})
    everywhere = {name: shape for part in shapes for name, shape in (part or {}).items()}
    is_critic = everywhere.get(_HEAD, (0,))[0] == 1  # only the last pipeline stage can see this itself
    if is_critic and stored.get(_HEAD, Stored((0,), "")).shape[0] != 1:
        for tensors in (wanted, stored, everywhere, *state.values()):
            tensors.pop(_HEAD, None)
    problems: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, list(_differences(wanted, stored, vocab_size)))
    found = {problem for part in problems for problem in part or ()}
    found |= {
        f"{name} is not in the model"
        for name in stored.keys() - everywhere.keys()
        if not name.startswith(_EXTRA_PREDICTION)
    }
    if found:
        raise CheckpointError(f"{path} belongs to another model: {list_first(sorted(found))}")
    add_prefix_for_sharding(state, weights.prefix)
    loaded = dist_checkpointing.load(state, str(path))
    for name, model in zip(chunk_names(models), models, strict=True):
        model.load_state_dict(loaded[name], strict=False)


def list_first(names: list[str]) -> str:
    """Return the first of many names, and the number of others."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


def _differences(wanted: Mapping[str, ShardedTensor], stored: Mapping[str, Stored], vocab_size: int) -> Iterator[str]:
    for name, tensor in wanted.items():
        shape = tuple(tensor.global_shape)
        if name not in stored:
            yield f"{name} is not in the checkpoint"
        elif stored[name].shape == shape:
            continue
        elif tensor.allow_shape_mismatch and stored[name].shape[1:] == shape[1:]:
            if not is_padding_of(stored[name].shape[0], vocab_size):
                yield f"{name} has {stored[name].shape[0]} rows for a vocabulary of {vocab_size}"
        else:
            yield f"{name} has the shape {_size(stored[name].shape)}, not {_size(shape)}"


def is_padding_of(rows: int, vocab_size: int) -> bool:
    """Return whether a layout pads a vocabulary to these rows: a multiple of TP, or of 128 x TP in Megatron-LM."""
    return any(rows == -(-vocab_size // n) * n for tp in range(1, 65) for n in (tp, 128 * tp))


def _state(models: list[torch.nn.Module]) -> dict[str, Any]:
    """Return the state without Transformer Engine's extra state, which checkpoints from a CPU do not have."""
    chunks = sharded_state(models, None, is_loading=True).items()
    return {name: {key: value for key, value in chunk.items() if "_extra_state" not in key} for name, chunk in chunks}


def _tensors(models: list[torch.nn.Module]) -> dict[str, ShardedTensor]:
    """Return this rank's shares by their names in a checkpoint."""
    state = _state(models)
    apply_factories(state)
    return {value.key: value for value in nested_values(state) if isinstance(value, ShardedTensor)}


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
