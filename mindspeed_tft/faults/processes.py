"""Find and end processes of the job that a rank under drill belongs to: its launcher, its node, the leading controller.

All processes of a job carry its mark in their environment (`ENV_MARK`). What a node is, is told by the variables
that torchrun gives to workers, and that relays and controllers inherit from the rank that started them.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

ENV_MARK = "TFT_DRILL_JOB"
ENV_NODE = "GROUP_RANK"
CONTROLLER = "mindspeed_tft.control.controller_main"


def of_job(mark: str) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """The living processes that carry this mark, with their environment."""
    for process in psutil.process_iter():
        try:
            environ = process.environ()
            if environ.get(ENV_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process, environ
        except (OSError, psutil.Error):
            continue  # it ended meanwhile, or belongs to another user and so not to this job


def launcher() -> psutil.Process:
    """Who started this rank: the parent of its session's leader, whatever shells are between."""
    return psutil.Process(os.getsid(0)).parent() or _none("this rank has no launcher any more")


def node(mark: str, number: int) -> list[psutil.Process]:
    """All processes of a node, the launchers first, so that nobody starts another one."""
    found = [process for process, environ in of_job(mark) if environ.get(ENV_NODE) == str(number)]
    workers = [process for process in found if _leads_session(process)]
    above = {parent.pid: parent for worker in workers if (parent := worker.parent()) is not None and parent.pid > 1}
    # A standby is a child of the launcher, and belongs to no rank yet.
    beside = [child for parent in above.values() for child in _children(parent)]
    every = {process.pid: process for process in (*above.values(), *found, *beside)}
    return list(every.values())


def leading_controller(mark: str) -> psutil.Process:
    """The controller whose orders the job obeys."""
    for process, _ in of_job(mark):
        words = _command(process)
        if CONTROLLER in words and "--socket" in words:
            directory = Path(words[words.index("--socket") + 1]).parent
            if any(facts["pid"] == process.pid and facts["leader"] for facts in _roles(directory)):
                return process
    return _none("no controller of this job says that it leads")


def end(processes: Iterable[psutil.Process]) -> list[int]:
    """SIGKILL, this very process last; the pids of the others."""
    ended = []
    for process in processes:
        if process.pid != os.getpid():
            try:
                process.kill()
                ended.append(process.pid)
            except psutil.NoSuchProcess:
                continue
    return ended


def end_node(mark: str, number: int) -> None:
    """All processes of this node are gone, as if somebody had pulled the plug. Does not return on that node."""
    victims = node(mark, number)
    print(f"drill: node {number} ends: {len(victims)} processes", flush=True)
    end(victims)
    if any(process.pid == os.getpid() for process in victims):
        os.kill(os.getpid(), signal.SIGKILL)


def _roles(directory: Path) -> Iterator[dict[str, object]]:
    for path in directory.glob("controller-*.json"):
        try:
            yield json.loads(path.read_text())
        except FileNotFoundError:
            continue


def _leads_session(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == process.pid and CONTROLLER not in _command(process)
    except ProcessLookupError:
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


def _command(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
    except psutil.NoSuchProcess:
        return []
    return words


def _none(why: str) -> psutil.Process:
    raise RuntimeError(f"drill: {why}")
