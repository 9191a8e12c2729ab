"""Worker reboot, the worker's side: may this process be started again alone, and does it want to be.

The launcher's side (`agent.supervisor`) gives every worker a private directory; a worker that could find its way back
into the running job leaves a mark there. Without the mark its death is what it always was: a failure of the job.

Imports no torch: it is read in workers, in the launcher and in the warm standby.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil

ENV_DIRECTORY = "TFT_AGENT_DIR"  # of the launcher, for this run; mode 0700
ENV_AGENT = "TFT_AGENT_PID"
# LOCAL_RANK is no name for a worker: under torchrun's --virtual-local-rank it is 0 everywhere.
ENV_LOCAL_RANK = "TFT_LOCAL_RANK"
ENV_REBORN = "TFT_REBORN"  # how often this rank was started again; not set in a first life

_REMEDY = "start with tftrun, or torchrun --logs-specs mindspeed_tft"


def available(environ: Mapping[str, str]) -> bool:
    """Whether the launcher above this process starts single workers again."""
    return not why_not(environ)


def why_not(environ: Mapping[str, str]) -> str:
    """Why reboot is not available, for the user; "" when it is."""
    reason = _obstacle(environ)
    return f"reboot is not available because {reason}; {_REMEDY}" if reason else ""


def _obstacle(environ: Mapping[str, str]) -> str:
    if any(not environ.get(name) for name in (ENV_DIRECTORY, ENV_AGENT, ENV_LOCAL_RANK)):
        return "the launcher of this process does not start single workers again (a plain torchrun, or --run-path)"
    if not Path(environ[ENV_DIRECTORY]).is_dir():
        return f"the launcher that made {environ[ENV_DIRECTORY]} is gone"
    # The variables are inherited further than they mean something: a worker may launch a job of its own.
    if _launcher() != environ[ENV_AGENT]:
        return f"this process was not started by the launcher whose variables it has (pid {environ[ENV_AGENT]})"
    return ""


def _launcher() -> str:
    """The pid of who started this session: each worker leads one, whatever shells are between it and this process."""
    try:
        return str(psutil.Process(os.getsid(0)).ppid())
    except psutil.Error:
        return ""  # led by a process that is gone, or of another container


def lives(environ: Mapping[str, str]) -> int:
    """How often this rank was started again before: 0 in its first life."""
    return int(environ.get(ENV_REBORN, "0"))


def mark_rebootable(environ: Mapping[str, str]) -> None:
    """From now on, when this process dies, it alone is started again.

    Raises:
        RuntimeError: reboot is not available, with the reason and the remedy.
    """
    reason = why_not(environ)
    if reason:
        raise RuntimeError(reason)
    write_whole(_own_mark(environ), str(os.getpid()))


def unmark(environ: Mapping[str, str]) -> None:
    """From now on the death of this process is a failure of the job. Harmless where nothing was marked."""
    if available(environ):
        _own_mark(environ).unlink(missing_ok=True)


def mark_of(directory: Path, local_rank: int | str) -> Path:
    """The file whose existence says that a worker may be started again."""
    return directory / f"rebootable-{local_rank}"


def _own_mark(environ: Mapping[str, str]) -> Path:
    return mark_of(Path(environ[ENV_DIRECTORY]), environ[ENV_LOCAL_RANK])


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or nothing. Not durable: the directory ends with the launcher."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.rename(path)
