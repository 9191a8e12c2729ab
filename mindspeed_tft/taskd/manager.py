"""TaskD's manager: a process beside the job, on its first node, that keeps the job's controller.

The controller is started when rank 0 asks, with what the job's flags say: a manager knows none of them. It listens at
TaskD's port where there are several nodes. It does not end with the manager: the ranks need it until their last word.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from mindspeed_tft.control import candidates, keepers
from mindspeed_tft.control.config import ControlConfig, ControlRefused, meeting_dir
from mindspeed_tft.observe import logs
from mindspeed_tft.settings import Refused
from mindspeed_tft.taskd import words

log = logging.getLogger(__name__)

_LOOK = 0.5  # seconds between two looks at the job
_INIT = "init_taskd_manager"
_KEYS = ("job_id", "node_nums", "proc_per_node", "plugin_dir", "fault_recover", "taskd_enable", "cluster_infos")
ENV_ENABLE = "TASKD_PROCESS_ENABLE"


@dataclass(frozen=True)
class Manager:
    """What a manager was told."""

    job: str
    nodes: int
    ranks: int  # on each node
    on: bool = True

    def judge(self, config: ControlConfig) -> ControlConfig:
        """The configuration of a job whose controller is wanted.

        Raises:
            ControlRefused: it is of another size than this manager was told.
        """
        if config.world_size != self.nodes * self.ranks:
            raise ControlRefused(
                f"{_INIT}: {self.nodes} nodes with {self.ranks} ranks each are not the {config.world_size} ranks of"
                " this job. Remedy: correct node_nums and proc_per_node"
            )
        return config


@dataclass
class Life:
    """A controller that was started here."""

    config: ControlConfig
    directory: Path = field(init=False)
    launcher: psutil.Process | None = field(init=False)

    def __post_init__(self) -> None:
        self.directory = meeting_dir(self.config)
        try:
            self.launcher = psutil.Process(self.config.launcher_pid) if self.config.launcher_pid else None
        except psutil.NoSuchProcess:
            self.launcher = None

    def is_over(self) -> bool:
        """Nothing leads this job any more, and its launcher, which might start it again, is gone."""
        if candidates.relay_of(self.directory) is candidates.RelayIs.ALIVE:
            return False
        roles = [candidates.read_role(path) for path in self.directory.glob("controller-*.json")]
        if any(role is not None and candidates.lives(role, self.directory) for role in roles):
            return False
        return self.launcher is None or not self.launcher.is_running()


_manager: Manager | None = None


def init_taskd_manager(config: dict[str, Any]) -> bool:
    """Say what the job is, before `start_taskd_manager`.

    Args:
        config: `job_id` (the value of MINDX_TASK_ID), `node_nums`, `proc_per_node`, and of TaskD's other keys
            `fault_recover` and `taskd_enable` ("on" or "off").

    Raises:
        Refused: a value that cannot be, or asks for what is not done here.
    """
    global _manager
    found = words.check_keys(_INIT, config, _KEYS)
    if found.get("plugin_dir"):
        raise Refused(f"{_INIT} 'plugin_dir'", "plugins of TaskD are not run here", "leave it out")
    if found.get("cluster_infos"):
        raise Refused(
            f"{_INIT} 'cluster_infos'",
            "the cluster manager is found by MINDX_SERVER_IP, as in the ranks",
            "leave it out",
        )
    for key in ("fault_recover", "taskd_enable"):
        if found.get(key, "on") not in ("on", "off"):
            raise Refused(f"{_INIT} {key!r}", f"{found[key]!r} is neither 'on' nor 'off'", "write one of the two")
    _manager = Manager(
        words.job(_INIT, "job_id", found.get("job_id")),
        words.number(_INIT, "node_nums", found.get("node_nums"), 1, 65535),
        words.number(_INIT, "proc_per_node", found.get("proc_per_node"), 1, 4096),
        os.environ.get(ENV_ENABLE, "on") != "off" and found.get("taskd_enable", "on") == "on",
    )
    return True


def start_taskd_manager() -> bool:
    """Keep the controller of the job, in each of its lives, until the job is over; False if none ever came.

    It is over when the controller and the launcher of the job have gone; without a job, when the process that started
    this one has. Ends at once where TASKD_PROCESS_ENABLE is off: then rank 0 starts the controller itself.

    Raises:
        RuntimeError: `init_taskd_manager` was not called.
        ControlRefused: another manager of this job runs here.
    """
    if _manager is None:
        raise RuntimeError(f"start_taskd_manager: {_INIT} was not called before")
    _log_here()
    if not _manager.on:
        log.warning("%s is off: rank 0 starts the controller of job %s itself", ENV_ENABLE, _manager.job)
        return True
    keeper = keepers.Keeper(keepers.door(_manager.job, keepers.CONTROLLER, 0), keepers.CONTROLLER, _manager.judge)
    parent = os.getppid()
    log.info("the manager of job %s waits for its rank 0", _manager.job)
    life: Life | None = None
    try:
        while not (life.is_over() if life is not None else os.getppid() != parent):
            config = keeper.serve(_LOOK)
            if config is not None:
                life = Life(config)
                log.info("%s", _started(config))
    finally:
        keeper.close()
    log.info("job %s is over", _manager.job) if life else log.warning("job %s never came", _manager.job)
    return life is not None


def _started(config: ControlConfig) -> str:
    again = f", start {config.restart + 1}" if config.restart else ""
    where = f"port {config.tcp_port()} of {config.tcp_host()}" if config.tcp() else "no port, on a single host"
    able = ", ".join(config.strategies)
    return f"the controller of {config.world_size} ranks is here{again}: {where}; strategies {able}"


def _log_here() -> None:
    logs.bind(host=os.uname().nodename)
    logs.install("text", "manager", whole=True)
