"""An asynchronous reinforcement-learning engine for language models: `from areal_like import train`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_like.launch import train as train


def __getattr__(name: str) -> Any:
    """Import `train` when it is asked for: this package alone imports nothing."""
    if name == "train":
        from areal_like.launch import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
