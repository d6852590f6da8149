"""One rank's share of packed micro-batches as tensors on its device, a micro-batch at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_like.core.columns import Use, column_of
from areal_like.core.sampling_masks import KEPT
from areal_like.core.trainer.packing import MicroBatch
from areal_like.core.types import TEACHER_IDS, TEMPERATURES, Batch


@dataclass(frozen=True)
class Ahead:
    """`tokens` `[t]` come after each token of a rank, 0 at the end of a sequence; `rows` predict the batch's `targets`.

    A target is the token two places after its row's, in the same sequence.
    """

    tokens: NDArray[np.int64]
    rows: NDArray[np.int64]
    targets: NDArray[np.int64]


def find_ahead(places: NDArray[np.int64], batch: Batch, wanted: NDArray[np.bool]) -> Ahead:
    """Return the tokens after some places of a batch, -1 for padding; targets are among the `wanted` tokens.

    The tokens that follow may be on another rank. Prompts are not shared.
    """
    ends = np.repeat(np.cumsum(batch.lengths), batch.lengths)
    last = len(batch.tokens) - 1
    here = np.maximum(places, 0)
    following, target = np.minimum(here + 1, last), np.minimum(here + 2, last)
    follows = (places >= 0) & (here + 1 < ends[here])
    predicts = follows & (here + 2 < ends[here]) & wanted[target]
    rows = np.flatnonzero(predicts)
    return Ahead(np.where(follows, batch.tokens[following], 0).astype(np.int64), rows, target[rows])


@dataclass(frozen=True)
class DeviceKeys:
    """`packing.Keys` on the device."""

    places: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor


@dataclass(frozen=True)
class ImageInputs:
    """The images of a micro-batch.

    `arguments` are passed to the model; there is always an image, because ranks compute the tower together. `rows` are
    the rows of the tower's output that stand for the micro-batch's image tokens, in order; -1 for an image token that a
    model sampled. `positions` `[4, 1, t]` are the text's and M-RoPE's, and `kinds` `[1, t]` 1 at image tokens.
    """

    arguments: Mapping[str, Tensor]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64] | None
    kinds: NDArray[np.int64]


type ReadImages = Callable[[NDArray[np.int64], NDArray[np.int64], Batch], ImageInputs]
"""Returns the images of the tokens at some places of a batch, -1 for padding, given these tokens' positions."""


@dataclass(frozen=True)
class DeviceImages:
    """ImageInputs on the device, without positions; `sampled`: some of the `rows` are -1."""

    arguments: Mapping[str, Tensor]
    rows: Tensor
    kinds: Tensor
    sampled: bool


@dataclass(frozen=True)
class DeviceAhead:
    """Ahead on the device: `tokens` `[1, t]`; `labels` and, if they have any, temperatures of the targets."""

    tokens: Tensor
    rows: Tensor
    labels: Tensor
    temperatures: Mapping[str, Tensor]


