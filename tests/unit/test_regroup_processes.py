"""Regrouping with real processes on gloo: blocked ranks, a rank that sleeps through it, a newcomer, a rank that never
comes, many in a row, and the lockstep audit. The test itself is the control plane and keeps the job's store."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

PROGRAM = Path(__file__).parent / "programs" / "regroup_rank.py"
WORLD = 3
FREE_WITHIN = 1.0  # seconds from the abort until a blocked rank has raised
MEDDLING = 5.0  # seconds that a rank alone may take until it is told that it is
# Seconds that gloo gives each operation. One that is begun in the very moment in which its connection ends is not
# always told, and waits to the end of this time, unless its process is told to stop.
LIMIT = 20
PATIENCE = 120.0  # seconds; nothing takes a tenth of it on an idle machine


class Rank:
    """A process of regroup_rank.py: orders go to its standard input, events come back as JSON lines."""

    def __init__(self, number: int, port: int, identity: int | None = None) -> None:
        self.identity = number if identity is None else identity
        self.noise: list[str] = []
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._kept: list[dict[str, Any]] = []  # came before they were expected
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(number), str(WORLD), str(port), str(self.identity), str(LIMIT)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._events.put(json.loads(line))
            else:
                self.noise.append(line)
        self._events.put(None)

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")

    def expect(self, event: str) -> dict[str, Any]:
        """The next event of this name; two threads answer, so that others may come before it."""
        for found in self._kept:
            if found["event"] == event:
                self._kept.remove(found)
                return found
        end = time.monotonic() + PATIENCE
        while True:
            try:
                new = self._events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {event} in {PATIENCE} s, but {self._kept}: {''.join(self.noise)}") from None
            assert new is not None and new["event"] != "error", f"{event} expected, {new}: {''.join(self.noise)}"
            if new["event"] == event:
                return new
            self._kept.append(new)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


class Job:
    """The ranks, connected, and the epoch of their groups. One for all tests, because processes are slow to start; a
    test finds and leaves every rank idle, on working groups."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.epoch = 0
        self.gone: list[Rank] = []
        self.ranks = [Rank(number, self.store.port) for number in range(WORLD)]

    def next(self) -> int:
        self.epoch += 1
        return self.epoch

    def replace_last(self) -> Rank:
        """Start another process in the place of the last rank; returns who had it."""
        old = self.ranks.pop()
        self.gone.append(old)
        self.ranks.append(Rank(WORLD - 1, self.store.port, identity=old.identity + 100))
        return old

    def identities(self) -> str:
        return ",".join(str(rank.identity) for rank in self.ranks)

    def regroup(self) -> None:
        regrouped = tell(self.ranks, f"regroup {self.next()} 20", "regrouped")
        # Two groups of all, and two pairs that have the last rank in common; one that was destroyed does not come back.
        assert [event["groups"] for event in regrouped] == [3, 3, 4]

    def turn(self) -> None:
        """A few rounds whose results are all right."""
        for rank in self.ranks:
            rank.tell(f"turn {self.identities()} 3")
            rank.tell("stop")
        for rank in self.ranks:
            assert rank.expect("turned")["wrong"] == 0


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    made = Job()
    try:
        for rank in made.ranks:
            rank.expect("ready")
        yield made
    finally:
        for rank in [*made.ranks, *made.gone]:
            rank.close()


def tell(ranks: list[Rank], order: str, event: str) -> list[dict[str, Any]]:
    """Give an order to all of these ranks and take the answer of each."""
    for rank in ranks:
        rank.tell(order)
    return [rank.expect(event) for rank in ranks]


def abort(ranks: list[Rank], epoch: int) -> None:
    """Abort on these ranks; who is told later may find its connections shut by the others."""
    assert any(shut["connections"] for shut in tell(ranks, f"abort {epoch}", "shut"))


