"""One rank's share of packed micro-batches as tensors on its device, a micro-batch at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_like.per_token import Routes, unknown_expert
from areal_like.trainer.ahead import find_ahead
from areal_like.trainer.image_inputs import ImageInputs, ImageReader
from areal_like.trainer.packing import MicroBatch
from areal_like.types import TEACHER_IDS, TEMPERATURES, Batch

_NOT_OF_LOSSES = ("loss_mask", TEACHER_IDS)


@dataclass(frozen=True)
class DeviceKeys:
    """`packing.Keys` on the device."""

    places: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor


@dataclass(frozen=True)
class DeviceImages:
    """`image_inputs.ImageInputs` on the device, without positions; `sampled`: some of the `rows` are -1."""

    arguments: Mapping[str, Tensor]
    rows: Tensor
    kinds: Tensor
    sampled: bool


@dataclass(frozen=True)
class DeviceAhead:
    """`ahead.Ahead` on the device: `tokens` `[1, t]`, `labels` at the targets, and their own temperatures, if any."""

    tokens: Tensor
    rows: Tensor
    labels: Tensor
    temperatures: Tensor | None


@dataclass(frozen=True)
class DeviceBatch:
    """One rank's share of a micro-batch on the device, t tokens of which n predict a wanted token.

    `tokens`, `positions` and `padding`, True at padding, are `[1, t]`; `cu_seqlens` `[pieces + 1]`, `max_seqlen`,
    `keys` are `packing.MicroBatch`'s. `rows` are the places that predict, `labels` the tokens they predict, and
    `support` `[rows, width]` is what `log_probs_and_entropy` takes, None where all were sampled from the whole
    vocabulary; `choices` `[rows, k]` are other ids whose log-probs are wanted, None if there are none. Sequences that
    share a place and what it predicts share a row: `expand` `[n]` is the row of each wanted token, None where each has
    its own. `sequences` are the numbers of these tokens' sequences in the batch, and each of `fields` the batch's
    values there, all `[n]`; `count` is n. `routes` has a row for each of the t tokens, also for padding, whose experts
    are unknown. `images` are those of a vision-language model, whose `positions` may be `[4, 1, t]`. `ahead` is for a
    layer for multi-token prediction that is trained.
    """

    tokens: Tensor
    positions: Tensor
    padding: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor
    labels: Tensor
    sequences: Tensor
    fields: Mapping[str, Tensor]
    count: Tensor
    keys: DeviceKeys | None = None
    support: Tensor | None = None
    routes: Tensor | None = None
    own_temperatures: Tensor | None = None
    expand: Tensor | None = None
    choices: Tensor | None = None
    images: DeviceImages | None = None
    ahead: DeviceAhead | None = None

    def temperatures(self, temperature: float) -> float | Tensor:
        """Return the temperatures of the labels, if some have their own, `[rows]`, or else `temperature`."""
        own = self.own_temperatures
        return temperature if own is None else torch.where(own > 0, own, temperature)

    def one_ahead(self) -> "DeviceBatch":
        """Return the micro-batch with the rows and labels of a layer for multi-token prediction."""
        assert self.ahead is not None
        rows = {"rows": self.ahead.rows, "labels": self.ahead.labels, "own_temperatures": self.ahead.temperatures}
        return replace(self, **rows, support=None, expand=None, choices=None)

    def of_tokens(self, of_rows: Tensor) -> Tensor:
        """Return values `[rows, …]` of the wanted tokens, `[n, …]`."""
        return of_rows if self.expand is None else of_rows.index_select(0, self.expand)


@dataclass(frozen=True)
class DeviceBatches:
    """Micro-batches that are packed and copied when an iterator reaches them, while the device computes the one before.

    Each of several iterators copies its own; `pack` gives the i-th of `count` and remembers it. `wanted` is
    `[tokens of the batch]`, where a prediction is to be looked at. `reader` makes the images of a model that takes any.
    `looks_ahead`: a layer for multi-token prediction is trained.
    """

    count: int
    pack: Callable[[int], MicroBatch]
    batch: Batch
    wanted: NDArray[np.bool]
    device: torch.device
    reader: ImageReader | None = None
    looks_ahead: bool = False

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[DeviceBatch]:
        packs = map(self.pack, range(self.count))
        others = self.device, self.reader, self.looks_ahead
        return (to_device(pack, self.batch, self.wanted, *others) for pack in packs)

    @property
    def targets(self) -> NDArray[np.int64]:
        """The places in the batch of all labels, in the order of the micro-batches."""
        packs = map(self.pack, range(self.count))
        return np.concatenate([pack.targets[self.wanted[pack.targets]] for pack in packs])


def find_generated(batch: Batch) -> NDArray[np.bool]:
    """Return the mask of tokens with useful log-probs, `[tokens]`: generated tokens, or all in other batches."""
    mask = batch.fields.get("loss_mask")
    return np.ones(len(batch.tokens), bool) if mask is None else mask > 0


def to_device(
    pack: MicroBatch,
    batch: Batch,
    wanted: NDArray[np.bool],
    device: torch.device,
    reader: ImageReader | None = None,
    looks_ahead: bool = False,
) -> DeviceBatch:
    """Copy a micro-batch; `wanted`, `reader` and `looks_ahead` are DeviceBatches's."""
    here = wanted[pack.targets]
    rows, targets = pack.rows[here], pack.targets[here]
    kept = None if batch.kept is None else batch.kept.take(targets)
    support = kept.as_rows() if kept is not None and len(kept.ids) else None
    temperatures, choices = batch.fields.get(TEMPERATURES), batch.fields.get(TEACHER_IDS)
    own, others = (None if each is None else each[targets] for each in (temperatures, choices))
    first, expand = _find_distinct(rows, batch.tokens[targets], own, support, others)

    def copy(array: NDArray[Any] | Tensor) -> Tensor:
        tensor = array if isinstance(array, Tensor) else torch.from_numpy(array)
        # from pageable memory the host would wait for the copy, and so for all kernels that were launched before it
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    keys, images = pack.keys, None if reader is None else reader.inputs(pack.places, pack.positions, batch)
    positions = pack.positions[None] if images is None or images.positions is None else images.positions
    return DeviceBatch(
        tokens=copy(pack.tokens)[None],
        positions=copy(positions),
        padding=copy(pack.places < 0)[None],
        cu_seqlens=copy(pack.cu_seqlens),
        max_seqlen=pack.max_seqlen,
        rows=copy(rows[first]),
        labels=copy(batch.tokens[targets[first]].astype(np.int64)),
        sequences=copy(np.repeat(np.arange(len(batch.lengths)), batch.lengths)[targets]),
        fields={name: copy(values[targets]) for name, values in batch.fields.items() if name not in _NOT_OF_LOSSES},
        count=copy(np.array(len(rows), np.int32)),
        keys=None
        if keys is None
        else DeviceKeys(copy(keys.places), copy(keys.cu_seqlens), keys.max_seqlen, copy(keys.positions)),
        support=None if support is None else copy(support[first]),
        routes=None if batch.routes is None else copy(_routes_at(batch.routes, pack.places)),
        own_temperatures=None if own is None else copy(own[first]),
        expand=None if expand is None else copy(expand),
        choices=None if others is None else copy(others[first].astype(np.int64)),
        images=None if images is None else _copy_images(images, copy),
        ahead=_copy_ahead(pack, batch, wanted, copy) if looks_ahead else None,
    )


