"""Warns of keys that have no effect; when that is so is metadata of each field in `areal_like/core/config/schema/`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from allocation.diagnostics import Finding
from allocation.plan import Plan
from areal_like.core.algorithms.settings import PRESETS, settings_of
from areal_like.core.config.findings import warn_ignored
from areal_like.core.config.schema import Ignored, Place, RunConfig, Section
from areal_like.core.types import Device


def check_unused(config: RunConfig, device: Device, plan: Plan | None) -> Iterator[Finding]:
    """Yield a warning for each key without effect, unless it has its default, as in a resolved configuration."""
    preset = PRESETS.get(config.algorithm)
    settings = settings_of(preset, config.actor) if preset else None
    yield from _find_ignored(Place(config, config, "", device, plan, settings), ())
    if device == "cuda":
        yield from _hidden_gpus(config)


def _find_ignored(place: Place, outer: tuple[Ignored, ...]) -> Iterator[Finding]:
    """Yield warnings for the keys of a section and of those below; `outer` are the conditions of the section."""
    for name, field in type(place.section).model_fields.items():
        value = getattr(place.section, name)
        marks = tuple(mark for mark in field.metadata if isinstance(mark, Ignored))
        reason = next((mark.why for mark in marks if mark.holds(place)), None)
        below = tuple(replace(mark, holds=lambda _: True) for mark in marks if mark.holds(place))
        reason = reason or next((mark.why for mark in outer if name not in mark.but), None)
        key = f"{place.key}.{name}".lstrip(".")
        if sections := dict(_sections(value, key)):
            for inner, section in sections.items():
                yield from _find_ignored(replace(place, section=section, key=inner), (*outer, *below))
        elif reason and value != field.default:
            yield warn_ignored(key, reason)


def _sections(value: Any, key: str) -> Iterator[tuple[str, Section]]:
    """Yield the sections that a value is or holds by name, each with its key."""
    if isinstance(value, Section):
        yield key, value
    elif isinstance(value, Mapping):
        yield from ((f"{key}.{name}", entry) for name, entry in value.items() if isinstance(entry, Section))


def _hidden_gpus(config: RunConfig) -> Iterator[Finding]:
    """Warn of GPUs named in a role's variables, which CUDA reads before they are set."""
    own = {role: section.env_vars or {} for role, section in config.further_roles.items()}
    for role, variables in {"actor": config.actor.env_vars, **own}.items():
        if "CUDA_VISIBLE_DEVICES" in variables:
            why = "a rank uses the GPU of its place in the layout"
            yield warn_ignored(f"{role}.env_vars.CUDA_VISIBLE_DEVICES", why, "name GPUs with `@` in the layout")
