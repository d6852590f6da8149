"""A user's own code, named in the configuration: `my_rewards.py:score` or `package.module:score`.

A name travels between processes where a function could not: every process loads it for itself, once. What a script
or notebook has given to `train` has a name in its own process alone, and goes to others as a Portable.
"""

import functools
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FORM = "my_file.py:name or package.module:name"


class UserCodeError(Exception):
    """A user's code cannot be had; the message names it, and the line where its import failed."""


def absolute(reference: str) -> str:
    """Return the same reference for a process with another working directory."""
    where, colon, name = reference.rpartition(":")
    return f"{Path(where).expanduser().absolute()}{colon}{name}" if where.endswith(".py") else reference


def load_object(reference: str) -> Any:
    """Load the object that `reference` names, and execute its module; raise UserCodeError."""
    if reference in _given:
        return _given[reference]
    where, _, name = reference.rpartition(":")
    if where == _GIVEN:
        raise UserCodeError(f"{name} was given by the Python code that called train(): call it there, or name a file")
    return _load_named(reference)


@contextmanager
def register(objects: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Have `load_object` find these objects under references, which this yields by key; a text is one already."""
    references = {}
    for key, value in objects.items():
        own = re.sub(r"\W", "", getattr(value, "__name__", type(value).__name__))  # such as <lambda>
        name = f"{key.partition('.')[0]}.{own}"
        references[key] = value if isinstance(value, str) else f"{_GIVEN}:{name}"
        if not isinstance(value, str):
            _given[references[key]] = value
    try:
        yield references
    finally:
        for reference in references.values():
            _given.pop(reference, None)


@dataclass(frozen=True)
class Portable:
    """Object that a reference names, on its way to a process that this one starts, through the pipe between them.

    An object that was given from Python travels by value, as Ray would send it (cloudpickle): its module may be a
    notebook, which no other process can import. It is made of its bytes once in a process, not by every call that has
    it with it; the pipe, which pickles too, carries nothing that the process at its other end has not made.
    """

    reference: str
    by_value: bytes | None

    @classmethod
    def pack(cls, reference: str) -> "Portable":
        """Pack an object; raise UserCodeError for one that cannot be sent."""
        if reference not in _given:
            return cls(absolute(reference), None)
        from pickle import PicklingError

        import cloudpickle

        try:
            return cls(reference, cloudpickle.dumps(_given[reference]))
        except (PicklingError, TypeError, AttributeError) as error:
            raise UserCodeError(f"{reference} cannot be sent to a worker process: {error}") from error

    def load(self) -> Any:
        """Load the object, in the process that it was sent to. Raises UserCodeError."""
        return load_object(self.reference) if self.by_value is None else _made_of(self.by_value)


@functools.cache
def _made_of(by_value: bytes) -> Any:
    """Return the object of a Portable. Its bytes come from the parent process: no other process has the pipe."""
    import cloudpickle

    return cloudpickle.loads(by_value)


def user_modules(thing: Any) -> list[ModuleType]:
    """Return modules that another process may not be able to import, among those that a function or a class is from.

    They are its own, and all that were imported from where that lies; none for what is installed. A partial is from
    where its function is.
    """
    while isinstance(thing, functools.partial):
        thing = thing.func
    own = sys.modules.get(getattr(thing, "__module__", None) or "")
    if own is None or _is_installed(own):
        return []
    folders = {folder for folder in (_folder(own), _root(own)) if folder}
    loaded = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    beside = [each for each in loaded if {_folder(each), _root(each)} & folders and not _is_installed(each)]
    return [own, *(module for module in beside if module is not own)]


def _folder(module: ModuleType) -> str:
    """Return where its file lies; "" where it has none."""
    file = getattr(module, "__file__", None)
    return os.path.dirname(os.path.abspath(file)) if file else ""


def _root(module: ModuleType) -> str:
    """Return the folder that a module was imported from, which for a package's module is the one above the package."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    paths = list(getattr(top, "__path__", ()))
    return os.path.dirname(os.path.abspath(paths[0])) if paths else _folder(top)


def _is_installed(module: ModuleType) -> bool:
    """Return whether every process of a run can import it: this project, Python's own and what was installed."""
    if module.__name__.partition(".")[0] in (*_OURS, *sys.builtin_module_names, *sys.stdlib_module_names):
        return True
    return bool({"site-packages", "dist-packages"} & set(Path(_folder(module)).parts))


_OURS = ("areal_like", "allocation")
_GIVEN = "given"
_given: dict[str, Any] = {}


@functools.cache
def _load_named(reference: str) -> Any:
    where, _, name = reference.rpartition(":")
    if not where or not name.isidentifier():
        raise UserCodeError(f"{reference!r} does not name a file or module and what to take from it: write {FORM}")
    module = _run_file(str(Path(where).expanduser().absolute())) if where.endswith(".py") else _import(where)
    try:
        return getattr(module, name)
    except AttributeError:
        own = ", ".join(key for key in vars(module) if not key.startswith("_")) or "nothing"
        raise UserCodeError(f"{where} has no {name!r}; it has {own}") from None


@functools.cache
def _run_file(path: str) -> ModuleType:
    """Import the module in a file, which can import what lies beside it, as a script can."""
    file = Path(path)
    if not file.is_file():
        raise UserCodeError(f"{path} does not exist")
    folder, name = str(file.parent), f"_of_user_{file.stem}"
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:  # never for a name that ends in .py
        raise UserCodeError(f"{path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's module fails in any way it likes
        raise UserCodeError(f"{path} cannot be imported: {where_it_failed(error, file.name)}") from error
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{name} cannot be imported: {where_it_failed(error, name)}") from error


def where_it_failed(error: BaseException, name: str) -> str:
    """Return the error in one line, with the last line of the user's file that it passed through."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename.endswith(name)), None)
    return (f"line {line}: " if line else "") + f"{type(error).__name__}: {error}"
