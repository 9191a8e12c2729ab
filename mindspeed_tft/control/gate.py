"""Keeps strangers at a controller's TCP port from taking its descriptors, which recoveries need: gRPC takes in whoever
connects, as many as come, and has no word for how many of them may stay.

A connection is a stranger until a call on it was let in (`admit`). Only so many strangers stay, each for so long; the
oldest go first, because who belongs here says so within moments. They are cut from outside: gRPC sees an end.
"""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import logging
import os
import resource
import socket
import stat
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

log = logging.getLogger(__name__)

LOOK = 0.5  # seconds
STRANGERS = 256  # that stay, with some for each host of the job, which all come at its start
PER_HOST = 4
PATIENCE = 10.0  # seconds until a stranger goes in any case
_SAY = 60.0  # seconds between two lines of the log
_DESCRIPTORS = 65536

Address = tuple[str, int]


@dataclass
class _Connection:
    peer: Address
    since: float
    cut: bool = False


def raise_limit() -> int:
    """As many descriptors as the system lets this process have, within reason; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft if soft != resource.RLIM_INFINITY else _DESCRIPTORS


class Gate:
    """Looks from a thread of its own: the descriptors of the process are thousands."""

    def __init__(self, hosts: int) -> None:
        self._port = 0
        self._most = STRANGERS + PER_HOST * hosts
        self._known: dict[int, _Connection | None] = {}  # by inode; None: not at our port
        self._admitted: set[Address] = set()
        self._new: collections.deque[Address] = collections.deque()  # since the last look
        self._cut: collections.Counter[str] = collections.Counter()  # since the last line of the log
        self._said = -_SAY
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tft-gate", daemon=True)

    def start(self, address: str) -> None:
        """From now on; `address`: where the controller listens, "" without a TCP port."""
        if address:
            self._port = int(address.rpartition(":")[2])
            self._most = min(self._most, raise_limit() // 2)
            self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def admit(self, peer: str) -> None:
        """A call from this peer, by the name that gRPC has for it, was let in."""
        if (address := address_of(peer)) is not None:
            self._new.append(address)

    def _run(self) -> None:
        while not self._ended.wait(LOOK):
            try:
                self.look(time.monotonic())
            except Exception:
                log.exception("the gate of port %d does not look any more", self._port)
                return

    def look(self, now: float) -> int:
        """One look; how many were cut."""
        fresh = {self._new.popleft() for _ in range(len(self._new))}
        self._admitted |= fresh
        found = dict(self._sockets())
        for inode in [inode for inode in self._known if inode not in found]:
            del self._known[inode]
        for inode, fd in found.items():
            if inode not in self._known:
                peer = self._peer(fd, inode)
                self._known[inode] = None if peer is None else _Connection(peer, now)
        here = [(inode, one) for inode, one in self._known.items() if one is not None]
        self._admitted &= {one.peer for _, one in here} | fresh
        strangers = [(inode, one) for inode, one in here if not one.cut and one.peer not in self._admitted]
        strangers.sort(key=lambda each: each[1].since)
        late = [each for each in strangers if now - each[1].since > PATIENCE]
        surplus = strangers[: max(0, len(strangers) - self._most)]
        cut = late if len(late) > len(surplus) else surplus
        for inode, one in cut:
            self._shut(found[inode], inode)
            one.cut = True
            self._cut[one.peer[0]] += 1
        self._say(now)
        return len(cut)

    def _sockets(self) -> Iterator[tuple[int, int]]:
        """Inode and descriptor of every socket of this process."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.stat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    yield status.st_ino, int(name)

    @contextlib.contextmanager
    def _held(self, fd: int, inode: int) -> Iterator[socket.socket | None]:
        """The socket, if the descriptor is still its: others close and open descriptors all the time."""
        with contextlib.ExitStack() as stack:
            try:
                copy = os.dup(fd)
            except OSError:
                yield None
                return
            if os.fstat(copy).st_ino != inode:
                os.close(copy)
                yield None
                return
            yield stack.enter_context(socket.socket(fileno=copy))

    def _peer(self, fd: int, inode: int) -> Address | None:
        """Who is connected to our port through it; None: nobody, or it is another kind of socket."""
        with self._held(fd, inode) as held:
            if held is None or held.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            try:
                here, peer = held.getsockname(), held.getpeername()
            except OSError:  # it listens, or its peer is gone already
                return None
            return _address(peer[0], peer[1]) if here[1] == self._port else None

    def _shut(self, fd: int, inode: int) -> None:
        with self._held(fd, inode) as held, contextlib.suppress(OSError):  # it is gone already
            if held is not None:
                held.shutdown(socket.SHUT_RDWR)

    def _say(self, now: float) -> None:
        if not self._cut or now - self._said < _SAY:
            return
        self._said = now
        most = ", ".join(f"{host} ({number})" for host, number in self._cut.most_common(5))
        log.warning(
            "cut %d connections to port %d that did not say who they are; they came from %s; let nobody but the hosts "
            "of this job reach that port",
            self._cut.total(),
            self._port,
            most,
        )
        self._cut.clear()


def address_of(peer: str) -> Address | None:
    """What gRPC calls "ipv4:10.0.0.1:4000" or "ipv6:%5Bfe80::1%5D:4000"; None for a Unix socket."""
    kind, _, rest = peer.partition(":")
    host, _, port = urllib.parse.unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _address(host.strip("[]"), int(port))


def _address(host: str, port: int) -> Address:
    found = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return str(found), port
