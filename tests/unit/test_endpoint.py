"""The metrics over HTTP: what Prometheus gets, who gets nothing, and that nobody holds up anybody."""

from __future__ import annotations

import json
import logging
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from control_support import until
from metrics_support import BROKEN, Watched
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families

from mindspeed_tft.engine import types as t
from mindspeed_tft.observe import catalogue, endpoint
from mindspeed_tft.observe.catalogue import METRICS, Facts
from mindspeed_tft.observe.endpoint import Endpoint, Exposition
from mindspeed_tft.observe.metrics import Metrics

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
FACTS = Facts(5, 1, "host1", {"mindspeed_tft": "0.1", "python": "3.11", "torch": "2.13"}, lambda: (2, 1))


def read(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return str(answer.read().decode())


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def served() -> Iterator[Callable[[Metrics, float], int]]:
    """`served(metrics, now)`: the port at which these metrics are."""
    started: list[Endpoint] = []

    def serve(metrics: Metrics, now: float) -> int:
        found = Endpoint("127.0.0.1", 0, Exposition(metrics, FACTS, "job1", lambda: now))
        found.start()
        started.append(found)
        until(lambda: found.port, 5, "a port")
        return found.port

    yield serve
    for one in started:
        one.close()
        assert one.port == 0


def job() -> Watched:
    """A job that was repaired once."""
    found = Watched("retry")
    found.train(1, 6)
    found.now += 1
    found.feed(t.FaultSeen(0, 1, "memory", "UCE ECC error", True))
    found.report(7, {**BROKEN, "trusted": False}, 0, 2, 3)
    found.report(7, BROKEN, 1)
    found.obey(0.5, repair={"taken": "", "moved:p0/1|3|1": "4096 0.1"})
    found.train(7, 9)
    return found


def test_what_prometheus_gets(served: Callable[[Metrics, float], int]) -> None:
    watched = job()
    text = read(served(watched.metrics, watched.now + 2))
    found = samples(text)

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted({"run": "job1", **labels}.items()))]

    assert (value("tft_step"), value("tft_completed_step")) == (10, 9)
    assert value("tft_step_seconds") == value("tft_step_seconds_max") == value("tft_rank_step_seconds", rank="3") == 2
    assert value("tft_ranks_expected") == value("tft_ranks_known") == value("tft_ranks_alive") == 4
    assert (value("tft_ranks_silent"), value("tft_ranks_parked"), value("tft_hosts_connected")) == (0, 1, 2)
    assert value("tft_heartbeat_age_seconds_max") == value("tft_heartbeat_age_seconds", host="h1") == 2
    assert (value("tft_protected"), value("tft_protection_level"), value("tft_controller_term")) == (1, 3, 5)
    assert (value("tft_shard_holders_min"), value("tft_shard_hosts_min")) == (2, 2)
    assert value("tft_controller_leader", index="1", host="host1") == 1
    assert value("tft_epoch") == 1
    assert value("tft_faults_total", kind="memory", strategy="retry") == 1
    assert value("tft_incidents_total", outcome="retried") == 1
    assert value("tft_recoveries_in_progress") == 0
    total = {"stage": "total", "strategy": "retry"}
    assert value("tft_recovery_seconds_count", **total) == value("tft_recovery_seconds_bucket", le="2.5", **total) == 1
    assert value("tft_recovery_seconds_bucket", le="1.0", **total) == 0
    assert value("tft_recovery_seconds_sum", **total) == 2.0
    assert value("tft_recovery_seconds_sum", stage="regroup", strategy="retry") == 0.5
    assert (value("tft_repair_bytes_total"), value("tft_dump_bytes_total")) == (4096, 0)
    assert value("tft_steps_lost_total") == value("tft_shard_hash_mismatches_total") == 0
    assert value("tft_effective_training_time_ratio") == pytest.approx(18 / (18 + 1 + 2 + 2))
    assert value("tft_productive_seconds") == 18 and value("tft_training_seconds") == 23
    assert value("tft_unproductive_seconds_total", reason="incident") == 2
    assert value("tft_unproductive_seconds_total", reason="recomputed") == 1
    assert value("tft_build_info", version="0.1", python="3.11", torch="2.13", megatron="") == 1
    assert "tft_dump_seconds" not in {name for name, _ in found}  # there was none


