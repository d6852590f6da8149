"""Checks of a migrated run: the part of `areal-like check` that needs neither the model, the data nor this machine."""

import re
from typing import Any

import yaml

from allocation.diagnostics import Severity
from areal_like.config.findings import ConfigError
from areal_like.config.load import load
from areal_like.interop.completion import fill_placeholders
from areal_like.preflight import preflight

_OUTSIDE = (  # beginnings of codes: findings about files, the model, or this machine
    *("DATASET", "MODEL", "TOKENIZER", "WEIGHTS", "START", "MACHINE", "DIRECTORY", "PORT", "RESUME", "PACKAGE"),
    *("ENDPOINT", "WORKFLOW", "REWARD-FUNCTION", "REWARD-MODEL", "REWARD-JUDGE"),
    *("TEACHER-FILES", "VARIABLE"),
)
_MACHINE = {"device": "cuda", "scheduler": {"type": "local"}}  # no cluster is asked
_NOWHERE = "/nonexistent"  # where no file is read, no code imported, and no hub asked
_CODE = re.compile(r"(^|\.)(workflow|function|algorithm)$")
_FILES = re.compile(r"(^|\.)path$")


def find_refusals(text: str) -> dict[str, str]:
    """Return the findings of the run's own checks about a migrated YAML, by key; `???` counts as a valid value."""
    values = _hide_files(yaml.safe_load(fill_placeholders(text)), "")
    try:
        checked = preflight(load({**values, **_MACHINE}), dry_run=True)
    except ConfigError as error:
        return {str(found.key): str(found.message) for found in error.findings}
    return {
        str(found.key): f"{found.message} [{found.code}]" + (f". {found.help}" if found.help else "")
        for found in checked.findings
        if found.severity is Severity.ERROR and not found.code.removeprefix("RUN-").startswith(_OUTSIDE)
    }


def _hide_files(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the configuration with paths at which nothing is."""
    hidden: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            hidden[name] = _hide_files(value, f"{key}.")
        elif isinstance(value, str) and _CODE.search(key) and ":" in value:
            hidden[name] = f"{_NOWHERE}/code.py:run"
        elif isinstance(value, str) and _FILES.search(key):
            hidden[name] = _NOWHERE if "dataset" not in key else f"{_NOWHERE}/rows.jsonl"
        else:
            hidden[name] = value
    return hidden
