"""A rank and the hashes of its shards: what it reports of them, and what it refuses to give, to take, to save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_tft.engine.types import OrderKind, RankReport
from mindspeed_tft.groups import CommunicationAborted
from mindspeed_tft.recovery import session as session_module
from mindspeed_tft.recovery.session import Session, ShardChanged
from mindspeed_tft.recovery.stamps import Mode, Stamps
from mindspeed_tft.replica.digest import Shard, digest
from tests.unit.test_session import DEADLINES, MINE, Left, ToyHost, ToyLink, compute, ordered, repair_orders

Made = tuple[Session, "Holder", ToyLink]


class Holder(ToyHost):
    """The toy's shard is a tensor, all of whose numbers are the step that it is of."""

    def __init__(self, save: Path) -> None:
        self.tensor = torch.zeros(16)
        self.in_flight = False  # a bit flips on the way to this rank
        super().__init__(save)

    @property
    def weights(self) -> int:
        return int(self.tensor[0])

    @weights.setter
    def weights(self, value: int) -> None:
        self.tensor.fill_(float(value))

    def shards(self) -> dict[str, Shard]:
        return {MINE: Shard([self.tensor])}

    def flip(self) -> None:
        self.tensor.view(torch.int32)[5] ^= 1 << 20

    def receive_shard(self, shard: str, source: int) -> int:
        taken = super().receive_shard(shard, source)
        if self.in_flight:
            self.flip()
        return taken


def of(value: int) -> str:
    """The hash of the shard of that step."""
    return digest(Shard([torch.full((16,), float(value))]))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(session_module.os, "_exit", leave)

    def made(mode: Mode = "step") -> Made:
        host, link = Holder(tmp_path), ToyLink()
        kinds: Callable[[str], str] = lambda text: "memory" if "UCE" in text else "exception"  # noqa: E731
        session = Session(host, link, DEADLINES, lambda step: str(step), kinds, Stamps(host.shards, mode))
        session.train_begin(0, 1)
        return session, host, link

    return made


def told(made: Made, until: str, flip: bool = False) -> RankReport:
    """What a rank reports after one whole step and a second one up to a phase."""
    session, host, link = made
    compute(session, host, 1)
    compute(session, host, 2, until)
    assert session.stamps.settle(20.0)
    if flip:
        host.flip()
    session.report()
    return link.reports[-1]


@pytest.mark.parametrize(
    ("until", "step"), [("forward", 1), ("commit", 1), ("update", None), ("gather", 2), ("end", 2)]
)
def test_the_report_has_the_hash_of_now_and_of_the_last_change(
    make: Callable[..., Made], until: str, step: int | None
) -> None:
    report = told(make(), until)
    wanted = {} if step is None else {MINE: of(step)}
    assert (report.digests, report.stamps) == (wanted, wanted)


@pytest.mark.parametrize("until", ["forward", "commit", "gather", "end"])
def test_a_flipped_bit_shows_in_the_report(make: Callable[..., Made], until: str) -> None:
    made = make()
    report = told(made, until, flip=True)
    assert report.trusted  # of commits it speaks the truth; the engine judges its shards
    assert report.stamps == {MINE: of(1 if until in ("forward", "commit") else 2)}
    assert report.digests == made[0].stamps.now() != report.stamps


