"""The faults of a soak are chosen so that each can be repaired; what grows with the number of repairs is named."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mindspeed_tft.agent import policy
from mindspeed_tft.cli import soak as soak_command
from mindspeed_tft.cli.main import app
from mindspeed_tft.faults import gpt_job, jobs, plans, rehearsal, soak, traces
from mindspeed_tft.faults.soak import SAMPLE, SETTLED, Level, Levels
from mindspeed_tft.faults.spec import REPAIR_PHASES, STEP_PHASES, FaultSpec, SpecError, parse_layout
from mindspeed_tft.faults.traces import StepLog
from mindspeed_tft.faults.verdict import Compared, Verdict

LAYOUTS = ("dp4", "tp2dp2", "pp2dp2", "dp2")
SEEDS = range(20)


def _by_step(faults: tuple[FaultSpec, ...]) -> dict[int, list[FaultSpec]]:
    found: dict[int, list[FaultSpec]] = {}
    for fault in faults:
        found.setdefault(fault.step, []).append(fault)
    return found


# -------------------------------------------------------------------------------------------- the faults


@pytest.mark.parametrize("preset", soak.PRESETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_fault_can_be_repaired_from_another_holder(layout: str, seed: int, preset: str) -> None:
    sizes = parse_layout(layout)
    faults = soak.random_faults(sizes, 2, 200, seed, preset)
    assert len(faults) == 200
    assert faults == soak.random_faults(sizes, 2, 200, seed, preset)
    steps = _by_step(faults)
    assert min(steps) >= 2
    ordered = sorted(steps)
    assert {after - before for before, after in itertools.pairwise(ordered)} == {2, 3}
    for together in steps.values():
        damaged = {fault.rank for fault in together if fault.kind == "uce" or fault.ends_process}
        shards = Counter(sizes.shard_of(rank, 2) for rank in damaged)
        assert all(count == 1 for count in shards.values()), together
        assert len(set(together)) == len(together) <= 2
        in_steps = [fault for fault in together if fault.phase in STEP_PHASES]
        if len(in_steps) == 2:  # past the commit the step could be over before the second one comes
            assert all(STEP_PHASES.index(str(fault.phase)) < STEP_PHASES.index("commit") for fault in in_steps)
        for fault in together:
            if fault.phase == "repair":  # only who gives or takes a shard gets there
                causes = [other for other in in_steps if other.kind == "uce" or other.ends_process]
                assert any(other.rank == fault.rank for other in causes), together


@pytest.mark.parametrize("seed", SEEDS)
def test_half_of_the_ranks_die_in_turn_and_the_others_never(seed: int) -> None:
    layout = parse_layout("dp4")
    mortal = soak.mortals(layout, seed)
    assert len(set(mortal)) == 2
    died = [fault for fault in soak.random_faults(layout, 2, 300, seed, "recover") if fault.ends_process]
    assert [fault.rank for fault in died] == [mortal[number % 2] for number in range(len(died))]
    assert {fault.kind for fault in died} == set(soak.DEATHS)
    assert 15 < len(died) < 70
    assert {fault.phase for fault in died} <= set(STEP_PHASES)
    assert not any(fault.ends_process for fault in soak.random_faults(layout, 2, 300, seed))


def test_who_dies_does_so_no_faster_than_a_launcher_bears() -> None:
    plan = soak.make_plan("dp4", "fp32", 2, 200, seed=3, preset="recover")
    assert (plan.preset, plan.launcher) == ("recover", "tftrun")
    limits = policy.Limits()
    assert plan.pace * limits.burst > limits.window
    retry = soak.make_plan("dp4", "fp32", 2, 200, seed=3)
    assert (retry.launcher, retry.pace) == ("torchrun", 0)
    assert plan.timeout > retry.timeout


def test_all_kinds_come_on_all_ranks_in_all_phases() -> None:
    faults = soak.random_faults(parse_layout("dp4"), 2, 400, 1)
    assert {fault.kind for fault in faults} == set(soak.KINDS)
    assert {fault.rank for fault in faults} == {0, 1, 2, 3}
    assert {fault.phase for fault in faults} == {*STEP_PHASES, *REPAIR_PHASES}
    sizes = Counter(len(together) for together in _by_step(faults).values())
    assert sizes[1] > 50
    assert sizes[2] > 50


def test_a_preset_after_which_nothing_goes_on_is_refused() -> None:
    with pytest.raises(SpecError, match="with preset retry or recover"):
        soak.make_plan("dp4", "fp32", 2, 50, seed=1, preset="dump")


def test_seeds_differ() -> None:
    layout = parse_layout("dp4")
    assert len({soak.random_faults(layout, 2, 50, seed) for seed in SEEDS}) == len(SEEDS)


def test_the_plan_is_that_of_a_drill_without_its_limits() -> None:
    plan = soak.make_plan("dp4", "bf16", 2, 200, seed=3)
    assert (plan.preset, plan.dtype, plan.every_step, plan.levels) == ("retry", "bf16", False, True)
    assert plan.steps == plan.faults[-1].step + 2 > 100
    assert plan.timeout > 2 * plan.steps
    assert plans.save_interval(plan) > plan.steps
    assert soak.make_plan("dp4", "fp32", 2, 40, seed=3, timeout=7.0).timeout == 7.0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("dp4", "fp32", 2, 39), "--faults 39: expected 40 to 5000"),
        (("dp4", "fp32", 1, 50), "needs at least 2"),
        (("dp4", "fp8", 2, 50), "known: fp32 bf16 fp16"),
        (("dp4", "fp32", 3, 50), "fitting: 2 4"),
        (("cp2dp2", "fp32", 2, 50), "available axes"),
        (("ep2dp2", "fp32", 2, 50), "for example ep2dp4"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[str, str, int, int], named: str) -> None:
    with pytest.raises(SpecError) as refused:
        soak.make_plan(*arguments, seed=1)
    assert named in str(refused.value)
    layout, dtype, replicas, faults = arguments
    words = ["--layout", layout, "--dtype", dtype, "--replicas", str(replicas), "--faults", str(faults)]
    ended = CliRunner().invoke(app, ["soak", *words], env={"COLUMNS": "300", "TERM": "dumb"})
    assert ended.exit_code == 2
    assert named in " ".join(ended.output.replace("│", " ").split())


# -------------------------------------------------------------------------------------------- the levels

FLAT = Level(heap=160 << 20, memory=400 << 20, threads=94, files=165, groups=30)


def _log(found: list[tuple[Level, int]]) -> StepLog:
    """A rank that ended a step a second at these levels, with so many recoveries being wound up."""
    records = [
        {"step": n, "pid": 1, "begin_wall": n - 1.0, "end_wall": float(n), "winding": winding, **vars(level)}
        for n, (level, winding) in enumerate(found, 1)
    ]
    return StepLog({0: tuple(records)})


def test_levels_are_those_of_the_first_calm_steps_and_of_the_last_ones() -> None:
    """A recovery after every second step, which it takes to wind it up; memory grows by 1 MiB a step."""
    count = 40
    calm = [replace(FLAT, memory=(400 + n) << 20) for n in range(2 * count)]
    found = [(replace(level, threads=97, files=170), 1) if n % 2 else (level, 0) for n, level in enumerate(calm)]
    closed = [2.0 * n + 0.5 for n in range(1, count + 1)]
    levels = soak.levels_of(_log(found), closed)[0]
    assert (levels.first.threads, levels.last.threads) == (94, 94)
    assert (levels.first.files, levels.last.files) == (165, 165)
    assert levels.per_repair("memory") / 2**20 == pytest.approx(2 * (count - SETTLED - SAMPLE) / levels.repairs, abs=1)
    assert soak.levels_of(_log(found), closed[: SETTLED - 1]) == {}
    assert soak.levels_of(_log(found[: 2 * (SETTLED + SAMPLE)]), closed) == {}  # no recovery between the samples
    assert soak.levels_of(_log([(level, 1) for level, _ in found]), closed) == {}
    assert soak.levels_of(_log([]), closed) == {}


def test_a_rank_that_was_started_again_is_not_judged() -> None:
    closed = [2.0 * n + 0.5 for n in range(1, 41)]
    log = _log([(FLAT, 0)] * 80)
    assert soak.levels_of(log, closed).keys() == {0}
    (records,) = log.steps.values()
    another = StepLog({0: (*records[:40], *({**record, "pid": 2} for record in records[40:]))})
    assert soak.levels_of(another, closed) == {}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"threads": 95}, "rank 2: 94 threads became 95 in 100 recoveries"),
        ({"files": 166}, "rank 2: 165 files became 166"),
        ({"groups": 31}, "rank 2: 30 groups became 31"),
        ({"threads": 93}, "94 threads became 93"),
        ({"memory": FLAT.memory + 101 * soak.MEMORY_PER_REPAIR}, "rank 2: memory grew by"),
        ({"heap": FLAT.heap + 101 * soak.HEAP_PER_REPAIR}, "rank 2: heap grew by 32 KiB a recovery over 100"),
    ],
)
def test_whatever_has_grown_is_named(change: dict[str, int], named: str) -> None:
    flat = Levels(FLAT, replace(FLAT, memory=FLAT.memory + 99 * soak.MEMORY_PER_REPAIR), 100)
    assert soak.grown({0: flat, 1: flat}) == []
    (reason,) = soak.grown({0: flat, 2: Levels(FLAT, replace(FLAT, **change), 100)})
    assert reason.startswith(named) or named in reason


def test_how_long_a_recovery_is_wound_up_is_known() -> None:
    assert soak.winding_up(_log([(FLAT, 0)] * 3)) == {0: 0.0}
    assert soak.winding_up(_log([(FLAT, 0), *[(FLAT, 1)] * 31, (FLAT, 0), (FLAT, 1), (FLAT, 1)])) == {0: 30.0}


def test_a_rank_tells_what_it_uses() -> None:
    found = gpt_job._levels()
    assert found.keys() == {"heap", "memory", "threads", "files", "groups", "winding"}
    assert found["memory"] > 1 << 20
    if found["heap"]:  # this C library tells
        before, kept = gpt_job._heap(), bytearray(1 << 24)
        assert len(kept) <= gpt_job._heap() - before < len(kept) + (1 << 20)
    assert found["threads"] >= 1
    assert found["files"] >= 3
    assert found["groups"] == 0


# --------------------------------------------------------------------------------------------- the whole


class _Played:
    """Plays the jobs of a soak; what they leave behind is real."""

    def __init__(
        self, work: Path, status: int = 0, different: int = 0, leak: str = "", stuck: range = range(0)
    ) -> None:
        """`leak`: what grows by one with each recovery; `stuck`: steps in which rank 1 is winding one up."""
        self.work, self.status, self.different, self.leak, self.stuck = work, status, different, leak, stuck
        self.plan = soak.make_plan("dp2", "fp32", 2, 40, seed=1)
        self.run: list[str] = []

    def job(self, job: jobs.Job, progress: Any) -> jobs.Ended:
        self.run.append(job.name)
        if job.name == "broken":
            assert job.env[gpt_job.ENV_LEVELS] == "1"
            self._leave_behind()
        (self.work / "log").write_text("the last words\n")
        return jobs.Ended(job.name, self.status if job.name == "broken" else 0, 1.0, 0.0, self.work / "log")

    def _leave_behind(self) -> None:
        """One step a second; the faults of a step come half a second before its end, and cost three seconds."""
        save = self.work / "dump"
        saved = self.plan.steps if self.status == 0 else 4
        (save / f"iter_{saved:07d}").mkdir(parents=True)
        (save / "latest_checkpointed_iteration.txt").write_text(str(saved))
        (save / traces.INCIDENTS).mkdir()
        (self.work / "broken-steps").mkdir()
        steps, fired, now, leaked = [], [], 0.0, 0
        broken = _by_step(self.plan.faults)
        for step in range(1, saved + 1):
            if step in broken:
                fired += [{"fault": str(fault), "wall": now + 0.5} for fault in broken[step]]
                self._incident(step, now + 0.75, "retried", len(broken[step]))
                now, leaked = now + 2.5, leaked + 1
            level = {**vars(FLAT), **({self.leak: getattr(FLAT, self.leak) + leaked} if self.leak else {})}
            steps.append({"step": step, "pid": 7, "begin_wall": now, "end_wall": now + 1.0, **level})
            now += 1.0
        if self.status:
            self._incident(saved + 1, now + 0.5, "dumped", 0)
        for rank in range(2):
            told = [{**line, "winding": int(rank == 1 and line["step"] in self.stuck)} for line in steps]
            lines = "".join(json.dumps(line) + "\n" for line in told)
            (self.work / "broken-steps" / f"rank{rank}.jsonl").write_text(lines)
        (self.work / "faults.jsonl").write_text("".join(json.dumps(line) + "\n" for line in fired))

    def _incident(self, step: int, opened: float, outcome: str, tries: int) -> None:
        content = {
            "outcome": outcome, "step": step - 1, "opened": opened, "closed": opened + 1.5, "seconds": {},
            "decision": [], "summary": f"It was {outcome}. Go on with:\n...", "engine": {"repairs": [{}] * tries},
        }  # fmt: skip
        path = self.work / "dump" / traces.INCIDENTS / f"incident-{step}.json"
        path.write_text(json.dumps(content))

    def compared(self, what: str, expected: Path, found: Path) -> Compared:
        self.run.append(f"{what} {found.name}")
        return Compared(what, 37, 1000, self.different, "x: 1" if self.different else None)


class _Silent:
    """A listener that shows nothing."""

    def stage(self, name: str, text: str, first: int, last: int) -> None: ...
    def step(self, number: int) -> None: ...
    def done(self, text: str) -> None: ...


def _soak(monkeypatch: pytest.MonkeyPatch, played: _Played) -> soak.Soaked:
    monkeypatch.setattr(rehearsal.jobs, "run", played.job)
    monkeypatch.setattr(rehearsal, "_compared", played.compared)
    return soak.soak(played.plan, 1, played.work, played.work / "cache", _Silent())


def test_a_soak_is_one_job_against_one_unbroken_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    played = _Played(tmp_path)
    found = _soak(monkeypatch, played)
    assert played.run == ["reference", "broken", f"end iter_{played.plan.steps:07d}"]
    assert (found.verdict, found.reasons) == (Verdict.EXACT, ())
    assert len(found.recoveries) == len(_by_step(played.plan.faults))
    assert found.tries == 40
    # The fault at 0.5, the first step after it ends at 3.5 of its own second.
    assert found.seconds == pytest.approx({"median": 3.0, "p90": 3.0, "max": 3.0})
    content = found.as_json()
    assert (content["verdict"], content["repairs"], content["tries_of_all"]) == ("exact", len(found.recoveries), 40)
    assert sum(content["kinds"].values()) == 40
    assert content["levels"]["1"]["first"] == vars(FLAT)
    console = Console(record=True, width=160)
    soak_command.show(found, console)
    text = console.export_text()
    assert "40 of 40 fired" in text
    assert "threads 94 to 94" in text


def test_a_rank_that_is_still_winding_up_is_not_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    played = _Played(tmp_path)
    played.stuck = range(played.plan.steps - 30, played.plan.steps + 1)
    monkeypatch.setattr(soak, "MAX_WINDING_UP", 100.0)
    found = _soak(monkeypatch, played)
    assert (found.verdict, found.reasons) == (Verdict.EXACT, ())
    assert 30 < found.winding_up[1] < 100
    console = Console(record=True, width=160)
    soak_command.show(found, console)
    assert ("not judged" in console.export_text()) is (1 not in found.levels)


@pytest.mark.parametrize(
    ("change", "word", "reason"),
    [
        ({"different": 2}, Verdict.INEXACT, "end: 2 differences"),
        ({"leak": "threads"}, Verdict.DEGRADED, "threads became"),
        ({"leak": "files"}, Verdict.DEGRADED, "files became"),
        ({"stuck": range(20, 1000)}, Verdict.DEGRADED, "rank 1: old groups were not destroyed for"),
        ({"status": 75}, Verdict.LOST, "did not train to its end (exit status 75, step 4): It was dumped."),
    ],
)
def test_a_soak_says_why_it_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any], word: Verdict, reason: str
) -> None:
    found = _soak(monkeypatch, _Played(tmp_path, **change))
    assert found.verdict is word
    assert any(reason in text for text in found.reasons), found.reasons
    assert "..." not in " ".join(found.reasons)


def test_the_command_ends_with_the_status_of_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def play(plan: Any, seed: int, work: Path, cache: Path, listener: Any) -> soak.Soaked:
        played = _Played(work, leak="files")
        assert (seed, plan.layout) == (1, parse_layout("dp2"))
        monkeypatch.setattr(rehearsal.jobs, "run", played.job)
        monkeypatch.setattr(rehearsal, "_compared", played.compared)
        return real(plan, seed, work, cache, listener)

    real = soak.soak
    monkeypatch.setattr(soak_command.soak, "soak", play)
    file = tmp_path / "report.json"
    ended = CliRunner().invoke(app, ["soak", "--faults", "40", "--layout", "dp2", "--json", str(file)])
    assert ended.exit_code == 4, ended.output
    assert "files became" in ended.output
    assert json.loads(file.read_text())["verdict"] == "degraded"


def test_the_time_of_a_recovery_begins_with_its_own_fault() -> None:
    log = StepLog({0: tuple({"step": n, "pid": 1, "begin_wall": n - 1.0, "end_wall": float(n)} for n in (3, 6))})
    incidents = [{"opened": opened, "closed": opened + 1, "engine": {"repairs": [1]}} for opened in (1.5, 4.0)]
    found = soak.recoveries_of(incidents, (1.0, 1.25, 3.5), log)
    assert [recovery.seconds for recovery in found] == [2.0, 2.5]
    unknown = soak.recoveries_of(incidents[:1], (), StepLog({}))
    assert [recovery.seconds for recovery in unknown] == [1.0]
