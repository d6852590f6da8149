"""The key of the report, in `stats_logger`."""

from areal_like.config.section import Section


class ReportKeys(Section):
    """The page of a run."""

    report: bool = True
    """Keep `report.html` in the run's directory up to date."""


KEYS = {"stats_logger": ReportKeys}
