"""The keys of several adapters (`adapters`), checked as keys of the run that has each of them alone."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from allocation.diagnostics import Finding
from areal_like.core.config.schema import RunConfig
from areal_like.core.config.validate import validate, wrong_keys


def check_adapters(config: RunConfig) -> Iterator[Finding]:
    """Yield unknown keys and wrong values in the sections of adapters."""
    values = config.model_dump()
    for name, adapter in config.adapters.items():
        own = adapter.merge_into(values)
        yield from at_adapter(config, name, [*wrong_keys(own), *validate(own)[1]])


def at_adapter(config: RunConfig, name: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings about a run with one adapter alone, at the adapter's keys where it has sections of its own.

    With the name "" the findings are about a run without several adapters.
    """
    own = config.adapters[name].model_fields_set if name else ()

    def place(key: str) -> str:
        return f"adapters.{name}.{key}" if key.partition(".")[0] in own else key

    for found in findings:
        key = found.key and " + ".join(map(place, found.key.split(" + ")))
        yield replace(found, source=replace(found.source, key=key))