@dataclass(frozen=True)
class DeviceBatch:
    """One rank's share of a micro-batch on the device, with t tokens; n of them predict a wanted token.

    `tokens`, `positions` and `padding`, True at padding, are `[1, t]`; `cu_seqlens` `[pieces + 1]`, `max_seqlen`,
    `keys` are `packing.MicroBatch`'s. `rows` are the places that predict, `labels` the tokens they predict, and
    `of_labels` `[rows, …]` the columns beside these (`columns.Use`), a row of ids of one width for each list, without
    columns whose lists are empty. Sequences that share a place and its predicted token share a row: `expand` `[n]` is
    the row of each wanted token, None where each has its own. `sequences` are the numbers of these tokens' sequences in
    the batch, and each of `fields` the batch's values there, all `[n]`; `count` is n. `inputs` are columns of the t
    tokens, also of padding. `images` are the images for a vision-language model, whose `positions` may be `[4, 1, t]`.
    `ahead` is for a layer for multi-token prediction that is trained.
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
    of_labels: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    expand: Tensor | None = None
    images: DeviceImages | None = None
    ahead: DeviceAhead | None = None

    def head(self, temperature: float) -> dict[str, Any]:
        """Return the arguments of `log_probs_and_entropy` that describe the labels, sampled at `temperature` or own."""
        own, support, choices = map(self.of_labels.get, (TEMPERATURES, KEPT, TEACHER_IDS))
        each = temperature if own is None else torch.where(own > 0, own, temperature)
        return {"labels": self.labels, "temperature": each, "support": support, "choices": choices}

    def one_ahead(self) -> "DeviceBatch":
        """Return the micro-batch with the rows and labels of a layer for multi-token prediction."""
        assert self.ahead is not None
        ahead = self.ahead
        return replace(self, rows=ahead.rows, labels=ahead.labels, of_labels=ahead.temperatures, expand=None)

    def of_tokens(self, of_rows: Tensor) -> Tensor:
        """Return values `[rows, …]` of the wanted tokens, `[n, …]`."""
        return of_rows if self.expand is None else of_rows.index_select(0, self.expand)


@dataclass(frozen=True)
class DeviceBatches:
    """Micro-batches that are packed and copied when an iterator reaches them, while the device computes the one before.

    Each of several iterators copies its own; `pack` gives the i-th of `count` and remembers it. `wanted` is
    `[tokens of the batch]`, where a prediction is to be looked at. `read_images` is of a model that takes any.
    `looks_ahead`: a layer for multi-token prediction is trained.
    """

    count: int
    pack: Callable[[int], MicroBatch]
    batch: Batch
    wanted: NDArray[np.bool]
    device: torch.device
    read_images: ReadImages | None = None
    looks_ahead: bool = False

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[DeviceBatch]:
        packs = map(self.pack, range(self.count))
        others = self.device, self.read_images, self.looks_ahead
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
    read_images: ReadImages | None = None,
    looks_ahead: bool = False,
) -> DeviceBatch:
    """Copy a micro-batch; `wanted`, `read_images` and `looks_ahead` are DeviceBatches's."""
    here = wanted[pack.targets]
    rows, targets = pack.rows[here], pack.targets[here]
    of_labels = _columns_at(targets, batch, "sampling", "label")
    first, expand = _find_distinct(rows, batch.tokens[targets], *of_labels.values())

    def copy(array: NDArray[Any] | Tensor) -> Tensor:
        tensor = array if isinstance(array, Tensor) else torch.from_numpy(array)
        # from pageable memory the host would wait for the copy, and so for all kernels that were launched before it
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    keys, images = pack.keys, None if read_images is None else read_images(pack.places, pack.positions, batch)
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
        fields={name: copy(values) for name, values in _columns_at(targets, batch, "loss").items()},
        count=copy(np.array(len(rows), np.int32)),
        keys=None
        if keys is None
        else DeviceKeys(copy(keys.places), copy(keys.cu_seqlens), keys.max_seqlen, copy(keys.positions)),
        of_labels={name: copy(values[first]) for name, values in of_labels.items()},
        inputs={name: copy(values) for name, values in _columns_at(pack.places, batch, "input").items()},
        expand=None if expand is None else copy(expand),
        images=None if images is None else _copy_images(images, copy),
        ahead=_copy_ahead(pack, batch, wanted, copy) if looks_ahead else None,
    )


def _copy_images(images: ImageInputs, copy: Callable[[NDArray[Any] | Tensor], Tensor]) -> DeviceImages:
    arguments = {name: copy(values) for name, values in images.arguments.items()}
    return DeviceImages(arguments, copy(images.rows), copy(images.kinds), bool((images.rows < 0).any()))


def _copy_ahead(
    pack: MicroBatch, batch: Batch, wanted: NDArray[np.bool], copy: Callable[[NDArray[Any] | Tensor], Tensor]
) -> DeviceAhead:
    ahead = find_ahead(pack.places, batch, wanted)
    labels = batch.tokens[ahead.targets].astype(np.int64)
    own = {TEMPERATURES: copy(batch.fields[TEMPERATURES][ahead.targets])} if TEMPERATURES in batch.fields else {}
    return DeviceAhead(copy(ahead.tokens)[None], copy(ahead.rows), copy(labels), own)


def _find_distinct(
    rows: NDArray[np.int64], *others: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Return the first place of each different row, and of every one its number among these, None if all differ.

    Rows `[n]` are the same where the others, `[n]` or `[n, width]`, are the same too.
    """
    if (np.diff(rows) > 0).all():
        return np.arange(len(rows)), None
    columns = [column for each in others for column in each.reshape(len(each), -1).T]
    order = np.lexsort([*columns, rows])
    changes = np.any([np.diff(column[order]) != 0 for column in (*columns, rows)], 0)
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.cumsum(np.concatenate(([0], changes)))
    return order[np.concatenate(([True], changes))], numbers


def _columns_at(places: NDArray[np.int64], batch: Batch, *uses: Use) -> dict[str, NDArray[Any]]:
    """Return a batch's columns of these uses at some places, -1 for padding; without columns whose lists are empty."""
    named = sorted(batch.of_use(*uses).items(), key=itemgetter(0), reverse=True)  # in one order on all ranks
    found = {name: column_of(name, values).select(values, places) for name, values in named}
    return {name: values for name, values in found.items() if values is not None}
