"""Trajectories as flat arrays, and back without a change of any bit.

The fields of `Trajectory` decide the form, so that a field that is added to it is recorded: arrays are joined, parts of
ragged columns too, numbers become one array, and everything else is JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_like.errors import CheckpointError
from areal_like.per_token import KeptIds
from areal_like.types import FinishReason, Node, TopIds, Trajectory

type Arrays = dict[str, NDArray[Any]]

_PARTS = {KeptIds: ("ids", "ends"), TopIds: ("ids", "logprobs")}  # arrays of a column that has several
_OF_FIELD = {"kept": KeptIds, "teacher_top": TopIds}
_INTEGERS = ("sample_id", "group_id", "sample")
_TEXTS = ("reward_parts", "nodes")


def to_arrays(trajectories: Sequence[Trajectory]) -> tuple[Arrays, str]:
    """Return the columns of trajectories as arrays, and the fields that are not numbers as JSON."""
    arrays: Arrays = {"lengths": np.array([len(item.tokens) for item in trajectories], np.int32)}
    for name in _INTEGERS:
        arrays[name] = np.array([getattr(item, name) for item in trajectories], np.int64)
    arrays["has_reward"] = np.array([item.reward is not None for item in trajectories], np.uint8)
    arrays["reward"] = np.array([item.reward or 0.0 for item in trajectories], np.float64)
    arrays["truncated"] = np.array([item.finish_reason is FinishReason.LENGTH for item in trajectories], np.uint8)
    known = {*_INTEGERS, *_TEXTS, "reward", "finish_reason", "images"}
    for name in (each.name for each in fields(Trajectory) if each.name not in known):
        arrays |= _column(name, [getattr(item, name) for item in trajectories])
    arrays |= _images([item.images for item in trajectories])
    texts = [
        {"reward_parts": dict(item.reward_parts), "nodes": [vars(node) for node in item.nodes]} for item in trajectories
    ]
    return arrays, json.dumps(texts)


def _column(name: str, values: Sequence[Any]) -> Arrays:
    """Return one column; `NAME.rows` counts the rows of each trajectory, if some have none."""
    there = [value for value in values if value is not None]
    if not there:
        return {}
    presence = (
        {} if len(there) == len(values) else {f"{name}.there": np.array([v is not None for v in values], np.uint8)}
    )
    if not is_dataclass(there[0]):
        return {name: np.concatenate(there)} | presence
    parts = _PARTS[type(there[0])]
    sizes = {f"{name}.{part}.sizes": np.array([len(getattr(v, part)) for v in there], np.int64) for part in parts}
    joined = {f"{name}.{part}": np.concatenate([getattr(v, part) for v in there]) for part in parts}
    return joined | sizes | presence


def _images(images: Sequence[Sequence[bytes]]) -> Arrays:
    """Return different images once, and the numbers of those of each trajectory."""
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
    for each in fields(Trajectory):
        name = each.name
        if name in _OF_FIELD and any(key.startswith(f"{name}.") for key in arrays):
            columns[name] = _split_parts(arrays, name, len(lengths))
        elif name in arrays and name not in columns and name != "images":
            columns[name] = _split(arrays, name, arrays[name], lengths)
    if "images" in arrays:
        columns["images"] = _split_images(arrays)
    names = list(columns)
    if len(others) != len(lengths):
        raise ValueError(f"{len(others)} descriptions of {len(lengths)} trajectories")
    return [Trajectory(**dict(zip(names, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _split(arrays: Mapping[str, NDArray[Any]], name: str, joined: NDArray[Any], lengths: NDArray[Any]) -> list[Any]:
    """Return each trajectory's part of a column, None where it has none."""
    there = arrays.get(f"{name}.there", np.ones(len(lengths), np.uint8)).astype(bool)
    ends = np.cumsum(lengths[there])
    if len(joined) != (ends[-1] if len(ends) else 0):
        raise ValueError(f"{name} has {len(joined)} rows of {int(lengths[there].sum())}")
    parts = iter(np.split(joined, ends[:-1]))
    return [next(parts) if it else None for it in there]


def _split_parts(arrays: Mapping[str, NDArray[Any]], name: str, count: int) -> list[Any]:
    """Return each trajectory's part of a column with several arrays."""
    made = _OF_FIELD[name]
    there = arrays.get(f"{name}.there", np.ones(count, np.uint8)).astype(bool)
    parts = [
        np.split(arrays[f"{name}.{part}"], np.cumsum(arrays[f"{name}.{part}.sizes"])[:-1]) for part in _PARTS[made]
    ]
    rows = iter(zip(*parts, strict=True))
    return [made(*next(rows)) if it else None for it in there]


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
