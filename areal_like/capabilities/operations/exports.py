"""Exports of a run to Prometheus and OpenTelemetry, and their checks before the start."""

import importlib.util
import socket
from collections.abc import Iterator

from allocation.diagnostics import Finding
from areal_like.capabilities.operations.prometheus import PrometheusEndpoint, split_address
from areal_like.capabilities.operations.schema import ExportKeys
from areal_like.core.config.findings import finding
from areal_like.core.config.keys import with_keys
from areal_like.job import Job
from areal_like.known import Known
from areal_like.metrics.listener import Listener

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_exports(known: Known) -> Iterator[Finding]:
    """Check that the address for Prometheus is free, and that OpenTelemetry is installed."""
    keys = with_keys(known.config.stats_logger, ExportKeys)
    if keys.prometheus is not None and (problem := _find_problem(*split_address(keys.prometheus))):
        key = "stats_logger.prometheus"
        message = f"the address {keys.prometheus} cannot be served: {problem}"
        yield finding("RUN-PROMETHEUS-ADDRESS", key, message, f"set `{key}=9401`, or another free port")
    if keys.opentelemetry is not None and not all(map(_is_installed, PACKAGES)):
        message = "packages of OpenTelemetry are not installed"
        help = (
            "run `requirements/install opentelemetry`, or `pip install opentelemetry-exporter-otlp-proto-http==1.45.2`"
        )
        yield finding("RUN-OPENTELEMETRY", "stats_logger.opentelemetry", message, help)


def _find_problem(host: str, port: int) -> str | None:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def make_exports(job: Job) -> Iterator[Listener]:
    """Yield the exports of a run. Raises RecordError."""
    config = job.config
    keys = with_keys(config.stats_logger, ExportKeys)
    if keys.prometheus is not None:
        yield PrometheusEndpoint(keys.prometheus, config.run_dir)
    if keys.opentelemetry is not None:
        from areal_like.capabilities.operations.spans import Spans

        yield Spans(keys.opentelemetry, f"{config.experiment_name}/{config.trial_name}")
