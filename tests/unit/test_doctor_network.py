"""`tftctl doctor` over several hosts, each a network namespace: what blocks a way is named, with both of its ends."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import netns
import pytest

from mindspeed_tft.control.authority import Authority

pytestmark = pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "-")
DOCTOR = (sys.executable, "-m", "mindspeed_tft.cli.main", "doctor")
NAMES = "node0,node1,node2"
QUICK = ("--timeout", "0.5")


@pytest.fixture
def network() -> Iterator[netns.Network]:
    with tempfile.TemporaryDirectory(prefix="tft-net-") as folder, netns.Network(3, Path(folder)) as made:
        yield made


class Doctors:
    """Doctors that answer on node1 and node2, with certificates, and one on node0 that asks them."""

    def __init__(self, network: netns.Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.authority = Authority.create(folder / "authority")
        for host in network:
            self.authority.node(host.name, [host.address])
        self.answering: dict[int, subprocess.Popen[str]] = {}

    def tls(self, host: netns.Host) -> tuple[str, str]:
        return "--tls-dir", str(self.folder / "authority" / host.name)

    def answer(self, index: int, *options: str) -> None:
        """Start one that answers, and wait until it does."""
        self.start(index, *options)
        self.wait(index)

    def start(self, index: int, *options: str) -> None:
        host = self.network[index]
        if index in self.answering:
            self.answering[index].kill()
            self.answering[index].wait()
        command = [*DOCTOR, "serve", *QUICK, *(options or self.tls(host))]
        self.answering[index] = host.start(command, stderr=subprocess.PIPE, text=True)

    def wait(self, index: int) -> None:
        stream = self.answering[index].stderr
        assert stream is not None
        said = stream.readline()
        while "answers at port" not in said:
            assert said, f"the doctor on node{index} has ended"
            said = stream.readline()

    def ask(self, *words: str) -> dict[str, Any]:
        """The report of one that asks."""
        host = self.network[0]
        process = host.start(
            [*DOCTOR, "--hosts", NAMES, "--json", *QUICK, *self.tls(host), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out, said = process.communicate(timeout=60)
        assert process.returncode in (0, 1), said
        found: dict[str, Any] = json.loads(out)
        assert (process.returncode == 1) == (found["verdict"] == "red"), out
        return found


@pytest.fixture
def doctors(network: netns.Network, tmp_path: Path) -> Doctors:
    made = Doctors(network, tmp_path)
    made.start(1)
    made.start(2)
    made.wait(1)
    made.wait(2)
    return made


def red(report: dict[str, Any]) -> list[str]:
    """All that is wrong, in words."""
    return [
        f"{f['host']}: {f['check']}: {f['text']} ({f['remedy']})" for f in report["findings"] if f["level"] == "red"
    ]


def ways(report: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(way["from"], way["to"]): way["why"] for way in report["ways"]}


def test_what_blocks_a_way_is_named(network: netns.Network, doctors: Doctors) -> None:
    flags = ("--", "--enable-high-availability", "--save", str(doctors.folder / "save"))
    report = doctors.ask(*flags)
    assert not red(report), red(report)
    assert len(report["ways"]) == report["ways_tried"] == 8  # 6 pairs, and the rendezvous of the first from two
    assert set(ways(report).values()) == {"ok"}
    assert {name: abs(clock["seconds"]) < 0.5 for name, clock in report["clocks"].items()} == dict.fromkeys(
        ["node0", "node1", "node2"], True
    )
    ports = [f["text"] for f in report["findings"] if f["check"] == "ports"]
    assert ports == ["--tft-controller-port: port 29654 is free", "--master-port: port 29500 is free"]
    assert any(f["check"] == "shared" and f["level"] == "green" for f in report["findings"])

    # Packets from node1 to node2 are lost; a listener has the port of torchrun's rendezvous; node2 lives in the past.
    network[1].run("ip neighbour replace 10.77.0.3 lladdr 02:00:00:00:00:77 nud permanent dev eth0".split())
    listener = network[0].start(
        [
            sys.executable,
            "-c",
            "import socket; s = socket.create_server(('', 29500)); print(1, flush=True); s.accept()",
        ],
        stdout=subprocess.PIPE,
    )
    assert listener.stdout is not None and listener.stdout.readline()
    doctors.answer(2, *doctors.tls(network[2]), "--pretend-clock", "-90")
    report = doctors.ask(*flags)
    lost = {("node1", "node2"), ("node2", "node1")}  # also what node1 would answer
    assert {pair: why for pair, why in ways(report).items() if why != "ok"} == dict.fromkeys(lost, "timeout")
    wrong = "\n".join(red(report))
    assert "node1 -> node2, by name: timeout: node2:" in wrong and "packets are filtered or lost" in wrong
    assert "open TCP from node1 to node2" in wrong
    assert f"--master-port: port 29500 is taken (by process {listener.pid}, python" in wrong
    assert "is ahead of node2 by 90" in wrong and "NTP" in wrong
    assert len(red(report)) == 4


@pytest.mark.full
def test_certificates_that_do_not_fit(network: netns.Network, doctors: Doctors, tmp_path: Path) -> None:
    stranger = Authority.create(tmp_path / "stranger")
    doctors.answer(1, "--tls-dir", str(stranger.node("node1")))
    doctors.answer(2, "--insecure")
    report = doctors.ask()
    wrong = "\n".join(red(report))
    assert "node1 cannot be asked: the certificate at node1:29654 is not signed by our ca.crt" in wrong
    assert "node2 cannot be asked: node2:29654 does not speak TLS" in wrong and "give node2 its --tls-dir" in wrong
    assert ways(report) == {("node0", "node1"): "other authority", ("node0", "node2"): "no TLS"}

    doctors.answer(1, "--tls-dir", str(doctors.folder / "authority" / "node2"))
    network[2].power_off()
    report = doctors.ask()
    wrong = "\n".join(red(report))
    assert "node1: tls: " in wrong and "and this host calls itself node1" in wrong
    assert "is for node2, 10.77.0.3, not for node1" in wrong
    assert "node2 cannot be asked: node2:29654 does not answer" in wrong or "node2:29654: there is no route" in wrong


@pytest.mark.full
def test_hosts_that_meet(network: netns.Network, tmp_path: Path) -> None:
    """The same command on all, as srun starts it; one of them cannot come, and says why."""
    point = ("--rendezvous", "node0", "--nodes", "3", "--insecure", "--wait", "4", *QUICK)
    network[2].run("ip route add prohibit 10.77.0.1".split())
    started = [
        host.start(
            [*DOCTOR, *point, "--node-rank", str(host.index), *(["--json"] * (host.index == 0))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in network
    ]
    said = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [1, 1, 1], said
    report = json.loads(said[0][0])
    assert report["hosts"] == ["node0", "node1"]
    assert any("1 of 3 hosts did not come within 4 s (node 2)" in text for text in red(report))
    assert ways(report) == {("node0", "node1"): "ok", ("node1", "node0"): "ok"}
    assert "red; the report is on node0" in said[1][1]
    assert "node2 cannot meet the others: node0:29654: " in said[2][1] and "Remedy: correct the routes" in said[2][1]
