"""Finds the folders of `areal_like/capabilities/`, each adds something to a run that the rest does not name.

A folder has files of these names, each optional (docs/capability.md): `schema.py` with KEYS, `capability.py` with
CAPABILITY, `commands.py` with COMMANDS, `interface.py` with INTERFACE, `codes.toml`. A folder that was deleted is
simply not there, and neither is one that needs it: NEEDS of its `__init__.py` has the names.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

_FOLDER, _PACKAGE = Path(__file__).with_name("capabilities"), "areal_like.capabilities"


def find_files(name: str) -> Iterator[tuple[str, Path]]:
    """Yield each capability that has a file of this name, and the file, in the order of their names."""
    folders = _FOLDER.iterdir() if _FOLDER.is_dir() else ()
    for folder in sorted(folder for folder in folders if folder.name.isidentifier()):
        if (file := folder / name).is_file() and all(
            (_FOLDER / each / "__init__.py").is_file() for each in _needs(folder)
        ):
            yield folder.name, file


def _needs(folder: Path) -> Sequence[str]:
    return getattr(import_module(f"{_PACKAGE}.{folder.name}"), "NEEDS", ())


def find_modules(name: str) -> Iterator[tuple[str, ModuleType]]:
    """Yield each capability that has a module of this name, and the module."""
    for capability, _ in find_files(f"{name}.py"):
        yield capability, import_module(f"{_PACKAGE}.{capability}.{name}")
