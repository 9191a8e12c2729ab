"""The lease of a leader in storage that hosts share: files beside the incidents. Every call may block or fail.

`claim-<generation>` is made once, by one candidate, and holds its term. `lease-<term>` is written by the holder of the
term alone, so that a late write of an old leader cannot hide a new one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mindspeed_tft.control.config import write_private
from mindspeed_tft.control.leadership import generation

PREFIX = "leadership-"

T = TypeVar("T")


@dataclass(frozen=True)
class Seen:
    """The latest claim, and how far its holder has counted; -1: it has not begun."""

    term: int
    counter: int


def fresh_name() -> str:
    """A name for the lease directory of one job, which no earlier job has used."""
    return PREFIX + uuid.uuid4().hex[:12]


def is_name(name: str) -> bool:
    """Whether a lease can have this name, which another host may have chosen."""
    return name.startswith(PREFIX) and "/" not in name and "\0" not in name


class Lease:
    """The lease directory of a job as it is seen from this host. Raises OSError where the storage does."""

    def __init__(self, incidents: Path, name: str) -> None:
        if not is_name(name):
            raise ValueError(f"{name!r} is no name of a lease")
        self.name = name
        self._directory = incidents / name

    def claim(self, term: int, found: bool) -> bool:
        """Claims a term; False when its generation is claimed already. `found`: makes the directory, too."""
        if found:
            self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._directory / f".{uuid.uuid4().hex}"
        with open(temporary, "x") as file:
            file.write(str(term))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, self._directory / f"claim-{generation(term)}")
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def renew(self, term: int, counter: int) -> None:
        """A sign of life of the holder of `term`."""
        write_private(self._directory / f"lease-{term}", str(counter))

    def look(self) -> Seen | None:
        """The latest claim; None when there is none."""
        claims = [name for name in os.listdir(self._directory) if name.startswith("claim-")]
        if not claims:
            return None
        latest = max(claims, key=lambda name: int(name.removeprefix("claim-")))
        term = int((self._directory / latest).read_text())
        try:
            counter = int((self._directory / f"lease-{term}").read_text())
        except FileNotFoundError:
            counter = -1
        return Seen(term, counter)

    def remove(self) -> None:
        """At the end of the job."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._directory)


class Storage:
    """Runs the calls in one thread, a daemon: storage that hangs holds neither the event loop nor the process's end."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._last: concurrent.futures.Future[object] | None = None
        threading.Thread(target=self._work, name="tft-lease", daemon=True).start()

    @property
    def busy(self) -> bool:
        """The last call has not come back."""
        return self._last is not None and not self._last.done()

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Runs a call soon."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)

        self._last = future  # type: ignore[assignment]
        self._jobs.put(run)
        return asyncio.wrap_future(future)

    async def run(self, job: Callable[[], T], timeout: float) -> T:
        """Runs a call and waits for it.

        Raises:
            OSError: the storage does not do it.
            asyncio.TimeoutError: not within `timeout` seconds, or an earlier call hangs.
        """
        end = asyncio.get_running_loop().time() + timeout
        while self.busy and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(timeout / 100)
        if self.busy:
            raise asyncio.TimeoutError("the storage does not answer")
        left = max(0.0, end - asyncio.get_running_loop().time())
        return await asyncio.wait_for(asyncio.shield(self.submit(job)), left)

    def _work(self) -> None:
        while True:
            self._jobs.get()()
