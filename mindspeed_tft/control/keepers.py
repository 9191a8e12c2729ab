"""Control processes that are not started by a rank: a keeper was there before the ranks, and starts them when asked.

A cluster's scripts start a manager beside the job, and a proxy in each launcher. They know nothing of the job but the
name that the cluster gave it; everything else, the ranks know. So a rank asks the keeper that it finds under that name,
on a Unix socket in a private directory, and where there is none it starts the process itself as ever. What was started
is a process of its own in both cases: it does not end with the keeper.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from mindspeed_tft.control import daemon, host_main, launch
from mindspeed_tft.control.config import (
    ENV_JOB,
    ControlConfig,
    ControlRefused,
    check_private,
    make_private,
    private_place,
    write_private,
)

log = logging.getLogger(__name__)

CONTROLLER, RELAY = "controller_main", "host_main"
ENV_DOOR = "TFT_RELAY_KEEPER"  # set by a keeper of relays for the ranks that its own process starts
_WORDS = {CONTROLLER: "the controller", RELAY: "the relay"}
_PEER = struct.Struct("3i")
_MOST = 1 << 20  # bytes of a request or an answer
_SLOW = 5.0  # seconds for a request to arrive

Adapt = Callable[[ControlConfig], ControlConfig]


def door(job: str, name: str, node: int) -> Path:
    """Where the keeper of a job listens that starts `name` for a node (of the controller: always node 0). The names
    are short: a socket's path must be."""
    return private_place("keeper", job) / (f"r{node}.sock" if name == RELAY else "c.sock")


# ------------------------------------------------------------------------------------------------- a rank


class Asked:
    """A control process that a keeper starts."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock, self._name = sock, name

    def failure(self, end: float) -> tuple[int, str] | None:
        """See `launch.Starting`."""
        with self._sock as sock:
            try:
                answer = _line(sock, end)
            except TimeoutError:
                return daemon.FAILED, f"the keeper of {_WORDS[self._name]} did not answer in time"
            except OSError as error:
                return daemon.FAILED, f"the keeper of {_WORDS[self._name]} was lost ({error})"
        if not answer:
            return daemon.FAILED, f"the keeper of {_WORDS[self._name]} ended before {_WORDS[self._name]} was ready"
        code, text = json.loads(answer)
        return None if code == daemon.OK else (int(code), str(text))


def ask(config: ControlConfig, name: str, args: list[str]) -> Asked | None:
    """Lets the keeper of this job start a control process; None: there is none, so it is for the caller to do."""
    path = _door_of(config, name)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        check_private(path.parent)
        sock.settimeout(_SLOW)
        sock.connect(str(path))
        _check_peer(sock)
        sock.sendall(json.dumps({"name": name, "args": args, "config": config.to_json()}).encode() + b"\n")
    except FileNotFoundError:
        sock.close()
        return None
    except OSError as error:
        sock.close()
        log.warning("%s is started without its keeper: nobody answers at %s (%s)", _WORDS[name], path, error)
        return None
    return Asked(sock, name)


def _door_of(config: ControlConfig, name: str) -> Path:
    if name == RELAY and os.environ.get(ENV_DOOR):
        return Path(os.environ[ENV_DOOR])
    return door(os.environ[ENV_JOB], name, config.node_rank)


# ------------------------------------------------------------------------------------------------- a keeper


class Keeper:
    """Listens at a door, one request at a time."""

    def __init__(self, path: Path, name: str, adapt: Adapt = lambda config: config) -> None:
        """`adapt`: judges the configuration of who asks (`ControlRefused`), and may change it.

        Raises:
            ControlRefused: another keeper listens there, or the directory is not private.
        """
        self.path, self._name, self._adapt = path, name, adapt
        make_private(path.parent)
        if _answers(path):
            raise ControlRefused(
                f"another process of this user keeps {_WORDS[name]} of this job already (at {path}); end that one"
            )
        self._listener = host_main.listen(path)
        self._inode = path.stat().st_ino

    def serve(self, seconds: float) -> ControlConfig | None:
        """Waits so long for one request and answers it: the configuration of what was started, None if nothing was."""
        try:
            self._listener.settimeout(seconds)
            sock, _ = self._listener.accept()
        except OSError:  # nobody came, or whoever came is gone again, or this was closed meanwhile
            return None
        with sock:
            try:
                _check_peer(sock)
                return self._answer(sock, _line(sock, time.monotonic() + _SLOW))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("a request to start %s was not understood: %s", _WORDS[self._name], error)
        return None

    def _answer(self, sock: socket.socket, line: bytes) -> ControlConfig | None:
        if not line:
            return None  # somebody looked whether we live
        request = json.loads(line)
        if request["name"] != self._name:
            raise ValueError(f"{request['name']!r} is not started here")
        args = [str(word) for word in request["args"]]
        try:
            config = self._adapt(ControlConfig.from_json(request["config"]))
        except ControlRefused as error:
            failure: tuple[int, str] | None = (daemon.REFUSED, str(error))
        else:
            failure = _start(config, self._name, args)
        sock.sendall(json.dumps(failure or (daemon.OK, "")).encode() + b"\n")
        if failure is None:
            return config
        log.warning("%s of this job is not started: %s", _WORDS[self._name], failure[1])
        return None

    def close(self) -> None:
        """Nobody is served any more. What was started goes on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in `serve`
        self._listener.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
            self.path.parent.rmdir()  # not empty: another keeper of this job is there


def _start(config: ControlConfig, name: str, args: list[str]) -> tuple[int, str] | None:
    directory = Path(args[args.index("--socket") + 1]).parent
    check_private(directory)
    file = directory / f"config-{secrets.token_hex(6)}.json"
    write_private(file, config.to_json())
    try:
        started = launch.Started(name, [*args, "--config", str(file)])
        return started.failure(time.monotonic() + launch.patience(config))
    finally:
        file.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------- both


def _check_peer(sock: socket.socket) -> None:
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid not in (os.getuid(), os.geteuid()):
        raise PermissionError(f"the process at the other end belongs to user {uid}")


def _line(sock: socket.socket, end: float) -> bytes:
    """One line; nothing if the other end closes before it is complete."""
    data = bytearray()
    while not data.endswith(b"\n"):
        sock.settimeout(max(0.01, end - time.monotonic()))
        more = sock.recv(65536)
        if not more:
            return b""
        data += more
        if len(data) > _MOST:
            raise ValueError(f"more than {_MOST} bytes")
    return bytes(data)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_SLOW)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
