"""ROLL's `device_mapping`: lists of GPU ids, parsed by a grammar of their own and never evaluated.

mapping = term { "+" term } ; term = "[" ints "]" | ["list" "("] "range" "(" ints ")" [")"]
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from allocation.convert.settings import number
from allocation.gpus import merge, n_gpus

MOST_GPUS = 1 << 17
_TERM = re.compile(r"\[([\d,\s]*)\]|(list\s*\(\s*)?range\s*\(([\d,\s]*)\)\s*(\))?")


def parse(text: str) -> tuple[range, ...]:
    """Return the ids in order, as ranges. Raises `ValueError` with the reason."""
    text = text.strip()
    ids: list[range] = []
    position = 0
    while True:
        term = _TERM.match(text, position)
        if not term or bool(term[2]) != bool(term[4]):
            raise ValueError(
                f"unsupported expression `{text[position : position + 20]}`" if text else "the mapping is empty"
            )
        ids += _singles(_numbers(term[1])) if term[1] is not None else [_range(term[3])]
        if n_gpus(ids) > MOST_GPUS:
            raise ValueError(f"the mapping has more than {MOST_GPUS} ids")
        rest = text[term.end() :].lstrip()
        if not rest:
            break
        if rest[0] != "+":
            raise ValueError(f"unsupported expression `{rest[:20]}`")
        position = len(text) - len(rest[1:].lstrip())
    runs = merge(run for part in ids for run in ([part] if part.step == 1 else _singles(part)))
    if not runs:
        raise ValueError("the mapping is empty")
    ends = sorted((run.start, run.stop) for run in runs)
    for (_, stop), (start, _) in pairwise(ends):
        if start < stop:
            raise ValueError(f"GPU {start} appears twice")
    return runs


def show(gpus: Sequence[range]) -> str:
    """Return the ids as ROLL writes them."""
    return " + ".join(f"list(range({ids.start},{ids.stop}))" for ids in gpus)


def _numbers(text: str) -> list[int]:
    values = [number(part.strip()) for part in text.split(",")] if text.strip() else []
    if None in values:
        raise ValueError("an id is a number from 0, and commas stand between them")
    return [value for value in values if value is not None]


def _singles(ids: Iterable[int]) -> list[range]:
    return [range(gpu, gpu + 1) for gpu in ids]


def _range(text: str) -> range:
    bounds = _numbers(text)
    if not 1 <= len(bounds) <= 3 or (len(bounds) == 3 and bounds[2] == 0):
        raise ValueError(f"`range({text})` needs one to three numbers, the third at least 1")
    ids = range(*bounds)
    if ids.stop - ids.start > MOST_GPUS * ids.step:
        raise ValueError(f"the mapping has more than {MOST_GPUS} ids")
    return ids
