"""Where the candidates of a job are, as far as this host knows: files in its meeting directory.

`controller-<index>.json` is written by each controller of this host, `uplink.json` by the relay: what it accepted last,
for the relay and the controllers that are started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from mindspeed_tft.control import leadership
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.config import RELAY_SOCKET, ControlConfig, write_private

_UPLINK = "uplink.json"


class RelayIs(Enum):
    """What became of the relay of this host."""

    ALIVE = "alive"
    DEAD = "dead"  # a rank starts it again
    ENDED = "ended"


@dataclass(frozen=True)
class RoleFile:
    """What a controller says of itself to its host."""

    pid: int
    index: int
    term: int  # the latest that it knows of
    leader: bool  # it leads this term
    ready: bool  # it leads, or was told by the leader of this term what a successor has to know
    unix: str  # path of its socket
    address: str  # for other hosts: "host:port"; "" without TCP
    run: str = ""  # of the job, as `restart` and `master` (MASTER_ADDR:MASTER_PORT): for operators who look for it
    master: str = ""
    restart: int = 0

    def write(self, directory: Path) -> None:
        write_private(_role_path(directory, self.index), json.dumps(asdict(self)))


@dataclass(frozen=True)
class Route:
    """How to reach a candidate."""

    index: int
    address: str  # "unix:/path" or "host:port"
    name: str = ""  # that its certificate carries, where that is not the host of the address


class Candidates:
    """The candidates as one process of this host knows them."""

    def __init__(self, config: ControlConfig, directory: Path) -> None:
        self._config, self._directory = config, directory
        self._table: dict[int, wire.Candidate] = {}
        if config.nnodes > 1:
            first = wire.Candidate(index=0, address=f"{config.tcp_host()}:{config.tcp_port()}")
            self._table[0] = first
        self.term, self.lease = 0, ""
        self._kept = True
        self._read()

    def here(self) -> list[int]:
        """Those that run on this host, or should."""
        if self._config.nnodes == 1:
            return list(range(leadership.count(1)))
        node = self._config.node_rank
        return [node] if node < leadership.count(self._config.nnodes) else []

    def role(self, index: int) -> RoleFile | None:
        """What a controller of this host said of itself; None before it was ready and after its end."""
        return read_role(_role_path(self._directory, index))

    def announced(self) -> list[wire.Candidate]:
        """Those of this host, for the others."""
        found = []
        for role in filter(None, map(self.role, self.here())):
            address = role.address if self._config.nnodes > 1 else f"unix:{role.unix}"
            found.append(wire.Candidate(index=role.index, host=self._config.host, address=address))
        return found

    def learn(self, candidates: list[wire.Candidate]) -> bool:
        """Takes over what is new; True when something was. The first one of several hosts is where the user says."""
        before = dict(self._table)
        first = 0 if self._config.nnodes == 1 else 1
        for candidate in candidates:
            if first <= candidate.index < leadership.count(self._config.nnodes) and candidate.address:
                self._table[candidate.index] = candidate
        return before != self._table

    def table(self) -> wire.Table:
        return wire.Table(candidates=[self._table[index] for index in sorted(self._table)])

    def routes(self) -> list[Route]:
        """All that can be tried, the lowest first. Those of this host by their Unix socket."""
        found: dict[int, Route] = {}
        for index, candidate in self._table.items():
            if index not in self.here():
                found[index] = self.route(candidate)
        for index in self.here():
            role = self.role(index)
            if role is not None:
                found[index] = Route(index, f"unix:{role.unix}")
        return [found[index] for index in sorted(found)]

    @staticmethod
    def route(candidate: wire.Candidate) -> Route:
        """The way to a candidate; for the first one the certificate has to fit the address that the user gave."""
        return Route(candidate.index, candidate.address, candidate.host if candidate.index else "")

    def save(self) -> None:
        """Keeps what was learned, for whoever is started again on this host."""
        if not self._kept:
            return
        known = [[c.index, c.host, c.address] for c in self.table().candidates]
        text = json.dumps({"term": self.term, "lease": self.lease, "table": known})
        write_private(self._directory / _UPLINK, text)

    def forget(self) -> None:
        """At the orderly end of a relay. What it hears from now on, in its last moments, is not kept."""
        self._kept = False
        (self._directory / _UPLINK).unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            known = json.loads((self._directory / _UPLINK).read_text())
        except FileNotFoundError:
            return
        self.term, self.lease = known["term"], known["lease"]
        self.learn([wire.Candidate(index=i, host=host, address=address) for i, host, address in known["table"]])


def read_role(path: Path) -> RoleFile | None:
    """What is in a role file; None where its controller has ended."""
    try:
        return RoleFile(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def _role_path(directory: Path, index: int) -> Path:
    return directory / f"controller-{index}.json"


def lives(role: RoleFile, directory: Path) -> bool:
    """Whether the process of a role file runs: that very one, not another with its number."""
    try:
        words = Path(f"/proc/{role.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(word.startswith(os.fsencode(directory)) for word in words)


def of_the_living(directory: Path) -> set[str]:
    """Names of the files by which controllers of this host that live are found, and of what its relay had accepted
    while they led: without it a term could be given twice."""
    found: set[str] = set()
    for path in directory.glob("controller-*.json"):
        role = read_role(path)
        if role is not None and lives(role, directory):
            found |= {path.name, Path(role.unix).name, _UPLINK}
    return found


def relay_of(directory: Path) -> RelayIs:
    """By its socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.1)
        try:
            probe.connect(str(directory / RELAY_SOCKET))
        except FileNotFoundError:
            return RelayIs.ENDED
        except ConnectionRefusedError:
            return RelayIs.DEAD
        except OSError:
            return RelayIs.ALIVE  # it is there, and slow
    return RelayIs.ALIVE


def forget(directory: Path, index: int) -> None:
    """At the orderly end of a controller."""
    _role_path(directory, index).unlink(missing_ok=True)


def leave(directory: Path) -> None:
    """Removes what processes that were killed left in the meeting directory, and the directory with the last of all."""
    with contextlib.suppress(OSError):
        for path in directory.glob("controller-*.json"):
            role = RoleFile(**json.loads(path.read_text()))
            if not lives(role, directory):
                Path(role.unix).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
        if {path.name for path in directory.iterdir()} == {_UPLINK}:  # kept for a relay that did not come
            (directory / _UPLINK).unlink(missing_ok=True)
        directory.rmdir()  # not empty: somebody else is still there, and will do it
