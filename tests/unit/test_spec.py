"""Faults and layouts are read as DRILL.md writes them; everything else is refused with a message that helps."""

from __future__ import annotations

import random

import pytest

from mindspeed_tft.faults.spec import (
    AVAILABLE_KINDS,
    AVAILABLE_PHASES,
    DEFAULT_FAULT,
    KINDS,
    KINDS_IN_REPAIR,
    PHASES,
    REPAIR_PHASES,
    STEP_PHASES,
    FaultSpec,
    Layout,
    SpecError,
    check_drill,
    check_replicas,
    default_nodes,
    first_rewind,
    format_faults,
    interval_before,
    parse_fault,
    parse_faults,
    parse_layout,
    without,
)


def test_a_fault_is_read() -> None:
    assert parse_fault("kill@1:7:backward") == FaultSpec("kill", 1, 7, "backward")
    assert parse_fault("uce-low@12:345") == FaultSpec("uce-low", 12, 345, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
def test_all_kinds_and_phases_are_known_and_survive_the_environment(kind: str, phase: str) -> None:
    faults = (FaultSpec(kind, 3, 2, phase), FaultSpec(kind, 0, 9))
    assert parse_faults(format_faults(faults)) == faults


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "KIND@RANK:STEP"),
        ("kill", "KIND@RANK:STEP"),
        ("kill@1", "KIND@RANK:STEP"),
        ("kill@-1:7", "KIND@RANK:STEP"),
        ("kill@1:7:", "KIND@RANK:STEP"),
        ("kill@1:7:update:x", "KIND@RANK:STEP"),
        ("kil@1:7", "preset dump: kill term segv"),
        ("kill@1:7:updat", "preset dump: data forward"),
        ("kill@1:0", "first step is 1"),
    ],
)
def test_a_wrong_fault_is_refused_with_what_would_be_right(text: str, named: str) -> None:
    with pytest.raises(SpecError, match="--fault") as refused:
        parse_fault(text)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("text", "layout", "world_size"),
    [
        ("dp4", Layout(dp=4), 4),
        ("tp2dp2", Layout(tp=2, dp=2), 4),
        ("pp2dp2", Layout(pp=2, dp=2), 4),
        ("tp2pp2dp2", Layout(tp=2, pp=2, dp=2), 8),
        ("ep2dp4", Layout(dp=4, ep=2), 4),
        ("cp2ep2dp2", Layout(dp=2, cp=2, ep=2), 4),
    ],
)
def test_a_layout_is_read(text: str, layout: Layout, world_size: int) -> None:
    assert parse_layout(text) == layout
    assert parse_layout(str(layout)) == layout
    assert layout.world_size == world_size


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "for example dp4"),
        ("4", "for example dp4"),
        ("dp", "for example dp4"),
        ("dp4-tp2", "for example dp4"),
        ("xp4", "known axes: dp tp pp ep cp"),
        ("dp4dp2", "twice"),
        ("dp0", "sizes start at 1"),
    ],
)
def test_a_wrong_layout_is_refused(text: str, named: str) -> None:
    with pytest.raises(SpecError, match="--layout") as refused:
        parse_layout(text)
    assert named in str(refused.value)


def test_replicas_must_divide_the_data_parallel_size() -> None:
    check_replicas(Layout(dp=4), 2)
    check_replicas(Layout(dp=4), 4)
    with pytest.raises(SpecError, match="fitting: 2 4"):
        check_replicas(Layout(dp=4), 3)
    with pytest.raises(SpecError, match="--replicas 2: the data-parallel size 1"):
        check_replicas(Layout(tp=4), 2)


