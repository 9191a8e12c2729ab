"""What a rank calls before training: its host's relay, and on node 0 the controller, are there when this returns."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Protocol

from mindspeed_tft.control import candidates, daemon
from mindspeed_tft.control.config import (
    ENV_JOB,
    RELAY_SOCKET,
    ControlConfig,
    ControlRefused,
    ControlUnavailable,
    check_private,
    make_private,
    meeting_dir,
    write_private,
)

_ROOT = Path(__file__).resolve().parents[2]


def ensure_host(config: ControlConfig, rank: int, local_rank: int) -> Path:
    """Path of the relay's socket, once somebody listens there.

    Local rank 0 starts the relay of its host, global rank 0 the controller too; the other ranks wait.

    Raises:
        ControlRefused: a setting has to be corrected.
        ControlUnavailable: something did not come up in time; training can go on, unprotected.
    """
    directory = meeting_dir(config)
    if local_rank == 0:
        return start_host(config, directory, controller=rank == 0)
    return wait_for_relay(directory, config.start)


def meeting_place(config: ControlConfig) -> Path:
    """Where this host's relay will listen once it is there. Where it cannot have a place: a path where nobody does."""
    try:
        return meeting_dir(config) / RELAY_SOCKET
    except ControlUnavailable:
        return Path(os.devnull)


def join_host(config: ControlConfig, local_rank: int) -> Path:
    """As `ensure_host`, for a process that comes later: the relay is there, unless this whole host is new to the job,
    and the controller runs somewhere in any case.

    Raises:
        ControlRefused, ControlUnavailable: as `ensure_host`.
    """
    directory = meeting_dir(config)
    try:
        return wait_for_relay(directory, config.start if local_rank else 1.0)
    except ControlUnavailable:
        if local_rank:
            raise
    return start_host(config, directory, controller=False, begins=False)


def start_host(config: ControlConfig, directory: Path, controller: bool, begins: bool = True) -> Path:
    """Starts the relay and, if wanted, the first controller of this job; the relay starts what else is needed here.

    Not `begins`: the job runs already, and controllers of this host may have outlived the relay.
    """
    make_private(directory)
    _sweep(directory, set() if begins else candidates.of_the_living(directory))
    nonce = secrets.token_hex(6)
    file = directory / f"config-{nonce}.json"
    write_private(file, config.to_json())
    socket_path, unix = directory / RELAY_SOCKET, directory / f"ctl-{nonce}.sock"
    names: dict[str, list[str]] = {}
    if controller:
        names["controller_main"] = ["--socket", str(unix), "--starting"]
    names["host_main"] = ["--socket", str(socket_path), *(["--starting"] if controller else [])]
    _bring_up(config, file, names)
    return socket_path


def reviver(config: ControlConfig, local_rank: int) -> Callable[[], None] | None:
    """What the processor of local rank 0 calls to start its host's relay again; nothing for the other ranks."""
    if local_rank != 0:
        return None
    directory = meeting_dir(config)

    def revive() -> None:
        check_private(directory)
        file = directory / f"config-{secrets.token_hex(6)}.json"
        write_private(file, config.to_json())
        _bring_up(config, file, {"host_main": ["--socket", str(directory / RELAY_SOCKET)]})

    return revive


def _bring_up(config: ControlConfig, file: Path, names: dict[str, list[str]]) -> None:
    started = [_start(config, file, name, args) for name, args in names.items()]
    end = time.monotonic() + patience(config)
    failures = [failure for one in started if (failure := one.failure(end))]
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
    if failures:
        with contextlib.suppress(OSError):  # not empty: somebody is there, and will remove it
            file.parent.rmdir()
    for code, text in failures:
        raise ControlRefused(text) if code == daemon.REFUSED else ControlUnavailable(text)


def wait_for_relay(directory: Path, timeout: float) -> Path:
    """Waits until a relay takes connections in the directory."""
    path = directory / RELAY_SOCKET
    end = time.monotonic() + timeout
    reason = "nobody made the socket"
    while time.monotonic() < end:
        try:
            check_private(directory)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(max(0.01, end - time.monotonic()))
                probe.connect(str(path))
            return path
        except (FileNotFoundError, ConnectionRefusedError) as error:
            reason = str(error)
        except OSError as error:
            raise ControlUnavailable(f"the relay at {path} cannot be reached: {error}") from error
        time.sleep(0.05)
    raise ControlUnavailable(f"no relay at {path} within {timeout:.0f} s ({reason}): did local rank 0 start?")


def environment() -> dict[str, str]:
    """The environment of a control process."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env["PYTHONSAFEPATH"] = "1"  # the training's working directory must not shadow our modules
    return env


def command(name: str, args: list[str]) -> list[str]:
    """The command of a control process."""
    return [sys.executable, "-m", f"mindspeed_tft.control.{name}", *args]


def patience(config: ControlConfig) -> float:
    """Seconds for a control process to come up: it gives up itself before that, and says why."""
    return config.start + 5


class Starting(Protocol):
    """A control process that comes up."""

    def failure(self, end: float) -> tuple[int, str] | None:
        """Waits for it, until `end` of the monotonic clock at most: an exit status and the reason, None when it is
        ready."""
        ...


def _start(config: ControlConfig, file: Path, name: str, args: list[str]) -> Starting:
    if os.environ.get(ENV_JOB):
        from mindspeed_tft.control import keepers  # of no use in a job that no cluster has given a name

        kept = keepers.ask(config, name, args)
        if kept is not None:
            return kept
    return Started(name, [*args, "--config", str(file)])


class Started:
    """A control process that leaves this one, once it is ready."""

    def __init__(self, name: str, args: list[str]) -> None:
        self._name = name
        # A session of its own: the launcher ends the worker's process group, and this has to outlive it.
        self._process = subprocess.Popen(
            command(name, ["--detach", *args]),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            close_fds=True,
        )

    def failure(self, end: float) -> tuple[int, str] | None:
        process = self._process
        try:
            out, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # the process that it forked ends too: it finds nobody to tell that it is ready
            process.communicate(timeout=5)
            return daemon.FAILED, f"{self._name} did not answer in time"
        if process.returncode == daemon.OK:
            return None
        text = out.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
        return process.returncode, text[-1]


def _sweep(directory: Path, kept: Container[str]) -> None:
    """Removes what a job of the same name left when it crashed. Whoever still lives has its files open."""
    for path in directory.iterdir():
        if path.name != RELAY_SOCKET and path.name not in kept:  # the first is replaced atomically by the relay itself
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