def test_a_rank_that_slept_through_a_regroup_disturbs_nobody(job: Job) -> None:
    tell(job.ranks, "copy", "copied")
    for rank in job.ranks:
        rank.tell(f"turn {job.identities()} 1")
    for rank in job.ranks:
        rank.expect("turning")
    zombie = job.replace_last()
    *survivors, newcomer = job.ranks
    zombie.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, zombie.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    tell(survivors, "watch", "blocked")
    old = job.next()
    abort(survivors, old)
    for rank in survivors:
        assert rank.expect("aborted")["wrong"] == 0
    newcomer.expect("ready")
    job.regroup()
    for rank in job.ranks:
        rank.tell(f"turn {job.identities()} 200")
    for rank in job.ranks:
        rank.expect("turning")

    zombie.tell(f"meddle {old}")
    woken = time.monotonic()
    zombie.process.send_signal(signal.SIGCONT)
    assert zombie.expect("aborted")["wrong"] == 0
    assert time.monotonic() - woken < LIMIT + MEDDLING
    ends = zombie.expect("meddled")["ends"]
    assert ends.pop("sockets") > 0
    assert ends.pop("sockets taking data") == 0
    kinds = {name: kind for name, (kind, _) in ends.items()}
    assert kinds.pop("regroup") == "RuntimeError"  # nobody else is there: its own time limit ended it
    assert set(kinds.values()) == {"CommunicationAborted"}, ends
    assert max(seconds for _, seconds in ends.values()) < LIMIT + MEDDLING, ends

    for rank in job.ranks:
        rank.tell("stop")
    for rank in job.ranks:
        turned = rank.expect("turned")
        assert turned["wrong"] == 0
        assert turned["rounds"] >= 200
    # Control: one number that is not what it should be is seen by all who get it.
    assert [event["wrong"] for event in tell(job.ranks, f"poison {job.identities()}", "poisoned")] == [5, 4, 5]


KINDS = "allreduce allgather reduce_scatter broadcast reduce barrier alltoall coalesced send recv two_handles".split()
ROUNDS = 22


def test_blocked_ranks_come_out_and_many_regroups_leave_nothing(job: Job) -> None:
    *present, absent = job.ranks
    job.regroup()
    job.turn()
    level = settled(job.ranks)
    for number in range(ROUNDS):
        kind = KINDS[number % len(KINDS)]
        for rank in present:
            rank.tell(f"block {kind}")
        tell(present, "watch", "blocked")
        abort(present, job.epoch + 1)
        for rank in present:
            free = rank.expect("free")
            assert free["kind"] == kind
            assert free["seconds"] < FREE_WITHIN, free
        tell([absent], f"abort {job.epoch + 1}", "shut")
        job.regroup()
        job.turn()
    settled(job.ranks, level)
    # Control: a backend that somebody holds on to is seen.
    tell(job.ranks, "keep", "kept")
    job.regroup()
    for now, before in zip(tell(job.ranks, "count", "count"), level, strict=True):
        assert all(now[measure] > before[measure] for measure in MEASURES), (now, before)
    tell(job.ranks, "let_go", "let_go")


def test_a_rank_that_never_comes_ends_in_an_error_and_the_next_try_succeeds(job: Job) -> None:
    *present, _ = job.ranks
    epoch = job.next()
    tell(job.ranks, f"abort {epoch}", "shut")
    for failed in tell(present, f"regroup {epoch} 1", "failed"):
        assert failed["seconds"] < MEDDLING, failed
    tell(job.ranks, f"abort {epoch + 1}", "shut")
    job.regroup()
    job.turn()


MEASURES = ("threads", "descriptors", "sockets")


def settled(ranks: list[Rank], level: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """What each process holds, once it is at `level`; without one, once it has been the same for a second: old backends
    go in the background."""
    begin, seen = time.monotonic(), tell(ranks, "count", "count")
    since = begin
    while True:
        now = tell(ranks, "count", "count")
        if level is not None:
            if all(a[m] <= b[m] for a, b in zip(now, level, strict=True) for m in MEASURES):
                return now
        elif any(a[m] != b[m] for a, b in zip(now, seen, strict=True) for m in MEASURES):
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > 1:
            return now
        assert time.monotonic() - begin < PATIENCE, f"{now} is more than {level or seen}"
        time.sleep(0.05)


def test_the_first_step_after_a_regroup_is_audited(job: Job) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in ("same", "order", "dtype", "transfer"):
        job.regroup()
        found[kind] = tell(job.ranks, f"step {kind}", "audited")
        # Asked again without a regroup between: nothing is armed.
        assert [rank.expect("again")["streams"] for rank in job.ranks] == [0, 0, 0]
    same = found.pop("same")
    assert [event["text"] for event in same] == ["", "", ""]
    # Collectives of two groups of all ranks and of a pair, with the first member of each; transfers with rank 0.
    assert [event["streams"] for event in same] == [2, 3, 5]
    for audited in found.values():
        first, odd, other = (event["text"] for event in audited)
        assert "rank 1 started" in odd
        assert "rank 0 started" in odd
        assert (first == "") == (audited is not found["transfer"])  # its sender sees it too
        assert other == ""
    assert (
        "transfers from 0 to 1: rank 1 started 1 operations, last: transfer int32 x64" in found["transfer"][1]["text"]
    )
