"""The base of every section of the tree."""

import os

from pydantic import AfterValidator, BaseModel, ConfigDict

_LONGEST_NAME, _LONGEST_PATH = 255, 2048  # bytes; a path has room for a run's own names below it
LEAST_TEMPERATURE = 1e-6  # below this SGLang is greedy, and gives the log-probs of temperature 1


class Section(BaseModel):
    """One node of the tree: immutable, unknown keys refused, no silent conversion between types, numbers finite.

    The docstring below a key is its description.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def _path(path: str | None) -> str | None:
    """Return a path with `~` replaced by the home directory; names without it, such as `owner/name`, as they are."""
    if path is None:
        return None
    if not path.isprintable():
        raise ValueError("a path of printable characters")
    path = os.path.expanduser(path)
    if len(path.encode()) > _LONGEST_PATH or any(len(name.encode()) > _LONGEST_NAME for name in path.split("/")):
        raise ValueError(f"a path of at most {_LONGEST_PATH} bytes, each name in it of at most {_LONGEST_NAME}")
    return path


def _name(name: str) -> str:
    """Return the name of a directory."""
    if len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"at most {_LONGEST_NAME} bytes, which is what file systems take")
    return name


def _greedy_or_not(temperature: float | None) -> float | None:
    if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"0, which is greedy, or at least {LEAST_TEMPERATURE:g}")
    return temperature


PATH = AfterValidator(_path)
NAME = AfterValidator(_name)
TEMPERATURE = AfterValidator(_greedy_or_not)
