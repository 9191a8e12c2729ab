"""Worker reboot, the launcher's side: look at the workers of this node, start a dead one again, tell who asks.

Knows processes and files; the launcher it works in is not known here (`patches.torch_elastic`), and what is decided is
`agent.policy`'s.

Files in the launcher's directory, each written whole:
  rebootable-<local rank>   by the worker: start me again when I die
  exit-<local rank>         {pid, status, signal, wall} of the last death of that rank, as soon as it is seen
  reboots.jsonl             a line for every restart: {local_rank, rank, old_pid, new_pid, status, wall}
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from mindspeed_tft.agent.policy import NEVER, Again, Policy, leaving
from mindspeed_tft.agent.reboot import mark_of, write_whole

REBOOTS_FILE = "reboots.jsonl"


def say(text: str) -> None:
    """One line to the user."""
    print(f"[mindspeed_tft] {text}", file=sys.stderr, flush=True)


class Process(Protocol):
    """The part of `subprocess.Popen` that is needed."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Standby(Protocol):
    """The part of `agent.spare.Spare` that is needed."""

    def look(self, calm: bool) -> None: ...
    def close(self) -> None: ...


class Watched:
    """A worker, in all its lives, to be held by the launcher in the place of a `subprocess.Popen`.

    A death that will be followed by another life is not shown: to the launcher the worker is still running.
    """

    def __init__(self, local_rank: int, rank: int, process: Process, directory: Path, lives: int = 0) -> None:
        """`lives`: of this rank before, on a node that was lost."""
        self.local_rank, self.rank, self.process = local_rank, rank, process
        self.mark = mark_of(directory, local_rank)
        self.count = lives  # of restarts
        self.due: float | None = None  # dead, and to be started again at this time
        self.shown = False  # the launcher may see that it is dead
        self.closing = False  # the launcher ends its workers, and sees them as they are
        self.status: int | None = None  # of this life
        self._exit_file = directory / f"exit-{local_rank}"

    # ------------------------------------------------------------------- what the launcher uses of a process

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        if self.closing:
            self.observe()
        return self.status if self.shown or self.closing else None

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)

    # ----------------------------------------------------------------------------------------------- ours

    def observe(self) -> bool:
        """See whether it has died, and make a death known at once; True when it died since the last look."""
        if self.status is not None:
            return False
        self.status = self.process.poll()
        if self.status is None:
            return False
        facts = {"pid": self.pid, "status": self.status, "signal": signal_name(self.status), "wall": time.time()}
        try_to_write(lambda: write_whole(self._exit_file, json.dumps(facts)))
        return True

    def reborn(self, process: Process) -> None:
        self.process, self.status, self.due = process, None, None

    def end_session(self) -> None:
        """Kill what a dead worker left behind in its process group: it may hold the device that the next one needs."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left, or nobody of ours
            os.killpg(self.pid, signal.SIGKILL)

    def __str__(self) -> str:
        return f"worker {self.rank} (pid {self.pid})"


class Supervisor:
    """The workers of one node, from one start of all of them to the next."""

    def __init__(
        self,
        directory: Path,
        workers: Mapping[int, Watched],
        start: Callable[[Watched], Process],
        policy: Policy,
        standby: Standby | None = None,
    ) -> None:
        """`start(worker)` starts the process of a worker for the `worker.count`-th time after the first; OSError if it
        cannot."""
        self._directory, self._workers, self._start, self._policy = directory, workers, start, policy
        self._standby = standby

    def look(self, now: float) -> None:
        """See who died, and start again whoever is due. Never blocks. `now`: seconds of a monotonic clock.

        All workers are seen before anything is decided: the status of one may decide about another.
        """
        died = [worker for worker in self._workers.values() if worker.observe()]
        for worker in died:
            self._decide(worker, now)
        why = leaving(self._gone())
        for worker in self._workers.values():
            if worker.due is None:
                continue
            if why:
                self._give_up(worker, why)
            elif worker.due <= now:
                self._restart(worker)
        if self._standby is not None:
            # Not before everybody is where training is: importing costs the CPU that they need to get there.
            self._standby.look(calm=self.all_train())

    def all_train(self) -> bool:
        """Whether all workers of this node live and have come as far as training is."""
        return all(worker.status is None and worker.mark.exists() for worker in self._workers.values())

    def stop(self) -> None:
        """The launcher is about to end its workers: nobody is started again, and nothing is hidden from it."""
        if self._standby is not None:
            self._standby.close()
        for worker in self._workers.values():
            worker.due, worker.closing = None, True

    def _gone(self) -> dict[int, int]:
        """Rank to status of the workers that have ended and are not to be started again."""
        workers = self._workers.values()
        return {worker.rank: worker.status for worker in workers if worker.status is not None and worker.due is None}

    def _decide(self, worker: Watched, now: float) -> None:
        assert worker.status is not None
        marked = worker.mark.exists() or worker.count > 0  # its first life had come far enough, and the others wait
        peers = {rank: status for rank, status in self._gone().items() if rank != worker.rank}
        decision = self._policy.decide(worker.local_rank, worker.status, marked=marked, peers=peers, now=now)
        if isinstance(decision, Again):
            worker.due = now + decision.delay
            worker.end_session()
        elif worker.status in NEVER or not marked:
            worker.shown = True  # as without us, and so without a word
        else:
            self._give_up(worker, decision.why)

    def _give_up(self, worker: Watched, why: str) -> None:
        worker.due, worker.shown = None, True
        say(f"{worker} ended {words(worker.status)}: not started again, {why}")

    def _restart(self, worker: Watched) -> None:
        dead, status = str(worker), worker.status
        entry = {"local_rank": worker.local_rank, "rank": worker.rank, "old_pid": worker.pid}
        worker.count += 1
        try:
            worker.mark.unlink(missing_ok=True)
            process = self._start(worker)
        except OSError as exc:
            self._give_up(worker, f"it cannot be: {exc}")
            return
        worker.reborn(process)
        say(f"{dead} ended {words(status)}: started again (pid {worker.pid}, {nth(worker.count)} time)")
        self._record({**entry, "new_pid": worker.pid, "status": status, "wall": time.time()})

    def _record(self, entry: Mapping[str, object]) -> None:
        def append() -> None:
            with open(self._directory / REBOOTS_FILE, "a") as file:
                file.write(json.dumps(entry) + "\n")

        try_to_write(append)


def try_to_write(write: Callable[[], None], what: str = "the end of a worker") -> None:
    """Files are for others to read; that they cannot be written must not end the workers."""
    try:
        write()
    except OSError as exc:
        say(f"{what} is not on record: {exc}")


def signal_name(status: int | None) -> str:
    """The signal that a status tells of; "" when it is none."""
    if status is None or status >= 0:
        return ""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"  # a real-time signal


def words(status: int | None) -> str:
    """How a process ended, to be read after "ended"."""
    name = signal_name(status)
    return f"by {name}" if name else f"with status {status}"


def nth(number: int) -> str:
    """1st, 2nd, 3rd, 4th, ..., 11th, ..., 21st"""
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
