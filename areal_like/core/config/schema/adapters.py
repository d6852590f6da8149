"""Several adapters of one run: `adapters`."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from areal_like.core.config.section import Section

_ALTERNATIVES = {"reward": ("type", "function", "parts")}  # a section has one of them


class AdapterConfig(Section):
    """One of several adapters: settings that differ from the run's own."""

    algorithm: str | None = None
    """Its algorithm; null: `algorithm` of the run."""
    train_dataset: dict[str, Any] = Field({})
    """Keys of `train_dataset` that differ."""
    valid_dataset: dict[str, Any] = Field({})
    """Keys of `valid_dataset` that differ."""
    reward: dict[str, Any] = Field({})
    """Keys of `reward` that differ."""
    actor: dict[str, Any] = Field({})
    """Settings of the algorithm in `actor` that differ."""

    def merge_into(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a run that has this adapter alone, from the run's."""
        merged = {**values, "adapters": {}, "algorithm": self.algorithm or values["algorithm"]}
        for name in ("train_dataset", "valid_dataset", "reward", "actor"):
            own: dict[str, Any] = getattr(self, name)
            if own:
                taken = _ALTERNATIVES.get(name, ())
                dropped = taken if any(key in own for key in taken) else ()
                before = values.get(name) or {}
                merged[name] = _merge({key: value for key, value in before.items() if key not in dropped}, own)
        return merged


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with changes."""
    merged = dict(values)
    for name, change in changes.items():
        before = merged.get(name)
        both = isinstance(before, Mapping) and isinstance(change, Mapping)
        merged[name] = _merge(before, change) if both else change  # type: ignore[arg-type]
    return merged


def _names(adapters: dict[str, AdapterConfig]) -> dict[str, AdapterConfig]:
    """Check the names, which directories, metrics and adapters on servers have too."""
    for name in adapters:
        if not name.isascii() or not name.replace("_", "").replace("-", "").isalnum() or len(name) > 64:
            raise ValueError(f"a name has at most 64 letters, digits, `_` and `-`; {name!r} does not")
    return adapters


Adapters = Annotated[dict[str, AdapterConfig], AfterValidator(_names)]
