"""The software of servers: each folder of `backends/` with a `backend.py` is a backend of its name, with a BACKEND."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path

from allocation.backends import BACKENDS, SERVER, Backend
from allocation.diagnostics import Finding
from allocation.model_spec import ModelSpec
from areal_like.core.config.schema import RunConfig
from areal_like.core.rollout.server import Server, ServerActor
from areal_like.core.types import Device

DEFAULT = "sglang"


def _no_findings(config: RunConfig, device: Device, model: ModelSpec | None) -> Iterator[Finding]:
    yield from ()


@dataclass(frozen=True, kw_only=True)
class ServerBackend:
    """The software of servers, as far as a run needs to know it.

    `letters` are its dimensions in an allocation. `connect` makes the client of a server from (name, url, session,
    rank, turn, aftermath_s, host_timeout_s), which `areal_like/backends/http.py` describes; `actor` runs it.
    `arguments` returns the arguments of a server of the policy from (config, model, sizes, device, index, columns,
    form), and `scorer_arguments` the arguments of a reward model, judge or teacher from (config, section, directory,
    sizes, device); None: such servers have another backend.

    The rest is known before the start: `check` yields findings about the backend's own section. `architectures` returns
    the models that it serves, empty where that is unknown, `classifiers` the models that score as in transformers, and
    `on_gpus_alone` has families that it serves only there. `cached_tokens_on_cpu` returns the size of a KV cache on a
    CPU. `call_starts` has, for some of the `tool_call_parsers`, the texts with which tool calls begin. `most_captured`
    returns the sequences that CUDA graphs of a server hold from (config, servers, vocabulary), None where that is
    unknown, and the reason in words.
    """

    connect: Callable[..., Server]
    actor: type[ServerActor]
    arguments: Callable[..., tuple[str, ...]]
    scorer_arguments: Callable[..., tuple[str, ...]] | None = None
    letters: str = "d"
    check: Callable[[RunConfig, Device, ModelSpec | None], Iterator[Finding]] = _no_findings
    architectures: Callable[[], Collection[str]] = frozenset
    classifiers: Sequence[str] = ()
    on_gpus_alone: Collection[str] = frozenset()
    cached_tokens_on_cpu: Callable[[RunConfig], int] = lambda config: config.context_length
    tool_call_parsers: Callable[[], Sequence[str]] = list
    call_starts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    most_captured: Callable[[RunConfig, int, int], tuple[int | None, str]] = lambda config, servers, words: (None, "")


@cache
def backend_names() -> tuple[str, ...]:
    """Return the names of all backends, the default one first."""
    found = {file.parent.name for file in (Path(__file__).parents[2] / "backends").glob("*/backend.py")}
    return (DEFAULT, *sorted(found - {DEFAULT}))


@cache
def find_backend(name: str = DEFAULT) -> ServerBackend:
    """Return a backend by its name."""
    backend: ServerBackend = import_module(f"areal_like.backends.{name}.backend").BACKEND
    return backend


def backend_of(config: RunConfig) -> ServerBackend:
    """Return the backend of the policy's servers, before there is a plan; the default one where none is named."""
    words = re.findall(r"\w+", config.rollout.backend or config.allocation_mode or "")
    return find_backend(next((word for word in words if word in backend_names()), DEFAULT))


def register_backends() -> None:
    """Add the backends that the compiler does not know to its own."""
    for name in backend_names():
        if name not in BACKENDS:
            BACKENDS[name] = Backend(name, SERVER, find_backend(name).letters)
