"""Columns in the `meta_info` of answers, and in requests that only score tokens."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec

from areal_like.core.columns import Column, Values, served_columns
from areal_like.core.rollout.sample import Sampling


def fields_of(columns: Iterable[Column]) -> list[tuple[str, Any, None]]:
    """Return the fields of columns with their types, for a Struct."""
    return [(name, kind, None) for column in columns for name, kind in column.sent.items()]


def request_served(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a request for the columns that a sampling wants, of all its tokens."""
    wanted = (column.request(sampling, 0) for column in served_columns().values())
    return {name: value for fields in wanted if fields is not None for name, value in fields.items()}


def read_served(info: Any, count: int, sampling: Sampling) -> dict[str, Values]:
    """Return these columns of `count` tokens, from the meta_info of a whole answer; raise ValueError if unusable."""
    wanted = [each for each in served_columns().values() if each.request(sampling, 0) is not None]
    piece = SimpleNamespace(info=msgspec.convert(info, msgspec.defstruct("Served", fields_of(wanted))))
    return {column.name: column.read(piece, count, sampling) for column in wanted}
