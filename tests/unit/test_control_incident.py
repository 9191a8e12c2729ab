"""The incident file, from events and actions as the controller sees them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mindspeed_tft.engine import types as t
from mindspeed_tft.observe import page
from mindspeed_tft.observe.files import page_of, stacks_name, where
from mindspeed_tft.observe.incident import EVENTS_FILE, Recorder
from mindspeed_tft.observe.report import stage_seconds


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


def test_it_holds_where_ranks_stood_and_what_was_noted_before(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks-rank1-pid11.txt"
    stacks.write_text("Thread 0x1: in sleep_for_ever")
    recorder = Recorder(tmp_path, "run1", {"layout": "dp2", "dtype": "bf16"})
    recorder.event(t.Registered(1.0, t.RankInfo(1, "a", 11, "tp0-pp0", 1, ("tp0-pp0/dense/0",))))
    recorder.action(t.Note("train", "long ago"), 1.0)
    recorder.event(t.Heartbeat(398.0, 1, 7, "update", waiting=True))
    recorder.event(t.Examined(399.5, 1, 11, "", str(stacks)))
    recorder.action(t.Note("train", "rank 1 hangs", warn=True), 400.0)  # the engine speaks before it stops
    recorder.action(t.Note("stop", "stopping 1 rank"), 400.0)
    recorder.action(t.Stop(1, (1,), "rank 1 hangs"), 400.0)
    assert (recorder.open, recorder.incident, recorder.step) == (True, 1, 7)
    recorder.event(t.Heartbeat(401.0, 1, 8, "forward-backward"))  # what comes later is not what was before
    recorder.recovered(t.Recovered("retried", 6, 1, "again", 1), 402.0, {})
    assert recorder.incident == 0
    recorder.flush()
    (file,) = tmp_path.glob("incident-*.json")
    found = json.loads(file.read_text())
    assert found["before"]["last_heard"] == [{"rank": 1, "t": -2.0, "step": 7, "phase": "update", "waiting": True}]
    assert found["before"]["timeline"] == []  # two minutes, not more
    assert [note["text"] for note in found["timeline"]] == ["rank 1 hangs", "stopping 1 rank"]
    (stack,) = found["stacks"]
    assert (stack["t"], stack["rank"], stack["text"]) == (-0.5, 1, "Thread 0x1: in sleep_for_ever")
    assert found["job"] == {"layout": "dp2", "dtype": "bf16"}


@pytest.mark.parametrize("kind", ["named", "link", "pipe", "directory"])
def test_no_host_names_what_the_leader_reads(tmp_path: Path, kind: str) -> None:
    """Stacks have one name in one directory; a path that a relay tells is for people."""
    secret, here = tmp_path / "node.key", tmp_path / "incidents"
    secret.write_text("the key of the leader")
    here.mkdir()
    own = here / stacks_name(1, 11)
    if kind == "link":
        own.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(own)
    elif kind == "directory":
        own.mkdir()
    recorder = Recorder(here, "run1")
    recorder.event(t.Examined(399.5, 1, 11, "", str(secret if kind == "named" else own)))
    recorder.action(t.Stop(1, (1,), "rank 1 hangs"), 400.0)
    recorder.recovered(t.Recovered("retried", 6, 1, "again", 1), 402.0, {})
    assert recorder.flush(), "the pen is held"
    (file,) = here.glob("incident-*.json")
    assert [stack["text"] for stack in json.loads(file.read_text())["stacks"]] == [""]
    assert "the key of the leader" not in file.read_text()


def test_the_step_of_log_lines_is_a_number_that_is_kept(tmp_path: Path) -> None:
    """Each line asks for it, also where there are thousands of ranks."""
    recorder = Recorder(tmp_path, "run1")
    assert recorder.step == 0
    for rank, step in ((0, 7), (1, 9), (0, 8)):
        recorder.event(t.Heartbeat(1.0, rank, step, "forward-backward"))
    assert recorder.step == 9 and vars(recorder)["step"] == 9
    recorder.recovered(t.Recovered("rewound", 3, 1, "from a checkpoint", 1), 2.0, {})
    assert recorder.step == 3
    recorder.event(t.Heartbeat(3.0, 0, 4, "forward-backward"))
    assert recorder.step == 4
    assert recorder.flush()


def test_a_page_lies_beside_each_incident(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "run1")
    feed(recorder)
    path = recorder.close(t.Closed("dumped", 7, "saved"), 4.0, {})
    assert path is not None and recorder.flush()
    assert page_of(path).read_text().startswith("<!doctype html>")
    assert where(path) == f"incident: {path}  page: {path.with_suffix('.html')}"


def test_a_page_that_cannot_be_made_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> str:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(page, "render", broken)
    recorder = Recorder(tmp_path, "run1")
    feed(recorder)
    path = recorder.close(t.Closed("dumped", 7, "saved"), 4.0, {})
    assert path is not None and json.loads(path.read_text())["outcome"] == "dumped"
    assert recorder.flush() and not page_of(path).exists()
    assert "a mistake of ours" in caplog.text


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