def _copy_images(images: ImageInputs, copy: Callable[[NDArray[Any] | Tensor], Tensor]) -> DeviceImages:
    arguments = {name: copy(values) for name, values in images.arguments.items()}
    return DeviceImages(arguments, copy(images.rows), copy(images.kinds), bool((images.rows < 0).any()))


def _copy_ahead(
    pack: MicroBatch, batch: Batch, wanted: NDArray[np.bool], copy: Callable[[NDArray[Any] | Tensor], Tensor]
) -> DeviceAhead:
    ahead, temperatures = find_ahead(pack.places, batch, wanted), batch.fields.get(TEMPERATURES)
    labels = batch.tokens[ahead.targets].astype(np.int64)
    own = None if temperatures is None else copy(temperatures[ahead.targets])
    return DeviceAhead(copy(ahead.tokens)[None], copy(ahead.rows), copy(labels), own)


def _find_distinct(
    rows: NDArray[np.int64], *others: NDArray[Any] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the first place of each different row, and of every one its number among these, None if all differ.

    Rows `[n]` are the same where the others, `[n]` or `[n, width]`, are the same too.
    """
    if (np.diff(rows) > 0).all():
        return np.arange(len(rows)), None
    columns = [column for each in others if each is not None for column in np.atleast_2d(each.T)]
    order = np.lexsort([*columns, rows])
    changes = np.any([np.diff(column[order]) != 0 for column in (*columns, rows)], 0)
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.cumsum(np.concatenate(([0], changes)))
    return order[np.concatenate(([True], changes))], numbers


def _routes_at(routes: Routes, places: NDArray[np.int64]) -> Routes:
    """Return the rows at some places of a batch; padding, at -1, has unknown experts."""
    rows = routes[np.maximum(places, 0)]
    rows[places < 0] = unknown_expert(routes.dtype)
    return rows
