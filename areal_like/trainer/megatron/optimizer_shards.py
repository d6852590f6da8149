"""What a rank of the distributed optimizer has, as parts of a checkpoint that any other layout can load.

In Megatron's form `fully_reshardable` the optimizer's state of a parameter has the parameter's own shape. To make it
Megatron gathers the state on every data-parallel rank (`sharded_param_state_fully_reshardable`, megatron-core 0.19.2,
which also saves what is behind a bucket of odd length in the wrong place). A rank's share of a parameter is a run of
its elements, though, and a run is a few boxes of the parameter: each rank writes and reads its own, and nothing is
gathered. Names, shapes and types in a checkpoint are those of Megatron's form.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

type Place = ShardedTensor | ShardedTensorFactory  # of a parameter in the whole model


def install() -> None:
    """Have Megatron's distributed optimizers write and read their own shares."""
    DistributedOptimizer.sharded_param_state_fully_reshardable = _shares
    DistributedOptimizer.load_parameter_state_from_fully_reshardable = _take


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the boxes that elements `start` to `end` of a row-major tensor fill, in their order."""
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
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """This rank's tensors by the number of their parameter, to be saved from or loaded into."""
    found = nested_values(extract_sharded_tensors_and_factories(model)[0])
    places = {place.data: place for place in found}
    return {
        number: {
            name: list(_parts(places[parameter], f"optimizer.state.{name}.", tensor, start))
            for name, tensor in _tensors(self, parameter).items()
        }
        for number, (parameter, start) in enumerate(_runs(self))
    }


@torch.no_grad()
def _take(self: DistributedOptimizer, state: Mapping[int, Mapping[str, list[Tensor]]]) -> None:
    """Take what was loaded into the tensors of `_shares`."""
    for number, (parameter, _) in enumerate(_runs(self)):
        whole = {name: torch.cat([part.flatten() for part in parts]) for name, parts in state[number].items()}
        self._set_main_param_and_optimizer_states(parameter, whole)


def _runs(optimizer: DistributedOptimizer) -> Iterator[tuple[Tensor, int]]:
    """The parameters of which this rank has a run, and the element of the flat parameter where that begins."""
    for buffer in optimizer.gbuf_ranges:
        for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
            for parameter, ranges in bucket["param_map"].items():
                yield parameter, ranges["param"].start


def _tensors(optimizer: DistributedOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The run of the float32 parameter and of what the optimizer remembers of it."""
    state = optimizer._get_main_param_and_optimizer_states(parameter)
    tensors = {name: state[name].detach() for name in ("param", *optimizer.optimizer_state_keys)}
    if optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:  # they were made just now: room on the device
        return {name: tensor.cpu().float() for name, tensor in tensors.items()}
    return tensors


def _parts(place: Place, prefix: str, run: Tensor, start: int) -> Iterator[ShardedTensor]:
    """The boxes of a run that begins at element `start` of the parameter that is at `place`."""
    whole = torch.empty(place.data.shape, dtype=run.dtype, device="meta")  # for where in it the parts are
    if isinstance(place, ShardedTensorFactory):  # of halves that tensor parallelism splits one by one
        made = nested_values(replace(place, key=prefix + place.key, data=whole).build())
    else:
        made = iter([replace(place, key=prefix + place.key, data=whole, dtype=run.dtype)])
    for part in made:
        at, ahead = part.data.storage_offset(), part.prepend_axis_num
        low, high = max(start, at), min(start + len(run), at + part.data.numel())
        if low >= high:
            continue
        taken = low - start
        for offsets, sizes in boxes(part.local_shape, low - at, high - at):
            shape = (*[1] * ahead, *sizes)
            here = zip(part.global_offset, (*[0] * ahead, *offsets), strict=True)
            yield replace(
                part,
                data=run[taken : taken + math.prod(sizes)].view(shape),
                local_shape=shape,
                global_offset=tuple(a + b for a, b in here),
                axis_fragmentations=None,  # no regular grid
                prepend_axis_num=0,
                replica_id=(*part.replica_id[:2], 0),  # data-parallel ranks have different runs
            )
            taken += math.prod(sizes)
