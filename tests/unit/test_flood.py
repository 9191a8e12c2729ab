"""Strangers at the controller's port: garbage, half handshakes, slow ones, huge frames, thousands of connections."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from control_support import HERE, Job, processes, until
from ports import free_port
from test_control_network import two_hosts

from mindspeed_tft.control import gate
from mindspeed_tft.control.authority import Authority
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.control.gate import Gate
from mindspeed_tft.control.native_log import SAY, Digest

STOP, REPLACED = 1.0, 10.0  # seconds: as in the tests without a flood, and what a new host may take to join
IDLE = 1500  # connections that stay open and say nothing
DESCRIPTORS = 512  # that every process may have at first


@pytest.fixture
def flood() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        process.kill()
        process.communicate(timeout=10)


def start_flood(running: list[subprocess.Popen[str]], port: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / "programs" / "flood.py"), str(port), str(seconds), str(IDLE)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    running.append(process)
    assert process.stdout is not None and process.stdout.readline() == "on\n"
    return process


def few_descriptors(*args: object, **options: object) -> subprocess.Popen[bytes]:
    limits = (DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return subprocess.Popen(*args, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits), **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("secured", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_flood_delays_no_recovery(
    job: Job, flood: list[subprocess.Popen[str]], secured: bool, record_property: pytest.RecordProperty
) -> None:
    """A whole host is replaced meanwhile: the survivors are stopped over streams that stand, the new relay has to come
    in past the strangers."""
    dirs: tuple[str | None, str | None] = (None, None)
    if secured:
        authority = Authority.create(job.tmp / "pki")
        dirs = (str(authority.node("hosta", ["127.0.0.1"])), str(authority.node("hostb", ["127.0.0.1"])))
    a, b = two_hosts(job.tmp, tls_dirs=dirs, engine=ControlConfig.engine, strategies=("dump", "recover"))
    options = {"step": 7, "holds": ["tp0-pp0/dense/0"], "popen": few_descriptors}
    ranks = job.start(a, **options) + job.start(b, first=2, **options)
    assert all(rank.wait("started")["ok"] for rank in ranks), job.text()
    leader = job.leader()
    quiet = len(os.listdir(f"/proc/{leader}/fd"))
    attack = start_flood(flood, a.port or 0, 30.0)
    most = len(os.listdir(f"/proc/{leader}/fd"))
    begin = time.monotonic()
    for rank in ranks[2:]:
        rank.kill()
    stop = max(float(str(rank.wait("stop")["at"])) for rank in ranks[:2]) - begin
    for rank in ranks[2:]:
        rank.process.wait(10)
    until(lambda: not processes(job.directories()[1], "host_main"), what="end of the relay")
    came = time.monotonic()
    newcomers = job.start(b, first=2, **options)
    for rank in newcomers:
        rank.wait("goodbye", 20)
    replaced = time.monotonic() - came
    most = max(most, len(os.listdir(f"/proc/{leader}/fd")))
    assert attack.poll() is None, "it was over before"
    record_property("stop_seconds", stop)
    record_property("replaced_seconds", replaced)
    assert stop < STOP
    assert replaced < REPLACED
    assert quiet + 50 < most < quiet + gate.STRANGERS + 3 * DESCRIPTORS, "the flood came, and was held"
    assert [rank.process.wait(20) for rank in job.ranks.values()] == [0, 0, 0, 0], job.text()
    job.end()
    assert [incident["outcome"] for incident in job.incidents()] == ["rebooted"]
    assert len(job.text()) < 20_000, "nor did it fill the log"
    assert "that did not say who they are; they came from 127.0.0.1" in job.text()


# ---------------------------------------------------------------------------------------------- the gate


class Port:
    """A listening socket of this process, and who connected."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", free_port()))
        self.number = self.listener.getsockname()[1]
        self.pairs: list[tuple[socket.socket, socket.socket]] = []

    def connect(self, count: int) -> list[str]:
        """Names of the new peers, as gRPC has them."""
        names = []
        for _ in range(count):
            client = socket.create_connection(("127.0.0.1", self.number))
            self.pairs.append((client, self.listener.accept()[0]))
            names.append("ipv4:{}:{}".format(*client.getsockname()))
        return names

    def alive(self) -> list[int]:
        """Which of the connections stand."""
        found = []
        for index, (client, _) in enumerate(self.pairs):
            client.setblocking(False)
            try:
                client.recv(1)
            except BlockingIOError:
                found.append(index)
        return found

    def close(self) -> None:
        for pair in self.pairs:
            for each in pair:
                each.close()
        self.listener.close()


