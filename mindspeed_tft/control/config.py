"""What the control processes are told when they start, and where on a host they meet. No behaviour of theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_tft.engine.types import Deadlines

DEFAULT_PORT = 29654
ENV_JOB = "MINDX_TASK_ID"  # the cluster's name of the job: by it keepers are found
ENV_PORT = "TFT_DEFAULT_PORT"  # set by a launcher: the port where several hosts meet, if no flag says otherwise
_SUN_PATH = 108  # bytes of a Unix socket's address on Linux, with the closing zero
_LONGEST_NAME = "/ctl-0123456789ab.sock"
RELAY_SOCKET = "relay.sock"


class ControlRefused(ValueError):
    """The settings cannot be served: the message names the setting, the reason and the remedy."""


class ControlUnavailable(RuntimeError):
    """The control plane could not be started or reached: training may go on, unprotected."""


@dataclass(frozen=True)
class ControlConfig:
    """One host's view of the job, handed to its relay and, on node 0, to the controller."""

    deadlines: Deadlines
    world_size: int
    local_world_size: int
    node_rank: int
    nnodes: int
    host: str  # name of this host; with TLS its certificate has to carry it
    incident_dir: str
    run_name: str
    run_id: str = "none"
    restart: int = 0
    master: str = ""  # MASTER_ADDR:MASTER_PORT, for telling jobs apart
    controller_host: str = "127.0.0.1"  # TTP_ADDR or MASTER_ADDR; not used by a single host
    port: int | None = None  # None: `default_port` with several hosts, no TCP at all with one
    default_port: int = DEFAULT_PORT
    tls_dir: str | None = None
    tls_key_password_file: str | None = None
    tls_decrypt: str | None = None  # "module:function"
    insecure: bool = False
    launcher_pid: int = 0  # process whose end the last words wait for; 0: nobody
    start: float = 60.0  # seconds in which the control processes have to come up
    shutdown: float = 60.0  # seconds that the launcher may take to end its workers
    engine: str = "mindspeed_tft.engine.machine:Engine"
    strategies: tuple[str, ...] = ("dump",)  # what the engine may decide for
    job: dict[str, str] = dataclasses.field(default_factory=dict)  # layout, dtype, ...: for who reads an incident
    log_format: str = "text"  # or "json"
    metrics_port: int | None = None  # None: no metrics are served; 0: any free port
    metrics_host: str = "127.0.0.1"
    otel_endpoint: str | None = None  # URL of an OpenTelemetry collector
    clusterd: str = ""  # URL of the cluster manager that decides; "": nobody is asked
    clusterd_job: str = ""  # by which name it knows this job
    clusterd_taskd: str = ""  # "host:port" where another client of it would listen; "": it is not looked for

    def tcp(self) -> bool:
        return self.nnodes > 1 or self.port is not None

    def tcp_host(self) -> str:
        """A single host with a port of its own stays on loopback, unless it was made safe or said to be."""
        alone = self.nnodes == 1 and self.tls_dir is None and not self.insecure
        return "127.0.0.1" if alone else self.controller_host

    def tcp_port(self) -> int:
        return self.default_port if self.port is None else self.port

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> ControlConfig:
        data = json.loads(text)
        deadlines, strategies = Deadlines(**data["deadlines"]), tuple(data["strategies"])
        return ControlConfig(**{**data, "deadlines": deadlines, "strategies": strategies})

    @staticmethod
    def from_env(
        deadlines: Deadlines, incident_dir: str, env: Mapping[str, str] | None = None, **settings: object
    ) -> ControlConfig:
        """What torchrun put into the environment of its workers; `settings` win."""
        env = os.environ if env is None else env
        world, local = int(env.get("WORLD_SIZE", "1")), int(env.get("LOCAL_WORLD_SIZE", "1"))
        address = env.get("MASTER_ADDR", "127.0.0.1")
        run_id = env.get("TORCHELASTIC_RUN_ID", "none")
        values: dict[str, object] = {
            "deadlines": deadlines,
            "world_size": world,
            "local_world_size": local,
            "node_rank": int(env.get("GROUP_RANK", "0")),
            "nnodes": int(env.get("GROUP_WORLD_SIZE", str(max(1, world // local)))),
            "host": os.uname().nodename,
            "incident_dir": incident_dir,
            "run_name": run_id,
            "run_id": run_id,
            "restart": int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "master": f"{address}:{env.get('MASTER_PORT', '')}",
            "controller_host": env.get("TTP_ADDR") or address,
            "default_port": int(env.get(ENV_PORT) or DEFAULT_PORT),
            "launcher_pid": os.getppid() if "TORCHELASTIC_RUN_ID" in env else 0,
        }
        return ControlConfig(**{**values, **settings})  # type: ignore[arg-type]


def meeting_dir(config: ControlConfig, base: str | None = None) -> Path:
    """The directory in which the ranks of this host, its relay and the controller meet. Same answer for all of them."""
    return private_place(config.run_id, config.master, str(config.restart), str(config.node_rank), base=base)


def private_place(*key: str, base: str | None = None) -> Path:
    """The directory of this user, on this host, for all who know the same key; nobody may have made it yet.

    Where it is there already, nobody looks elsewhere: a better place can appear in the middle of a job, such as
    XDG_RUNTIME_DIR with a login.

    Raises:
        ControlUnavailable: there is none that a Unix socket could be in.
    """
    uid = os.getuid()
    name = hashlib.sha256("\0".join((*key, str(uid))).encode()).hexdigest()[:12]
    candidates = [base] if base else [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    usable = []
    for candidate in candidates:
        path = Path(candidate or ".") / f"tft-{uid}" / name
        fits = len(os.fsencode(path)) + len(_LONGEST_NAME) < _SUN_PATH
        if candidate and fits and os.path.isdir(candidate) and os.access(candidate, os.W_OK | os.X_OK):
            usable.append(path)
    if usable:
        return next((path for path in usable if path.is_dir()), usable[0])
    raise ControlUnavailable(
        f"no directory for the control sockets: none of {[c for c in candidates if c]} is writable and short enough "
        f"for a Unix socket ({_SUN_PATH} bytes); set TMPDIR to a short path"
    )


def make_private(path: Path) -> None:
    """Makes the directory and its parent, and insists that they are ours alone."""
    for directory in (path.parent, path):
        with contextlib.suppress(FileExistsError):  # checked below like one that we made
            directory.mkdir(mode=0o700)
        check_private(directory)


def check_private(directory: Path) -> None:
    """Refuses a directory that another user could have prepared for us or can look into."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ControlRefused(
            f"{directory} is not a private directory of this user (mode {stat.filemode(status.st_mode)}, owner "
            f"{status.st_uid}): somebody else may listen there; remove it, or set TMPDIR to a directory of your own"
        )


def write_private(path: Path, text: str) -> None:
    """A file that only we can read, complete as soon as it has its name."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        file.write(text)
    os.rename(temporary, path)
