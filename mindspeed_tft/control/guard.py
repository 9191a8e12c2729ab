"""Keeps the controllers of a host alive: starts what is missing, and says where they listen. A part of the relay."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import secrets
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mindspeed_tft.control import launch
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.candidates import Candidates, lives
from mindspeed_tft.control.config import ControlConfig

log = logging.getLogger(__name__)

_PER_MINUTE = 4  # starts of one controller; a host that kills them is not fought with
_MINUTE = 60.0


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    began: float
    again: bool
    ready: bool = False


class Guard:
    """Looks once a heartbeat period."""

    def __init__(
        self,
        config: ControlConfig,
        directory: Path,
        candidates: Candidates,
        starting: bool,
        up: Callable[[], bool],
        tell: Callable[[list[wire.Candidate]], None],
    ) -> None:
        """
        Args:
            starting: somebody else starts the first controller of the job right now.
            up: whether a controller leads this host.
            tell: takes the controllers of this host whenever they changed.
        """
        self._config, self._directory, self._candidates = config, directory, candidates
        self._up, self._tell = up, tell
        self._elsewhere = {0} if starting else set[int]()
        self._seen: set[int] = set()  # came up; without a file they have ended in the ordinary way
        self._starts: dict[int, collections.deque[float]] = collections.defaultdict(collections.deque)
        self._children: dict[int, _Child] = {}
        self._said: list[wire.Candidate] | None = None
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._look()
            await asyncio.sleep(self._config.deadlines.heartbeat)

    def say_again(self) -> None:
        """Whoever leads now has not heard of them."""
        self._said = None
        self._look()

    def _look(self) -> None:
        for index in self._candidates.here():
            role = self._candidates.role(index)
            alive = role is not None and lives(role, self._directory)
            if alive:
                self._seen.add(index)
            child = self._children.get(index)
            if child is not None:
                self._look_at(index, child, alive and role is not None and role.pid == child.process.pid)
            elif not alive and self._may_start(index, died=role is not None):
                if role is not None:
                    Path(role.unix).unlink(missing_ok=True)
                self._start(index, again=role is not None)
        if self._up():
            announced = self._candidates.announced()
            if announced != self._said:
                self._said = announced
                self._tell(announced)

    def _may_start(self, index: int, died: bool) -> bool:
        now = self._loop.time()
        if not died:
            if index in self._seen:
                return False
            patience = self._config.start if index in self._elsewhere else self._config.deadlines.heartbeat_lost
            first = index == 0 and index not in self._elsewhere  # nobody leads before it does
            if not first and not (self._up() and index not in self._elsewhere) and now - self._began < patience:
                return False
        starts = self._starts[index]
        while starts and now - starts[0] > _MINUTE:
            starts.popleft()
        if len(starts) >= _PER_MINUTE or (len(starts) > 1 and now - starts[-1] < 2 ** len(starts)):
            return False
        starts.append(now)
        return True

    def _start(self, index: int, again: bool) -> None:
        """Starts a controller as our child, so that its end leaves nothing behind."""
        unix = self._directory / f"ctl-{secrets.token_hex(6)}.sock"
        words = ["--index", str(index), "--socket", str(unix), "--config", "-"]
        try:
            process = subprocess.Popen(
                launch.command("controller_main", words),
                env=launch.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            log.warning("controller %d cannot be started: %s", index, error)
            return
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # its end is seen at the next look
            process.stdin.write(self._config.to_json().encode())
        self._children[index] = _Child(process, self._loop.time(), again)

    def _look_at(self, index: int, child: _Child, ready: bool) -> None:
        """Whether a child came up, and whether it has ended."""
        if ready and not child.ready:
            child.ready = True
            if child.again:
                log.warning("controller %d was started again (process %d)", index, child.process.pid)
        if child.process.poll() is not None:
            del self._children[index]
            if not child.ready:
                log.warning(
                    "controller %d did not come up (exit status %d); it is tried again", index, child.process.returncode
                )
        elif not child.ready and self._loop.time() - child.began > self._config.start:
            log.warning("controller %d was not ready within %.0f s", index, self._config.start)
            child.process.kill()  # and taken note of at the next look
