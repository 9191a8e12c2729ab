"""What candidates share: the lease in storage, the words for a successor, and where they are."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from pathlib import Path

import pytest
from control_support import config

from mindspeed_tft.control import candidates, peers
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.candidates import Candidates, RoleFile
from mindspeed_tft.control.leadership import next_term
from mindspeed_tft.control.lease import Lease, Seen, Storage, fresh_name
from mindspeed_tft.control.seats import Departed, SeatState
from mindspeed_tft.engine import types as t

INFO = t.RankInfo(3, "b", 11, "tp0-pp0", 3, ("tp0-pp0/dense/1",))


def test_a_seat_comes_back_from_the_wire() -> None:
    old = dataclasses.replace(INFO, pid=10)
    full = SeatState(3, "s2", INFO, "ended", True, ("s0", "s1"), Departed(old, "was killed"), 17, True)
    for state in (full, SeatState(3, "s1", INFO)):
        again = wire.Seat.FromString(peers.seat_to_wire(state).SerializeToString())
        assert peers.seat_from_wire(again) == state
    empty = SeatState(3, "s1", INFO)
    fields = {field.name for field in dataclasses.fields(SeatState)} - {"rank", "session", "info"}
    same = {name for name in fields if getattr(full, name) == getattr(empty, name)}
    assert not same, "vary it above"


def test_a_generation_is_claimed_once(tmp_path: Path) -> None:
    name = fresh_name()
    first, second = Lease(tmp_path, name), Lease(tmp_path, name)
    term = next_term(0, 0)
    assert first.claim(term, found=True)
    assert first.look() == Seen(term, -1)
    first.renew(term, 5)
    assert second.look() == Seen(term, 5)
    rivals = [next_term(term, index) for index in (1, 2)]
    won = [lease.claim(rival, found=False) for lease, rival in zip((first, second), rivals, strict=True)]
    assert won == [True, False]
    first.renew(term, 6)  # an old leader that writes late hides nothing
    assert second.look() == Seen(rivals[0], -1)
    first.remove()
    assert not list(tmp_path.iterdir())
    first.remove()


def test_many_threads_claim_and_one_wins(tmp_path: Path) -> None:
    name, won = fresh_name(), []
    assert Lease(tmp_path, name).claim(1, found=True)

    def claim(index: int) -> None:
        if Lease(tmp_path, name).claim(next_term(1, index), found=False):
            won.append(index)

    threads = [threading.Thread(target=claim, args=(index % 3,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(won) == 1


def test_a_directory_that_is_not_there_is_not_made_by_a_follower(tmp_path: Path) -> None:
    """Else storage of its own could be taken for the leader's."""
    with pytest.raises(OSError):
        Lease(tmp_path, fresh_name()).claim(6, found=False)
    with pytest.raises(OSError):
        Lease(tmp_path, fresh_name()).look()


def test_a_lease_is_named_by_us(tmp_path: Path) -> None:
    for name in ("../x", "leadership-../../x", "x"):
        with pytest.raises(ValueError, match="no name of a lease"):
            Lease(tmp_path, name)


def test_storage_that_hangs_is_left_alone() -> None:
    go_on = threading.Event()

    async def main() -> None:
        storage = Storage()
        with pytest.raises(asyncio.TimeoutError):
            await storage.run(go_on.wait, 0.1)
        assert storage.busy
        with pytest.raises(asyncio.TimeoutError, match="does not answer"):
            await storage.run(lambda: True, 0.1)
        go_on.set()
        assert await storage.run(lambda: 7, 5.0) == 7

    asyncio.run(main())


def test_routes_prefer_the_own_host_and_keep_the_users_address(tmp_path: Path) -> None:
    cfg = config(tmp_path, 3, nnodes=3, node_rank=1, controller_host="node0", port=1234)
    known = Candidates(cfg, tmp_path)
    assert [(route.index, route.address) for route in known.routes()] == [(0, "node0:1234")]
    RoleFile(os.getpid(), 1, 0, False, False, "/run/ctl.sock", "10.0.0.2:1234").write(tmp_path)
    assert [one.address for one in known.announced()] == ["10.0.0.2:1234"]
    others = [
        wire.Candidate(index=0, host="a", address="10.0.0.1:1234"),
        wire.Candidate(index=2, host="c", address="10.0.0.3:999"),
        wire.Candidate(index=7, host="x", address="10.0.0.9:1"),
    ]
    assert known.learn(others)
    assert not known.learn(others)
    found = [(route.index, route.address, route.name) for route in known.routes()]
    assert found == [(0, "node0:1234", ""), (1, "unix:/run/ctl.sock", ""), (2, "10.0.0.3:999", "c")]


def test_what_a_relay_accepted_outlives_it(tmp_path: Path) -> None:
    cfg = config(tmp_path, 3, nnodes=3, controller_host="node0")
    known = Candidates(cfg, tmp_path)
    known.term, known.lease = 6, "leadership-abc"
    known.learn([wire.Candidate(index=2, host="c", address="10.0.0.3:999")])
    known.save()
    again = Candidates(cfg, tmp_path)
    assert (again.term, again.lease, again.table()) == (6, "leadership-abc", known.table())
    known.forget()
    known.save()  # the last words of a leader come late
    assert Candidates(cfg, tmp_path).term == 0


def test_the_last_one_removes_what_killed_controllers_left(tmp_path: Path) -> None:
    directory = tmp_path / "meeting"
    directory.mkdir()
    unix = directory / "ctl-1.sock"
    unix.touch()
    dead = 2**22 + 1  # above the largest number of a process
    RoleFile(dead, 0, 1, True, True, str(unix), "").write(directory)
    candidates.leave(directory)
    assert not directory.exists()
