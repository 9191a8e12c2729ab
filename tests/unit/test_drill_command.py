"""`tftctl drill` refuses what it cannot do with exit status 2, and reports what it found as DRILL.md says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mindspeed_tft.cli import demo, drill
from mindspeed_tft.cli.main import app
from mindspeed_tft.cli.progress import LineListener
from mindspeed_tft.faults import rehearsal
from mindspeed_tft.faults.rehearsal import Plan, Report, StepLog, read_steps, saved_step, stage_seconds
from mindspeed_tft.faults.spec import parse_fault, parse_layout
from mindspeed_tft.faults.verdict import Compared, Evidence, Verdict, judge

KEYS = {
    "verdict",
    "strategy",
    "tries",
    "step_at_fault",
    "resumed_at",
    "steps_lost",
    "seconds",
    "processes_restarted",
    "compared",
    "incident",
}
FAULT = parse_fault("kill@1:7:backward")


def _report(tmp_path: Path, **change: Any) -> Report:
    comparisons = (Compared("dump", 37, 1000, 0), Compared("end", 37, 1000, 0))
    found: dict[str, Any] = {
        "fired": (FAULT,), "steps": 12, "faulty_exit": 1, "completed": 6, "saved": 6, "reported": 6, "resumed_exit": 0,
        "resumed_first": 7, "comparisons": comparisons,
    }  # fmt: skip
    seen = Evidence(**{**found, **change})
    incident = tmp_path / "incident-1.json"
    incident.write_text("{}")
    (tmp_path / "broken.log").write_text("the last words\n")
    word, reasons = judge(seen)
    return Report(
        plan=Plan(layout=parse_layout("dp4"), faults=(FAULT,)),
        verdict=word,
        reasons=reasons,
        evidence=seen,
        seconds=stage_seconds(100.0, None, (7, 103.0, 103.5)),
        processes_restarted=(0, 1, 2, 3),
        strategy="dump",
        tries=(),
        incident=incident,
        dump=tmp_path / "dump",
        reference=tmp_path / "reference",
        logs=(tmp_path / "broken.log",),
        tail="the last words" if word is Verdict.LOST else "",
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--fault", "kil@1:7"], "--fault 'kil@1:7': unknown kind 'kil'"),
        (["--fault", "kill@9:7"], "ranks 0 to 3"),
        (["--layout", "dp4x"], "--layout 'dp4x'"),
        (["--preset", "retry"], "not available yet; available: dump"),
        (["--replicas", "3"], "fitting: 1 2 4"),
        (["--dtype", "fp8"], "known: fp32 bf16 fp16"),
        (["--steps", "1"], "expected 3 to 100"),
        (["--launcher", "mpirun"], "known: torchrun tftrun"),
        (["--timeout", "0"], "positive"),
        (["--megatron", "/nonexistent"], "--megatron /nonexistent: holds no megatron/core"),
        (["--json", "/nonexistent/report.json"], "does not exist"),
        (["--keep", "/proc/drills"], "--keep /proc/drills: cannot be created"),
        (["stray"], "follow after"),
    ],
)
def test_bad_arguments_end_at_once_with_status_2(arguments: list[str], named: str) -> None:
    ended = CliRunner().invoke(app, ["drill", *arguments], env={"COLUMNS": "300", "TERM": "dumb"})
    assert ended.exit_code == 2
    assert named in " ".join(ended.output.replace("│", " ").split())


def test_arguments_after_two_dashes_are_for_megatron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans: list[Plan] = []

    def rehearse(plan: Plan, *unused: Any) -> Report:
        plans.append(plan)
        return _report(tmp_path)

    monkeypatch.setattr(drill, "rehearse", rehearse)
    ended = CliRunner().invoke(app, ["drill", "--fault", "exc@0:5", "--", "--overlap-grad-reduce", "--lr", "2e-3"])
    assert ended.exit_code == 0, ended.output
    (plan,) = plans
    assert plan.extra == ("--overlap-grad-reduce", "--lr", "2e-3")
    assert plan.faults == (parse_fault("exc@0:5").settled(1234),)
    assert rehearsal.training_flags(plan)[-3:] == plan.extra


@pytest.mark.parametrize(
    ("change", "word", "status"),
    [
        ({}, "exact", 0),
        ({"comparisons": (Compared("dump", 37, 1000, 1, "[bold]: 1"),)}, "inexact", 3),
        ({"completed": 8}, "degraded", 4),
        ({"saved": None}, "lost", 5),
    ],
)
def test_the_report_is_shown_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any], word: str, status: int
) -> None:
    report = _report(tmp_path, **change)
    monkeypatch.setattr(drill, "rehearse", lambda *unused: report)
    file = tmp_path / "report.json"
    ended = CliRunner().invoke(app, ["drill", "--json", str(file), "--keep", str(tmp_path / "keep")])
    assert ended.exit_code == status, ended.output
    assert word in ended.output
    content = json.loads(file.read_text())
    assert content.keys() >= KEYS
    assert content["verdict"] == word
    assert content["step_at_fault"] == 7
    assert content["resumed_at"] == report.evidence.saved
    assert content["compared"].keys() == {"tensors", "bytes", "different", "first_difference", "padding"}
    assert set(content["seconds"]) >= set(rehearsal.STAGES)
    assert (content["seconds"]["total"], content["seconds"]["first_step"]) == (3.5, 0.5)
    assert ("the last words" in ended.output) is (word == "lost")


def test_the_incident_survives_the_directory_of_the_drill(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    drill.write_json(_report(tmp_path), file, kept=False)
    content = json.loads(file.read_text())
    assert content["incident"] == str(tmp_path / "report-incident.json")
    assert Path(content["incident"]).read_text() == "{}"


def test_seconds_come_from_the_fault_the_incident_and_the_first_step() -> None:
    incident = {
        "opened": 100.25,
        "closed": 102.0,
        "seconds": {"train": 0.0, "stop": 0.5, "decide": 0.125, "stage": 0.25, "write": 0.75, "total": 1.75},
    }
    found = stage_seconds(100.0, incident, (7, 110.0, 111.0))
    assert found["detect"] == 0.25
    assert (found["stop"], found["decide"], found["dump"]) == (0.5, 0.125, 1.0)
    assert (found["reboot"], found["first_step"], found["total"]) == (8.0, 1.0, 11.0)
    assert (found["regroup"], found["repair"], found["rollback"]) == (None, None, None)
    assert set(stage_seconds(None, None, None).values()) == {None}


def test_the_steps_that_ranks_ended_are_read_and_a_torn_line_is_not(tmp_path: Path) -> None:
    def line(step: int, pid: int, begin: float) -> str:
        return json.dumps({"step": step, "pid": pid, "begin_wall": begin, "end_wall": begin + 1}) + "\n"

    (tmp_path / "rank0.jsonl").write_text(line(6, 10, 1.0) + line(7, 10, 3.0))
    (tmp_path / "rank10.jsonl").write_text(line(6, 20, 0.5) + '{"step": 8, "pi')
    found = read_steps(tmp_path)
    assert found.completed == 7
    assert found.pids == {0: 10, 10: 20}
    assert found.first() == (6, 0.5, 2.0)
    assert read_steps(tmp_path / "none") == StepLog({})
    assert StepLog({}).completed == 0
    assert StepLog({}).first() is None


def test_a_saved_step_needs_the_tracker_and_the_directory_it_names(tmp_path: Path) -> None:
    assert saved_step(tmp_path) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    assert saved_step(tmp_path) is None
    (tmp_path / "iter_0000006").mkdir()
    assert saved_step(tmp_path) == 6


def test_the_demo_does_not_trust_a_comparison_that_misses_the_changed_byte(tmp_path: Path) -> None:
    report = _report(tmp_path)
    assert demo.exit_status(report, demo.Control("x", 1, "x")) == 0
    assert demo.exit_status(report, demo.Control("x", 0, None)) == 5
    assert demo.exit_status(report, None) == 5
    assert demo.exit_status(_report(tmp_path, completed=8), None) == 4


def test_progress_without_a_terminal_is_plain_lines(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        listener = LineListener(Console(file=out, width=200))
        listener.stage("broken", "with the plugin, kill@1:7:[backward]", 1, 7)
        listener.step(1)
        listener.done("exit status 1")
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[0] == "broken: with the plugin, kill@1:7:[backward]"
    assert lines[-1].startswith("broken: done in 0.0 s, exit status 1")
