"""Readers of files: who knows a kind of file reads and checks it, and registers as an entry point `allocation.readers`.

So a run's YAML has one reader, that of the engine which runs it, and one verdict.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from allocation.diagnostics import Finding
from allocation.plan import Plan

GROUP = "allocation.readers"


class FileError(ValueError):
    """A file that cannot be read, or an override that is none; the message says where and what would be right."""


@dataclass(frozen=True)
class ReadFile:
    """A file that was read and checked.

    A finding's source has its place: `run.yaml:12`. `plan` is None when a finding is an error.
    `checked_with` says what there was besides the layout: `cluster 4x8, model Qwen/Qwen3-0.6B, batch 256x4`.
    """

    findings: tuple[Finding, ...]
    plan: Plan | None
    checked_with: str


Reader = Callable[[str, Sequence[str]], ReadFile]


def read_file(file: str, overrides: Sequence[str] = ()) -> ReadFile:
    """What the installed reader says of `file` with `key=value` overrides. Raises `FileError`."""
    registered = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    if not registered:
        raise FileError(f"{file}: no reader of run files is installed; `pip install areal-like` brings one")
    try:
        reader: Reader = registered[0].load()
    except ImportError as error:
        raise FileError(f"{file}: the reader {registered[0].name} cannot be loaded: {error}") from error
    return reader(file, overrides)
