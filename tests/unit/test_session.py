"""A rank's part in a recovery, with a toy framework: what it reports, what it writes, when it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_tft.engine.incident import EXIT_UNDECIDED
from mindspeed_tft.engine.types import (
    Commit,
    Deadlines,
    LinkState,
    Order,
    OrderKind,
    RankInfo,
    RankReport,
    Update,
    Wish,
)
from mindspeed_tft.groups import CommunicationAborted
from mindspeed_tft.recovery import files
from mindspeed_tft.recovery import session as session_module
from mindspeed_tft.recovery.notices import Notice
from mindspeed_tft.recovery.record import SmallState, StepRecord
from mindspeed_tft.recovery.session import Session, WrongNumbers

DEADLINES = Deadlines(heartbeat=0.1, heartbeat_lost=0.2, stop=0.2, order=0.3, dump=0.3, exit=0.1, reboot=0.0)


class Left(BaseException):
    """Stands for the end of the process."""


class ToyHost:
    """A framework with one optimizer whose shard is a number: the step it is of."""

    def __init__(self, save: Path) -> None:
        self.save, self.weights, self.rng_draws, self.abort_commit = save, 0, 0, False
        self.holder_has, self.saved, self.stops = 0, -1, 0
        self.loadable: tuple[int, ...] = ()
        self.load_breaks = False
        self.hit = "some"
        self.done: list[str] = []

    def info(self) -> RankInfo:
        return RankInfo(0, "host", 1, "tp0-pp0", 0, ("tp0-pp0/dense/0",))

    def save_directory(self) -> Path:
        return self.save

    def saved_step(self) -> int:
        return self.saved

    def checkpoints(self) -> tuple[int, ...]:
        return self.loadable

    notices = Notice

    def commit(self, step: int, hold: int = 0, save: int = 0, limit: int = 0) -> tuple[int, int, int]:
        if self.abort_commit:
            raise CommunicationAborted("peer gone")
        return hold, save, limit

    def all_agree(self, mine: bool) -> bool:
        return mine

    def small_state(self, step: int) -> SmallState:
        return SmallState(step, {"draws": self.rng_draws}, {}, {"num_steps": step}, [], 0.0)

    def small_state_after(self, record: StepRecord) -> SmallState:
        return self.small_state(record.step)

    def rng_digest(self, state: SmallState) -> str:
        return f"draws={state.rng['draws']}"

    def finish_update(self, record: StepRecord) -> None:
        if record.skipped:
            return
        self.weights = record.step
        record.updates[0] = Update.DONE

    def stage_shards(self, shards: list[str], directory: Path) -> dict[str, str]:
        return {shard: "sha" for shard in shards}

    def write_part(self, state: SmallState, part: str, sources: dict[str, str], directory: Path) -> dict[Path, str]:
        path = self.checkpoint_directory(directory, state.step) / "model.pt"
        return {path: files.write_verified(path, lambda file: file.write(f"{self.weights}:{state.rng}".encode()))}

    def stopped(self) -> None:
        self.stops += 1

    def complete(self, step: int, parts: list[str], directory: Path) -> dict[Path, str]:
        path = self.checkpoint_directory(directory, step) / "index"
        return {path: files.write_verified(path, lambda file: file.write(",".join(parts).encode()))}

    def damage(self) -> str:
        if self.hit == "unknown":
            raise RuntimeError("the device refuses to tell")
        return self.hit

    def regroup(self, epoch: int, link: str) -> None:
        self.done.append(f"regroup {epoch}{' on ' + link if link else ''}")

    def send_shard(self, shard: str, target: int) -> int:
        self.done.append(f"send {shard} to {target}")
        return 4096

    def receive_shard(self, shard: str, source: int) -> int:
        self.done.append(f"receive {shard} from {source}")
        self.weights = self.holder_has
        return 4096

    def roll_back(self, state: SmallState, again: bool) -> None:
        self.done.append(f"roll back to {state.step}{' again' if again else ''}")
        self.rng_draws = state.rng["draws"]

    def load(self, step: int) -> None:
        self.done.append(f"load {step}")
        self.weights = -1
        if self.load_breaks:
            raise CommunicationAborted("peer gone")
        self.weights = self.rng_draws = step

    def forget_first_times(self) -> None:
        self.done.append("forget first times")

    def take_place(self, state: SmallState) -> None:
        self.done.append(f"take the place at {state.step}")
        self.rng_draws = state.rng["draws"]

    def send_state(self, state: SmallState, target: int) -> int:
        self.done.append(f"send the state of {state.step} to {target}")
        return 12

    def receive_state(self, source: int) -> SmallState:
        self.done.append(f"receive a state from {source}")
        return SmallState(self.holder_has, {"draws": 5}, {}, {}, [], 0.0)

    def checkpoint_directory(self, base: Path, step: int) -> Path:
        return base / f"iter_{step:07d}"

    def tracker(self, base: Path) -> Path:
        return base / "latest.txt"


class ToyLink:
    """The processor's end, without a network: orders are put in, what is said is kept."""

    def __init__(self) -> None:
        self.step, self.phase, self.connected, self.stop_epoch, self.parked = 0, "", True, 0, ""
        self.returns = False  # a controller that was lost
        self.orders: list[Order] = []
        self.said: list[tuple[Any, ...]] = []
        self.reports: list[RankReport] = []
        self.link_state = LinkState()
        self.wish = Wish()

    def fault(self, kind: str, message: str, own: bool) -> None:
        self.said.append(("fault", kind, own))
        self.stop_epoch = 1

    def report(self, report: RankReport) -> None:
        self.reports.append(report)

    def next_order(self, timeout: float) -> Order | None:
        return self.orders.pop(0) if self.orders else None

    def order_done(self, order_id: int, ok: bool, message: str = "", result: dict[str, str] | None = None) -> None:
        self.said.append(("done", order_id, ok, message, result or {}))

    def wait_stop(self, timeout: float, after: int = 0) -> bool:
        return True

    def wait_connected(self, timeout: float) -> bool:
        self.said.append(("waits for a controller", timeout))
        self.connected = self.returns
        return self.connected

    def tell_link(self, state: LinkState) -> None:
        self.link_state = state

    def held(self, hold: int, step: int) -> None:
        self.said.append(("held", hold, step))

    def released(self, hold: int) -> None:
        self.said.append(("released", hold))

    def left_hold(self) -> None:
        self.said.append(("left the hold",))

    def saved(self, save: int, step: int, path: str, why: str = "") -> None:
        self.said.append(("saved", save, step, path))

    def put_back(self, order: Order) -> None:
        self.orders.insert(0, order)

    def resumed(self) -> None:
        self.said.append(("resumed",))

    def close(self, timeout: float = 5.0) -> None:
        self.said.append(("close",))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Session, ToyHost, ToyLink]]:
    host, link = ToyHost(tmp_path), ToyLink()

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(session_module.os, "_exit", leave)
    kinds = {"UCE": "memory", "LINK": "link"}

    def classify(text: str) -> str:
        return next((kind for word, kind in kinds.items() if word in text), "exception")

    yield Session(host, link, DEADLINES, lambda step: f"resume at {step}", classify), host, link


