"""`events.jsonl`: what happened last, of bounded size. The part before it is `events.previous.jsonl`."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from areal_like.errors import writing
from areal_like.events import Event
from areal_like.metrics.lines import Lines, read_rows, replacing

EVENTS_FILE, PREVIOUS_FILE = "events.jsonl", "events.previous.jsonl"
SEGMENT_BYTES = 16 << 20  # of each of both files, a little more than that at most
_ATTEMPT = '{"lane": "run"'  # how a line about the end of an attempt begins


class EventFile:
    """Appends events; when the file is full it takes the place of the previous one. Raises RecordError."""

    def __init__(self, directory: Path) -> None:
        self._path, self._previous = directory / EVENTS_FILE, directory / PREVIOUS_FILE
        self._lines = Lines(self._path)

    def write(self, events: Iterable[Event]) -> None:
        """Append events."""
        self._lines.write(map(asdict, events))
        if self._lines.size > SEGMENT_BYTES:
            self._turn()

    def close(self) -> None:
        """End the file."""
        self._lines.close()

    def _turn(self) -> None:
        """Begin a new file; of the previous one only the ends of attempts stay."""
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
    """Return the events of a run that are still there, the last ones. Raises OSError, RecordError."""
    return [event for name in (PREVIOUS_FILE, EVENTS_FILE) for event in read_rows(directory / name, Event)]
