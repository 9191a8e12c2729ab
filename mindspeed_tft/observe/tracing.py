"""Incidents as OpenTelemetry traces: one trace for each, a span for each stage. Sent when the incident is over, by
OpenTelemetry's own thread; a collector that is not there costs the trace and nothing else.

The packages are an extra, and are imported only where they are asked for. What OpenTelemetry reads from the environment
(OTEL_EXPORTER_OTLP_HEADERS, ..._CERTIFICATE, ..._CLIENT_KEY) holds here, too.
"""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING

from mindspeed_tft.observe.recoveries import DETECT, Recovery

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_SDK, _EXPORTER = "opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
_SOON = 200  # milliseconds: a dump's trace has to be away before its controller is
_LAST = 5.0  # seconds for what is left in the end
REMEDY = "pip install mindspeed_tft[otel]"


def missing() -> str:
    """The package that is not installed, of those that tracing needs; "" when all are."""
    return next((name for name in (_SDK, _EXPORTER) if not _is_installed(name)), "")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def exporting(url: str) -> SpanProcessor:
    """What sends spans to a collector at this URL, over OTLP and gRPC. http: plain; https: with TLS."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=url), schedule_delay_millis=_SOON)


class Tracer:
    """Makes a trace of each incident that is told."""

    def __init__(self, processor: SpanProcessor, run: str, host: str, version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create(
            {"service.name": "mindspeed_tft", "service.version": version, "service.instance.id": run, "host.name": host}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("mindspeed_tft", version)
        self._offset = time.time() - time.monotonic()
        self._run = run

    def tell(self, found: Recovery) -> None:
        """An incident is over."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        begin = found.opened - (found.detect or 0.0)
        root = self._tracer.start_span(
            f"incident: {found.outcome}",
            start_time=self._nanoseconds(begin),
            attributes={
                "tft.run": self._run,
                "tft.epoch": found.epoch,
                "tft.outcome": found.outcome,
                "tft.strategy": found.strategy,
                "tft.step": found.step,
                "tft.steps_lost": -1 if found.lost is None else found.lost,
                "tft.summary": found.summary,
                **{f"tft.faults.{kind}": ranks for kind, ranks in found.faults.items()},
            },
        )
        inside = set_span_in_context(root)
        detect = [(DETECT, begin, found.opened)] if found.detect is not None else []
        for stage, start, end in (*detect, *found.stages):
            span = self._tracer.start_span(stage, inside, start_time=self._nanoseconds(start))
            span.end(self._nanoseconds(end))
        if found.outcome == "failed":
            root.set_status(Status(StatusCode.ERROR, found.summary))
        root.end(self._nanoseconds(found.closed))

    def close(self) -> None:
        """Sends what is left, which takes seconds where nobody is there, and gives up."""
        self._provider.force_flush(int(_LAST * 1000))
        self._provider.shutdown()

    def _nanoseconds(self, at: float) -> int:
        return int((at + self._offset) * 1e9)
