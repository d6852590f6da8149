"""Readers of run files, registered as entry points `allocation.readers`.

A run's YAML has one reader, which belongs to the engine that runs it, and one result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from allocation.diagnostics import Finding
from allocation.plan import Plan

GROUP = "allocation.readers"


class FileError(ValueError):
    """Raised for an unreadable file or an invalid override; the message names the place and the fix."""


@dataclass(frozen=True)
class ReadFile:
    """A file that was read and checked. The source of a finding has its place: `run.yaml:12`.

    `plan` is None if a finding is an error. `checked_with` lists the context besides the layout: `cluster 4x8, model
    Qwen/Qwen3-0.6B, batch 256x4`.
    """

    findings: tuple[Finding, ...]
    plan: Plan | None
    checked_with: str


Reader = Callable[[str, Sequence[str]], ReadFile]


def read_file(file: str, overrides: Sequence[str] = ()) -> ReadFile:
    """Return the installed reader's result for `file` with `key=value` overrides. Raises `FileError`."""
    registered = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    if not registered:
        raise FileError(f"{file}: no reader of run files is installed; install one with `pip install areal-like`")
    try:
        reader: Reader = registered[0].load()
    except ImportError as error:
        raise FileError(f"{file}: the reader {registered[0].name} cannot be loaded: {error}") from error
    return reader(file, overrides)
