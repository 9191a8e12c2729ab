"""Real Megatron, a process dies: it alone is started again, and the run ends byte for byte as if nothing had happened.

The few that run always kill one rank of four; marker `full` runs the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from mindspeed_tft.faults.plans import Plan
from mindspeed_tft.faults.rehearsal import rehearse
from mindspeed_tft.faults.spec import parse_fault, parse_layout

from .chains import assert_in_a_row, in_a_row, went_on_after
from .conftest import Drilled, Quiet

pytestmark = pytest.mark.megatron

KINDS = ("kill", "segv", "exc", "oom")
LAYOUTS = ("dp4", "tp2dp2", "pp2dp2")
DTYPES = ("fp32", "bf16")
RANKS = (0, 1, 2, 3)
PHASES = (*("data", "forward", "backward", "grad-reduce", "clip", "commit", "update", "param-gather"), "save", "eval")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")


@pytest.fixture
def recover(drill: Callable[..., Drilled]) -> Callable[..., Drilled]:
    """`recover(*arguments)`: a drill with preset `recover`."""
    return lambda *arguments: drill("--preset", "recover", *arguments)


def _arguments(*faults: str) -> list[str]:
    return [word for fault in faults for word in ("--fault", fault)]


def _assert_exact(found: Drilled, *faults: str) -> None:
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert sorted(report["faults_fired"]) == sorted(faults)
    dead = [fault for fault in map(parse_fault, faults) if fault.ends_process]
    assert report["processes_restarted"] == sorted({fault.rank for fault in dead})
    assert ("recover" in [each["strategy"] for each in report["recoveries"]]) is bool(dead)
    assert (report["steps_lost"], report["processes_left_behind"]) == (0, [])
    # Weights, main weights, both moments, and the generators, at the end of the very job that was broken.
    (compared,) = report["comparisons"]
    assert (compared["what"], compared["different"]) == ("end", 0)
    assert compared["tensors"] > 30
    assert compared["bytes"] > 1_000_000
    if len(faults) == 1:
        assert report["resumed_at"] in went_on_after(faults[0])
        _assert_seconds(report["seconds"])


def _assert_seconds(seconds: dict[str, float | None]) -> None:
    stages = ("detect", "stop", "reboot", "regroup", "repair", "rollback", "first_step", "total")
    known = {stage: seconds[stage] for stage in stages}
    assert None not in known.values(), known
    parts = sum(value for stage, value in known.items() if value is not None and stage != "total")
    assert known["reboot"] and known["total"] and known["reboot"] < known["total"]
    assert parts <= known["total"] + 0.5  # of clocks of several processes
    assert seconds["dump"] is None


def _restarts(found: Drilled) -> list[int]:
    """The ranks that the launcher said it started again, in order."""
    said = re.findall(r"worker (\d+) \(pid \d+\) ended .*: started again", (found.directory / "broken.log").read_text())
    return [int(rank) for rank in said]


def test_a_killed_rank_comes_back_alone(recover: Callable[..., Drilled]) -> None:
    fault = "kill@1:7:backward"
    found = recover("--fault", fault)
    _assert_exact(found, fault)
    assert _restarts(found) == [1]
    (incident,) = found.incidents
    assert incident["outcome"] == "rebooted"
    assert re.search(r"Rank 1 \(pid \d+ .*\) was replaced by pid \d+", incident["summary"])


@pytest.mark.full
def test_a_rank_whose_code_raises_makes_room_for_another_process(recover: Callable[..., Drilled]) -> None:
    fault = "exc@2:7:forward"
    found = recover("--layout", "tp2dp2", "--fault", fault)
    _assert_exact(found, fault)
    assert _restarts(found) == [2]


def _chains() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Every phase of a step in every layout and data type, one death after the other in one job. Kinds and ranks change
    from job to job, so that each pair of two values of different columns occurs; no rank dies more than three times."""
    for (number, layout), (place, dtype) in product(enumerate(LAYOUTS), enumerate(DTYPES)):
        kinds = [KINDS[(phase + number + 2 * place) % 4] for phase in range(len(PHASES))]
        ranks = [RANKS[(phase + phase // 4 + 2 * number + place) % 4] for phase in range(len(PHASES))]
        yield layout, dtype, in_a_row(kinds, ranks, PHASES)


def _assert_chain(found: Drilled, faults: Sequence[str]) -> None:
    """Each rank came back alone, and training went on in the step in which it had died."""
    _assert_exact(found, *faults)
    assert _restarts(found) == [parse_fault(fault).rank for fault in faults]
    assert_in_a_row(found.report["recoveries"], "recover", faults)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "dtype", "faults"), list(_chains()))
def test_matrix(recover: Callable[..., Drilled], layout: str, dtype: str, faults: tuple[str, ...]) -> None:
    job = ("--layout", layout, "--dtype", dtype, "--steps", "36", "--timeout", "400")  # ten starts of a process
    _assert_chain(recover(*job, *_arguments(*faults)), faults)


@pytest.mark.full
def test_communication_that_overlaps_computing(recover: Callable[..., Drilled]) -> None:
    phases = ("data", "forward", "backward", "grad-reduce", "clip", "update")
    faults = in_a_row(["kill"] * 6, [1, 2, 3, 0, 1, 2], phases)
    _assert_chain(recover("--steps", "24", "--timeout", "300", *_arguments(*faults), "--", *OVERLAP), faults)


@pytest.mark.full
def test_two_ranks_of_different_shards_at_once(recover: Callable[..., Drilled]) -> None:
    faults = ("kill@1:7:forward", "kill@2:7:forward")
    found = recover(*_arguments(*faults))
    _assert_exact(found, *faults)
    assert sorted(_restarts(found)) == [1, 2]


@pytest.mark.full
@pytest.mark.parametrize("cause", ["kill@{}:{}:backward", "exc@{}:{}:update", "uce@{}:{}:forward"])
def test_a_fault_inside_the_repair_of_another(recover: Callable[..., Drilled], cause: str) -> None:
    """The rank that is being repaired may die of it, too: it comes back once more. Another rank each time, and one
    that holds another shard: launchers give up on a worker that dies again and again."""
    seconds = (("kill", "rollback"), ("kill", "regroup"), ("segv", "repair"), ("exc", "rollback"), ("link", "rollback"))
    faults = []
    for number, (kind, phase) in enumerate(seconds):
        step, rank = 4 + 4 * number, number % 4
        hit = rank if phase == "repair" else (rank + 1) % 4
        faults += [cause.format(rank, step), f"{kind}@{hit}:{step}:{phase}"]
    found = recover("--steps", "24", "--timeout", "300", *_arguments(*faults))
    _assert_exact(found, *faults)
    dead = [fault.rank for fault in map(parse_fault, faults) if fault.ends_process]
    assert sorted(_restarts(found)) == sorted(dead)
    assert len(found.incidents) == len(seconds)


@pytest.mark.full
def test_the_same_rank_twice(recover: Callable[..., Drilled]) -> None:
    faults = ("kill@1:4:forward", "kill@1:9:forward")
    found = recover(*_arguments(*faults))
    _assert_exact(found, *faults)
    assert _restarts(found) == [1, 1]
    assert [(each["strategy"], each["step"]) for each in found.report["recoveries"]] == [("recover", 3), ("recover", 8)]


@pytest.mark.full
def test_the_same_fault_twice(recover: Callable[..., Drilled]) -> None:
    """The newcomer dies where its predecessor did."""
    faults = ("kill@1:7:forward",) * 2
    found = recover(*_arguments(*faults))
    _assert_exact(found, *faults)
    assert _restarts(found) == [1, 1]


@pytest.mark.full
def test_a_repair_and_a_reboot_one_after_the_other(recover: Callable[..., Drilled]) -> None:
    faults = ("uce@1:4:backward", "kill@2:8:forward", "link@0:10:data")
    found = recover(*_arguments(*faults))
    _assert_exact(found, *faults)
    assert [each["strategy"] for each in found.report["recoveries"]] == ["retry", "recover", "retry"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["uce", "uce-low", "link"])
def test_what_can_be_repaired_starts_no_process(recover: Callable[..., Drilled], kind: str) -> None:
    fault = f"{kind}@3:7:backward"
    found = recover(*_arguments(fault))
    report = found.report
    assert (found.status, report["verdict"], report["strategy"]) == (0, "exact", "retry"), found.output
    assert (report["processes_restarted"], report["seconds"]["reboot"], _restarts(found)) == ([], None, [])


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_under_torchrun_with_our_logs_specs(recover: Callable[..., Drilled], kind: str) -> None:
    fault = f"{kind}@0:7:clip"
    _assert_exact(recover("--launcher", "torchrun-logs-specs", "--fault", fault), fault)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_warm_standby_takes_the_place(recover: Callable[..., Drilled], layout: str) -> None:
    """The second death comes in a process that was a standby itself."""
    faults = ("kill@1:5:backward", "exc@1:9:forward")
    found = recover("--layout", layout, "--warm-standby", *_arguments(*faults))
    _assert_exact(found, *faults)
    log = (found.directory / "broken.log").read_text()
    ready = [int(pid) for pid in re.findall(r"standby \(pid (\d+)\) is ready", log)]
    started = [int(pid) for pid in re.findall(r"started again \(pid (\d+), ", log)]
    assert len(started) == 2
    assert started[0] in ready


@pytest.mark.full
def test_a_rank_without_the_launcher_that_could_start_it_again_leads_to_a_dump(
    references: Path, tmp_path: Path
) -> None:
    """The control: the same job and the same fault, and nobody who starts the process again."""
    fault = parse_fault("kill@1:7:backward")
    plan = Plan(layout=parse_layout("dp4"), faults=(fault,), preset="recover", launcher="torchrun")
    report = rehearse(plan, tmp_path, references, Quiet())
    assert (report.verdict.value, report.strategy) == ("degraded", "dump"), (report.reasons, report.tail)
    content = report.as_json()
    assert (content["steps_lost"], content["compared"]["different"]) == (0, 0)
    assert "reboot is not available" in (tmp_path / "broken.log").read_text()


@pytest.mark.full
def test_without_a_holder_nobody_is_waited_for(recover: Callable[..., Drilled]) -> None:
    """On dp4 with 2 replicas ranks 1 and 3 hold the same shard."""
    found = recover(*_arguments("kill@1:7:forward", "kill@3:7:forward"))
    assert (found.status, found.report["verdict"]) == (5, "lost"), found.output
    assert "rebooted" not in [incident["outcome"] for incident in found.incidents]


@pytest.mark.full
@pytest.mark.parametrize("fault", ["stop@1:7:backward", "stop@0:7:save", "hang@2:7:forward", "hang@3:7:update"])
def test_a_rank_that_hangs_is_noticed_and_replaced(recover: Callable[..., Drilled], fault: str) -> None:
    found = recover("--warm-standby", "--fault", fault)
    _assert_exact(found, fault)
    assert found.report["seconds"]["detect"] < 15.0
    (incident,) = found.incidents
    assert " hangs: no " in incident["summary"]


@pytest.mark.full
def test_newcomers_and_survivors_go_back_together(recover: Callable[..., Drilled]) -> None:
    """Both holders of a shard die, and there is a checkpoint: all load it, and compute in lockstep from the first step
    on, though for some of them it is the first step of their lives."""
    faults = ("kill@1:7:data", "kill@3:7:data")
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather", "--num-workers", "2")
    found = recover("--save-interval", "4", *_arguments(*faults), "--", *overlap)
    report = found.report
    assert (found.status, report["verdict"]) == (4, "degraded"), found.output
    assert (report["steps_lost"], report["compared"]["different"]) == (2, 0)
    assert report["processes_restarted"] == [1, 3]
