"""`report.html`: one self-contained page about a run, from entries that are appended during the run.

Each entry is a separate script after the page's code (`page.template.html`), so that the file is a complete page
after every entry, however the run ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.core.errors import writing
from areal_like.core.events import Event
from areal_like.metrics.lines import Appended, as_json
from areal_like.metrics.samples import SampleRow, pick

TEMPLATE = Path(__file__).with_name("page.template.html")
REPORT_FILE = "report.html"
MOST_LANES = 64  # drawn; `events.jsonl` has all lanes
MOST_SAMPLES, MOST_CHARACTERS = 6, 2000  # per step, and per prompt and response
PAGE_BYTES = 36 << 20  # of a page; a larger one is rebuilt with fewer points of old steps
END_OF_ENTRY = b"</script>\n"


class Report:
    """The page of one run, or a comparison of several; entries belong to the run with the number `run`.

    Raises RecordError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.run = 0
        self._path = path
        self._lanes: set[str] = set()
        _repair(path)
        self._file = Appended(path)
        if not self._file.size:
            self._file.write(TEMPLATE.read_text(encoding="utf-8"))

    @property
    def is_full(self) -> bool:
        """Whether the page has to be rebuilt."""
        return self._file.size > PAGE_BYTES

    def describe(self, about: Mapping[str, Any]) -> None:
        """Add the facts known before the run (`run.json`)."""
        self._add("about", about)

    def log(self, step: int, scalars: Mapping[str, float | None]) -> None:
        self._add("scalars", [step, {name: shorten(value) for name, value in scalars.items()}])

    def series(self, points: Mapping[str, Sequence[tuple[int, float | None]]]) -> None:
        """Add numbers of many steps by name."""
        self._add("series", points)

    def forget(self, step: int) -> None:
        """Remove earlier metrics and samples of `step` and later steps from the page."""
        self._add("forget", step)

    def events(self, events: Iterable[Event]) -> None:
        """Add spans to the timeline, without groups, which are too many."""
        spans = []
        for event in events:
            if event.lane != "groups" and (event.lane in self._lanes or len(self._lanes) < MOST_LANES):
                self._lanes.add(event.lane)
                spans.append(
                    [event.lane, event.name, round(event.start, 3), round(event.end - event.start, 4), event.ids]
                )
        self._add("spans", spans)

    def samples(self, step: int, name: str | None, samples: Sequence[SampleRow]) -> None:
        """Show some of a step's samples: of all steps up to 99, then of every tenth, then of every hundredth."""
        if name is None and step % 10 ** max(0, len(str(step)) - 2):
            return
        some = [
            {**sample, "prompt": _cut(sample["prompt"]), "response": _cut(sample["response"])}
            for sample in pick(samples, MOST_SAMPLES)
        ]
        self._add("samples", [step, name, some])

    def close(self) -> None:
        self._file.close()

    def _add(self, kind: str, value: Any) -> None:
        text = as_json(value).replace("<", "\\u003c")
        self._file.write(f'<script>add({self.run},"{kind}",{text}){END_OF_ENTRY.decode()}')


def _repair(path: Path) -> None:
    """Remove a last entry that a kill left incomplete. Raises RecordError."""
    with writing(path):
        if not path.is_file():
            return
        with path.open("rb+", buffering=0) as file:
            size = file.seek(0, 2)
            start = max(0, size - PAGE_BYTES)
            file.seek(start)
            end = file.read().rfind(END_OF_ENTRY)
            file.truncate(start + end + len(END_OF_ENTRY) if end >= 0 else 0)


def shorten(value: float | None) -> float | None:
    """Return a number with six digits."""
    return value if value is None else float(f"{value:.6g}")


def _cut(text: str) -> str:
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} … {text[-half:]}"
