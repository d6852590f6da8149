"""`report.html`: one page that shows a run, without a network, from what is appended to it while the run goes on.

Each entry is a script of its own after the page's code (`report.template.html`), so that the file is a whole page after
every one of them, however the run ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from pydantic import TypeAdapter, ValidationError

from areal_like.errors import RecordError, private, writing
from areal_like.events import Event
from areal_like.metrics.lines import as_json, first_of, read_rows, replacing
from areal_like.metrics.samples import Sample, picked, read_samples, recorded

TEMPLATE = Path(__file__).with_name("report.template.html")
ABOUT_FILE, EVENTS_FILE, METRICS_FILE, REPORT_FILE = "run.json", "events.jsonl", "metrics.jsonl", "report.html"
SUMMARY_FILE = "summary.json"  # written when all steps are made
MOST_LANES = 64  # that are drawn; `events.jsonl` has all
MOST_SAMPLES, MOST_CHARACTERS = 6, 2000  # of a step, and of each prompt and response


class Report:
    """The page of one run, or of several that are compared; `run` is the number of the run that entries are about.

    Raises RecordError where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.run = 0
        self._path = path
        self._lanes: set[str] = set()
        with writing(path):
            self._file = open(path, "a", encoding="utf-8", opener=private)  # noqa: SIM115
            if not self._file.tell():
                self._file.write(TEMPLATE.read_text(encoding="utf-8"))

    def about(self, about: Mapping[str, Any]) -> None:
        """What is known before the run: see `run.json`."""
        self._add("about", about)

    def log(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """See StatsSink."""
        self._add("scalars", [step, {name: _short(value) for name, value in scalars.items()}])

    def events(self, events: Iterable[Event]) -> None:
        """Add spans to the timeline; groups are too many to be drawn."""
        spans = []
        for event in events:
            if event.lane != "groups" and (event.lane in self._lanes or len(self._lanes) < MOST_LANES):
                self._lanes.add(event.lane)
                spans.append(
                    [event.lane, event.name, round(event.start, 3), round(event.end - event.start, 4), event.ids]
                )
        self._add("spans", spans)

    def samples(self, step: int, name: str | None, samples: Sequence[Sample]) -> None:
        """Show some of a step's samples, of fewer and fewer steps: all up to 99, then every tenth, every hundredth."""
        if name is None and step % 10 ** max(0, len(str(step)) - 2):
            return
        some = [
            {**sample, "prompt": _cut(sample["prompt"]), "response": _cut(sample["response"])}
            for sample in picked(samples, MOST_SAMPLES)
        ]
        self._add("samples", [step, name, some])

    def close(self) -> None:
        """See StatsSink."""
        with writing(self._path):
            self._file.close()

    def _add(self, kind: str, value: Any) -> None:
        text = as_json(value).replace("<", "\\u003c")
        with writing(self._path):
            self._file.write(f'<script>add({self.run},"{kind}",{text})</script>\n')
            self._file.flush()


def write_report(runs: Sequence[Path], output: Path) -> None:
    """Make the page anew from what runs have left in their directories; an old one stays until it is whole.

    Raises OSError, RecordError.
    """
    with replacing(output) as partial:
        report = Report(partial)
        for report.run, directory in enumerate(runs):
            report.about(read_about(directory))
            for row in read_rows(directory / METRICS_FILE, dict[str, int | float | None]):
                report.log(int(row.pop("step", 0) or 0), row)
            report.events(read_events(directory))
            for step, name in recorded(directory):
                report.samples(step, name, read_samples(directory, step, name))
        report.close()


class About(TypedDict):
    """What is known before a run."""

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
    """What `run.json` says. Raises OSError, and RecordError where it was not written to its end, or by a run."""
    file = directory / ABOUT_FILE
    try:
        return TypeAdapter(About).validate_json(file.read_bytes(), strict=True)
    except ValidationError as error:
        raise RecordError(f"{file} is not what a run writes: {first_of(error)}") from error


def read_events(directory: Path) -> list[Event]:
    """What `events.jsonl` says. Raises OSError, RecordError."""
    return read_rows(directory / EVENTS_FILE, Event)


def chrome_trace(directory: Path) -> dict[str, Any]:
    """The events in the Trace Event Format, which chrome://tracing and ui.perfetto.dev show; times in microseconds."""
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
