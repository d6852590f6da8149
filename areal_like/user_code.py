"""A user's own code, named in the configuration: `my_rewards.py:score` or `package.module:score`.

A name travels between processes where a function could not: every process loads it for itself, once.
"""

import functools
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

FORM = "my_file.py:name or package.module:name"


class UserCodeError(Exception):
    """A user's code cannot be had; the message names it, and the line where its import failed."""


def absolute(reference: str) -> str:
    """The same reference for a process with another working directory."""
    where, colon, name = reference.rpartition(":")
    return f"{Path(where).expanduser().absolute()}{colon}{name}" if where.endswith(".py") else reference


@functools.cache
def load_object(reference: str) -> Any:
    """What `reference` names; its module is run on the way. Raises UserCodeError."""
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
    """The module in a file; what lies beside it can be imported by it, as in a script."""
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
    """The error in one line, with the last line of the user's file that it passed through."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename.endswith(name)), None)
    return (f"line {line}: " if line else "") + f"{type(error).__name__}: {error}"