def test_every_metric_has_a_type_and_a_meaning(served: Callable[[Metrics, float], int]) -> None:
    text = read(served(job().metrics, 130.0))
    for metric in METRICS:
        name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        assert re.search(rf"^# TYPE {name}(_total)? {metric.kind}$", text, re.M), metric.name
        assert re.search(rf"^# HELP {name}(_total)? \S", text, re.M), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.unit != "seconds" or "seconds" in metric.name, metric.name


def test_a_large_job_has_no_series_by_rank(served: Callable[[Metrics, float], int]) -> None:
    ranks, hosts = 1024, 128
    watched = Watched(ranks=ranks, hosts=hosts)
    watched.train(1, 2)
    found = samples(read(served(watched.metrics, watched.now)))
    assert len(found) < hosts + 100
    assert sum(name == "tft_heartbeat_age_seconds" for name, _ in found) == hosts
    assert not any(name == "tft_rank_step_seconds" for name, _ in found)
    assert found["tft_step_seconds", (("run", "job1"),)] == 2


def test_nothing_is_served_elsewhere(served: Callable[[Metrics, float], int]) -> None:
    port = served(Metrics(4, 5.0), 0.0)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        read(port, "/")
    assert samples(read(port, "/metrics?x=1"))["tft_protected", (("run", "job1"),)] == 0


def test_slow_and_silent_askers_hold_up_nobody(
    served: Callable[[Metrics, float], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_PATIENCE", 0.5)
    port = served(job().metrics, 130.0)
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(endpoint._ASKERS - 1)]
    for one in slow:
        one.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
    began = time.monotonic()
    assert "tft_step" in read(port)  # beside all of them
    assert time.monotonic() - began < 0.4
    for one in slow:
        one.settimeout(5)
        assert one.recv(1) == b""  # cut
        one.close()
    assert time.monotonic() - began < 3


def test_more_than_a_few_are_turned_away(served: Callable[[Metrics, float], int]) -> None:
    port = served(job().metrics, 130.0)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(endpoint._ASKERS)]
    one_more = socket.create_connection(("127.0.0.1", port))
    one_more.settimeout(5)
    assert one_more.recv(1) == b""
    for one in (*silent, one_more):
        one.close()
    until(lambda: _answers(port), 5, "an answer once they are gone")


def _answers(port: int) -> bool:
    try:
        return "tft_step" in read(port)
    except OSError:
        return False


def test_a_port_that_is_taken_is_said_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoint, "_AGAIN", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = Endpoint("127.0.0.1", port, Exposition(job().metrics, FACTS, "job1", lambda: 130.0))
        with caplog.at_level(logging.WARNING):
            found.start()
            until(lambda: "cannot be used" in caplog.text, 5, "a warning")
        assert f"--tft-metrics-port: 127.0.0.1:{port} cannot be used (Address already in use)" in caplog.text
        assert "training goes on" in caplog.text and found.port == 0
    try:
        until(lambda: found.port == port, 5, "the port")
        assert "tft_step" in read(port)
        assert caplog.text.count("cannot be used") == 1
    finally:
        found.close()


def test_what_cannot_be_prepared_costs_the_metrics_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("no such certificate")

    found = Endpoint("127.0.0.1", free_port(), Exposition(Metrics(1, 1.0), FACTS, "", lambda: 0.0), fail)
    found.start()
    found._thread.join(5)
    assert "no metrics: no such certificate" in caplog.text and found.port == 0
    found.close()


