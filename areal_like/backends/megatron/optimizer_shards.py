"""A rank's shards of the distributed optimizer, in a checkpoint that any other layout can load.

In Megatron's format `fully_reshardable`, the optimizer state of a parameter has the parameter's shape. For this,
Megatron gathers the state on every data-parallel rank (`sharded_param_state_fully_reshardable`, megatron-core 0.19.2,
which also saves the elements after a bucket of odd length in the wrong place). A rank's share of a parameter is a run
of its elements, and a run consists of a few boxes of the parameter: each rank writes and reads its own boxes, without a
gather. Names, shapes and types in a checkpoint follow Megatron's format.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from operator import add
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

type Place = ShardedTensor | ShardedTensorFactory  # a parameter's position in the whole model


def install() -> None:
    """Make Megatron's distributed optimizers write and read their own shares."""
    DistributedOptimizer.sharded_state_dict = _shares
    DistributedOptimizer.load_parameter_state_from_fully_reshardable = _take


def mend_places(optimizer: DistributedOptimizer) -> None:
    """Correct Megatron's positions of parameters in their optimizer groups if they have two data types.

    Megatron counts parameters in order but stores float32 ones first (`_build_model_and_main_param_groups`, 0.19.2):
    every weight of a bfloat16 critic with a float32 head would be saved under another weight's name.
    """
    by_type = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for group, (exact, rounded) in enumerate(by_type):
        for place, parameter in enumerate([*exact, *rounded]):
            optimizer.model_param_group_index_map[parameter] = group, place


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of the boxes that elements `start` to `end` of a row-major tensor fill, in order."""
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
    for begin, stop in pairwise([start, first * row, last * row, end] if first <= last else [start, end]):
        index, at = divmod(begin, row)
        rows, rest = divmod(stop - begin, row)
        if rest:  # a part of one row
            for offsets, sizes in boxes(shape[1:], at, at + rest):
                yield (index, *offsets), (1, *sizes)
        elif rows:
            yield (index, *[0] * (len(shape) - 1)), (rows, *shape[1:])


def _shares(
    self: DistributedOptimizer, model: dict[str, Any], is_loading: bool = False, metadata: Any = None
) -> dict[str, Any]:
    """Return the existing state, with tensors by the number of their parameter, to save or to load into."""
    places = {place.data: place for place in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    tensors = {
        number: _parts(places[parameter], start, _tensors(self, parameter))
        for number, (parameter, start) in enumerate(_runs(self))
    }
    return {**self.state_dict(), "param_state": tensors, "param_state_sharding_type": "fully_reshardable"}


@torch.no_grad()
def _take(self: DistributedOptimizer, state: Mapping[int, Mapping[str, list[Tensor]]]) -> None:
    """Copy the loaded state into the tensors of `_shares`."""
    for number, (parameter, _) in enumerate(_runs(self)):
        whole = {name: torch.cat([part.flatten() for part in parts]) for name, parts in state[number].items()}
        if self._get_main_param_and_optimizer_states(parameter)["param"].dtype == torch.int16:
            group, place = self.model_param_group_index_map[parameter]
            weights, whole["param"] = halves(whole["param"])
            self.optimizer.param_groups[group]["params"][place].detach().copy_(weights)  # rounded differently elsewhere
        self._set_main_param_and_optimizer_states(parameter, whole)


def _runs(optimizer: DistributedOptimizer) -> Iterator[tuple[Tensor, int]]:
    """Yield the parameters with a run on this rank, and the run's first element in the flat parameter."""
    for buffer in optimizer.gbuf_ranges:
        for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
            for parameter, ranges in bucket["param_map"].items():
                yield parameter, ranges["param"].start


def _tensors(optimizer: DistributedOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the run of the float32 parameter and of its optimizer state."""
    state = optimizer._get_main_param_and_optimizer_states(parameter)
    tensors = {name: state[name].detach() for name in ("param", *optimizer.optimizer_state_keys)}
    group, place = optimizer.model_param_group_index_map[parameter]
    stepped = optimizer.optimizer.param_groups[group]["params"][place].detach()
    if tensors["param"].dtype == torch.int16:
        tensors["param"] = join_halves(stepped, tensors["param"])
    elif stepped.dtype == torch.float32:
        tensors["param"] = stepped  # Transformer Engine never updates its copy of float32 parameters
    if optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:  # just created: room on the device
        return {name: tensor.cpu().float() for name, tensor in tensors.items()}
    return tensors


def join_halves(weights: Tensor, low: Tensor) -> Tensor:
    """Return float32 weights `[n]`; Transformer Engine's Adam keeps their lower 16 bits beside the bfloat16 weights.

    A negative lower half was rounded up (`transformer_engine/common/multi_tensor/adam.cu`, 2.16).
    """
    return torch.stack([low, weights.view(torch.int16) - (low < 0).short()], -1).view(torch.float32)[..., 0]


def halves(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 weights `[n]` into bfloat16 weights, rounded up at ties, and the lower 16 bits."""
    low, high = weights.view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1)
    return (high + (low < 0).short()).view(torch.bfloat16), low


def _parts(place: Place, start: int, runs: Mapping[str, Tensor]) -> dict[str, list[ShardedTensor]]:
    """Return the boxes of tensors by name, each a run from element `start` of the parameter at `place`."""
    runs = {name: run.flatten() for name, run in runs.items()}
    found = list(_cut(place, start, start + len(runs["param"])))
    return {
        name: [
            replace(
                part,
                key=f"optimizer.state.{name}.{part.key}",
                data=run[at : at + math.prod(part.local_shape)].view(part.local_shape),
                dtype=run.dtype,
            )
            for part, at in found
        ]
        for name, run in runs.items()
    }


def _cut(place: Place, start: int, end: int) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield the places of the boxes that elements `start` to `end` of a parameter fill, and their starts in the run."""
    if isinstance(place, ShardedTensorFactory):  # for halves that tensor parallelism splits separately
        whole = torch.empty(place.data.shape, dtype=place.data.dtype, device="meta")  # as memory for views of it
        places = [(part, part.data.storage_offset()) for part in nested_values(replace(place, data=whole).build())]
        if not all(part.data.is_contiguous() for part, _ in places):  # not in any model here
            raise NotImplementedError(f"{place.key} is split along an inner axis: its parts are not runs of elements")
    else:
        places = [(place, 0)]
    for part, first in places:
        at, ahead = max(start, first), [0] * part.prepend_axis_num
        stop = min(end, first + math.prod(part.local_shape))
        for offsets, sizes in boxes(part.local_shape, at - first, stop - first) if at < stop else ():
            yield (
                replace(
                    part,
                    data=None,
                    local_shape=(*[1] * len(ahead), *sizes),
                    global_offset=tuple(map(add, part.global_offset, (*ahead, *offsets))),
                    axis_fragmentations=None,  # not a regular grid
                    prepend_axis_num=0,
                    replica_id=(*part.replica_id[:2], 0),  # data-parallel ranks have different runs
                ),
                at - start,
            )
            at += math.prod(sizes)
