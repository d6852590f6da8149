"""`report.html`: one self-contained page about a run, from entries that are appended during the run.

Each entry is a separate script after the page's code (`report.template.html`), so that the file is a complete page
after every entry, however the run ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from pydantic import TypeAdapter, ValidationError

from areal_like.core.errors import RecordError, writing
from areal_like.core.events import Event
from areal_like.metrics.event_file import read_events
from areal_like.metrics.lines import Appended, as_json, first_of, replacing, rows_of
from areal_like.metrics.samples import SampleRow, list_written, pick, read_samples

TEMPLATE = Path(__file__).with_name("report.template.html")
ABOUT_FILE, METRICS_FILE, REPORT_FILE = "run.json", "metrics.jsonl", "report.html"
SUMMARY_FILE = "summary.json"  # written after the last step
MOST_LANES = 64  # drawn; `events.jsonl` has all lanes
MOST_SAMPLES, MOST_CHARACTERS = 6, 2000  # per step, and per prompt and response
PAGE_BYTES = 36 << 20  # of a page; a larger one is rebuilt with fewer points of old steps
MOST_SPANS = 100_000  # of a rebuilt page: the last ones
LAST_ROWS, MOST_POINTS, MOST_NUMBERS = 200, 2000, 400_000  # unreduced steps; before them, points per curve and in total
MOST_STEPS = 100  # with samples on a rebuilt page, from the first to the last
_END = "</script>\n"


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
        """See StatsSink."""
        self._add("scalars", [step, {name: _short(value) for name, value in scalars.items()}])

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
        """See StatsSink."""
        self._file.close()

    def _add(self, kind: str, value: Any) -> None:
        text = as_json(value).replace("<", "\\u003c")
        self._file.write(f'<script>add({self.run},"{kind}",{text}){_END}')


def _repair(path: Path) -> None:
    """Remove a last entry that a kill left incomplete. Raises RecordError."""
    with writing(path):
        if not path.is_file():
            return
        with path.open("rb+", buffering=0) as file:
            size = file.seek(0, 2)
            start = max(0, size - PAGE_BYTES)
            file.seek(start)
            end = file.read().rfind(_END.encode())
            file.truncate(start + end + len(_END) if end >= 0 else 0)


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Build the page from the directories of runs; an old page stays until the new one is complete.

    Raises OSError, RecordError.
    """
    with replacing(output) as partial:
        report = Report(partial)
        for report.run, directory in enumerate(runs):
            report.describe(read_about(directory))
            add_metrics(report, directory / METRICS_FILE)
            report.events([event for event in read_events(directory) if event.lane != "groups"][-MOST_SPANS:])
            places = list_written(directory)
            for step, name in places[:: -(-len(places) // MOST_STEPS)] if places else ():
                report.samples(step, name, read_samples(directory, step, name))
        report.close()


def add_metrics(report: Report, file: Path) -> None:
    """Add the metrics of all steps; of old steps only the lowest and highest value of each stretch, which keeps peaks.

    Raises OSError, RecordError.
    """
    kind = dict[str, int | float | None]
    names: set[str] = set()
    rows = 0
    for row in rows_of(file, kind):
        names |= row.keys()
        rows += 1
    old = rows - LAST_ROWS if rows > MOST_POINTS else 0
    stretch = max(1, -(-2 * old // min(MOST_POINTS, max(2, MOST_NUMBERS // max(1, len(names))))))
    ends: dict[str, list[tuple[int, float]]] = {}  # lowest and highest of each stretch, in pairs
    starts: dict[str, int] = {}
    for number, row in enumerate(rows_of(file, kind)):
        step = int(row.pop("step", 0) or 0)
        if number < old:
            for name, value in row.items():
                if value is not None:
                    _extend(ends.setdefault(name, []), starts, name, number // stretch, (step, value))
            continue
        if number == old and ends:
            report.series({name: _in_order(pairs) for name, pairs in ends.items()})
        report.log(step, row)


def _extend(
    pairs: list[tuple[int, float]], starts: dict[str, int], name: str, stretch: int, point: tuple[int, float]
) -> None:
    """Add a point to the last stretch of a curve, or start a new stretch."""
    if starts.get(name) != stretch:
        starts[name] = stretch
        pairs += [point, point]
    elif point[1] < pairs[-2][1]:
        pairs[-2] = point
    elif point[1] >= pairs[-1][1]:
        pairs[-1] = point


def _in_order(pairs: Sequence[tuple[int, float]]) -> list[tuple[int, float | None]]:
    """Return the points of a curve in order of steps, without duplicates."""
    return [(step, _short(value)) for step, value in sorted(set(pairs))]


class About(TypedDict):
    """Facts known before a run."""

    title: str
    started: NotRequired[float]
    steps: NotRequired[int]
    layout: NotRequired[str]
    staleness: NotRequired[int]
    max_logprob_diff: NotRequired[float | None]
    config: NotRequired[str]
    plan: NotRequired[str]
    findings: NotRequired[list[str]]


def read_about(directory: Path) -> About:
    """Return the content of `run.json`; raise OSError, or RecordError if it is incomplete or foreign."""
    file = directory / ABOUT_FILE
    try:
        return TypeAdapter(About).validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        raise RecordError(f"{file} was not written by a run: {first_of(error)}") from error


def chrome_trace(directory: Path) -> dict[str, Any]:
    """Return the events in the Trace Event Format of chrome://tracing and ui.perfetto.dev; times in microseconds."""
    events = read_events(directory)
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(event.lane for event in events))}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": lane}}
        for lane, number in lanes.items()
    ]
    spans = [
        {
            "ph": "X",
            "cat": "areal-like",
            "name": event.name,
            "pid": 0,
            "tid": lanes[event.lane],
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": event.ids,
        }
        for event in events
    ]
    return {"traceEvents": names + spans, "displayTimeUnit": "ms"}


def _short(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.6g}")


def _cut(text: str) -> str:
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} … {text[-half:]}"
