"""What every module of this package offers: one `System`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from allocation.diagnostics import Finding
from allocation.grid import DEFAULT_ORDER
from allocation.plan import Plan


@dataclass(frozen=True, slots=True)
class System:
    """Another system's settings.

    `read` turns their text into an allocation with findings, `write` a plan into text (empty when nothing of it has a
    place). `limits` explains what the system cannot say, by the code of the finding. `orders` are the rank orders that
    it can be told. `even` says whose GPUs must be equally many on every node: each engine's, or all together.
    """

    name: str
    title: str
    read: Callable[[str], tuple[str, list[Finding]]]
    write: Callable[[Plan], str]
    limits: Mapping[str, str] = field(default_factory=dict)
    orders: tuple[str, ...] = (DEFAULT_ORDER,)
    even: Literal["none", "each", "all"] = "none"
