"""An adaptor that knows the names of `mindio_ttp` alone runs on our engine: real processes, real kills, byte for byte.

The names themselves, and what is refused, are tested in `test_mindio_names`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mindio_support import WORLD, Job, Run, run, start

FINE = {0}
SAVED = {75, -signal.SIGKILL}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same program without a fault."""
    found = run(tmp_path_factory.mktemp("unbroken"), codes=FINE, uce=True)
    assert len(found.states) == WORLD and {what for what in found.order(0)} == {"end"}
    return found


def test_a_killed_rank_leads_to_one_checkpoint_of_the_agreed_step(tmp_path: Path) -> None:
    fault = {"rank": 3, "step": 5, "phase": "forward", "kind": "kill"}
    found = run(tmp_path, codes=SAVED, fault=fault)
    assert found.codes[3] == -signal.SIGKILL and found.codes[:3] == [75, 75, 75]
    assert found.order(3) == ["fault"]
    savers = found.of("save")[0]["info"][0]["ranks"]
    assert savers in ([0, 1], [2, 1])  # in the order of the slices
    (renamer,) = {one["rank"] for one in found.of("rename")}
    for rank in range(3):
        saves = ["clean", "save", *(["rename"] if rank == renamer else [])] if rank in savers else []
        assert found.order(rank) == ["stop", *saves]
    assert {(one["thread"], one["args"], one["ctx"]) for one in found.of("stop")} == {(False, 2, "my context")}
    assert {(one["uce"], one["type"]) for one in found.of("clean")} == {(False, "dump")}
    for saved in found.of("save"):
        assert (saved["step"], saved["info"]) == (4, [{"type": 0, "ranks": savers}])
    assert found.of("rename")[0]["step"] == 4
    assert max(one["at"] for one in found.of("save")) < found.of("rename")[0]["at"]
    assert (found.save / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert [path.name for path in found.save.iterdir() if path.is_dir()] == ["iter_0000004"]


@pytest.mark.full
@pytest.mark.parametrize(("phase", "step"), [("forward", 4), ("late", 5), ("update", 5)])
def test_what_was_saved_goes_on_as_if_nothing_had_been(tmp_path: Path, unbroken: Run, phase: str, step: int) -> None:
    """A rank that dies when the others update, or in its own update, loses nothing either."""
    fault = {"rank": 3, "step": 5, "phase": phase, "kind": "kill"}
    run(tmp_path, codes=SAVED, fault=fault)
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == str(step)
    resumed = run(tmp_path, codes=FINE, load=step)
    assert resumed.states == unbroken.states


@pytest.mark.full
@pytest.mark.parametrize(("phase", "step"), [("forward", 4), ("update", 5)])
def test_a_memory_error_is_repaired_without_a_trace(tmp_path: Path, unbroken: Run, phase: str, step: int) -> None:
    fault = {"rank": 1, "step": 5, "phase": phase, "kind": "uce"}
    found = run(tmp_path, codes=FINE, uce=True, fault=fault)
    for rank in range(WORLD):
        told = [what for what in found.order(rank) if what != "fault"]
        wanted = ["stop", "clean", *(["repair"] if rank in (1, 3) else []), "rollback", "end"]
        assert told == wanted, (rank, told)
    assert {(one["rank"], one["uce"], one["type"]) for one in found.of("clean")} == {
        (rank, rank == 1, "retry") for rank in range(WORLD)
    }
    taken, given = found.of("repair", 1)[0], found.of("repair", 3)[0]
    both = {"type": [0], "src": [3], "dst": [1], "rank_list": [1, 3]}
    assert taken["info"] == {**both, "repair_type": 1} and given["info"] == {**both, "repair_type": 0}
    assert (taken["step"], taken["rebuild"], taken["errors"]) == (step, True, [1])
    assert (given["step"], given["rebuild"], given["errors"]) == (step, False, [1])
    assert {one["step"] for one in found.of("rollback")} == {step}
    assert found.states == unbroken.states


@pytest.mark.full
def test_without_the_decorator_it_is_the_same(tmp_path: Path, unbroken: Run) -> None:
    fault = {"rank": 1, "step": 5, "phase": "forward", "kind": "uce"}
    found = run(tmp_path, codes=FINE, uce=True, fault=fault, explicit=True)
    assert [one["step"] for one in found.of("again")] == [4] * WORLD
    assert found.states == unbroken.states


@pytest.mark.full
def test_a_callback_that_fails_once_is_tried_again_on_all_ranks(tmp_path: Path, unbroken: Run) -> None:
    """The damaged rank was repaired before that; its second try needs no repair any more."""
    fault = {"rank": 1, "step": 5, "phase": "forward", "kind": "uce"}
    found = run(tmp_path, codes=FINE, uce=True, fault=fault, rollback_fails=2)
    for rank in range(WORLD):
        assert [what for what in found.order(rank) if what in ("stop", "clean")] == ["stop", "clean"] * 2
        assert len(found.of("rollback", rank)) in (1, 2) and len(found.of("repair", rank)) == (rank in (1, 3))
    assert len(found.of("rollback", 2)) == 2
    assert [one["uce"] for one in found.of("clean", 1)] == [True, False]  # a device tells of a fault once
    assert found.states == unbroken.states


@pytest.mark.full
def test_a_wrong_repair_is_seen(tmp_path: Path, unbroken: Run) -> None:
    """The control of the comparison above: one number, a ten-millionth."""
    fault = {"rank": 1, "step": 5, "phase": "forward", "kind": "uce"}
    found = run(tmp_path, codes=FINE, uce=True, fault=fault, sabotage=True)
    assert found.states != unbroken.states


@pytest.mark.full
def test_a_memory_error_beside_all_tensors_moves_nothing(tmp_path: Path, unbroken: Run) -> None:
    """The clean callback answers 2; the text is that of a fault, the memory of this program is whole."""
    fault = {"rank": 1, "step": 5, "phase": "forward", "kind": "text", "text": "UCE ERROR"}
    found = run(tmp_path, codes=FINE, uce=True, fault=fault, clean={"1": 2})
    assert not found.of("repair") and len(found.of("rollback")) == WORLD
    assert found.states == unbroken.states


@pytest.mark.full
def test_a_fault_of_a_link_is_repaired_by_its_registered_text(tmp_path: Path, unbroken: Run) -> None:
    fault = {"rank": 2, "step": 5, "phase": "forward", "kind": "text", "text": "MY LINK is down"}
    found = run(tmp_path, codes=FINE, uce=True, fault=fault)
    assert not found.of("repair") and {one["step"] for one in found.of("rollback")} == {4}
    assert found.states == unbroken.states


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "replicas"),
    [
        ({"kind": "uce"}, 1),  # nobody else has its slice
        ({"kind": "text", "text": "MY NUMBERS are wrong"}, 2),  # registered as RS_RETRY: nobody's state counts
    ],
    ids=["no replica", "wrong numbers"],
)
def test_where_no_state_is_left_all_load_the_newest_checkpoint(
    tmp_path: Path, fault: dict[str, str], replicas: int
) -> None:
    undisturbed = run(tmp_path / "undisturbed", codes=FINE, uce=True, replicas=replicas)
    words = {"rank": 1, "step": 7, "phase": "forward", **fault}
    found = run(tmp_path / "rewound", codes=FINE, uce=True, replicas=replicas, periodic=3, fault=words)
    kinds = {one["rank"]: (one["info"]["repair_type"], one["rebuild"]) for one in found.of("repair")}
    load, rebuild = (5, False), (6, True)
    assert kinds == {rank: rebuild if rank == 1 and fault["kind"] == "uce" else load for rank in range(WORLD)}
    assert [one["step"] for one in found.of("rollback")] == [3] * WORLD
    assert found.states == undisturbed.states


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, {"periodic": 3, "load_apart": True}], ids=["there is none", "not the same one"])
def test_a_checkpoint_that_is_none_for_all_ends_the_job(tmp_path: Path, more: dict[str, Any]) -> None:
    fault = {"rank": 1, "step": 7, "phase": "forward", "kind": "text", "text": "MY NUMBERS are wrong"}
    found = run(tmp_path, codes={76}, uce=True, fault=fault, **more)
    assert not found.of("save") and not found.states


