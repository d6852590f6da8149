"""The common interface of this package's modules: one `System` each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from allocation.diagnostics import Finding
from allocation.grid import DEFAULT_ORDER
from allocation.plan import Plan


@dataclass(frozen=True, slots=True)
class System:
    """Another system's settings.

    `read` turns their text into an allocation with findings, `write` a plan into text (empty if no part of it has an
    equivalent). `limits` explains the system's limits by finding code. `orders` are the rank orders that it
    supports. `even` says which engines must have equally many GPUs on every node: each one, or all together.
    """

    name: str
    title: str
    read: Callable[[str], tuple[str, list[Finding]]]
    write: Callable[[Plan], str]
    limits: Mapping[str, str] = field(default_factory=dict)
    orders: tuple[str, ...] = (DEFAULT_ORDER,)
    even: Literal["none", "each", "all"] = "none"
