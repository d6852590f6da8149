"""Watching a run: alerts on the console, memory of processes, utilization, Prometheus and OpenTelemetry."""

from areal_like.capabilities.operations.exports import check_exports, make_exports
from areal_like.capabilities.operations.hook import make_operations
from areal_like.capability import Capability

CAPABILITY = Capability(checks=(check_exports,), hook=make_operations, listeners=make_exports)
