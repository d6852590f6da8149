"""Change modules of a run in all of its processes, right after their import, where this folder is on PYTHONPATH.

CHANGES is JSON: for the name of each module, `module:function` to call with it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Finds the modules that CHANGES names."""

    def __init__(self, changes: dict[str, str]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in self._changes or (spec := PathFinder.find_spec(name, path)) is None or spec.loader is None:
            return None
        spec.loader = _Changing(spec.loader, self._changes[name])
        return spec


class _Changing(Loader):
    """Loads a module as its own loader does, and changes it."""

    def __init__(self, loader: Loader, change: str) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        home, _, function = self._change.partition(":")
        getattr(import_module(home), function)(module)


sys.meta_path.insert(0, _Finder(json.loads(os.environ.get("CHANGES", "{}"))))