def _check(
    preset: str = "dump",
    layout: str = "dp4",
    fault: str = "kill@1:7:backward",
    steps: int = 12,
    replicas: int = 2,
    dtype: str = "fp32",
    save_interval: int | None = None,
    nodes: int = 1,
) -> None:
    """`fault` may be several, divided by commas."""
    check_drill(preset, parse_layout(layout), parse_faults(fault), steps, replicas, dtype, save_interval, nodes)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"preset": "dmup"}, "known presets: dump retry"),
        ({"preset": "elastic"}, "available: dump retry"),
        ({"preset": "retry", "fault": "stop@1:7"}, "where there are uce uce-low link"),
        ({"preset": "dump", "fault": "nan@1:7"}, "use --preset retry"),
        ({"preset": "retry", "fault": "nan@1:7:forward"}, "corrupted in phase 'backward'"),
        ({"preset": "retry", "fault": "nan@1:7", "dtype": "fp16"}, "loss scaler takes it for an overflow and skips"),
        ({"preset": "retry", "fault": "nan@1:3:backward"}, "needs step 4 or later"),
        ({"preset": "retry", "fault": "nan@1:7,uce@1:9:save"}, "say with --save-interval how often"),
        ({"preset": "retry", "fault": "nan@1:7", "save_interval": 7}, "is needed before step 7; give 4 or less"),
        ({"preset": "retry", "fault": "uce@1:7:save", "save_interval": 3}, "step 7 is not saved then"),
        ({"preset": "retry", "save_interval": 0}, "--save-interval 0: expected at least 1"),
        ({"preset": "dump", "replicas": 1}, "held by nobody; use --replicas 2, or --preset retry"),
        (
            {"preset": "retry", "fault": "uce@1:3", "replicas": 1},
            "with --replicas 1 training goes on from a checkpoint",
        ),
        ({"preset": "retry", "fault": "uce@2:7:rollback"}, "add for example --fault uce@2:7:backward"),
        ({"preset": "retry", "fault": "uce@2:7:rollback,uce@1:6"}, "repair of another fault of step 7"),
        ({"preset": "retry", "fault": "uce@2:7:rollback,kill@1:7"}, "none that is repaired online is given"),
        ({"preset": "retry", "fault": "term@2:7:rollback,uce@1:7"}, "where there are uce uce-low link kill exc segv"),
        ({"preset": "retry", "fault": "link@2:7:repair,link@1:7"}, "only kind 'uce' of step 7 destroys one"),
        ({"preset": "dump", "fault": "kill@1:7:rollback"}, "available: data forward"),
        (
            {"preset": "recover", "fault": "term@1:7"},
            "where there are kill segv exc oom stop hang uce uce-low link flip controller agent node; use",
        ),
        ({"preset": "recover", "fault": "nan@1:7"}, "use --preset retry"),
        ({"preset": "recover", "fault": "kill@2:7:rollback"}, "none that is repaired online is given"),
        (
            {"preset": "recover", "fault": "kill@2:7:repair,link@1:7"},
            "or 'kill' or 'node' or 'oom' or 'segv' or 'stop' or 'uce' of",
        ),
        ({"preset": "retry", "fault": "uce@4:7"}, "ranks 0 to 3"),
        ({"preset": "retry", "layout": "dp1tp4"}, "--replicas 2"),
        ({"fault": "uce-low@1:7"}, "where there are kill term segv exc"),
        ({"fault": "kill@1:7:eval"}, "available: data forward"),
        ({"fault": "kill@4:7"}, "ranks 0 to 3"),
        ({"fault": "kill@1:12"}, "one of 2 to 11"),
        ({"fault": "kill@1:1"}, "one of 2 to 11"),
        ({"steps": 2}, "expected 3 to 100"),
        ({"steps": 1000}, "expected 3 to 100"),
        ({"layout": "cp2dp2"}, "available axes: dp tp pp ep"),
        ({"layout": "ep2dp2"}, "ep must divide dp, and --replicas 2 what is left"),
        ({"layout": "ep3dp4"}, "ep must divide dp"),
        ({"layout": "dp1tp4"}, "--replicas 2"),
    ],
)
def test_what_cannot_be_drilled_is_refused_before_anything_starts(arguments: dict[str, object], named: str) -> None:
    _check()
    with pytest.raises(SpecError) as refused:
        _check(**arguments)  # type: ignore[arg-type]
    assert named in str(refused.value)


@pytest.mark.parametrize("kind", ["uce", "uce-low", "link", "kill"])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in REPAIR_PHASES])
def test_online_repair_is_drilled_in_every_phase(kind: str, phase: str) -> None:
    _check(preset="retry", fault=f"{kind}@3:7:{phase}")


@pytest.mark.parametrize("kind", KINDS_IN_REPAIR)
@pytest.mark.parametrize("phase", REPAIR_PHASES)
def test_a_fault_may_fall_into_the_repair_of_another_one(kind: str, phase: str) -> None:
    _check(preset="retry", fault=f"uce@1:7,{kind}@2:7:{phase}")


@pytest.mark.parametrize("kind", AVAILABLE_KINDS["recover"])
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in REPAIR_PHASES])
def test_worker_reboot_is_drilled_in_every_phase(kind: str, phase: str) -> None:
    refused = {
        ("hang", "save"): "between steps work may take any time",
        ("hang", "eval"): "between steps work may take any time",
        ("flip", "update"): "half of the shard is still to be written; use phase 'param-gather'",
    }
    if (kind, phase) in refused:
        with pytest.raises(SpecError, match=refused[kind, phase]):
            _check(preset="recover", fault=f"{kind}@3:7:{phase}")
        return
    _check(preset="recover", fault=f"{kind}@3:7:{phase}", nodes=2)


@pytest.mark.parametrize("kind", KINDS_IN_REPAIR)
@pytest.mark.parametrize("phase", REPAIR_PHASES)
@pytest.mark.parametrize("cause", ["kill", "exc", "oom", "uce"])
def test_a_fault_may_fall_into_the_repair_after_a_death(kind: str, phase: str, cause: str) -> None:
    _check(preset="recover", fault=f"{cause}@1:7,{kind}@2:7:{phase}")


def test_it_is_known_which_faults_end_their_process() -> None:
    ended = {kind for kind in KINDS if FaultSpec(kind, 1, 7, "backward").ends_process}
    assert ended == {"kill", "segv", "exc", "oom", "stop", "hang", "node"}
    # An order that fails is tried again, by the same process.
    for phase in REPAIR_PHASES:
        assert {kind for kind in KINDS if FaultSpec(kind, 1, 7, phase).ends_process} == {"kill", "segv", "node"}


