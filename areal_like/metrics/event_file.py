"""`events.jsonl`: the latest events, of bounded size. `events.previous.jsonl` has the part before."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from areal_like.core.errors import writing
from areal_like.core.events import Event
from areal_like.metrics.lines import Lines, read_rows, replacing

EVENTS_FILE, PREVIOUS_FILE = "events.jsonl", "events.previous.jsonl"
SEGMENT_BYTES = 16 << 20  # of each file, exceeded by the last write at most
_ATTEMPT = '{"lane": "run"'  # start of a line about the end of an attempt


class EventFile:
    """Appends events; a full file replaces the previous one. Raises RecordError."""

    def __init__(self, directory: Path) -> None:
        self._path, self._previous = directory / EVENTS_FILE, directory / PREVIOUS_FILE
        self._lines = Lines(self._path)

    def write(self, events: Iterable[Event]) -> None:
        """Append events."""
        self._lines.write(map(asdict, events))
        if self._lines.size > SEGMENT_BYTES:
            self._turn()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _turn(self) -> None:
        """Start a new file; keep only the ends of attempts of the previous one."""
        self._lines.close()
        with writing(self._previous):
            attempts: list[str] = []
            if self._previous.exists():
                with self._previous.open(encoding="utf-8", errors="replace") as old:
                    attempts = [line for line in old if line.startswith(_ATTEMPT)]
            with replacing(self._previous) as partial:
                partial.write_text("".join(attempts) + self._path.read_text(encoding="utf-8", errors="replace"))
            self._path.unlink()
        self._lines = Lines(self._path)


def read_events(directory: Path) -> list[Event]:
    """Return the latest events of a run, which its files still have. Raises OSError, RecordError."""
    return [event for name in (PREVIOUS_FILE, EVENTS_FILE) for event in read_rows(directory / name, Event)]
