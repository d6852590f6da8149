"""Trajectories as flat arrays, and back without a change of any bit.

Every column that a trajectory has is recorded, so a column that is declared elsewhere needs no code here.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_like.core.columns import Ragged
from areal_like.core.errors import CheckpointError
from areal_like.core.types import FinishReason, Node, Trajectory

type Arrays = dict[str, NDArray[Any]]

_INTEGERS = ("sample_id", "group_id", "sample")
_PER_TOKEN = ("tokens", "logprobs", "versions")
_OTHERS = ("lengths", "has_reward", "reward", "truncated", "images")


def to_arrays(trajectories: Sequence[Trajectory]) -> tuple[Arrays, str]:
    """Return the columns of trajectories as arrays, and the fields that are not numbers as JSON."""
    arrays: Arrays = {"lengths": np.array([len(item.tokens) for item in trajectories], np.int32)}
    for name in _INTEGERS:
        arrays[name] = np.array([getattr(item, name) for item in trajectories], np.int64)
    arrays["has_reward"] = np.array([item.reward is not None for item in trajectories], np.uint8)
    arrays["reward"] = np.array([item.reward or 0.0 for item in trajectories], np.float64)
    arrays["truncated"] = np.array([item.finish_reason is FinishReason.LENGTH for item in trajectories], np.uint8)
    columns = {name for item in trajectories for name in item.columns}
    for name in _PER_TOKEN if trajectories else ():
        arrays[name] = np.concatenate([getattr(item, name) for item in trajectories])
    for name in sorted(columns):
        arrays |= _column(name, [item.columns.get(name) for item in trajectories])
    arrays |= _images([item.images for item in trajectories])
    texts = [
        {"reward_parts": dict(item.reward_parts), "nodes": [vars(node) for node in item.nodes]} for item in trajectories
    ]
    return arrays, json.dumps(texts)


def _column(name: str, values: Sequence[Any]) -> Arrays:
    """Return one column; `NAME.there` says which trajectories have it, if some do not."""
    there = [value for value in values if value is not None]
    flat = flatten(name, Ragged.join(there) if isinstance(there[0], Ragged) else np.concatenate(there))
    if len(there) < len(values):
        flat[f"{name}.there"] = np.array([value is not None for value in values], np.uint8)
    return flat


def flatten(name: str, values: Any) -> Arrays:
    """Return values per token as arrays by name; lists of ids are two arrays."""
    return {f"{name}.ids": values.ids, f"{name}.ends": values.ends} if isinstance(values, Ragged) else {name: values}


def _images(images: Sequence[Sequence[bytes]]) -> Arrays:
    """Return different images once, and the numbers of each trajectory's images."""
    known: dict[bytes, int] = {}
    places = [known.setdefault(image, len(known)) for own in images for image in own]
    if not known:
        return {}
    return {
        "images": np.frombuffer(b"".join(known), np.uint8),
        "images.sizes": np.array([len(image) for image in known], np.int64),
        "images.places": np.array(places, np.int64),
        "images.counts": np.array([len(own) for own in images], np.int64),
    }


def from_arrays(arrays: Mapping[str, NDArray[Any]], texts: str) -> list[Trajectory]:
    """Return the trajectories of `to_arrays`. Raises ValueError, KeyError or TypeError for other arrays."""
    lengths, others = arrays["lengths"], json.loads(texts)
    columns: dict[str, list[Any]] = {name: arrays[name].tolist() for name in _INTEGERS}
    columns["reward"] = [
        value if there else None for value, there in zip(arrays["reward"].tolist(), arrays["has_reward"], strict=True)
    ]
    columns["finish_reason"] = [FinishReason.LENGTH if it else FinishReason.STOP for it in arrays["truncated"]]
    columns["reward_parts"] = [each["reward_parts"] for each in others]
    columns["nodes"] = [tuple(Node(**node) for node in each["nodes"]) for each in others]
    for name in _PER_TOKEN:
        columns[name] = _split(arrays, name, lengths)
    own = {name.partition(".")[0] for name in arrays} - {*_INTEGERS, *_PER_TOKEN, *_OTHERS}
    split = {name: _split(arrays, name, lengths) for name in sorted(own)}
    columns["columns"] = [
        {name: parts[number] for name, parts in split.items() if parts[number] is not None}
        for number in range(len(lengths))
    ]
    if "images" in arrays:
        columns["images"] = _split_images(arrays)
    names = list(columns)
    if len(others) != len(lengths):
        raise ValueError(f"{len(others)} descriptions of {len(lengths)} trajectories")
    return [Trajectory(**dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _split(arrays: Mapping[str, NDArray[Any]], name: str, lengths: NDArray[Any]) -> list[Any]:
    """Return each trajectory's part of a column, None where it has none."""
    there = arrays.get(f"{name}.there", np.ones(len(lengths), np.uint8)).astype(bool)
    joined = arrays[name] if name in arrays else Ragged(arrays[f"{name}.ids"], arrays[f"{name}.ends"])
    ends = np.cumsum(lengths[there])
    if len(joined) != (ends[-1] if len(ends) else 0) or (
        isinstance(joined, Ragged) and joined.ends[-1] != len(joined.ids)
    ):
        raise ValueError(f"{name} has {len(joined)} rows of {int(lengths[there].sum())}")
    parts = iter(joined[end - length : end] for end, length in zip(ends.tolist(), lengths[there].tolist(), strict=True))
    return [next(parts) if it else None for it in there]


def _split_images(arrays: Mapping[str, NDArray[Any]]) -> list[tuple[bytes, ...]]:
    ends = np.cumsum(arrays["images.sizes"])
    known = [each.tobytes() for each in np.split(arrays["images"], ends[:-1])]
    places = np.split(arrays["images.places"], np.cumsum(arrays["images.counts"])[:-1])
    return [tuple(known[place] for place in own) for own in places]


def decode(arrays: Mapping[str, NDArray[Any]], texts: str, where: str) -> list[Trajectory]:
    """Return the trajectories of a file; raise CheckpointError, which names it, if they are not such arrays."""
    try:
        return from_arrays(arrays, texts)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"{where} has no trajectories of a training step: {error}. Restore the file from a backup"
        ) from error