@pytest.fixture
def port() -> Iterator[Port]:
    made = Port()
    yield made
    made.close()


def at(port: Port, most: int) -> Gate:
    made = Gate(0)
    made._port, made._most = port.number, most
    return made


def test_the_oldest_strangers_go_first(port: Port) -> None:
    here = at(port, 3)
    friends = port.connect(2)
    assert here.look(0.0) == 0
    for name in friends:
        here.admit(name)
    port.connect(3)
    assert here.look(1.0) == 0
    port.connect(2)
    assert here.look(2.0) == 2
    assert port.alive() == [0, 1, 4, 5, 6]
    assert here.look(2.5) == 0


def test_a_stranger_has_not_for_ever(port: Port) -> None:
    here = at(port, 3)
    (friend, _) = port.connect(2)
    here.admit(friend)
    assert here.look(0.0) == 0 and here.look(gate.PATIENCE) == 0
    assert here.look(gate.PATIENCE + 1) == 1
    assert port.alive() == [0]


def test_who_was_let_in_is_forgotten_with_his_connection(port: Port) -> None:
    here = at(port, 0)
    (friend,) = port.connect(1)
    here.admit(friend)
    assert here.look(0.0) == 0 and here._admitted
    for each in port.pairs.pop():
        each.close()
    here.look(1.0)
    here.look(2.0)
    assert not here._admitted and not any(here._known.values())


def test_other_sockets_are_left_alone(port: Port) -> None:
    other = Port()
    try:
        other.connect(2)
        port.connect(2)
        assert at(port, 0).look(0.0) == 2
        assert (port.alive(), other.alive()) == ([], [0, 1])
    finally:
        other.close()


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("ipv4:10.0.0.1:4000", ("10.0.0.1", 4000)),
        ("ipv6:%5B::1%5D:4000", ("::1", 4000)),
        ("ipv6:[fe80::1%25eth0]:7", ("fe80::1", 7)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:4000", ("10.0.0.1", 4000)),
        ("unix:", None),
        ("unix:/run/x.sock", None),
    ],
)
def test_how_grpc_names_a_peer(name: str, address: tuple[str, int] | None) -> None:
    assert gate.address_of(name) == address


def test_grpc_s_own_log_is_counted() -> None:
    digest = Digest()
    line = "I1130 19:41:38.632432   13070 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL: {}"
    expired = line.format(
        "error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate has expired"
    )
    (first,) = digest.line(expired, 0.0)
    assert first.startswith("refused a connection ") and "`tftctl certs rotate`" in first
    assert not any(digest.line(expired, at) for at in range(1, 50))
    assert "refused 50 connections " in digest.line(expired, SAY)[0]
    (garbage,) = digest.line(line.format("error:1000009c:SSL routines:OPENSSL_internal:HTTP_REQUEST: x"), 1.0)
    assert "not TLS" in garbage
    assert digest.line("I1130 19:41:38.632432 1 chttp2.cc:1] something that happens", 0.0) == []
    error = "E1130 19:41:38.632432 1 tcp.cc:{}] no descriptors left"
    assert digest.line(error.format(1), 0.0) == ["gRPC: no descriptors left"]
    assert digest.line(error.format(1), 1.0) == []
