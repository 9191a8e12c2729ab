"""How the hosts find each other: those that a name leads to, or all who come to the address of the first.

The meeting point is the address at which the first controller of the job will listen, so that who can meet can be
protected.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspeed_tft.control.config import ControlRefused
from mindspeed_tft.doctor import names, probe
from mindspeed_tft.doctor.channel import Channel, ChannelError
from mindspeed_tft.doctor.findings import Finding, Level
from mindspeed_tft.doctor.job import Job
from mindspeed_tft.doctor.peer import SEND, Peer, greet
from mindspeed_tft.doctor.probe import Failed, Outcome, Secure, Target, Why

_PAUSE = 0.2  # seconds from one try to reach the meeting point to the next
_STRANGERS = 8  # of those who came and did not belong here, so many are named
# What more patience may cure: the first host is not there yet, its name is not either.
_PASSING = (Why.REFUSED, Why.NAME, Why.UNREACHABLE, Why.FILTERED, Why.BROKEN)

Say = Callable[[str], None]


@dataclass
class Host:
    """A host that answers."""

    name: str  # in the report
    channel: Channel
    said: Mapping[str, Any]  # its greeting
    asked: str | None = None  # the name or address that the user gave for it; None: it came to us, or is this one
    here: bool = False  # it is this very host, where no doctor has a port


@dataclass
class Missing:
    """A host that does not answer."""

    name: str
    why: Outcome
    target: Target | None = None  # where others may knock


@dataclass
class Met:
    hosts: list[Host] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@contextlib.contextmanager
def this_host(job: Job, contexts: Secure | None, name: str) -> Iterator[Host]:
    """This very host, as one of those that answer."""
    ours, theirs = socket.socketpair()
    peer = Peer(job, contexts)

    def serve() -> None:
        with Channel(theirs, "who asks") as channel, contextlib.suppress(ChannelError):
            greet(channel, job, 0, SEND)
            peer.serve(channel)

    thread = threading.Thread(target=serve, name="doctor-peer", daemon=True)
    thread.start()
    with Channel(ours, name) as channel:
        yield Host(name, channel, greet(channel, job, None, SEND), here=True)
    thread.join(job.timeout)


def visit(job: Job, contexts: Secure | None, hosts: Sequence[str], say: Say) -> Met:
    """Go to `tftctl doctor serve` on each of these hosts (HOST or HOST:PORT)."""
    met = Met()

    def one(text: str) -> Host | Missing:
        address, port = split(text, job.controller_port)
        target = Target(text, address, port, what="the doctor's port")
        try:
            connection = probe.connect(target, contexts, job.timeout)
            channel = Channel(connection, text)
            said = greet(channel, job, None, 2 * job.timeout)
        except Failed as failure:
            return Missing(text, Outcome(failure.why, str(failure)), target)
        except ChannelError as error:
            return Missing(text, Outcome(Why.STRANGER, str(error)), target)
        return Host(text, channel, said, asked=address)

    say(f"going to {len(hosts)} hosts")
    with concurrent.futures.ThreadPoolExecutor(probe.AT_ONCE) as pool:
        for found in pool.map(one, hosts):
            (met.hosts if isinstance(found, Host) else met.missing).append(found)  # type: ignore[arg-type]
    return met


def split(text: str, port: int) -> tuple[str, int]:
    """HOST or HOST:PORT; an address of IPv6 with a port is written in brackets.

    Raises:
        ValueError: that is no port.
    """
    host, colon, number = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        return text.strip("[]"), port
    if not number.isdigit() or not 0 < int(number) < 65536:
        raise ValueError(f"{text}: {number!r} is no port")
    return host.strip("[]"), int(number)


def is_here(host: str) -> bool:
    """Whether an address or name is this host's."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe_:
            probe_.bind(address)
        return True
    except OSError:
        return False


