"""Syntax tree to engines with sizes: the meaning of each word, the defaults, and the role of each member.

Every omitted size is 1, including ETP, whose default in Megatron is TP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache

from allocation.backends import BACKENDS, DEFAULT_ROLE, SERVER, SIZE_OF, UNKNOWN_BACKEND, Backend
from allocation.diagnostics import Source, Span
from allocation.language.spelling import spell
from allocation.language.syntax import LARGEST, Dim, Member
from allocation.registry import UnknownSize


class _Size:
    """The size of an engine named like the attribute, 1 if omitted. Raises `UnknownSize`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, engine: Engine, owner: type) -> int:
        value = engine.sizes.get(self.name, 1)
        if value is None:
            raise UnknownSize(self.name)
        return value


@dataclass(frozen=True, slots=True)
class Engine:
    """A member with its meaning.

    `sizes` maps `dp tp pp cp ep etp vpp` and, if written, `ffn_dp ffn_pp` to a positive integer, or to None if the
    value in the string is unusable; reading such a size raises `UnknownSize`. `written` has the dimension of each size
    in the string, `dims` every dimension with its part.
    """

    node: Member
    source: Source
    role: str
    backend: Backend
    sizes: Mapping[str, int | None]
    written: Mapping[str, Dim] = field(repr=False)
    dims: tuple[tuple[str, Dim], ...] = field(repr=False)

    dp, tp, pp, cp, ep, etp, vpp, ffn_dp, ffn_pp = (_Size() for _ in range(9))

    @property
    def per_replica(self) -> int:
        """GPUs with `d1`, the factor of `d`."""
        return self.tp * self.pp * self.cp

    @property
    def world(self) -> int:
        """GPUs of the engine; `e` adds none."""
        return self.dp * self.per_replica

    @property
    def expert_block(self) -> int:
        """Ranks that hold the experts of one replica: etp·ep·pp."""
        return self.etp * self.ep * self.pp

    @property
    def edp(self) -> int:
        """Expert data parallel size: copies of the experts. Raises `UnknownSize` if it is not whole."""
        copies, rest = divmod(self.world, self.expert_block)
        if rest:
            raise UnknownSize("edp")
        return copies

    @property
    def smallest_world(self) -> int:
        """Smallest number of GPUs on which both grids of this layout fit: pp·lcm(tp·cp, etp·ep)."""
        if self.backend.kind == SERVER:
            return self.per_replica
        return self.pp * math.lcm(self.tp * self.cp, self.etp * self.ep)

    @property
    def starred(self) -> bool:
        """Whether the member has a `d*` that is not yet resolved."""
        return self.sizes.get("dp", 1) is None and "dp" in self.written and self.written["dp"].count == "*"

    @property
    def label(self) -> str:
        """The engine's name in messages: its text without GPU ids."""
        return spell(replace(self.node, name=None, gpus=()))

    def spans(self, *names: str) -> tuple[Span, ...]:
        """Return the spans of the sizes `names`, or of the whole layout if the string names none."""
        return tuple(self.written[n].span for n in names if n in self.written) or (self.node.layout.span,)

    def says(self, name: str) -> str:
        """Return the size as the user wrote it (`e4`), or its value with a note that it is the default."""
        if name in self.written:
            return str(self.written[name])
        letter = {"etp": "t"}.get(name, name[0])
        return f"{letter}{getattr(self, name)} (default)"


def resolve(node: Member, source: Source, role: str | None) -> Engine:
    """Return the engine of `node`. Wrong words leave sizes unknown; the rules of `words.py` report them."""
    backend = BACKENDS.get(node.backend.text) or BACKENDS.get(_guess(node.backend.text), UNKNOWN_BACKEND)
    written: dict[str, Dim] = {}
    sizes: dict[str, int | None] = {}
    dims = node.layout.dims
    for part, dim in dims:
        name = SIZE_OF[part].get(dim.letter)
        if name is None:
            continue
        # A size of 1 has no effect, whether the backend has the dimension or not.
        usable = (dim.letter in backend.letters or dim.count == "1") and name not in written
        sizes[name] = count(dim) if usable else None
        written.setdefault(name, dim)
    if backend is UNKNOWN_BACKEND:
        sizes = dict.fromkeys(name for names in SIZE_OF.values() for name in names.values())
    if role is None:
        role = node.name.text if node.name else DEFAULT_ROLE[backend.kind]
    return Engine(node, source, role, backend, sizes, written, dims)


def count(dim: Dim) -> int | None:
    """Return the count as a positive integer, None when it is none (or `*`)."""
    return _number(dim.count)


@lru_cache(1024)
def _number(text: str) -> int | None:
    digits = text.lstrip("0")
    if not digits.isdecimal() or len(digits) > len(str(LARGEST)):
        return None
    value = int(digits)
    return value if value <= LARGEST else None


@lru_cache(256)
def _guess(word: str) -> str:
    close = get_close_matches(word.lower(), BACKENDS, n=1)
    return close[0] if close else ""
