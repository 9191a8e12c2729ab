"""TaskD's proxy: in the launcher of each node, it keeps the node's relay.

The relay is started when the node's first rank asks, and ends with the ranks. It listens on a Unix socket: there it
sees who its ranks are and when they die, which a port on loopback would not tell, and no other user of the host comes
in. So no port of the node is opened; the one of the manager is where the relay goes to.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.control import keepers
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.observe import logs
from mindspeed_tft.settings import Refused
from mindspeed_tft.taskd import words

_INIT = "init_taskd_proxy"
_KEYS = (
    "UpstreamAddr", "UpstreamPort", "ListenAddr", "ListenPort", "ServerRank", "ProcessRank", "Framework", "Role",
)  # fmt: skip
_LOOK = 1.0


class Proxy:
    """A keeper of the relay, on a thread of its own."""

    def __init__(self, door: Path, upstream: Mapping[str, Any] | None = None) -> None:
        """`upstream`: `controller_host` and `port` of the controller, where they are not those of the job."""
        self._upstream = upstream or {}
        self._keeper = keepers.Keeper(door, keepers.RELAY, self._adapt)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tft-taskd-proxy", daemon=True)
        os.environ[keepers.ENV_DOOR] = str(self._keeper.path)  # for the ranks that this process starts
        self._thread.start()

    def _adapt(self, config: ControlConfig) -> ControlConfig:
        return dataclasses.replace(config, **self._upstream) if config.nnodes > 1 else config

    def _run(self) -> None:
        while not self._end.is_set():
            config = self._keeper.serve(_LOOK)
            if config is not None:
                logs.say(f"the relay of node {config.node_rank} is here, and goes to {_goal(config)}", sys.stderr)

    def close(self) -> None:
        self._end.set()
        self._keeper.close()
        self._thread.join(2 * _LOOK)
        if os.environ.get(keepers.ENV_DOOR) == str(self._keeper.path):
            del os.environ[keepers.ENV_DOOR]


def _goal(config: ControlConfig) -> str:
    return f"port {config.tcp_port()} of {config.tcp_host()}" if config.nnodes > 1 else "the controller of this host"


_proxy: Proxy | None = None


def init_taskd_proxy(config: dict[str, Any]) -> bool:
    """Keep the relay of this node from now on, on a thread of this process; returns at once.

    Args:
        config: TaskD's keys: `ServerRank` (the number of this node, default RANK or MS_NODE_RANK), `UpstreamAddr` and
            `UpstreamPort` (of the manager; default: as the job says), `ListenAddr` (loopback), `ListenPort`,
            `ProcessRank`, `Framework`, `Role`.

    Raises:
        Refused: a value that cannot be.
        ControlRefused: another proxy of this node runs here.
    """
    global _proxy
    found = words.check_keys(_INIT, config, _KEYS)
    if found.get("Framework", words.PYTORCH) not in (words.PYTORCH, words.MINDSPORE):
        raise Refused(
            f"{_INIT} 'Framework'", f"{found['Framework']!r} is unknown", f"write {words.PYTORCH} or {words.MINDSPORE}"
        )
    if not is_loopback(str(found.get("ListenAddr", words.LOOPBACK))):
        raise Refused(
            f"{_INIT} 'ListenAddr'",
            f"{found['ListenAddr']} can be reached from other hosts, and a relay serves its own host",
            f"leave it out, or write {words.LOOPBACK}",
        )
    words.port(_INIT, "ListenPort", found.get("ListenPort", words.PROXY_PORT))
    if found.get("Role", "Proxy") != "Proxy":
        raise Refused(f"{_INIT} 'Role'", f"{found['Role']!r} is another role", "leave it out")
    if _proxy is not None:
        raise Refused(_INIT, "this process has a proxy already", "call destroy_taskd_proxy first")
    default = os.environ.get("RANK") or os.environ.get("MS_NODE_RANK") or "0"
    node = words.number(_INIT, "ServerRank", found.get("ServerRank", default), 0, 65535)
    _proxy = Proxy(keepers.door(words.job(_INIT, "MINDX_TASK_ID"), keepers.RELAY, node), _upstream(found))
    return True


def keep_for_children(job: str) -> None:
    """As `init_taskd_proxy`, for the ranks that this very process starts, whatever the number of its node will be.

    Raises:
        ControlRefused, ControlUnavailable: there is no private place for the socket.
    """
    global _proxy
    if _proxy is None:
        beside = keepers.door(job, keepers.RELAY, 0)
        _proxy = Proxy(beside.with_name(f"p{os.getpid()}"))
        atexit.register(destroy_taskd_proxy)


def _upstream(found: words.Config) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if found.get("UpstreamAddr"):
        given["controller_host"] = str(found["UpstreamAddr"])
    if "UpstreamPort" in found:
        given["port"] = words.port(_INIT, "UpstreamPort", found["UpstreamPort"])
    return given


def destroy_taskd_proxy() -> bool:
    """Keep the relay no more. One that runs goes on until its ranks have ended. False: there was no proxy."""
    global _proxy
    proxy, _proxy = _proxy, None
    if proxy is None:
        return False
    proxy.close()
    return True
