"""The metrics of a real job that was broken and repaired, as it leaves them behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families

from .conftest import Drilled

pytestmark = [pytest.mark.megatron, pytest.mark.full]


@pytest.fixture
def measured(drill: Callable[..., Drilled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Drilled]:
    """`measured(*arguments)`: a drill whose broken job serves metrics."""
    lines = (
        "import wrapt",
        "def measure(module):",
        "    flags = module.plugin_flags",
        f"    module.plugin_flags = lambda plan: (*flags(plan), '--tft-metrics-port', '{free_port()}')",
        "wrapt.register_post_import_hook(measure, 'mindspeed_tft.faults.rehearsal')",
    )
    place = tmp_path / "measured"
    place.mkdir()
    (place / "sitecustomize.py").write_text("\n".join(lines))
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), *([before] if before else [])]))
    return drill


def numbers(found: Drilled) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = (found.directory / "dump" / "tft_incidents" / "metrics.prom").read_text()
    return {
        (sample.name, frozenset(one for one in sample.labels.items() if one[0] != "run")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_repair_is_in_the_numbers_as_it_is_in_the_incident(measured: Callable[..., Drilled]) -> None:
    found = measured("--preset", "retry", "--fault", "uce@1:60:backward", "--steps", "100")  # after some heartbeats
    assert (found.status, found.report["verdict"]) == (0, "exact"), found.output  # byte for byte, with metrics on
    incident = json.loads(Path(found.report["incident"]).read_text())
    left = numbers(found)

    def value(name: str, **labels: str) -> float:
        return left[name, frozenset(labels.items())]

    assert value("tft_faults_total", kind="memory", strategy="retry") == 1
    assert value("tft_incidents_total", outcome="retried") == 1
    assert value("tft_repair_bytes_total") == sum(moved["bytes"] for moved in incident["transfers"]) > 100_000
    assert (value("tft_steps_lost_total"), value("tft_epoch")) == (0, 1)
    for stage in ("regroup", "repair", "rollback", "resume", "total"):
        seconds = value("tft_recovery_seconds_sum", stage=stage, strategy="retry")
        assert seconds == pytest.approx(incident["seconds"][stage], abs=0.01), stage
    assert value("tft_ranks_known") == value("tft_ranks_expected") == 4
    assert value("tft_ranks_alive") == 0  # all have finished
    assert 0 < value("tft_effective_training_time_ratio") < 1
    lost = value("tft_unproductive_seconds_total", reason="incident")
    assert lost == pytest.approx(incident["seconds"]["total"], abs=0.01)


def test_a_dump_is_in_the_last_numbers(measured: Callable[..., Drilled]) -> None:
    found = measured("--fault", "kill@1:7:update")
    assert (found.status, found.report["verdict"]) == (0, "exact"), found.output
    left = numbers(found)
    assert left["tft_incidents_total", frozenset({("outcome", "dumped")})] == 1
    assert left["tft_faults_total", frozenset({("kind", "lost"), ("strategy", "dump")})] == 1
    assert left["tft_dump_bytes_total", frozenset()] > 100_000 and left["tft_dump_seconds", frozenset()] > 0
    assert left["tft_protected", frozenset()] == 0
