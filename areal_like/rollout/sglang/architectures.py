"""The models for which the installed SGLang has code, and the one that it serves.

Does not import SGLang, which takes long.
"""

import importlib.util
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from allocation.families import families_with

# Families with kernels that SGLang 0.5.17 has for GPUs only; tests replace these kernels (`tests/support`)
ON_GPUS_ALONE = frozenset(families_with(lambda family: not family.server.on_cpus))
_NAMED = re.compile(r"^EntryClass\b[^=\n]*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)


@cache
def served_architectures() -> frozenset[str]:
    """Return the names that `architectures` in a config.json may have; empty without SGLang."""
    package = importlib.util.find_spec("sglang")
    if package is None or package.origin is None:
        return frozenset()
    modules = Path(package.origin).parent.glob("srt/models/*.py")
    named = (found for file in modules for found in _NAMED.findall(file.read_text()))
    return frozenset(name for found in named for name in re.findall(r"\w+", found))


def read_fields(arguments: Sequence[str]) -> dict[str, Any]:
    """Return config.json of the model in a server's arguments, empty where it is not on disk."""
    return read_config(Path(arguments[arguments.index("--model-path") + 1]))


def read_config(model: Path) -> dict[str, Any]:
    """Return a model's config.json, empty where it is not on disk."""
    config = model / "config.json"
    fields: dict[str, Any] = json.loads(config.read_text()) if config.is_file() else {}
    return fields
