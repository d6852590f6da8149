"""Events of a run as OpenTelemetry spans; the SDK exports them in a thread of its own."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from areal_like.core.config.keys import mask_urls
from areal_like.core.events import Event
from areal_like.metrics.console import complain
from areal_like.metrics.listener import Listener

EXPORT_S = 5.0  # for an export, and for the last one at the end of a run


class Spans(Listener):
    """Exports every event to `url`."""

    name = "stats_logger.opentelemetry"

    def __init__(self, url: str, run: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "areal-like", "run": run}))
        exporter = _Reported(url, OTLPSpanExporter(endpoint=url, timeout=EXPORT_S))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("areal_like")

    def events(self, events: Sequence[Event]) -> None:
        """Export events, each with its lane, and the numbers of its step, version or group."""
        for event in events:
            attributes: Mapping[str, Any] = {"lane": event.lane, **event.ids}
            span = self._tracer.start_span(event.name, attributes=attributes, start_time=int(event.start * 1e9))
            span.end(int(event.end * 1e9))

    def close(self) -> None:
        """Export the rest."""
        self._provider.force_flush(int(EXPORT_S * 1000))
        self._provider.shutdown()


class _Reported(SpanExporter):
    """Reports the first export that fails, once."""

    def __init__(self, url: str, exporter: SpanExporter) -> None:
        self._url, self._exporter, self._failed = url, exporter, False
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it repeats the failure with each export

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS and not self._failed:
            self._failed = True
            url = mask_urls(self._url)
            complain([f"warning: {url} (stats_logger.opentelemetry) takes no spans; training continues without them"])
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
