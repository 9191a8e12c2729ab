"""`tftctl drill` refuses what it cannot do with exit status 2, and reports what it found as DRILL.md says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mindspeed_tft.arguments import resolve
from mindspeed_tft.cli import demo, drill
from mindspeed_tft.cli.main import app
from mindspeed_tft.cli.progress import LineListener
from mindspeed_tft.faults import jobs, plans, rehearsal, traces, verdict
from mindspeed_tft.faults.plans import Plan
from mindspeed_tft.faults.rehearsal import Report
from mindspeed_tft.faults.spec import AVAILABLE_KINDS, parse_fault, parse_faults, parse_layout
from mindspeed_tft.faults.traces import StepLog, read_steps, saved_step, stage_seconds
from mindspeed_tft.faults.verdict import Compared, Evidence, Recovery, Verdict, judge

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
        (["--preset", "elastic"], "not available yet; available: dump retry"),
        (["--preset", "dump", "--fault", "uce-low@1:7"], "where there are kill term segv exc"),
        (["--replicas", "3"], "fitting: 2 4"),
        (["--dtype", "fp8"], "known: fp32 bf16 fp16"),
        (["--steps", "1"], "expected 3 to 100"),
        (["--launcher", "mpirun"], "known: torchrun tftrun torchrun-logs-specs"),
        (["--preset", "recover", "--launcher", "torchrun"], "a plain torchrun ends all ranks instead; use tftrun or"),
        (["--preset", "recover", "--fault", "term@1:7"], "where there are kill segv exc oom"),
        (["--preset", "retry", "--warm-standby"], "no process is started again; use it with preset recover"),
        (["--timeout", "0"], "positive"),
        (["--replicas", "1"], "held by nobody"),
        (["--preset", "retry", "--fault", "nan@1:7", "--dtype", "fp16"], "the loss scaler takes it for an overflow"),
        (["--preset", "retry", "--save-interval", "0"], "expected at least 1"),
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


def test_the_fault_that_nobody_named_fits_the_preset() -> None:
    expected = {"dump": "kill@1:7:backward", "retry": "uce@1:7:backward", "recover": "kill@1:7:backward"}
    for preset, fault in expected.items():
        plan = drill.make_plan(preset=preset)
        assert (plan.preset, plan.faults) == (preset, (parse_fault(fault),))
        assert ("--enable-hbmfault-repair" in plans.plugin_flags(plan)) is (preset != "dump")
        assert ("--enable-worker-reboot" in plans.plugin_flags(plan)) is (preset == "recover")
        assert not {"--enable-hbmfault-repair", "--enable-worker-reboot"} & set(plans.stock_flags(plan))


@pytest.mark.parametrize("preset", AVAILABLE_KINDS)
def test_a_preset_is_a_file_with_the_flags_of_its_drill(preset: str) -> None:
    from_file, _ = resolve(["--tft-config", preset])
    flags = plans.plugin_flags(drill.make_plan(preset=preset))
    ours = [*flags[flags.index("--enable-high-availability") :]]
    assert resolve(ours)[0] == from_file


def test_preset_recover_brings_its_launcher_and_says_whether_a_standby_is_wanted() -> None:
    assert drill.make_plan(preset="retry").launcher == "torchrun"
    cold, warm = (drill.make_plan(preset="recover", warm_standby=wanted) for wanted in (False, True))
    assert (cold.launcher, warm.launcher) == ("tftrun", "tftrun")
    assert drill.make_plan(preset="recover", launcher="torchrun-logs-specs").launcher == "torchrun-logs-specs"
    assert rehearsal._standby(cold) == {"TFT_WARM_STANDBY": "0"}
    assert rehearsal._standby(warm) == {
        "TFT_WARM_STANDBY": "1",
        "TFT_STANDBY_IMPORTS": "mindspeed_tft.adaptor,megatron.core,megatron.training",
        "TFT_DRILL_WAIT": "1",
    }


@pytest.mark.parametrize(
    ("faults", "save", "evaluation"),
    [
        (["uce@1:7:forward"], 13, (1000, 0)),
        (["uce@1:7:save"], 7, (1000, 0)),
        (["uce@1:7:eval"], 13, (7, 2)),
        (["uce@1:6:save", "link@1:9:save", "uce@0:8:eval"], 3, (8, 2)),
        (["nan@1:7:backward"], 4, (1000, 0)),
        (["uce@2:5:forward", "nan@1:9:backward", "nan@1:9:backward", "uce@0:8:eval"], 5, (8, 2)),
    ],
)
def test_the_job_saves_and_evaluates_where_a_fault_needs_it(
    faults: list[str], save: int, evaluation: tuple[int, int]
) -> None:
    plan = drill.make_plan(preset="retry", faults=faults)
    assert plans.save_interval(plan) == save
    flags = plans.stock_flags(plan)
    found = tuple(int(flags[flags.index(name) + 1]) for name in ("--eval-interval", "--eval-iters"))
    assert found == evaluation


def test_how_often_the_job_saves_can_be_said() -> None:
    assert plans.save_interval(drill.make_plan(preset="retry", save_interval=3)) == 3
    assert plans.save_interval(drill.make_plan(preset="retry", faults=["nan@1:7"], save_interval=3)) == 3


def test_a_job_without_replicas_saves_periodically_and_its_reference_has_one_optimizer_instance() -> None:
    plan = drill.make_plan(preset="retry", replicas=1)
    assert plans.save_interval(plan) == 4
    assert plans.stock_flags(plan)[-2:] == ("--num-distributed-optimizer-instances", "1")
    flags = plans.plugin_flags(plan)
    assert "--distributed-optimizer-no-replica" in flags
    assert "--optimizer-replica-num" not in flags


def test_wrong_numbers_are_an_error_at_once_in_all_jobs_of_a_drill_with_a_corrupted_gradient() -> None:
    for fault, disabled in (("nan@1:7", True), ("uce@1:7:backward", False)):
        plan = drill.make_plan(preset="retry", faults=[fault])
        for flags in (plans.stock_flags(plan), plans.plugin_flags(plan)):
            assert ("--rerun-mode disabled" in " ".join(flags)) is disabled
    plan = drill.make_plan(preset="retry", faults=["nan@1:7"], extra=["--rerun-mode", "validate_results"])
    assert plans.training_flags(plan)[-2:] == plan.extra  # the later one counts


def test_arguments_after_two_dashes_are_for_megatron(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Plan] = []

    def rehearse(plan: Plan, *unused: Any) -> Report:
        given.append(plan)
        return _report(tmp_path)

    monkeypatch.setattr(drill, "rehearse", rehearse)
    ended = CliRunner().invoke(app, ["drill", "--fault", "exc@0:5", "--", "--overlap-grad-reduce", "--lr", "2e-3"])
    assert ended.exit_code == 0, ended.output
    (plan,) = given
    assert plan.extra == ("--overlap-grad-reduce", "--lr", "2e-3")
    assert plan.faults == (parse_fault("exc@0:5").settled(1234),)
    assert plans.training_flags(plan)[-3:] == plan.extra


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
    assert set(content["seconds"]) >= set(traces.STAGES)
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


def _steps(*records: tuple[int, int, int, float, float]) -> StepLog:
    """From (rank, step, pid, begin, end)."""
    found: dict[int, list[dict[str, Any]]] = {}
    for rank, step, pid, begin, end in records:
        found.setdefault(rank, []).append({"step": step, "pid": pid, "begin_wall": begin, "end_wall": end})
    return StepLog({rank: tuple(lines) for rank, lines in found.items()})


@pytest.mark.parametrize(
    ("records", "again", "restarted"),
    [
        ([(0, 7, 1, 1.0, 2.0), (1, 7, 2, 1.1, 2.1), (0, 8, 1, 2.0, 3.0)], 0, ()),
        ([(0, 7, 1, 1.0, 2.0), (0, 7, 1, 3.0, 4.0)], 1, ()),
        ([(0, 7, 1, 1.0, 2.0), (1, 7, 2, 3.0, 4.0)], 1, ()),  # also when it is another rank that computes it again
        ([(0, 6, 1, 1.0, 2.0), (0, 7, 1, 2.0, 3.0), (0, 6, 1, 4.0, 5.0), (0, 7, 1, 5.0, 6.0)], 2, ()),
        ([(0, 7, 1, 1.0, 2.0), (1, 6, 2, 0.0, 1.0), (1, 7, 9, 1.0, 2.0)], 0, (1,)),
    ],
)
def test_completed_steps_that_were_computed_again_are_counted(
    records: list[tuple[int, int, int, float, float]], again: int, restarted: tuple[int, ...]
) -> None:
    found = _steps(*records)
    assert (found.computed_again, found.restarted) == (again, restarted)


def test_the_first_step_after_a_fault_is_one_that_began_after_it() -> None:
    log = _steps(
        (0, 6, 1, 1.0, 2.0), (0, 7, 1, 2.0, 4.0), (0, 8, 1, 6.0, 7.0), (1, 8, 2, 6.1, 7.5), (0, 9, 1, 8.0, 9.0)
    )
    assert log.first(after=3.0) == (8, 6.0, 7.5)  # the fault fell into step 7, which rank 0 ended
    assert log.first(after=8.5) is None
    again = _steps((0, 5, 1, 3.0, 4.0), (0, 5, 1, 6.0, 7.0), (1, 5, 1, 3.1, 4.1), (1, 5, 1, 6.1, 7.1))
    assert again.first(after=2.0) == (5, 3.0, 4.1)  # a second fault came, and the step once more


def test_incidents_are_read_in_their_order_with_the_way_out(tmp_path: Path) -> None:
    directory = tmp_path / traces.INCIDENTS
    directory.mkdir()
    told = [("z", "retried", 6, 1.0), ("b", "dumped", 8, 3.0), ("c", "failed", -1, 2.0), ("a", "rewound", 4, 2.5)]
    told += [("d", "rebooted", 6, 1.5), ("e", "rebooted", 3, 1.75)]
    for name, outcome, step, opened in told:
        content = {"outcome": outcome, "step": step, "opened": opened, "engine": {"furthest_step": 6}}
        (directory / f"incident-{name}.json").write_text(json.dumps(content))
    found = [traces.recovery_of(incident) for _, incident in traces.read_incidents(tmp_path)]
    assert found == [
        Recovery("retry", 6),
        Recovery("recover", 6),
        Recovery("recover", 3, (4, 5, 6)),
        Recovery("none", -1),
        Recovery("rewind", 4, (5, 6)),
        Recovery("dump", 8),
    ]


def test_faults_that_fired_are_counted(tmp_path: Path) -> None:
    log, faults = tmp_path / "faults.jsonl", parse_faults("uce@1:7:data,uce@1:7:data,link@0:9:clip,uce@1:7:data")
    assert traces.read_fired(log, faults) == ((), ())
    lines = [{"fault": "link@0:9:clip", "wall": 3.0}, *({"fault": "uce@1:7:data", "wall": at} for at in (1.0, 2.0))]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fired, moments = traces.read_fired(log, faults)
    assert sorted(map(str, fired)) == ["link@0:9:clip", "uce@1:7:data", "uce@1:7:data"]
    assert moments == (1.0, 2.0, 3.0)


def test_where_one_rank_comes_back_the_wait_for_it_is_a_stage_of_the_incident() -> None:
    incident = {"opened": 100.25, "closed": 107.0, "seconds": {"stop": 0.1, "reboot": 6.0, "repair": 0.2, "total": 6.5}}
    found = stage_seconds(100.0, incident, (7, 107.0, 107.5), relaunched=False)
    assert (found["detect"], found["reboot"], found["repair"], found["total"]) == (0.25, 6.0, 0.2, 7.5)


def test_where_the_job_goes_on_nothing_is_rebooted_or_dumped() -> None:
    incident = {"opened": 100.25, "closed": 101.0, "seconds": {"stop": 0.1, "repair": 0.2, "rollback": 0.3}}
    found = stage_seconds(100.0, incident, (7, 101.0, 101.5), relaunched=False)
    assert (found["detect"], found["repair"], found["rollback"]) == (0.25, 0.2, 0.3)
    assert (found["first_step"], found["total"]) == (0.5, 1.5)
    assert (found["reboot"], found["dump"]) == (None, None)


@pytest.mark.parametrize(
    ("incident", "saved", "reason"),
    [
        ({"outcome": "dumped", "step": 6}, 6, "ended with exit status 1 and a checkpoint"),
        # Nothing could be saved: what is there is the last periodic checkpoint.
        ({"outcome": "failed", "step": -1}, 4, "no incident report tells of a checkpoint"),
    ],
)
def test_a_job_that_cannot_be_saved_goes_on_from_its_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, incident: dict[str, Any], saved: int, reason: str
) -> None:
    plan = drill.make_plan(preset="retry", save_interval=4)

    def play(job: Any, progress: Any) -> jobs.Ended:
        if job.name == "broken":
            _leave_behind(tmp_path, plan, 1, saved, incident)
        else:
            _log_steps(tmp_path / "resumed-steps", {saved + 1: (20.0, 21.0)})
        return jobs.Ended(job.name, int(job.name == "broken"), 1.0, 0.0, tmp_path / "log")

    monkeypatch.setattr(rehearsal.jobs, "run", play)
    monkeypatch.setattr(rehearsal, "_compared", lambda what, *_: Compared(what, 37, 1000, 0))
    monkeypatch.setattr(rehearsal.Rehearsal, "reference", lambda self: tmp_path / "reference")
    report = rehearsal.rehearse(plan, tmp_path, tmp_path / "cache", _Silent())
    assert (report.verdict, verdict.steps_lost(report.evidence)) == (Verdict.DEGRADED, 6 - saved)
    assert any(reason in text for text in report.reasons), report.reasons


class _Silent:
    """A listener that shows nothing."""

    def stage(self, name: str, text: str, first: int, last: int) -> None: ...
    def step(self, number: int) -> None: ...
    def done(self, text: str) -> None: ...


@pytest.mark.parametrize("status", [0, 1])
def test_a_job_that_goes_on_is_compared_at_its_end_and_one_that_ends_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    """The jobs are played; what they leave behind is real."""
    plan = drill.make_plan(preset="retry")
    (fault,) = plan.faults
    run: list[str] = []

    def play(job: Any, progress: Any) -> jobs.Ended:
        run.append(job.name)
        code = _leave_behind(tmp_path, plan, status) if job.name == "broken" else 0
        return jobs.Ended(job.name, code, 1.0, 0.0, tmp_path / "log")

    def same(what: str, expected: Path, found: Path) -> Compared:
        run.append(f"{what} {found.relative_to(tmp_path)}")
        return Compared(what, 37, 1000, 0)

    monkeypatch.setattr(rehearsal.jobs, "run", play)
    monkeypatch.setattr(rehearsal, "_compared", same)
    monkeypatch.setattr(rehearsal.Rehearsal, "reference", lambda self: tmp_path / "reference")
    report = rehearsal.rehearse(plan, tmp_path, tmp_path / "cache", _Silent())
    content = report.as_json()
    assert content["faults_fired"] == [str(fault)]
    if status == 0:
        assert run == ["broken", "end dump/iter_0000012"]
        assert (content["verdict"], content["strategy"], content["resumed_at"]) == ("exact", "retry", 6)
        assert (content["steps_lost"], content["processes_restarted"], content["dump"]) == (0, [], None)
        assert content["seconds"]["total"] == 2.5
    else:
        assert run == ["broken", "resumed", "dump dump/iter_0000006", "end final/iter_0000012"]
        assert (content["verdict"], content["strategy"], content["resumed_at"]) == ("degraded", "dump", 6)
        assert "exit status 1" in content["reasons"][0]


def _leave_behind(
    work: Path, plan: Plan, status: int, saved: int | None = None, told: dict[str, Any] | None = None
) -> int:
    """A broken job's checkpoint, incident, fault log and step log."""
    saved = (plan.steps if status == 0 else 6) if saved is None else saved
    told = told or {"outcome": "retried" if status == 0 else "dumped", "step": 6}
    save = work / "dump"
    (save / f"iter_{saved:07d}").mkdir(parents=True)
    (save / "latest_checkpointed_iteration.txt").write_text(str(saved))
    incident = {**told, "opened": 10.5, "closed": 11.0, "seconds": {}, "decision": ["S = 6"]}
    (save / traces.INCIDENTS).mkdir()
    (save / traces.INCIDENTS / "incident-1.json").write_text(json.dumps(incident))
    (work / "faults.jsonl").write_text(json.dumps({"fault": str(plan.faults[0]), "wall": 10.0}) + "\n")
    _log_steps(work / "broken-steps", {6: (8.0, 9.0), 7: (11.5, 12.5)} if status == 0 else {6: (8.0, 9.0)})
    return status


def _log_steps(directory: Path, ended: dict[int, tuple[float, float]]) -> None:
    directory.mkdir()
    for rank in range(4):
        lines = [{"step": s, "pid": rank, "begin_wall": a, "end_wall": b} for s, (a, b) in ended.items()]
        (directory / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


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
