"""torch's TCPStore: connections to the job's store that end when its host is silent, and that are made anew.

torch waits for an answer as long as the connection stands, and to a host that lost its power it stands for a quarter of
an hour. The kernel is told to give up earlier.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mindspeed_tft.agent.places import JobStore
from mindspeed_tft.groups import sockets
from mindspeed_tft.patches.groups import HIGH_AVAILABILITY, MASTER
from mindspeed_tft.registry import REGISTRY

log = logging.getLogger(__name__)

PAUSE = 0.2  # seconds between two attempts to connect
ATTEMPT = 3.0  # seconds for one of them: a host that is starting does not answer the first packet


class StoreUnreachable(RuntimeError):
    """Nobody serves the job's store at its address."""


def connect(host: str, port: int, seconds: float, *, patience: float, nodes: int | None = None) -> Any:
    """A new connection to the store at an address, whose name is resolved again.

    Args:
        seconds: for all attempts to connect; operations that wait for a key are given the same time, or `patience`.
        patience: seconds after which an operation fails when the host does not answer any more.
        nodes: count as one of so many clients for which a static rendezvous waits.

    Raises:
        StoreUnreachable: there was nobody in time.
    """
    from torch._C._distributed_c10d import TCPStore

    end = time.monotonic() + seconds
    _await_listener(host, port, end)
    left = timedelta(seconds=max(1.0, end - time.monotonic()))
    before = sockets.tcp_sockets()
    try:
        store = TCPStore(host, port, nodes, False, left, wait_for_workers=nodes is not None)
    except RuntimeError as exc:
        raise StoreUnreachable(f"the job's store at {host}:{port} does not answer: {exc}") from exc
    limit_silence(sockets.tcp_sockets() - before, port, patience)
    store.set_timeout(timedelta(seconds=max(seconds, patience)))  # torch's `get` always waits: the host may be busy
    return store


def _await_listener(host: str, port: int, end: float) -> None:
    """torch's own attempts are loud, and wait for the kernel."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.01, min(ATTEMPT, end - time.monotonic()))):
                return
        except OSError as exc:
            if time.monotonic() + PAUSE > end:
                raise StoreUnreachable(f"nobody serves the job's store at {host}:{port}: {exc}") from exc
        time.sleep(PAUSE)


def limit_silence(among: frozenset[sockets.SocketRef], port: int, seconds: float) -> int:
    """Let those of these sockets that are connected to `port` fail when the other side is silent for so long.

    Returns their number.
    """
    count = 0
    for ref in among:
        try:
            sock = socket.socket(fileno=os.dup(ref.fd))
        except OSError:
            continue  # closed since
        try:
            if sock.getpeername()[1] != port:
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 3)))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 3)))
            count += 1
        except OSError:
            continue  # listens, or is not connected any more
        finally:
            sock.close()
    return count


def root(store: Any) -> Any | None:
    """The TCPStore below all prefixes; None: the job meets in a store of another kind."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def job_store(place: JobStore, timeout: timedelta) -> Any:
    """Where the workers of a job meet, over a new connection. StoreUnreachable if nobody serves it within `timeout`."""
    from torch._C._distributed_c10d import PrefixStore

    connection = connect(place.host, place.port, timeout.total_seconds(), patience=place.patience)
    return PrefixStore(place.prefix, connection)


@REGISTRY.wrap("torch.distributed.rendezvous:_create_c10d_store", group=HIGH_AVAILABILITY, needs=MASTER)
def create_store(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The ranks of a job whose launcher can replace nodes meet where the launcher says, each generation by itself.

    torch's own place lives in the launcher of node 0, and under c10d moves with it.
    """
    place = JobStore.from_env(os.environ)
    if place is None:
        return wrapped(*args, **kwargs)
    return job_store(place, _timeout_of(*args, **kwargs))


def _timeout_of(
    hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
) -> timedelta:
    """The one argument of torch's function that we need."""
    return timeout
