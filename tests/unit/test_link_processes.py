"""Groups that move to another network interface: real processes on gloo, one on each of two hosts (network namespaces)
that are joined by two networks. The kernel's counters tell where the traffic went."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import netns
import pytest

PROGRAM = Path(__file__).parent / "programs" / "link_rank.py"
PORT = 29533
PATIENCE = 120.0  # seconds; nothing takes a tenth of it on an idle machine
NUMBERS = 500_000
PAYLOAD = 4 * NUMBERS  # bytes of one all-reduce of `work`
LITTLE = PAYLOAD // 20  # the job's store, and address resolution


class Rank:
    """A process of link_rank.py on one host."""

    def __init__(self, host: netns.Host, world: int, store: str) -> None:
        self.host = host
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process = host.start(
            [sys.executable, PROGRAM, str(host.index), str(world), store, str(PORT)],
            env={"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, bufsize=1,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._said.put(line)

    def tell(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")

    def answer(self) -> dict[str, Any]:
        noise: list[str] = []
        end = time.monotonic() + PATIENCE
        while True:
            try:
                line = self._said.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.host.name} said nothing in {PATIENCE} s but {''.join(noise)}") from None
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
            noise.append(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)


class Job:
    def __init__(self, network: netns.Network) -> None:
        self.network = network
        self.hosts = network.hosts
        self.ranks = [Rank(host, len(network.hosts), network[0].address) for host in network]
        self.epoch = 0
        assert [rank.answer()["event"] for rank in self.ranks] == ["ready", "ready"]

    def all(self, order: str) -> list[dict[str, Any]]:
        for rank in self.ranks:
            rank.tell(order)
        return [rank.answer() for rank in self.ranks]

    def move(self, link: str, seconds: float = 20) -> list[dict[str, Any]]:
        self.epoch += 1
        return self.all(f"move {link} {self.epoch} {seconds}")

    def moved(self, link: str) -> None:
        """To a link that works."""
        assert [(each["event"], each["groups"]) for each in self.move(link)] == [("moved", 2), ("moved", 2)]
        assert [(each["event"], each["groups"]) for each in self.all("try 20")] == [("tried", 2), ("tried", 2)]

    def works(self, on: int) -> None:
        """Gradients are right, and go over the interface of this number, on both hosts, and over no other."""
        before = [[host.bytes(f"eth{link}") for link in (0, 1)] for host in self.hosts]
        worked = self.all(f"work {NUMBERS}")
        assert [each["event"] for each in worked] == ["worked", "worked"], worked
        for host, earlier in zip(self.hosts, before, strict=True):
            grown = [host.bytes(f"eth{link}") - earlier[link] for link in (0, 1)]
            assert grown[on] > PAYLOAD and grown[1 - on] < LITTLE, (host.name, grown)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """One for all tests, because processes are slow to start. A test finds and leaves it on eth0, with eth1 working."""
    if reason := netns.why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="tft-link-") as folder, netns.Network(2, Path(folder), links=2) as network:
        made = Job(network)
        yield made
        for rank in made.ranks:
            rank.close()


def test_the_traffic_moves_to_the_other_interface_and_back(job: Job) -> None:
    job.works(on=0)
    job.moved("eth1")
    job.works(on=1)
    job.moved("-")
    job.works(on=0)


def test_a_link_that_is_down_on_one_host_changes_nothing(job: Job) -> None:
    job.hosts[1].run(["ip", "link", "set", "eth1", "down"])
    waited, refused = job.move("eth1", seconds=0.5)
    assert refused["kind"] == "LinkUnusable" and refused["text"] == "interface eth1 of host node1 is down"
    assert waited["kind"] == "RuntimeError" and "1 of 2 ranks came" in waited["text"]
    job.works(on=0)  # without any other move
    job.hosts[1].run(["ip", "link", "set", "eth1", "up"])
    _, refused = job.move("eth7", seconds=0.5)
    assert refused["text"] == "interface eth7 is not on host node1, which has eth0, eth1, lo"


def test_a_link_on_which_hosts_do_not_meet_and_back(job: Job) -> None:
    """Its interfaces are up, but there is a cable missing between the switches."""
    job.network.cut(1, link=1)
    assert [each["event"] for each in job.move("eth1", seconds=0.5)] == ["failed", "failed"]
    for each in job.all("work 10"):  # nobody trains on half of the groups
        assert each["kind"] == "CommunicationAborted", each
    job.moved("-")
    job.works(on=0)
    job.network.heal(1, link=1)
    job.moved("eth1")
    job.works(on=1)
    job.moved("eth0")
    job.works(on=0)


def test_a_link_that_drops_long_frames_is_found_by_the_test_and_not_by_training(job: Job) -> None:
    """Hosts were set to long frames, the switch was not: connections are made, and everything short goes through."""
    for host in job.hosts:
        host.run(["ip", "link", "set", "eth1", "mtu", "9000"])
    assert [each["event"] for each in job.move("eth1")] == ["moved", "moved"]  # the control: building proves little
    # Who has received all is done, whatever becomes of its own words: one rank that fails puts all back.
    told = [each["text"] for each in job.all("try 1") if each["event"] == "failed"]
    assert any("did not end, all tests had 1 s" in text for text in told), told
    job.moved("-")
    job.works(on=0)
    for host in job.hosts:
        host.run(["ip", "link", "set", "eth1", "mtu", "1500"])


def test_traffic_that_is_routed_elsewhere_is_told(job: Job) -> None:
    """The addresses are those of eth1, the way is over eth0: it works, and nothing has moved."""
    routes = [
        (host, f"{other.addresses[1]}/32 dev eth0 src {host.addresses[0]}")
        for host, other in zip(job.hosts, reversed(job.hosts), strict=True)
    ]
    for host, route in routes:
        host.run(["ip", "route", "add", *route.split()])
    assert [each["event"] for each in job.move("eth1")] == ["moved", "moved"]
    told = [each["text"] for each in job.all("try 1") if each["event"] == "failed"]
    assert any("does not use eth1" in text and "(eth0)" in text for text in told), told
    for host, route in routes:
        host.run(["ip", "route", "delete", *route.split()])
    job.moved("-")
    job.works(on=0)
