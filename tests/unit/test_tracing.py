"""Incidents as traces: with OpenTelemetry's own SDK, which keeps them in memory here."""

from __future__ import annotations

import argparse
import importlib.util

import pytest
from metrics_support import BROKEN, Watched

from mindspeed_tft import arguments
from mindspeed_tft.engine import types as t
from mindspeed_tft.observe import tracing
from mindspeed_tft.settings import Refused

pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> tracing.Tracer:
    return tracing.Tracer(SimpleSpanProcessor(exporter), "job1", "host1", "0.1")


def root_of(spans: tuple[ReadableSpan, ...]) -> ReadableSpan:
    (found,) = [span for span in spans if span.parent is None]
    return found


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_an_incident_is_a_trace_and_each_stage_a_span(exporter: InMemorySpanExporter, tracer: tracing.Tracer) -> None:
    job = Watched("retry")
    job.train(1, 6)
    job.now += 1.0
    job.feed(t.FaultSeen(0, 1, "memory", "UCE ECC error", True))
    job.report(7, {**BROKEN, "trusted": False}, 0, 2, 3)
    job.report(7, BROKEN, 1)
    job.obey()
    (told,) = job.told
    tracer.tell(told)
    tracer.tell(told)
    spans = exporter.get_finished_spans()
    traces = {span.context.trace_id for span in spans if span.context is not None}
    assert len(traces) == 2 and len(spans) == 2 * (len(told.stages) + 2)
    spans = spans[: len(spans) // 2]
    root = root_of(spans)
    assert root.name == "incident: retried" and root.status.status_code is StatusCode.UNSET
    assert root.attributes is not None and root.context is not None
    assert root.attributes["tft.strategy"] == "retry" and root.attributes["tft.step"] == 6
    assert root.attributes["tft.faults.memory"] == 1 and root.attributes["tft.steps_lost"] == 0
    assert root.attributes["tft.summary"] == told.summary
    assert root.resource.attributes["service.instance.id"] == "job1"
    stages = [span for span in spans if span is not root]
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in stages)
    assert [span.name for span in stages] == ["detect", *(stage for stage, _, _ in told.stages)]
    assert {"stop", "regroup", "repair", "rollback", "resume"} <= {span.name for span in stages}
    assert sum(map(seconds, stages)) == pytest.approx(seconds(root)) == pytest.approx(3.0)
    assert stages[0].start_time == root.start_time and stages[-1].end_time == root.end_time


def test_a_job_that_could_not_be_saved_is_an_error(exporter: InMemorySpanExporter, tracer: tracing.Tracer) -> None:
    job = Watched()
    job.feed(t.RankLost(0, 1, "killed by signal 9", 1001))
    job.report(1, BROKEN, 1)  # no step is complete
    job.obey()
    (told,) = job.told
    assert told.outcome == "failed"
    tracer.tell(told)
    root = root_of(exporter.get_finished_spans())
    assert root.status.status_code is StatusCode.ERROR and root.status.description == told.summary
    tracer.close()


def refusals(*words: str) -> list[str]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_flags(parser)
    given = parser.parse_args(["--enable-high-availability", *words])
    return [str(refusal) for refusal in arguments.conflicts(*arguments.collect(given, {}))]


def test_without_the_package_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_is_installed", lambda name: name != tracing._EXPORTER)
    (refusal,) = refusals("--tft-otel-endpoint", "http://collector:4317")
    assert refusal.startswith(f"--tft-otel-endpoint: {tracing._EXPORTER} is not installed")
    assert "pip install mindspeed_tft[otel]" in refusal
    monkeypatch.setattr(tracing, "_is_installed", lambda _name: True)
    assert refusals("--tft-otel-endpoint", "http://collector:4317") == []
    (refusal,) = refusals("--tft-otel-endpoint", "collector:4317")
    assert "is no URL" in refusal and "http://HOST:4317" in refusal


def test_what_is_installed_is_seen() -> None:
    assert tracing._is_installed(tracing._SDK)
    assert not tracing._is_installed("opentelemetry.nowhere.at.all")
    assert bool(tracing.missing()) == (not _has_exporter())


def _has_exporter() -> bool:
    try:
        return importlib.util.find_spec(tracing._EXPORTER) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tft-metrics-host", "0.0.0.0"), ""),  # no port, no danger
        (("--tft-metrics-port", "9464"), ""),
        (("--tft-metrics-port", "9464", "--tft-metrics-host", "::1"), ""),
        (("--tft-metrics-port", "9464", "--tft-metrics-host", "0.0.0.0"), "anybody who reaches 0.0.0.0"),
        (("--tft-metrics-port", "9464", "--tft-metrics-host", "0.0.0.0", "--tft-insecure"), ""),
        (("--tft-metrics-port", "9464", "--tft-metrics-host", "node0", "--tft-tls-dir", "certs"), ""),
        (("--tft-metrics-port", "9464", "--tft-controller-port", "9464"), "--tft-metrics-port: 9464 is the port of"),
    ],
)  # fmt: skip
def test_metrics_that_everybody_could_read_are_refused(words: tuple[str, ...], said: str) -> None:
    found = refusals(*words)
    assert len(found) == bool(said) and all(said in refusal and "Remedy: " in refusal for refusal in found)


def test_a_port_that_cannot_be_is_refused() -> None:
    with pytest.raises(Refused, match="--tft-metrics-port"):
        refusals("--tft-metrics-port", "70000")
