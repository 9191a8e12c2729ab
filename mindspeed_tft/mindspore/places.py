"""Where a process of a MindSpore job stands: its rank, its host, its launcher; by the environment that msrun makes."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.engine.types import Deadlines
from mindspeed_tft.settings import Refused, Settings

log = logging.getLogger(__name__)

LIFE = "TFT_MSRUN_LIFE"  # set by our agent: how often the job was started again
LOCAL = "TFT_MSRUN_LOCAL"  # set by our agent: workers of this host
PATIENCE = "TFT_MSRUN_PATIENCE"  # seconds that survivors of a fault may take to end; our agent tells its workers
STATUS = "TFT_MSRUN_STATUS"  # set by our agent: where a worker that leaves on our word says its exit status


@dataclass(frozen=True)
class Place:
    """One worker of a job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    scheduler: str  # host of MindSpore's scheduler
    job: str  # tells jobs apart: address and port of the scheduler
    life: int = 0

    @property
    def nodes(self) -> int:
        return max(1, self.world_size // self.local_world_size)

    def config(self, deadlines: Deadlines, incident_dir: str, **settings: Any) -> ControlConfig:
        """What the control processes of this host are told."""
        return ControlConfig(
            deadlines=deadlines,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            node_rank=self.rank // self.local_world_size,
            nnodes=self.nodes,
            host=self.host,
            incident_dir=incident_dir,
            run_name=f"msrun-{self.job.rpartition(':')[2] or self.job}",
            run_id=f"msrun-{self.job}",
            restart=self.life,
            master=self.job,
            controller_host=self.scheduler,
            **settings,
        )


def find(environ: Mapping[str, str]) -> Place:
    """The place of this process. A program that msrun did not start is a job of one rank.

    Raises:
        Refused: a variable that msrun sets is missing or no number.
    """
    world = _number(environ, "MS_WORKER_NUM", 1)
    rank = _number(environ, "MS_NODE_ID", None if world > 1 else 0)
    scheduler, port = environ.get("MS_SCHED_HOST", "127.0.0.1"), environ.get("MS_SCHED_PORT", "")
    alone = scheduler in ("127.0.0.1", "localhost", "::1")
    local = _number(environ, LOCAL, world if alone else _workers_beside(rank))
    if world % local:
        raise Refused(LOCAL, f"{world} workers are not a multiple of {local} a host", "start as many on each host")
    job = f"{scheduler}:{port}" if port else f"pid-{os.getpid()}"
    life = _number(environ, LIFE, 0)
    return Place(rank, world, rank % local, local, os.uname().nodename, scheduler, job, life)


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdigit():
        raise Refused(name, f"{text!r} is no number", "start the job with msrun, and with --node_rank on several hosts")
    return int(text)


def _workers_beside(rank: int) -> int:
    """Workers that this process's launcher has started, itself included."""
    try:
        beside = psutil.Process(os.getppid()).children()
        roles = [child.environ().get("MS_ROLE") for child in beside]
    except psutil.Error:
        roles = []
    return max(1, roles.count("MS_WORKER"))


def deadlines(found: Settings, environ: Mapping[str, str]) -> Deadlines:
    """All timeouts of a recovery, within the time after which our agent kills the survivors of a fault.

    Raises:
        Refused: settings that do not fit into each other, or not into that time.
    """
    patience = float(environ[PATIENCE]) if environ.get(LIFE) and environ.get(PATIENCE) else None
    return found.deadlines(patience, waits=f"set {PATIENCE} to at least {{seconds}}")


def launcher() -> list[str]:
    """The command line of the msrun above this process; empty where there is none."""
    try:
        found = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []
    return found if any("msrun" in word or "mindspore.parallel.cluster.run" in word for word in found[:4]) else []


def leave_status(environ: Mapping[str, str], rank: int, code: int) -> None:
    """Tell our agent the exit status of this process: msrun's functions tell every failure as the same one."""
    directory = environ.get(STATUS)
    if directory:
        try:
            whole = Path(directory, f"{rank}.tmp")  # whoever is killed meanwhile has said nothing
            whole.write_text(str(code), encoding="utf-8")
            whole.rename(whole.with_suffix(""))
        except OSError as exc:
            log.warning("the agent is not told of exit status %d: %s", code, exc)


def resume_words(environ: Mapping[str, str]) -> str:
    """The command that starts this job again. Its script loads the newest checkpoint with `FaultTolerance.resume`."""
    kept = [f"MS_ENABLE_TFT={shlex.quote(environ['MS_ENABLE_TFT'])}"] if environ.get("MS_ENABLE_TFT") else []
    return " ".join([*kept, *map(shlex.quote, launcher() or [sys.executable, *sys.argv])])


def why_no_dying_gasp(environ: Mapping[str, str]) -> str:
    """Why a lost rank would take all others with it, before they can save; "" where it would not."""
    if LIFE in environ or not launcher():
        return ""
    return (
        "msrun kills all ranks as soon as one is lost: no dying gasp is possible in this job. Pause, save and link"
        " switch work. Remedy: set MS_ENABLE_TFT='{TTP:1}', and put the directory that `python -m mindspeed_tft.names"
        " taskd` prints on PYTHONPATH, so that msrun leaves its processes to the agent"
    )
