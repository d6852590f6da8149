"""A user's own code, named in the configuration: `my_rewards.py:score` or `package.module:score`.

A name can be sent between processes if a function cannot: every process loads it once. An object that a script or
notebook passes to `train` has a name only in its own process, and is sent to others as a Portable.
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
    """User code cannot be loaded; the message names it, and the line where its import failed."""


def absolute(reference: str) -> str:
    """Return the reference with an absolute path, for a process with another working directory."""
    where, colon, name = reference.rpartition(":")
    return f"{Path(where).expanduser().absolute()}{colon}{name}" if where.endswith(".py") else reference


def load_object(reference: str) -> Any:
    """Load the object named by `reference`, and execute its module; raise UserCodeError."""
    if reference in _given:
        return _given[reference]
    where, _, name = reference.rpartition(":")
    if where == _GIVEN:
        raise UserCodeError(f"{name} was given by the Python code that called train(): call it there, or name a file")
    return _load_named(reference)


@contextmanager
def register(objects: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Register objects for `load_object`, and yield their references by key; a text already is a reference."""
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
    """A referenced object, sent to a child process through the pipe between them.

    An object passed from Python is sent by value (cloudpickle), because its module may be a notebook, which no other
    process can import. Each process unpickles it once, not for every call. The pipe carries only data from the process
    at its other end.
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
        """Load the object in the receiving process. Raises UserCodeError."""
        return load_object(self.reference) if self.by_value is None else _made_of(self.by_value)


@functools.cache
def _made_of(by_value: bytes) -> Any:
    """Unpickle the object of a Portable. Its bytes come from the parent process, the only other holder of the pipe."""
    import cloudpickle

    return cloudpickle.loads(by_value)


def user_modules(thing: Any) -> list[ModuleType]:
    """Return the modules of a function or class that another process may not be able to import.

    They are its own module and all modules imported from the same folder, without installed packages. For a partial,
    the module of its function counts.
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
    """Return the folder of a module's file, "" if it has none."""
    file = getattr(module, "__file__", None)
    return os.path.dirname(os.path.abspath(file)) if file else ""


def _root(module: ModuleType) -> str:
    """Return the folder that a module was imported from; for a module of a package, the folder above the package."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    paths = list(getattr(top, "__path__", ()))
    return os.path.dirname(os.path.abspath(paths[0])) if paths else _folder(top)


def _is_installed(module: ModuleType) -> bool:
    """Return whether every process of a run can import the module: this project's, Python's or an installed one."""
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
    """Import the module in a file; it can import its neighbours, like a script."""
    file = Path(path)
    if not file.is_file():
        raise UserCodeError(f"{path} does not exist")
    folder, name = str(file.parent), f"_of_user_{file.stem}"
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:  # impossible for a name that ends in .py
        raise UserCodeError(f"{path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise UserCodeError(f"{path} cannot be imported: {where_it_failed(error, file.name)}") from error
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{name} cannot be imported: {where_it_failed(error, name)}") from error


def where_it_failed(error: BaseException, name: str) -> str:
    """Return the error in one line, with the last line of the user's file in its traceback."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename.endswith(name)), None)
    return (f"line {line}: " if line else "") + f"{type(error).__name__}: {_text(error)}"


def _text(error: BaseException) -> str:
    """Return an error's text; its `__str__` may be the user's, and raise anything."""
    try:
        return str(error)
    except BaseException as problem:  # noqa: BLE001 - see above
        return f"(its text is unknown: __str__ raised {type(problem).__name__})"