@pytest.mark.full
def test_a_device_that_cannot_be_cleaned_leads_to_a_dump(tmp_path: Path) -> None:
    fault = {"rank": 1, "step": 5, "phase": "forward", "kind": "uce"}
    found = run(tmp_path, codes={75}, uce=True, fault=fault, clean={"1": 1})
    assert (found.save / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert {one["info"][0]["ranks"][1] for one in found.of("save")} == {3}  # rank 1 held the same slice


@pytest.mark.full
def test_an_unknown_error_leads_to_a_dump_and_nobody_is_needed_twice(tmp_path: Path) -> None:
    fault = {"rank": 0, "step": 5, "phase": "forward", "kind": "text", "text": "division by zero"}
    found = run(tmp_path, codes={75}, uce=True, fault=fault)
    assert (found.save / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert not found.of("rollback")


def tftctl(job: Job, *words: str) -> str:
    command = [Path(sys.executable).with_name("tftctl"), *words]
    done = subprocess.run(command, env=job.environ, capture_output=True, text=True, timeout=60, check=False)
    return f"{done.returncode} {done.stdout}{done.stderr}"


@pytest.mark.full
def test_a_pause_holds_all_after_one_step(tmp_path: Path) -> None:
    """And changes nothing: the same job without it ends with the same bytes."""
    steps = 150
    undisturbed = run(tmp_path / "undisturbed", codes=FINE, steps=steps, pace=0.02)
    job = start(tmp_path / "paused", steps=steps, pace=0.02)
    try:
        job.wait_for("begin")
        said = tftctl(job, "pause", "--for", "60s")
        assert said.startswith("0 ") and "paused after step" in said, said
        held = {one["rank"]: one["done"] for one in job.told() if one["what"] == "sync"}  # the last one of each
        assert len(held) == WORLD and len(set(held.values())) == 1 and f"step {held[0]} " in said
        refused = tftctl(job, "dump")
        assert not refused.startswith("0 ") and "dump is not possible here" in refused
        assert tftctl(job, "resume").startswith("0 ")
    except BaseException:
        job.kill()
        raise
    found = job.finish(FINE)
    assert not found.of("stop") and found.states == undisturbed.states


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_that_ends_while_all_are_held_leads_to_a_dump_of_that_step(tmp_path: Path, number: int) -> None:
    """SIGTERM is how a scheduler takes a node away: the rank itself saves as well, if its slice is wanted."""
    job = start(tmp_path, steps=4000, pace=0.01)
    try:
        job.wait_for("begin")
        said = tftctl(job, "pause", "--for", "60s")
        assert "paused after step" in said, said
        job.processes[3].send_signal(number)
    except BaseException:
        job.kill()
        raise
    found = job.finish(SAVED)
    (step,) = {one["step"] for one in found.of("save")}
    assert f"paused after step {step} " in said
    assert (found.save / "latest_checkpointed_iteration.txt").read_text() == str(step)


@pytest.mark.full
def test_a_dead_rank_is_replaced(tmp_path: Path, unbroken: Run) -> None:
    launcher = ("tftrun", "--nproc-per-node", str(WORLD))
    fault = {"rank": 3, "step": 5, "phase": "forward", "kind": "kill"}
    found = run(tmp_path, codes=FINE, launcher=launcher, uce=True, arf=True, fault=fault)
    assert {one["rank"] for one in found.of("clean")} == {0, 1, 2} and {one["type"] for one in found.of("clean")} == {
        "recover"
    }
    assert [one["ranks"] for one in found.of("rebuild")] == [[3]] * WORLD
    assert [(one["rank"], one["rebuild"], one["info"]["repair_type"]) for one in found.of("repair", 3)] == [
        (3, False, 3)
    ]
    assert {one["step"] for one in found.of("rollback")} == {4}
    assert found.states == unbroken.states
