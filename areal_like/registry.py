"""Finds the folders of `areal_like/capabilities/`, each adds something to a run that the rest does not name.

A folder has files of these names, each optional (docs/capability.md): `schema.py` with KEYS, `capability.py` with
CAPABILITY, `served.py` with `make_form`, `commands.py` with COMMANDS, `interface.py` with INTERFACE, `codes.toml`. A
folder that was deleted is simply not there.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

_FOLDER, _PACKAGE = Path(__file__).with_name("capabilities"), "areal_like.capabilities"


def find_files(name: str) -> Iterator[tuple[str, Path]]:
    """Yield each capability that has a file of this name, and the file, in the order of their names."""
    folders = _FOLDER.iterdir() if _FOLDER.is_dir() else ()
    for folder in sorted(folder for folder in folders if folder.name.isidentifier()):
        if (file := folder / name).is_file():
            yield folder.name, file


def find_modules(name: str) -> Iterator[tuple[str, ModuleType]]:
    """Yield each capability that has a module of this name, and the module."""
    for capability, _ in find_files(f"{name}.py"):
        yield capability, import_module(f"{_PACKAGE}.{capability}.{name}")
