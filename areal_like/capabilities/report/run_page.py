"""The page of a run that is under way; a page that became too large is rebuilt with fewer points of old steps."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.capabilities.report.page import REPORT_FILE, Report
from areal_like.capabilities.report.schema import ReportKeys
from areal_like.capabilities.report.write import write_report
from areal_like.config.keys import with_keys
from areal_like.events import Event
from areal_like.job import Job
from areal_like.metrics.listener import Listener
from areal_like.metrics.samples import SampleRow


class RunPage(Listener):
    """Adds everything that the run records to its page."""

    name = REPORT_FILE

    def __init__(self, directory: Path) -> None:
        self._directory, self._path = directory, directory / REPORT_FILE
        self.files = {"report": self._path}
        self._page = Report(self._path)

    def describe(self, about: Mapping[str, Any]) -> None:
        """Add the facts known before the run."""
        self._page.describe(about)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add metrics of a step."""
        self._page.log(step, scalars)
        self._rebuild()

    def events(self, events: Sequence[Event]) -> None:
        """Add spans to the timeline."""
        self._page.events(events)
        self._rebuild()

    def samples(self, step: int, name: str | None, samples: Sequence[SampleRow]) -> None:
        """Add some of a step's samples."""
        self._page.samples(step, name, samples)
        self._rebuild()

    def forget(self, step: int) -> None:
        """Remove earlier metrics and samples of `step` and later steps."""
        self._page.forget(step)

    def close(self) -> None:
        """Close the page."""
        self._page.close()

    def _rebuild(self) -> None:
        if self._page.is_full:
            self._page.close()
            try:
                write_report([self._directory], self._path)
            finally:
                self._page = Report(self._path)


def make_page(job: Job) -> Iterator[RunPage]:
    """Yield the page of a run, unless `stats_logger.report=false`. Raises RecordError."""
    if with_keys(job.config.stats_logger, ReportKeys).report:
        yield RunPage(job.config.run_dir)
