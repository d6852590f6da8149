"""Conditions under which a key has no effect: metadata of its field, which docs print and a run warns of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """A section of a configuration, and the facts known when its keys are judged.

    `key` is the section's dotted key, `device` where the run computes, `plan` its layout where that is valid, and
    `settings` the algorithm's; None for an algorithm that is not a preset.
    """

    run: Any
    section: Any
    key: str
    device: str
    plan: Any
    settings: Any

    @property
    def role(self) -> str:
        """First part of the key: the role where the section belongs to one."""
        return self.key.partition(".")[0]

    @property
    def backend(self) -> str | None:
        """Return the backend of the section's role: `megatron` or `fsdp`, None where it is not known."""
        engines = self.plan.engines if self.plan else ()
        return next((engine.backend for engine in engines if engine.role == self.role), None)


@dataclass(frozen=True)
class Ignored:
    """A key, or every key of a section except `but`, has no effect where `holds`; `why` completes "because".

    `reads` is a key of the same section that the condition depends on; without this key the condition never holds.
    """

    why: str
    holds: Callable[[Place], bool]
    but: tuple[str, ...] = ()
    reads: str | None = None


def ignored_if(key: str, value: Any) -> Ignored:
    """Return the condition that a dotted key of the run has a value."""

    def holds(place: Place) -> bool:
        found = place.run
        for name in key.split("."):
            found = getattr(found, name, None)
        return bool(found == value)

    written = str(value).lower() if isinstance(value, bool) else "null" if value is None else value
    return Ignored(f"`{key}` is `{written}`", holds)


def with_settings(why: str, holds: Callable[[Any, Any], bool]) -> Ignored:
    """Return a condition on the run and the settings of a preset algorithm."""
    return Ignored(why, lambda place: place.settings is not None and holds(place.run, place.settings))


def for_reference(why: str) -> Ignored:
    """Return the condition that the section belongs to the reference."""
    return Ignored(f"{why} (`ref` only)", lambda place: place.role == "ref")


CPU = Ignored("`device` is `cpu`, where everything is in host memory", lambda place: place.device == "cpu")