def test_a_fault_of_a_node_ends_all_its_ranks_and_needs_another_node() -> None:
    assert FaultSpec("node", 3, 7, "backward").victims(per_node=2) == (2, 3)
    assert FaultSpec("node", 0, 7, "backward").victims(per_node=4) == (0, 1, 2, 3)
    assert FaultSpec("kill", 3, 7, "backward").victims(per_node=2) == (3,)
    assert FaultSpec("agent", 3, 7, "backward").victims(per_node=2) == ()
    assert [default_nodes(parse_faults(text)) for text in ("kill@1:7", "kill@1:7,node@1:9", "agent@1:7")] == [1, 2, 2]
    _check(preset="recover", layout="tp2dp2", fault="node@3:7", nodes=2)
    _check(preset="dump", fault="controller@0:7,node@3:7", nodes=4)
    for refused, words in (
        ({"preset": "recover", "fault": "node@3:7"}, "hits one node of several; use --nodes 2"),
        ({"preset": "recover", "fault": "kill@3:7", "nodes": 3}, "fitting: 1 2 4"),
        (
            {"preset": "recover", "fault": "node@3:7", "nodes": 2, "layout": "pp2dp2"},
            "shard of rank 2 are on that node",
        ),
        ({"preset": "dump", "fault": "controller@0:7"}, "add a fault that ends it, such as kill@1:8"),
    ):
        with pytest.raises(SpecError, match=words):
            _check(**refused)


def test_a_corrupted_gradient_and_a_lost_only_copy_need_a_checkpoint_to_go_back_to() -> None:
    for fault in ("nan@1:7", "nan@1:7:backward,nan@1:7:backward", "nan@1:4,uce@0:9"):
        _check(preset="retry", fault=fault)
        _check(preset="retry", fault=fault, dtype="bf16", save_interval=3)
    _check(preset="retry", fault="uce@1:7", replicas=1)
    _check(preset="retry", fault="uce@1:8:save,uce@0:7", replicas=1, save_interval=4)
    assert first_rewind(parse_faults("uce@1:5,nan@0:8,nan@1:7"), 2) == parse_fault("nan@1:7")
    assert first_rewind(parse_faults("uce@1:5,nan@0:8"), 1) == parse_fault("uce@1:5")
    assert first_rewind(parse_faults("uce@1:5"), 2) is None
    assert parse_fault("nan@1:7").settled(3) == parse_fault("nan@1:7:backward")


def test_the_checkpoint_to_go_back_to_is_older_than_the_last_completed_step() -> None:
    assert interval_before(7) == 4
    for step in range(4, 100):
        saved = range(interval_before(step), step, interval_before(step))
        assert len(saved) == 1, step
        assert 1 <= saved[0] <= step - 2, step


@pytest.mark.parametrize(
    ("layout", "replicas", "together"),
    [
        ("dp4", 2, [{0, 2}, {1, 3}]),
        ("dp4", 4, [{0, 1, 2, 3}]),
        ("tp2dp2", 2, [{0, 2}, {1, 3}]),
        ("pp2dp2", 2, [{0, 1}, {2, 3}]),
        ("tp2pp2dp2", 2, [{0, 2}, {1, 3}, {4, 6}, {5, 7}]),
        ("dp4", 1, [{0}, {1}, {2}, {3}]),
    ],
)
def test_it_is_known_who_holds_the_same_shard(layout: str, replicas: int, together: list[set[int]]) -> None:
    sizes = parse_layout(layout)
    shards: dict[tuple[int, ...], set[int]] = {}
    for rank in range(sizes.world_size):
        shards.setdefault(sizes.shard_of(rank, replicas), set()).add(rank)
    assert sorted(shards.values(), key=min) == together


def test_faults_are_taken_away_as_often_as_they_were_given() -> None:
    faults = parse_faults("uce@1:7:data,link@0:7:data,uce@1:7:data,uce@1:7:data")
    assert without(faults, faults[:1]) == faults[1:2] + faults[2:]
    assert without(faults, faults) == ()
    assert without(faults, ()) == faults


def test_every_preset_that_is_available_has_a_fault_to_begin_with() -> None:
    for preset, fault in DEFAULT_FAULT.items():
        _check(preset=preset, fault=fault)
    assert DEFAULT_FAULT.keys() == AVAILABLE_KINDS.keys() == AVAILABLE_PHASES.keys()


def test_a_fault_without_phase_gets_one_from_the_seed_and_leaves_the_global_generator_alone() -> None:
    before = random.getstate()
    fault = parse_fault("kill@1:7")
    chosen = [fault.settled(seed) for seed in range(200)]
    assert {one.phase for one in chosen} == set(STEP_PHASES)
    assert chosen == [fault.settled(seed) for seed in range(200)]
    assert random.getstate() == before
    named = parse_fault("kill@1:7:update")
    assert named.settled(3) == named
