"""Keys of exports to other systems, in `stats_logger`."""

import re
from typing import Annotated

from pydantic import AfterValidator

from areal_like.config.section import Section


def _check_address(value: int | str | None) -> int | str | None:
    port = re.fullmatch(r"(?:.*\S:)?(\d{1,5})", str(value), re.ASCII)
    if value is not None and (port is None or not 0 < int(port[1]) < 65536):
        raise ValueError("a port, or HOST:PORT")
    return value


def _check_url(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
        raise ValueError("a URL such as http://localhost:4318/v1/traces")
    return value


class ExportKeys(Section):
    """Destinations outside the run's directory."""

    prometheus: Annotated[int | str | None, AfterValidator(_check_address)] = None
    """Serve the newest metrics for Prometheus on this port of loopback, or at `HOST:PORT`; requests need the token in
    `prometheus.token` in the run's directory (see [operations](operations.md#prometheus))."""
    opentelemetry: Annotated[str | None, AfterValidator(_check_url)] = None
    """Export events as OpenTelemetry spans to this URL (OTLP over HTTP; see
    [operations](operations.md#opentelemetry))."""


KEYS = {"stats_logger": ExportKeys}
