"""Keys that were renamed: an old name works for one release, with a warning that names the new one."""

from collections.abc import Iterator, Mapping
from typing import Any

from allocation.diagnostics import Finding, Severity
from areal_like.config.findings import finding

RENAMED: Mapping[str, str] = {"weight_update.ahead_mb": "weight_update.prefetch_mb"}


def rename_keys(data: dict[str, Any], places: dict[str, str]) -> Iterator[Finding]:
    """Move the values of old keys to the new ones, in place; yield a warning for each, or an error if both are set."""
    for old, new in RENAMED.items():
        section, _, leaf = old.rpartition(".")
        values: Any = data
        for name in section.split("."):
            values = values.get(name) if isinstance(values, dict) else None
        if not isinstance(values, dict) or leaf not in values:
            continue
        renamed = new.rpartition(".")[2]
        if renamed in values:
            message = f"{old} is the old name of {new}, which is set too"
            yield finding("CONFIG-RENAMED", old, message, f"remove {old}")
            continue
        values[renamed] = values.pop(leaf)
        places[new] = places.pop(old, places.get(section, ""))
        message, help = f"this key is now {new}; the old name works for one release", f"write {new}"
        yield finding("CONFIG-RENAMED", new, message, help, severity=Severity.WARNING)