def test_damaged_memory_is_not_read(make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    session, host, link = make()
    compute(session, host, 1)
    assert session.stamps.settle(20.0)
    monkeypatch.setattr(host, "shards", lambda: pytest.fail("it was read"))
    link.orders = [ordered(OrderKind.EXIT, 1, code=76, summary="")]
    with pytest.raises(Left):
        session.recover(RuntimeError("UCE ERROR"))
    assert not link.reports[-1].trusted
    assert (link.reports[-1].digests, link.reports[-1].stamps) == ({}, {})


def test_a_device_that_gives_nothing_away_is_no_fault(make: Callable[..., Made], caplog: Any) -> None:
    made = make("stop")

    def stopped() -> dict[str, Shard]:
        raise RuntimeError("the device is stopped")

    made[1].shards = stopped  # type: ignore[method-assign]
    made[0].stamps._shards = stopped
    report = told(made, "forward")
    assert (report.digests, report.stamps, report.trusted) == ({}, {}, True)
    assert "the device is stopped" in caplog.text


def test_a_hash_that_was_reported_binds(make: Callable[..., Made]) -> None:
    """Without a hash in every step, the first stop says nothing of what was before. The second one does."""
    made = make("stop")
    session, host, link = made
    first = told(made, "forward")
    assert (first.digests, first.stamps) == ({MINE: of(1)}, {})
    host.flip()
    session.report()
    second = link.reports[-1]
    assert second.stamps == {MINE: of(1)} != second.digests


def test_a_finished_update_tells_its_hash(make: Callable[..., Made]) -> None:
    session, host, link = make()
    compute(session, host, 1)
    compute(session, host, 2, "commit")
    link.orders = [ordered(OrderKind.FINISH_UPDATE, 1, step=2), ordered(OrderKind.EXIT, 2, code=76, summary="")]
    with pytest.raises(Left):
        session.recover(CommunicationAborted("peer gone"))
    (done,) = (entry for entry in link.said if entry[:2] == ("done", 1))
    assert done[4][f"digest:{MINE}"] == of(2) == session.stamps.known[MINE]


# ------------------------------------------------------------------------------------------------ save


def test_a_checkpoint_is_not_written_from_a_flipped_bit(make: Callable[..., Made]) -> None:
    session, host, link = make()
    compute(session, host, 1)
    assert session.stamps.settle(20.0)
    session.saving(1)
    compute(session, host, 2)
    assert session.stamps.settle(20.0)
    host.flip()
    with pytest.raises(ShardChanged, match=f"shard {MINE} has hash .* after its last update, {of(2)}") as raised:
        session.saving(2)
    host.loadable, host.hit, host.holder_has = (1, 2), "none", 2  # the device knows of nothing
    link.orders = repair_orders(2, f"{MINE}|1|0")
    session.recover(raised.value)
    assert ("fault", "memory", True) in link.said
    assert not link.reports[0].trusted
    assert link.reports[0].saved == {f"1|{MINE}": of(1)}
    assert session.stamps.now() == session.stamps.known == {MINE: of(2)}


def dump(step: int, wanted: str) -> list[Any]:
    directory = {"step": step, "directory": ".tft-dump-a", "digests": {MINE: wanted}}
    return [
        ordered(OrderKind.STAGE_SHARDS, 1, shards=[MINE], **directory),
        ordered(OrderKind.WRITE_PART, 2, part="tp0-pp0", sources={MINE: "self", "other": "rank:1"}, **directory),
        ordered(OrderKind.EXIT, 3, code=75, summary="saved"),
    ]


def test_a_flip_between_report_and_write_is_seen(make: Callable[..., Made]) -> None:
    session, host, link = make("stop")
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    report, wanted = link.report, of(1)

    def report_and_flip(said: RankReport) -> None:
        report(said)
        assert said.digests == {MINE: wanted}
        host.flip()

    link.report = report_and_flip  # type: ignore[method-assign]
    link.orders = dump(1, wanted)
    with pytest.raises(Left):
        session.recover(CommunicationAborted("peer gone"))
    answers = [entry[2:4] for entry in link.said if entry[0] == "done"]
    assert [ok for ok, _ in answers] == [False, False, True]
    assert all("not the one that it should have" in why for _, why in answers[:2])


def test_what_is_right_is_staged_and_written(make: Callable[..., Made]) -> None:
    session, host, link = make()
    compute(session, host, 1)
    link.orders = dump(1, of(1))
    with pytest.raises(Left):
        session.recover(CommunicationAborted("peer gone"))
    assert [entry[2] for entry in link.said if entry[0] == "done"] == [True, True, True]


# ------------------------------------------------------------------------------------------------ send, receive, load


def repair(step: int, transfer: str, wanted: str) -> list[Any]:
    orders = repair_orders(step, transfer)
    orders[1].payload["digests"] = {MINE: wanted}
    return [*orders[:-1], ordered(OrderKind.EXIT, 9, code=76, summary="")]


@pytest.mark.parametrize("flips", [False, True])
def test_a_shard_is_checked_where_it_was_put(make: Callable[..., Made], flips: bool) -> None:
    session, host, link = make()
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    host.holder_has, host.in_flight = 1, flips
    link.orders = repair(1, f"{MINE}|1|0", of(1))
    with pytest.raises(Left):
        session.recover(RuntimeError("UCE ERROR"))
    answers = {entry[1]: entry[2:4] for entry in link.said if entry[0] == "done"}
    assert answers[2][0] is answers[3][0] is not flips
    if flips:  # still a rank without a state, which goes on by no order
        assert "not the one that it should have" in answers[2][1]
        assert "damaged and not repaired" in answers[3][1]


def test_a_holder_notices_that_what_it_sends_is_wrong(make: Callable[..., Made]) -> None:
    session, host, link = make()
    compute(session, host, 1)
    link.orders = repair(1, f"{MINE}|0|1", of(7))
    with pytest.raises(Left):
        session.recover(CommunicationAborted("peer gone"))
    assert [entry[2] for entry in link.said if entry[:2] == ("done", 2)] == [False]


def test_nobody_trains_on_with_a_flipped_bit(make: Callable[..., Made]) -> None:
    session, host, link = make()
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    assert session.stamps.settle(20.0)
    host.flip()
    link.orders = [*repair_orders(1)[:-1], ordered(OrderKind.EXIT, 9, code=76, summary="")]
    with pytest.raises(Left):
        session.recover(CommunicationAborted("peer gone"))
    (answer,) = (entry for entry in link.said if entry[:2] == ("done", 3))
    assert (answer[2], "after its last update" in answer[3]) == (False, True)


@pytest.mark.parametrize(("loaded", "ok"), [(1, True), (3, False)])
def test_what_is_loaded_is_what_was_saved(make: Callable[..., Made], loaded: int, ok: bool) -> None:
    session, host, link = make()
    compute(session, host, 1)
    session.saving(1)
    compute(session, host, 2)
    load = host.load

    def load_other(step: int) -> None:
        load(step)
        host.weights = loaded

    host.load = load_other  # type: ignore[method-assign]
    link.orders = [
        ordered(OrderKind.REGROUP, 1, step=1, epoch=1),
        ordered(OrderKind.LOAD, 2, step=1),
        ordered(OrderKind.EXIT, 9, code=76, summary=""),
    ]
    with pytest.raises(Left):
        session.recover(CommunicationAborted("peer gone"))
    (answer,) = (entry for entry in link.said if entry[:2] == ("done", 2))
    assert answer[2] is ok
    assert ("when step 1 was saved" in answer[3]) is not ok
    host.loadable = (1, 2)
    session.report()  # and what was not what was saved is not tried again
    assert link.reports[-1].checkpoints == ((1, 2) if ok else (2,))


def test_before_training_there_is_nothing_to_hash(tmp_path: Path) -> None:
    """A fault in start-up finds a host that has no optimizer yet."""

    def none() -> dict[str, Shard]:
        raise AssertionError("there are no shards yet")

    host, link = Holder(tmp_path), ToyLink()
    session = Session(host, link, DEADLINES, str, lambda _text: "exception", Stamps(none, "step"))
    session.saving(5)  # Megatron converts a checkpoint
    session.report()
    assert (link.reports[-1].digests, link.reports[-1].stamps) == ({}, {})


def test_a_device_that_cannot_hash_saves_all_the_same(make: Callable[..., Made], caplog: Any) -> None:
    session, host, _ = make("stop")
    compute(session, host, 1)

    def cannot() -> dict[str, str]:
        raise RuntimeError("not implemented on this device")

    session.stamps.now = cannot  # type: ignore[method-assign]
    session.saving(1)
    assert "not implemented on this device" in caplog.text
