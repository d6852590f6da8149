"""Patches: changes of SGLang that come with a server, each from one file of `patches/` or from a capability."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from areal_like.config.schema import RunConfig
from areal_like.registry import find_modules

_FOLDER = Path(__file__).with_name("patches")

SCORE = "--score-temperature"  # of our launcher alone: the temperature of log-probs of a server that only scores

type Command = Callable[[Any, str, Any], tuple[bool, str]]
"""What each rank of a server does, from (model runner, text, group of the ranks) to success and a message."""


@dataclass(frozen=True)
class Launch:
    """A server that starts.

    `own` has the values of flags that only patches know. `server` are SGLang's ServerArgs and `model` the model's
    configuration, once SGLang has read the arguments.
    """

    arguments: list[str]
    own: Mapping[str, str]
    cuda: bool
    server: Any = None
    model: Any = None

    @property
    def generates(self) -> bool:
        """Whether the server generates tokens with weights that change, and does not only score."""
        return not (self.server.is_embedding or SCORE in self.own)

    @property
    def architectures(self) -> Collection[str]:
        """Names of the model, as its config.json has them."""
        return self.model.architectures or ()


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A change of SGLang.

    `options` returns options of the policy's servers, by name, from the configuration and the names of the columns that
    servers return; it runs in the controller, which does not import SGLang. `flags` are options of our launcher alone.
    In the process that serves HTTP, `prepare` runs before SGLang reads its arguments and returns further ones, and
    `serve` afterwards. `schedule` runs in each scheduler process before its scheduler is built. `commands` are by the
    names with which the server's route for commands gets them.
    """

    options: Callable[[RunConfig, Collection[str]], Mapping[str, object]] = lambda config, columns: {}
    flags: tuple[str, ...] = ()
    prepare: Callable[[Launch], Sequence[str]] = lambda launch: ()
    serve: Callable[[Launch], None] = lambda launch: None
    schedule: Callable[[Launch], None] = lambda launch: None
    commands: Mapping[str, Command] = field(default_factory=dict)


@cache
def all_patches() -> tuple[Patch, ...]:
    """Return the patches of this folder, in the order of their files, then those of capabilities (`sglang.py`)."""
    names = sorted(file.stem for file in _FOLDER.glob("*.py") if file.stem != "__init__")
    own = [import_module(f"{__package__}.patches.{name}").PATCH for name in names]
    return (*own, *(module.PATCH for _, module in find_modules("sglang")))


def split_flags(arguments: Sequence[str], cuda: bool) -> Launch:
    """Return a launch with SGLang's own arguments, and the values of our flags apart."""
    flags = {flag for patch in all_patches() for flag in patch.flags}
    left, own = list(arguments), dict[str, str]()
    for flag in flags & {*left}:
        place = left.index(flag)
        own[flag] = left[place + 1]
        del left[place : place + 2]
    return Launch(left, own, cuda)