def gather(job: Job, contexts: Secure | None, point: tuple[str, int], wait: float, say: Say) -> Met:
    """Wait at the meeting point until all other hosts of the job have come.

    Args:
        wait: seconds.

    Raises:
        ControlRefused: the meeting point cannot be had.
    """
    host, port = point
    try:
        listener = probe.listen(host, port)
    except OSError as error:
        raise ControlRefused(_why_not_here(host, port, error)) from None
    met = Met()
    strangers: list[str] = []
    numbers: set[object] = set()
    end = time.monotonic() + wait
    say(f"waiting at {host}:{port} for {job.nodes - 1} more hosts")
    with listener, concurrent.futures.ThreadPoolExecutor(probe.AT_ONCE) as pool:
        coming: set[concurrent.futures.Future[Host | str]] = set()
        while len(met.hosts) < job.nodes - 1 and time.monotonic() < end:
            listener.settimeout(min(_PAUSE, max(0.01, end - time.monotonic())))
            with contextlib.suppress(TimeoutError):
                connection, address = listener.accept()
                coming.add(pool.submit(_receive, connection, str(address[0]), job, contexts))
            done = {future for future in coming if future.done()}
            coming -= done
            for future in done:
                found = future.result()
                if isinstance(found, str):
                    strangers.append(found)
                elif found.said["node"] in numbers and found.said["node"] is not None:
                    met.findings.append(
                        Finding(
                            "hosts",
                            Level.RED,
                            f"{found.name} came as node {found.said['node']}, as another did",
                            "give each host a --node-rank of its own",
                        )
                    )
                else:
                    numbers.add(found.said["node"])
                    met.hosts.append(found)
                    say(f"{found.name} has come ({len(met.hosts)} of {job.nodes - 1})")
    met.hosts.sort(key=lambda host: (host.said["node"] is None, host.said["node"], host.name))
    unique(met.hosts)
    _say_missing(met, numbers, strangers, job, wait)
    return met


def unique(hosts: list[Host]) -> None:
    """Hosts of one name (several "nodes" of one machine) get their numbers."""
    counts: dict[str, int] = {}
    for host in hosts:
        counts[host.name] = counts.get(host.name, 0) + 1
    for number, host in enumerate(hosts, 1):
        if counts[host.name] > 1:
            host.name = f"{host.name}#{host.said['node'] if host.said['node'] is not None else number}"


def _say_missing(met: Met, numbers: set[object], strangers: list[str], job: Job, wait: float) -> None:
    lacking = job.nodes - 1 - len(met.hosts)
    if lacking > 0:
        nodes = [node for node in range(1, job.nodes) if node not in numbers]
        named = f" (node {', '.join(map(str, nodes[:_STRANGERS]))})" if len(nodes) == lacking else ""
        met.findings.append(
            Finding(
                "hosts",
                Level.RED,
                f"{lacking} of {job.nodes} hosts did not come within {wait:g} s{named}",
                "look at what the doctor says there: it names why it cannot come; start it on all hosts at the same"
                " time, or give more --wait",
            )
        )
    for text in list(dict.fromkeys(strangers))[:_STRANGERS]:
        # Who was late, and came again in time, is no reason to stop.
        level = Level.RED if lacking > 0 else Level.YELLOW
        met.findings.append(Finding("hosts", level, text, "look at the certificates and versions there"))


def _receive(connection: socket.socket, address: str, job: Job, contexts: Secure | None) -> Host | str:
    """A host that has come; or, in words, why that was none."""
    target = Target(address, address, 0)
    try:
        connection.settimeout(job.timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = probe.let_in(connection, contexts)
        channel = Channel(connection, address)
        said = greet(channel, job, 0, job.timeout)
    except OSError as error:
        connection.close()
        _, text = probe.explain(error, target, job.timeout)
        return f"{address} came and was not let in: {text.replace(f'{address}:0', 'it')}"
    except ChannelError as error:
        connection.close()
        return f"{address} came and said nothing sensible: {error}"
    return Host(str(said["host"]), channel, said)


def _why_not_here(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"--rendezvous: {host} has no address here ({str(error.strerror).lower()}); name the first host"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--rendezvous: {host} is no address of this host; name the host of node 0, or give --node-rank here"
    taken = names.explain_taken(port, error)
    return f"--tft-controller-port: port {port} is taken ({taken}); stop what listens there, or choose another port"


def come(
    job: Job, contexts: Secure | None, point: tuple[str, int], node: int | None, wait: float, say: Say
) -> tuple[Channel, Mapping[str, Any]]:
    """Go to the meeting point, and try again for `wait` seconds where that may help.

    Raises:
        Failed: with the last reason.
    """
    host, port = point
    target, end = Target(host, host, port, names=(host,), what="the meeting point"), time.monotonic() + wait
    say(f"going to {host}:{port}")
    while True:
        try:
            channel = Channel(probe.connect(target, contexts, job.timeout), f"{host}:{port}")
            return channel, greet(channel, job, node, max(job.timeout, 5.0))
        except Failed as failure:
            if failure.why not in _PASSING or time.monotonic() > end:
                raise
        except ChannelError as error:
            if time.monotonic() > end:
                raise Failed(Why.STRANGER, str(error)) from None
        time.sleep(_PAUSE)