def compute(session: Session, host: ToyHost, step: int, until: str = "end") -> None:
    """Go through one step as Megatron would, up to a phase."""
    session.step_begin(step, 1)
    host.rng_draws += 1
    if until == "forward":
        return
    session.commit()
    if until == "commit":
        return
    session.update_begin(0)
    if until == "update":
        return
    host.weights = step
    session.update_end(0)
    if until == "gather":
        return
    session.step_end()


def ordered(kind: OrderKind, number: int, **payload: Any) -> Order:
    return Order(number, 0, kind, payload)


def dump_orders(step: int) -> list[Order]:
    return [
        ordered(OrderKind.WRITE_PART, 1, step=step, directory=".tft-dump-a", part="tp0-pp0", sources={"x": "self"}),
        ordered(OrderKind.PUBLISH, 2, step=step, directory=".tft-dump-a", parts=["tp0-pp0"]),
        ordered(OrderKind.EXIT, 3, code=75, summary="saved"),
    ]


@pytest.mark.parametrize(
    ("until", "commit", "update"),
    [
        ("forward", Commit.NONE, Update.UNTOUCHED),
        ("commit", Commit.PASSED, Update.UNTOUCHED),
        ("update", Commit.PASSED, Update.DIRTY),
        ("gather", Commit.PASSED, Update.DONE),
        ("end", Commit.PASSED, Update.DONE),
    ],
)
def test_the_report_says_where_the_rank_stands(
    made: tuple[Session, ToyHost, ToyLink], until: str, commit: Commit, update: Update
) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, until)
    session.report()
    report = link.reports[-1]
    assert (report.step, report.commit, report.update) == (2, commit, update)
    assert report.rng_start == "draws=1"
    assert report.rng_end == ("" if until == "forward" else "draws=2")


