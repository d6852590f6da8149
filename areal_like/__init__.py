"""An asynchronous reinforcement-learning engine for language models: `from areal_like import train`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_like.launch import train as train


def __getattr__(name: str) -> Any:
    """Import `train`, or a function of a capability's `interface.py`, when it is used: this package imports nothing."""
    if name == "train":
        from areal_like.launch import train

        return train
    if not name.startswith("_"):
        from areal_like.core.registry import find_modules

        for _, module in find_modules("interface"):
            if name in module.INTERFACE:
                return module.INTERFACE[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
