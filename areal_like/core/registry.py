"""Finds the folders of `areal_like/capabilities/`, and `areal_like/interop/`: the rest names none of their features.

A folder has files of these names, each optional (docs/capability.md): `schema.py` with KEYS, `capability.py` with
CAPABILITY, `sglang.py` with PATCH, `served.py` with `make_form`, `commands.py` with COMMANDS, `interface.py` with
INTERFACE, `foreign_keys.py` with FOREIGN_KEYS, and `codes.toml`. A folder that was deleted is simply not there, and
neither is one that needs it: NEEDS of its `__init__.py` has the names.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).parents[1]


def find_files(name: str) -> Iterator[tuple[str, Path]]:
    """Yield each folder that has a file of this name, and the file: capabilities in the order of their names first."""
    capabilities = _ROOT / "capabilities"
    folders = sorted(capabilities.iterdir()) if capabilities.is_dir() else []
    for folder in [folder for folder in folders if folder.name.isidentifier()] + [_ROOT / "interop"]:
        needed = [capabilities / each / "__init__.py" for each in _needs(folder)]
        if (file := folder / name).is_file() and all(each.is_file() for each in needed):
            yield folder.name, file


def _needs(folder: Path) -> Sequence[str]:
    return getattr(import_module(_name_of(folder)), "NEEDS", ())


def _name_of(path: Path) -> str:
    return ".".join(["areal_like", *path.relative_to(_ROOT).with_suffix("").parts])


def find_modules(name: str) -> Iterator[tuple[str, ModuleType]]:
    """Yield each folder that has a module of this name, and the module."""
    for capability, file in find_files(f"{name}.py"):
        yield capability, import_module(_name_of(file))
