"""The lockstep audit: what it notes, and what it says when two ranks started different communications."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist

from mindspeed_tft.groups.audit import Audit, LockstepBroken, Member, describe
from mindspeed_tft.groups.waiting import Abort, Interrupted

TIMEOUT = timedelta(seconds=20)
WORLD = (10, 11, 12)  # global ranks of the group's members


def options(kind: type[Any], **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


SUM = options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.SUM)
MAX = options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)
Launch = tuple[str, list[Any]]


def allreduce(tensor: torch.Tensor, opts: Any = SUM) -> Launch:
    return "allreduce", [[tensor], opts]


def broadcast(tensor: torch.Tensor, root: int) -> Launch:
    return "broadcast", [[tensor], options(dist.BroadcastOptions, rootRank=root)]


def send(to: int, size: int = 4, tag: int = 0) -> Launch:
    return "send", [[torch.zeros(size)], to, tag]


def recv(frm: int, size: int = 4, tag: int = 0) -> Launch:
    return "recv", [[torch.zeros(size)], frm, tag]


def outcomes(launches: dict[int, list[Launch]], timeout: timedelta = TIMEOUT) -> list[int | Exception]:
    """Each rank notes its launches on a group of all ranks and checks; what came back or was raised, by rank."""
    store = dist.HashStore()
    found: list[int | Exception] = [0] * len(launches)

    def rank(number: int) -> None:
        audit = Audit(epoch=3, serial=1)
        for operation, args in launches[number]:
            audit.note("tp", number, operation, args)
        try:
            found[number] = audit.check(lambda: store, [Member("tp", number, WORLD[: len(launches)])], timeout, Abort())
        except LockstepBroken as exc:
            found[number] = exc

    threads = [threading.Thread(target=rank, args=(number,)) for number in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def broken(found: list[int | Exception]) -> list[int]:
    return [rank for rank, result in enumerate(found) if isinstance(result, LockstepBroken)]


SAME_STEP = [allreduce(torch.zeros(2, 3)), broadcast(torch.zeros(4), 1), ("barrier", [])]


def test_the_same_step_passes() -> None:
    assert outcomes({0: SAME_STEP, 1: SAME_STEP, 2: SAME_STEP}) == [0, 1, 1]


@pytest.mark.parametrize(
    "other",
    [
        [SAME_STEP[1], SAME_STEP[0], SAME_STEP[2]],
        SAME_STEP[:2],
        [*SAME_STEP, ("barrier", [])],
        [],
        [allreduce(torch.zeros(2, 3, dtype=torch.int32)), *SAME_STEP[1:]],
        [allreduce(torch.zeros(3, 2)), *SAME_STEP[1:]],
        [allreduce(torch.zeros(2, 3), MAX), *SAME_STEP[1:]],
        [SAME_STEP[0], broadcast(torch.zeros(4), 2), SAME_STEP[2]],
    ],
    ids=["order", "one less", "one more", "nothing", "dtype", "shape", "reduction", "root"],
)
def test_a_rank_that_does_something_else_is_named(other: list[Launch]) -> None:
    found = outcomes({0: SAME_STEP, 1: SAME_STEP, 2: other})
    assert found[:2] == [0, 1]
    assert broken(found) == [2]
    assert f"group tp, collectives: rank 12 started {len(other)} operations" in str(found[2])
    assert (
        "rank 10 started 3 operations, last: allreduce float32[2,3] SUM; broadcast float32 x4 root 1; barrier"
        in str(found[2])
    )


def test_the_first_member_is_the_odd_one() -> None:
    assert broken(outcomes({0: [], 1: SAME_STEP, 2: SAME_STEP})) == [1, 2]


def test_only_the_last_operations_are_told_but_all_count() -> None:
    many = [allreduce(torch.zeros(size)) for size in range(1, 30)]
    found = outcomes({0: many, 1: [allreduce(torch.zeros(99)), *many[1:]]})
    assert "started 29 operations, last: allreduce float32[26] SUM; " in str(found[1])


def test_sender_and_receiver_agree() -> None:
    # The first member talks to one, that one to the next; the order between directions does not matter.
    found = outcomes({0: [send(1), recv(1)], 1: [send(0), recv(0), send(2, 7)], 2: [recv(1, 7)]})
    assert found == [2, 4, 2]


@pytest.mark.parametrize(
    ("receives", "text"),
    [
        ([recv(0, 4)], "transfers from 10 to 11: rank 11 started 1 operations"),
        ([recv(0, 8), recv(0, 4)], "rank 11 started 2 operations, last: transfer float32 x8; transfer float32 x4"),
        ([], "transfers from 10 to 11: rank 11 started 0 operations, last: none"),
    ],
    ids=["one less", "order", "nothing"],
)
def test_a_receiver_that_does_something_else(receives: list[Launch], text: str) -> None:
    found = outcomes({0: [send(1, 4), send(1, 8)], 1: receives})
    assert 1 in broken(found)
    assert text in str(found[1])


def test_tags_are_streams_of_their_own() -> None:
    found = outcomes({0: [send(1, 4, tag=1), send(1, 8, tag=2)], 1: [recv(0, 8, tag=2), recv(0, 4, tag=1)]})
    assert broken(found) == []


def test_a_receive_from_anyone_is_left_out() -> None:
    found = outcomes({0: [send(1), recv(1)], 1: [("recv_anysource", [[torch.zeros(4)], 0]), send(0)]})
    assert found == [1, 2]


def test_what_may_differ_between_members() -> None:
    gather = options(dist.GatherOptions, rootRank=0)
    shape, flat = torch.zeros(2, 3), torch.zeros(6)
    step = {
        0: [
            ("gather", [[[flat, flat]], [flat], gather]),
            broadcast(shape, 0),
            ("all_to_all_single", [torch.zeros(5), torch.zeros(3), [1, 4], [1, 2], None]),
            ("_reduce_scatter_base", [torch.zeros(1), torch.zeros(4), SUM]),
        ],
        1: [
            ("gather", [[], [flat], gather]),
            broadcast(flat, 0),
            ("all_to_all_single", [torch.zeros(4), torch.zeros(6), [2, 2], [4, 2], None]),
            ("_reduce_scatter_base", [torch.zeros(3), torch.zeros(4), SUM]),
        ],
    }
    assert broken(outcomes(step)) == []


def test_an_operation_that_is_called_in_an_unusual_way_is_noted_all_the_same() -> None:
    assert describe("allreduce", ()) == "allreduce"
    assert describe("broadcast", ([torch.zeros(1)], 0)) == "broadcast float32 x1"
    assert describe("new_in_torch", ([torch.zeros(1)],)) == "new_in_torch"


def test_a_rank_that_does_not_answer_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(epoch=1, serial=1)
    audit.note("tp", 1, "barrier", [])
    with caplog.at_level(logging.WARNING):
        assert audit.check(dist.HashStore, [Member("tp", 1, WORLD)], timedelta(seconds=0.1), Abort()) == 0
    assert "no answer from ranks [10] within 0.1 s" in caplog.text


def test_those_that_answer_are_compared_though_another_does_not() -> None:
    store, late = dist.HashStore(), timedelta(seconds=0.2)
    Audit(1, 1).check(lambda: store, [Member("tp", 0, WORLD)], late, Abort())
    audit = Audit(1, 1)
    for operation, args in [recv(2), ("barrier", [])]:  # rank 2 never comes
        audit.note("tp", 1, operation, args)
    with pytest.raises(LockstepBroken, match="rank 11 started 1 operations, last: barrier, rank 10 started 0"):
        audit.check(lambda: store, [Member("tp", 1, WORLD)], late, Abort())


def test_an_answer_of_an_earlier_audit_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    for earlier in (Audit(1, 1), Audit(2, 1)):
        earlier.note("tp", 0, "barrier", [])
        earlier.check(lambda: store, [Member("tp", 0, WORLD)], TIMEOUT, Abort())
    with caplog.at_level(logging.WARNING):
        assert Audit(2, 2).check(lambda: store, [Member("tp", 1, WORLD)], timedelta(seconds=0.1), Abort()) == 0
    assert "no answer" in caplog.text


def test_a_store_that_is_gone_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def gone() -> dist.HashStore:
        raise RuntimeError("Broken pipe\nmore")

    with caplog.at_level(logging.WARNING):
        assert Audit(1, 1).check(gone, [Member("tp", 1, WORLD)], TIMEOUT, Abort()) == 0
    assert "lockstep not audited, the store does not answer: Broken pipe" in caplog.text


def test_a_stop_ends_the_wait() -> None:
    stop = Abort()
    threading.Timer(0.05, stop.set, ["peer died", 2]).start()
    begin = time.monotonic()
    with pytest.raises(Interrupted, match="peer died"):
        Audit(1, 1).check(dist.HashStore, [Member("tp", 1, WORLD)], TIMEOUT, stop)
    assert time.monotonic() - begin < 5


def test_a_group_of_one_has_nothing_to_compare() -> None:
    audit = Audit(1, 1)
    audit.note("alone", 0, "barrier", [])
    assert audit.check(dist.HashStore, [Member("alone", 0, (5,))], TIMEOUT, Abort()) == 0


def test_launches_of_several_threads_all_count() -> None:
    audit = Audit(1, 1)

    def launch() -> None:
        for _ in range(200):
            audit.note("tp", 0, "barrier", [])

    threads = [threading.Thread(target=launch) for _ in range(8)]
    run: list[Callable[[], None]] = [*(thread.start for thread in threads), *(thread.join for thread in threads)]
    for step in run:
        step()
    store, other = dist.HashStore(), Audit(1, 1)
    audit.check(lambda: store, [Member("tp", 0, WORLD)], TIMEOUT, Abort())
    with pytest.raises(LockstepBroken, match="rank 10 started 1600 operations"):
        other.check(lambda: store, [Member("tp", 1, WORLD)], TIMEOUT, Abort())