def test_a_broken_step_is_left_behind(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    link.orders = dump_orders(1)
    with pytest.raises(Left) as left:
        session.recover(CommunicationAborted("peer gone"))
    assert left.value.args == (75,)
    assert ("fault", "peer", False) in link.said
    assert host.stops == 1
    assert (host.save / "iter_0000001" / "model.pt").read_text() == "1:{'draws': 1}"
    assert (host.save / "iter_0000001" / "index").read_text() == "tp0-pp0"
    assert sorted(files.verify_checkpoint(host.save / "iter_0000001")["files"]) == ["index", "model.pt"]
    assert (host.save / "latest.txt").read_text() == "1"
    assert ("done", 2, True, "", {"path": str(host.save / "iter_0000001"), "resume": "resume at 1"}) in link.said


def test_what_a_dead_writer_left_is_swept_by_the_publisher(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    for name in (".tft-dump-abc-0000001-1", ".tft-dump-other-0000001-1"):
        (host.save / name).mkdir()
    link.orders = dump_orders(1)
    for order in link.orders[:2]:
        order.payload["directory"] = ".tft-dump-abc-0000001-2"
    with pytest.raises(Left):
        session.recover(CommunicationAborted("peer gone"))
    assert [path.name for path in host.save.glob(".tft-dump-*")] == [".tft-dump-other-0000001-1"]


def test_a_rank_held_at_the_commit_finishes_the_step(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    host.abort_commit = True
    with pytest.raises(CommunicationAborted) as caught:
        compute(session, host, 2, "commit")
    assert session.record.commit is Commit.ENTERED
    link.orders = [ordered(OrderKind.FINISH_UPDATE, 9, step=2), *dump_orders(2)]
    with pytest.raises(Left):
        session.recover(caught.value)
    assert (host.save / "iter_0000002" / "model.pt").read_text() == "2:{'draws': 2}"


def test_a_dirty_shard_is_never_written(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "update")
    link.orders = [*dump_orders(1)[:1], *dump_orders(2)[:1], ordered(OrderKind.EXIT, 3, code=76, summary="")]
    with pytest.raises(Left):
        session.recover(RuntimeError("the user's bug"))
    assert ("fault", "exception", True) in link.said and link.reports[-1].fault == "RuntimeError: the user's bug"
    outcomes = [entry for entry in link.said if entry[0] == "done" and entry[1] == 1]
    assert [ok for _, _, ok, _, _ in outcomes] == [False, False]
    assert not list(host.save.glob("iter_*"))


def test_finishing_a_step_whose_gradients_were_not_final_is_refused(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    link.orders = [ordered(OrderKind.FINISH_UPDATE, 1, step=2), ordered(OrderKind.EXIT, 2, code=76, summary="")]
    with pytest.raises(Left):
        session.recover(CommunicationAborted("x"))
    assert [entry[2] for entry in link.said if entry[:2] == ("done", 1)] == [False]
    assert host.weights == 1


def test_a_skipped_step_counts_once_it_is_committed(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    session.step_begin(2, 1)
    session.commit(skipped=True)
    assert session.record.update is Update.DONE
    link.orders = dump_orders(2)
    with pytest.raises(Left):
        session.recover(CommunicationAborted("x"))
    assert (host.save / "iter_0000002" / "model.pt").read_text().startswith("1:")


def test_a_checkpoint_that_exists_is_not_written_again(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    existing = host.save / "iter_0000001" / "model.pt"
    existing.parent.mkdir()
    existing.write_text("Megatron's own")
    (host.save / "latest.txt").write_text("1")
    host.saved = 1
    link.orders = dump_orders(1)
    with pytest.raises(Left):
        session.recover(CommunicationAborted("x"))
    assert existing.read_text() == "Megatron's own"
    published = next(entry for entry in link.said if entry[:2] == ("done", 2))
    assert published[2] and published[4]["exists"] == "1"


def test_a_checkpoint_of_the_same_step_from_another_run_is_not_taken_for_ours(
    made: tuple[Session, ToyHost, ToyLink],
) -> None:
    session, host, link = made
    compute(session, host, 1)
    foreign = host.save / "iter_0000001" / "model.pt"
    foreign.parent.mkdir()
    foreign.write_text("another run's")
    (host.save / "latest.txt").write_text("1")
    link.orders = dump_orders(1)
    with pytest.raises(Left):
        session.recover(CommunicationAborted("x"))
    assert foreign.read_text() == "1:{'draws': 1}"
    assert (host.save / "iter_0000001.incomplete-0" / "model.pt").read_text() == "another run's"


def test_an_exception_of_a_signal_waits_for_the_end_of_the_update(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session = made[0]
    session.step_begin(1, 1)
    assert not session.defer(RuntimeError("a worker died"))
    session.commit()
    session.update_begin(0)
    assert session.defer(RuntimeError("a worker died"))
    with pytest.raises(RuntimeError, match="a worker died"):
        session.update_end(0)
    assert session.record.update is Update.DONE and not session.defer(RuntimeError("x"))


def test_a_fault_before_the_first_step_after_a_resume(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    host.weights = 40
    session.train_begin(40, 1)
    link.orders = dump_orders(40)
    with pytest.raises(Left):
        session.recover(CommunicationAborted("x"))
    assert (link.reports[-1].step, link.reports[-1].commit, link.reports[-1].update) == (40, Commit.PASSED, Update.DONE)
    assert (host.save / "iter_0000040" / "model.pt").read_text() == "40:{'draws': 0}"


def test_without_a_controller_the_exception_is_the_users_own(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1, "forward")
    link.connected = False
    with pytest.raises(ZeroDivisionError):
        session.recover(ZeroDivisionError())
    assert link.said == [("waits for a controller", session.deadlines.stop)]


def test_a_controller_that_is_lost_with_a_rank_is_waited_for(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1, "forward")
    link.connected, link.returns = False, True
    with pytest.raises(Left):
        session.recover(ZeroDivisionError())
    assert link.said[0][0] == "waits for a controller"
    assert ("fault", "exception", True) in link.said
    assert link.reports


def test_nobody_waits_for_ever(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, _ = made
    compute(session, host, 1)
    with pytest.raises(Left) as left:
        session.recover(CommunicationAborted("x"))
    assert left.value.args == (EXIT_UNDECIDED,)


def test_a_directory_outside_the_save_directory_is_refused(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    link.orders = [ordered(OrderKind.DISCARD, 1, directory="../x"), ordered(OrderKind.EXIT, 2, code=76, summary="")]
    with pytest.raises(Left):
        session.recover(CommunicationAborted("x"))
    assert [entry[2] for entry in link.said if entry[:2] == ("done", 1)] == [False]


# ------------------------------------------------------------------------------------------------ online repair

MINE = "tp0-pp0/dense/0"


def repair_orders(step: int, *transfers: str) -> list[Order]:
    return [
        ordered(OrderKind.REGROUP, 1, step=step, epoch=1),
        *([ordered(OrderKind.REPAIR, 2, step=step, transfers=list(transfers))] if transfers else []),
        ordered(OrderKind.ROLLBACK, 3, step=step),
        ordered(OrderKind.RESUME, 4, step=step),
    ]


def test_a_damaged_rank_gets_its_shard_and_trains_on(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    host.weights, host.holder_has = -999, 1
    link.orders = repair_orders(1, f"{MINE}|1|0")
    session.recover(RuntimeError("UCE ERROR"))
    assert ("fault", "memory", True) in link.said
    assert not link.reports[0].trusted
    (told,) = [entry[4] for entry in link.said if entry[:2] == ("done", 2)]
    moved, seconds = told[f"moved:{MINE}|1|0"].split()
    assert moved == "4096" and 0 <= float(seconds) < 5
    assert host.done == ["regroup 1", f"receive {MINE} from 1", "roll back to 1 again"]
    assert (host.weights, host.rng_draws) == (1, 1)
    session.report()  # a fault after the rollback finds a whole rank at the end of step 1
    last = link.reports[-1]
    assert (last.step, last.commit, last.update, last.trusted, last.fault) == (1, Commit.PASSED, Update.DONE, True, "")


def test_a_healthy_rank_sends_and_rolls_back(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "gather")
    link.orders = repair_orders(2, f"{MINE}|0|3", "tp0-pp0/dense/1|1|2")
    session.recover(CommunicationAborted("peer gone"))
    assert host.done == ["regroup 1", f"send {MINE} to 3", "roll back to 2"]
    assert link.reports[0].trusted and ("resumed",) in link.said


def test_groups_are_built_on_the_link_that_was_kept(made: tuple[Session, ToyHost, ToyLink]) -> None:
    """Also by a rank that had not heard of it, or was in the middle of another move."""
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    told = {"name": "eth1", "before": "", "since": "2026-12-01T00:00:00", "epoch": "3"}
    link.stop_epoch = 4
    link.orders = [ordered(OrderKind.REGROUP, 1, step=1, epoch=4, link=told), *repair_orders(1)[1:]]
    session.recover(CommunicationAborted("x"))
    assert host.done == ["regroup 4 on eth1", "roll back to 1 again"]
    assert link.link_state == session.links.state == LinkState("eth1", "", "2026-12-01T00:00:00", 3)


def test_a_dirty_shard_is_whole_once_it_came_from_another_holder(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "update")
    host.holder_has = 2
    link.orders = repair_orders(2, f"{MINE}|1|0")
    session.recover(RuntimeError("UCE ERROR"))
    assert host.weights == 2 and host.done[-1] == "roll back to 2"


def test_a_damaged_rank_without_repair_never_trains_on(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    link.orders = [*repair_orders(1)[:-1], ordered(OrderKind.EXIT, 9, code=76, summary="")]
    with pytest.raises(Left):
        session.recover(RuntimeError("UCE ERROR"))
    assert ("done", 3, False, "DumpError: this rank's memory was damaged and not repaired", {}) in link.said
    assert host.done == ["regroup 1"]


def test_a_device_that_does_not_tell_what_was_hit_is_no_source(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    host.hit = "unknown"
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    link.orders = dump_orders(1)
    with pytest.raises(Left):
        session.recover(RuntimeError("UCE ERROR"))
    assert ("fault", "device", True) in link.said
    assert [report.trusted for report in link.reports] == [False]


def test_a_stop_that_came_after_the_regroup_is_answered_next(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    link.orders = repair_orders(1)
    session.recover(CommunicationAborted("x"))
    link.stop_epoch = 2  # of a second fault, seen by others first
    link.orders = dump_orders(1)
    with pytest.raises(Left):
        session.recover(CommunicationAborted("x"))
    assert [report.epoch for report in link.reports] == [1, 2]
    assert (host.save / "latest.txt").read_text() == "1"


# -------------------------------------------------------------------------------------------- back to a checkpoint


def rewind_orders(step: int, *transfers: str) -> list[Order]:
    return [
        ordered(OrderKind.REGROUP, 1, step=step, epoch=1),
        *([ordered(OrderKind.REPAIR, 2, step=step, transfers=list(transfers))] if transfers else []),
        ordered(OrderKind.LOAD, 3, step=step, epoch=1),
        ordered(OrderKind.RESUME, 4, step=step),
    ]


@pytest.mark.parametrize(("mine", "said"), [(True, ("fault", "precision", True)), (False, ("fault", "peer", False))])
def test_wrong_numbers_end_in_a_checkpoint(
    made: tuple[Session, ToyHost, ToyLink], mine: bool, said: tuple[str, str, bool]
) -> None:
    session, host, link = made
    host.loadable = (1, 2)
    for step in (1, 2, 3):
        compute(session, host, step)
    compute(session, host, 4, "forward")
    link.orders = rewind_orders(2)
    session.recover(WrongNumbers("NaN", mine=mine))
    assert said in link.said
    assert link.reports[0].checkpoints == (1, 2)
    assert (host.done, host.weights) == (["regroup 1", "load 2"], 2)
    assert session.first_step
    session.report()
    last = link.reports[-1]
    assert (last.step, last.commit, last.update, last.trusted, last.fault) == (2, Commit.PASSED, Update.DONE, True, "")


def test_damaged_memory_is_whole_after_a_load(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    link.orders = rewind_orders(1, "tp0-pp0/unowned|1|0")
    session.recover(RuntimeError("UCE ERROR"))
    assert not link.reports[0].trusted
    assert host.done == ["regroup 1", "receive tp0-pp0/unowned from 1", "load 1"]
    session.report()
    assert link.reports[-1].trusted


def test_half_a_load_is_no_state(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    host.load_breaks = True
    link.orders = [*rewind_orders(1)[:-1], ordered(OrderKind.EXIT, 9, code=76, summary="")]
    with pytest.raises(Left):
        session.recover(CommunicationAborted("x"))
    assert ("done", 3, False, "CommunicationAborted: peer gone", {}) in link.said
    session.report()
    assert (link.reports[0].trusted, link.reports[-1].trusted) == (True, False)


@pytest.mark.parametrize(
    ("hit", "kind", "trusted"), [("none", "memory", True), ("some", "memory", False), ("lost", "device", False)]
)
def test_the_device_is_asked_what_was_hit(
    made: tuple[Session, ToyHost, ToyLink], hit: str, kind: str, trusted: bool
) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    host.hit = hit
    link.orders = [ordered(OrderKind.EXIT, 9, code=76, summary="")]
    with pytest.raises(Left):
        session.recover(RuntimeError("UCE ERROR"))
    assert ("fault", kind, True) in link.said
    assert link.reports[0].trusted is trusted


def test_a_rank_that_waits_for_the_others_says_that_it_was_asked_to_end(
    made: tuple[Session, ToyHost, ToyLink],
) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    link.stop_epoch = 1  # the others were stopped, too: somebody is waited for
    assert session.terminated("SIGTERM") and session.terminated("SIGTERM")
    assert link.said.count(("fault", "terminated", True)) == 1
    session.report()
    assert link.reports[-1].fault == ""  # what it reports of its state stays what it was


def test_after_a_load_with_newcomers_first_times_are_forgotten(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    link.orders = [
        ordered(OrderKind.REGROUP, 1, step=1, epoch=1),
        ordered(OrderKind.LOAD, 2, step=1, epoch=1, newcomers=["1"]),
        ordered(OrderKind.RESUME, 3, step=1),
    ]
    session.recover(CommunicationAborted("x"))
    assert host.done == ["regroup 1", "load 1", "forget first times"]


def test_a_newcomer_gets_shard_and_small_state_and_takes_its_place(made: tuple[Session, ToyHost, ToyLink]) -> None:
    session, host, link = made
    session.train_begin(0, 1)
    link.stop_epoch, host.holder_has = 1, 3
    link.orders = [
        ordered(OrderKind.REGROUP, 1, step=3, epoch=1),
        ordered(OrderKind.REPAIR, 2, step=3, transfers=[f"{MINE}|1|0", "tp0-pp0/small|1|0"]),
        ordered(OrderKind.ROLLBACK, 3, step=3, newcomers=["0"]),
        ordered(OrderKind.RESUME, 4, step=3),
    ]
    session.join()
    assert not link.reports[0].trusted
    assert host.done == [
        "regroup 1", f"receive {MINE} from 1", "receive a state from 1", "take the place at 3", "forget first times",
    ]  # fmt: skip
    session.report()
    last = link.reports[-1]
    assert (last.step, last.update, last.trusted, host.rng_draws) == (3, Update.DONE, True, 5)


def test_a_newcomer_without_the_small_state_of_the_step_does_not_train(
    made: tuple[Session, ToyHost, ToyLink],
) -> None:
    session, host, link = made
    session.train_begin(0, 1)
    link.stop_epoch, host.holder_has = 1, 2
    link.orders = [
        ordered(OrderKind.REPAIR, 2, step=3, transfers=[f"{MINE}|1|0", "tp0-pp0/small|1|0"]),
        ordered(OrderKind.ROLLBACK, 3, step=3, newcomers=["0"]),
        ordered(OrderKind.EXIT, 9, code=76, summary=""),
    ]
    with pytest.raises(Left):
        session.join()
    refused = next(entry for entry in link.said if entry[:2] == ("done", 3))
    assert (
        refused[2] is False
        and "needs the small state of step 3 from another rank, and has that of step 2" in refused[3]
    )


class Waiting(ToyLink):
    """Time passes while an order is waited for; what happens meanwhile is a list of (seconds, change)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *changes: tuple[float, Callable[[Waiting], None]]) -> None:
        super().__init__()
        self.now, self.changes = 0.0, list(changes)
        monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def next_order(self, timeout: float) -> Order | None:
        self.now += timeout
        while self.changes and self.now >= self.changes[0][0]:
            self.changes.pop(0)[1](self)
        return super().next_order(timeout)


def let_in(link: Waiting) -> None:
    link.parked, link.stop_epoch = "", 1
    link.orders = [
        ordered(OrderKind.REGROUP, 1, step=3, epoch=1),
        ordered(OrderKind.REPAIR, 2, step=3, transfers=[f"{MINE}|1|0", "tp0-pp0/small|1|0"]),
        ordered(OrderKind.ROLLBACK, 3, step=3, newcomers=["0"]),
        ordered(OrderKind.RESUME, 4, step=3),
    ]


LONG = 10_000.0  # far beyond any deadline here


def test_a_spare_waits_for_its_place_without_limit_and_takes_it(
    made: tuple[Session, ToyHost, ToyLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, host, _ = made
    link = session.link = Waiting(monkeypatch, (LONG, let_in))
    link.parked, host.holder_has = "process 7 on host b has its place and lives", 3
    session.train_begin(0, 1)
    session.join()
    assert [report.epoch for report in link.reports] == [0, 1]
    assert "take the place at 3" in host.done


def test_a_newcomer_that_is_not_parked_gives_up_in_time(
    made: tuple[Session, ToyHost, ToyLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _, _ = made
    link = session.link = Waiting(monkeypatch, (LONG, let_in))
    session.train_begin(0, 1)
    with pytest.raises(Left, match=str(EXIT_UNDECIDED)):
        session.join()
    assert link.now < DEADLINES.patience(recovers=True) + 1


def lose_controller(link: Waiting) -> None:
    link.connected = False


@pytest.mark.parametrize(("parked", "code"), [("taken", 0), ("", EXIT_UNDECIDED)])
def test_without_a_controller_nobody_waits_for_long(
    made: tuple[Session, ToyHost, ToyLink],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parked: str,
    code: int,
) -> None:
    session, _, _ = made
    link = session.link = Waiting(monkeypatch, (1.0, lose_controller))
    link.parked = parked
    session.train_begin(0, 1)
    with pytest.raises(Left) as left:
        session.join()
    assert left.value.args == (code,)
    assert link.now == pytest.approx(1.0 + DEADLINES.stop, abs=0.41)
    assert "the controller is gone" in capsys.readouterr().err


def test_a_spare_that_is_asked_to_end_ends(
    made: tuple[Session, ToyHost, ToyLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _, _ = made
    link = session.link = Waiting(monkeypatch, (1.0, lambda link: session.terminated("SIGTERM") and None))
    link.parked = "taken"
    session.train_begin(0, 1)
    with pytest.raises(Left) as left:
        session.join()
    assert left.value.args == (0,)
    assert link.now < 2.0


def test_who_is_sent_off_says_why(made: tuple[Session, ToyHost, ToyLink], capsys: pytest.CaptureFixture[str]) -> None:
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    link.orders = [ordered(OrderKind.EXIT, -1, code=0, words="rank 0 leaves: another process took its place")]
    with pytest.raises(Left) as left:
        session.recover(CommunicationAborted("x"))
    assert left.value.args == (0,)
    assert capsys.readouterr().err.count("rank 0 leaves: another process took its place") == 1
