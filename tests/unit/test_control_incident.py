"""The incident file, from events and actions as the controller sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_tft.engine import types as t
from mindspeed_tft.observe.incident import EVENTS_FILE, Recorder, stage_seconds


def feed(recorder: Recorder) -> None:
    recorder.event(t.Registered(1.0, t.RankInfo(0, "a", 10, "tp0-pp0", 0, ("tp0-pp0/dense/0",))))
    recorder.event(t.Heartbeat(1.5, 0, 3, "forward"))
    recorder.event(t.Tick(1.6))
    recorder.event(t.RankLost(2.0, 1, "its process ended", 11))
    recorder.action(t.Note("stop", "rank 1 is gone", True), 2.0)
    recorder.action(t.Stop(4, (0,), "rank 1 is gone"), 2.0)
    recorder.event(t.Reported(2.5, t.RankReport(0, 7, t.Commit.PASSED, t.Update.DONE)))
    recorder.action(t.Note("decide", "S = 7"), 2.5)
    recorder.action(t.Order(1, 0, t.OrderKind.EXIT, {"code": 75}), 2.6)
    recorder.event(t.OrderDone(3.0, 0, 1, True, "", {"a": "b"}))


def test_it_holds_what_happened(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "new", "run1")
    feed(recorder)
    path = recorder.close(t.Closed("dumped", 7, "saved"), 4.0, {"state": "closed"})
    assert path is not None and path.name.startswith("incident-") and path.name.endswith("-4.json")
    found = json.loads(path.read_text())
    assert (found["outcome"], found["step"], found["summary"], found["epoch"]) == ("dumped", 7, "saved", 4)
    assert found["decision"] == ["S = 7"]
    assert found["seconds"] == {"stop": 0.5, "decide": 1.5, "total": 2.0}
    assert found["faults"][0]["rank"] == 1
    (order,) = found["orders"]
    assert (order["kind"], order["seconds"], order["result"]) == ("exit", pytest.approx(0.4), {"a": "b"})
    assert found["reports"][0]["commit"] == "passed"
    assert found["engine"] == {"state": "closed"}
    assert found["versions"]["python"]
    assert [item["rank"] for item in found["ranks"]] == [0]
    lines = [json.loads(line) for line in (tmp_path / "new" / EVENTS_FILE).read_text().splitlines()]
    assert [line["what"] for line in lines] == [
        "Registered", "RankLost", "Note", "Stop", "Reported", "Note", "Order", "OrderDone",
    ]  # fmt: skip
    assert not recorder.open


def test_without_a_fault_there_is_none(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "run1")
    recorder.event(t.Registered(1.0, t.RankInfo(0, "a", 10, "p", 0, ())))
    assert recorder.close(t.Closed("finished", -1, ""), 2.0, {}) is None


def test_two_incidents_in_one_second_are_two_files(tmp_path: Path) -> None:
    paths = set()
    for _ in range(3):
        recorder = Recorder(tmp_path, "run1")
        feed(recorder)
        paths.add(recorder.close(t.Closed("failed", -1, "no"), 4.0, {}))
    assert len(paths) == 3 and None not in paths


def test_a_directory_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / "file" / "incidents", "run1")
    feed(recorder)
    assert recorder.close(t.Closed("failed", -1, "no"), 4.0, {}, timeout=0.3) is None
    assert caplog.text.count("cannot be written") == 1


def test_stages_that_come_again_add_up() -> None:
    stages = [(1.0, "stop"), (2.0, "plan"), (2.5, "write"), (4.0, "plan"), (4.5, "write")]
    assert stage_seconds(stages, 1.0, 5.0) == {"stop": 1.0, "plan": 1.0, "write": 2.0, "total": 4.0}


def test_an_incident_is_on_disk_before_its_recorder_ends(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "run1")
    feed(recorder)
    path = recorder.recovered(t.Recovered("retried", 6, 1, "again", 1), 4.0, {})
    assert recorder.flush()
    assert json.loads(path.read_text())["outcome"] == "retried"