def test_a_mistake_of_ours_is_an_answer_and_is_said_once(
    served: Callable[[Metrics, float], int], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = job().metrics
    port = served(metrics, 130.0)
    before, metrics.outcomes = metrics.outcomes, None  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(urllib.error.HTTPError, match="500"):
            read(port)
    assert caplog.text.count("by a mistake of ours") == 1 and "TypeError" in caplog.text
    metrics.outcomes = before
    assert "tft_step" in read(port)


def test_a_mistake_before_a_request_is_read_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asks badly is no mistake of ours."""
    wrong: list[Exception] = [ssl.SSLError("no certificate"), KeyError("identity"), KeyError("identity")]

    def secure(_: socket.socket) -> ssl.SSLSocket:
        raise wrong.pop(0)

    found = Endpoint("127.0.0.1", 0, Exposition(Metrics(1, 1.0), FACTS, "", lambda: 0.0), lambda: secure)
    found.start()
    until(lambda: found.port, 5, "a port")
    for said in (0, 1, 1):
        with socket.create_connection(("127.0.0.1", found.port), 5) as line:
            assert line.recv(1) == b""  # it is closed when all was said
        assert caplog.text.count("by a mistake of ours") == said
    assert "KeyError" in caplog.text and "no certificate" not in caplog.text
    found.close()


# ------------------------------------------------------------------------------------------- what refers to the metrics


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\btft_\w+", query))


KNOWN = {metric.name for metric in METRICS}
KNOWN |= {
    f"{metric.name}_{end}" for metric in METRICS if metric.kind == "histogram" for end in ("bucket", "sum", "count")
}


def test_the_dashboard_asks_for_metrics_that_exist(root: Path) -> None:
    board = json.loads((root / "examples" / "grafana-dashboard.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    for query in queries:
        assert names_in(query) and names_in(query) <= KNOWN, query
    shown = set[str]().union(*map(names_in, queries))
    wanted = {
        "tft_step", "tft_step_seconds", "tft_protection_level", "tft_recovery_seconds_bucket", "tft_faults_total",
        "tft_effective_training_time_ratio", "tft_heartbeat_age_seconds",
    }  # fmt: skip
    assert wanted <= shown
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in board["panels"]}) == len(places)
    assert not names_in("rate(tft_nonsense_total[5m])") <= KNOWN  # the check can fail


def test_the_alerts_ask_for_metrics_that_exist(root: Path) -> None:
    (scrape,) = yaml.safe_load((root / "examples" / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape["metrics_path"] == endpoint.PATH
    rules = yaml.safe_load((root / "examples" / "prometheus-rules.yml").read_text())
    found = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len(found) >= 6
    for rule in found:
        assert names_in(rule["expr"]) and names_in(rule["expr"]) <= KNOWN, rule
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in ("critical", "warning")


def grows(query: str) -> list[tuple[str, dict[str, str]]]:
    """The counters, with the labels asked for, of which a query wants to know whether they grew."""
    found = re.findall(r"(?:increase|rate|max_over_time)\((tft_\w+_total)(?:\{(.*?)\})?\[", query)
    return [(name, dict(re.findall(r'(\w+)="(.*?)"', labels))) for name, labels in found]


def test_counters_of_alerts_are_there_before_they_count(served: Callable[[Metrics, float], int], root: Path) -> None:
    """`increase` is 0 for a counter that comes into being with its first count."""
    rules = yaml.safe_load((root / "examples" / "prometheus-rules.yml").read_text())
    expressions = {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}
    found = samples(read(served(Metrics(4, 5.0), 0.0)))
    asked = [one for expression in expressions.values() for one in grows(expression)]
    assert ("tft_incidents_total", {"outcome": "failed"}) in asked and len(asked) >= 3
    for name, wanted in asked:
        values = [value for (known, labels), value in found.items() if known == name and wanted.items() <= {*labels}]
        assert values and not any(values), (name, wanted)
    outcomes = {dict(labels)["outcome"] for name, labels in found if name == "tft_incidents_total"}
    assert outcomes == set(catalogue.OUTCOMES)
    # The controller of a job that failed may be asked once more, or never again: it must not take two samples.
    assert "increase" not in expressions["RecoveryFailed"]


def test_every_outcome_of_an_incident_is_a_series(root: Path) -> None:
    """As `types` names them, but for the end of a job without a fault."""
    text = (root / "mindspeed_tft" / "engine" / "types.py").read_text()
    named = re.findall(r"^    outcome: str  # (.*)$", text, re.M)
    assert len(named) == 2
    assert {word for line in named for word in re.findall(r'"(\w+)"', line)} - {"finished"} == set(catalogue.OUTCOMES)


def test_the_page_has_every_metric_with_type_unit_and_meaning(root: Path) -> None:
    """`python -m mindspeed_tft.observe.catalogue` prints the table of docs/metrics.md."""
    assert catalogue.table() in (root / "docs" / "metrics.md").read_text()


def test_names_of_labels_are_few() -> None:
    labels = {label for metric in METRICS for label in metric.labels}
    assert labels == {
        "rank", "host", "index", "kind", "strategy", "outcome", "stage", "reason", "version", "python", "torch",
        "megatron",
    }  # fmt: skip


@pytest.mark.full
def test_the_benchmark_of_the_metrics_plays_a_whole_repair(root: Path) -> None:
    command = [sys.executable, str(root / "benchmarks" / "metrics.py"), "--ranks", "256", "--repeats", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "256 ranks on 32 hosts" in ended.stdout and "a repair" in ended.stdout
