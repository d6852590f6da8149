"""Builds the page, and a trace, from the files of runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from pydantic import TypeAdapter, ValidationError

from areal_like.capabilities.report.page import Report, shorten
from areal_like.errors import RecordError
from areal_like.metrics.event_file import read_events
from areal_like.metrics.lines import first_of, replacing, rows_of
from areal_like.metrics.names import ABOUT_FILE, METRICS_FILE
from areal_like.metrics.samples import list_written, read_samples

MOST_SPANS = 100_000  # of a rebuilt page: the last ones
LAST_ROWS, MOST_POINTS, MOST_NUMBERS = 200, 2000, 400_000  # unreduced steps; before them, points per curve and in total
MOST_STEPS = 100  # with samples on a rebuilt page, from the first to the last


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
    return [(step, shorten(value)) for step, value in sorted(set(pairs))]


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
