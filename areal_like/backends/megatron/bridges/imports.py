"""Imports of libraries with side effects, or with requirements that are not installed."""

import contextlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "transformer_engine"


@contextlib.contextmanager
def placeholder_transformer_engine() -> Iterator[None]:
    """Provide placeholders for `import transformer_engine` in the body, unless the library is installed.

    Their classes can be named, subclassed and annotated with, but not instantiated. Import megatron.core first: it
    asks whether the library is there, and needs the true answer.
    """
    if importlib.util.find_spec(_NAME) is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Placeholder)]:
            del sys.modules[name]


@contextlib.contextmanager
def root_logging_kept() -> Iterator[None]:
    """Undo an import's changes of the root logger (Megatron's training package gives it a handler and a level)."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:] = handlers
        root.setLevel(level)


class _Placeholder(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = type(name, (_NotInstalled,), {})
        else:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _NotInstalled:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ModuleNotFoundError(f"{type(self).__name__} needs Transformer Engine, which is not installed", name=_NAME)


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == _NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a placeholder has nothing to run."""
