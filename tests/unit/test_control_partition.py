"""Controllers on hosts with networks of their own, and cables that are cut: never two that are obeyed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import netns
import pytest
from control_support import DEADLINES, Job, Rank, config, until
from test_control_network import Authority

from mindspeed_tft.control.config import ControlConfig

LOST = 1.0
OPTIONS = {"step": 7, "holds": ["tp0-pp0/dense/0"], "seconds": 120.0}

pytestmark = pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "namespaces can be made")


class Hosts:
    """A job of one rank on each host but the first, which has two."""

    def __init__(self, tmp: Path, network: netns.Network, shared: bool = True) -> None:
        """`shared`: all have the directory of the incidents."""
        self.network, self.job = network, Job(tmp)
        authority, count = Authority(tmp), len(network.hosts)
        for host in network:
            cfg = config(
                tmp,
                count + 1,
                local_world_size=1 if host.index else 2,
                nnodes=count,
                node_rank=host.index,
                host=host.name,
                controller_host=network[0].name,
                tls_dir=authority.node(host.name),
                engine=ControlConfig.engine,
                deadlines=replace(DEADLINES, heartbeat_lost=LOST, stop=6.0),
                start=30.0,
                incident_dir=str(tmp / ("incidents" if shared else f"incidents{host.index}")),
            )
            self.job.start(cfg, first=host.index + (host.index > 0), popen=host.start, **OPTIONS)
        for rank in self.ranks:
            assert rank.wait("started", 40)["ok"], self.text()
        for host in network:
            until(lambda: [role for role in self.job.roles(host.index) if role["ready"]], 20, "controllers")  # noqa: B023
        leases = "incidents*/leadership-*/lease-1"
        until(lambda: any(int(path.read_text()) > 10 for path in tmp.glob(leases)), what="signs of life of the leader")

    @property
    def ranks(self) -> list[Rank]:
        return [self.job.ranks[rank] for rank in sorted(self.job.ranks)]

    def text(self, node: int | None = None) -> str:
        """What was said on one host, or on all."""
        ranks = self.ranks if node is None else self.ranks[:2] if node == 0 else [self.ranks[node + 1]]
        return "".join(rank.text() for rank in ranks)

    def leads(self, node: int) -> bool:
        return any(role["leader"] for role in self.job.roles(node))

    def takes_over(self, node: int) -> None:
        name = f"controller {node} on host {self.network[node].name} leads now"
        try:
            until(lambda: name in self.text(node), 20 * LOST, name)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.text()}") from None


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="tft", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    yield base
    shutil.rmtree(base)


@pytest.mark.parametrize(
    ("shared", "why"),
    [(True, "another one has term 6"), (False, "only 1 of 3 hosts are heard")],
    ids=["shared", "apart"],
)
def test_a_leader_that_is_cut_off_gives_way_and_is_obeyed_no_more(
    tmp_path: Path, folder: Path, shared: bool, why: str
) -> None:
    with netns.Network(3, folder) as network:
        hosts = Hosts(tmp_path, network, shared)
        network.cut(0)
        hosts.takes_over(1)
        until(lambda: f"leads no more (term 1): {why}" in hosts.text(0), 10 * LOST, f"end of the old leader: {why}")
        assert not hosts.leads(0)
        hosts.ranks[1].kill()  # on the side of the old leader
        hosts.ranks[1].process.wait(10)
        until(lambda: "FAULT TOLERANCE IS OFF on this host" in hosts.text(0), 10 * LOST)
        assert not any(rank.lines("stop") for rank in hosts.ranks), "somebody gave orders"
        network.heal(0)
        for rank in (hosts.ranks[0], *hosts.ranks[2:]):  # the loss is told to the new leader, which stops all
            assert int(str(rank.wait("stop", 20 * LOST)["epoch"])) > 1
        assert [rank.process.wait(30) for rank in (hosts.ranks[0], *hosts.ranks[2:])] == [75, 75, 75], hosts.text()
        assert hosts.text().count("Step 6 is saved") >= 1
        hosts.job.end()


def test_a_host_that_is_powered_off_with_the_leader(tmp_path: Path, folder: Path) -> None:
    """Two hosts: the one that is left leads by the lease, and saves the step."""
    with netns.Network(2, folder) as network:
        hosts = Hosts(tmp_path, network)
        hosts.job.crashed.add(0)
        network[0].power_off()
        hosts.takes_over(1)
        assert not hosts.ranks[2].lines("disconnected"), "given up too early"
        hosts.job.ranks[2].kill(15)
        hosts.job.ranks[2].process.wait(10)
        hosts.job.end()


def test_two_hosts_that_are_cut_apart_have_one_leader(tmp_path: Path, folder: Path) -> None:
    """The leader keeps its lease moving: the other host is unprotected, until the cable is mended."""
    with netns.Network(2, folder) as network:
        hosts = Hosts(tmp_path, network)
        network.cut(1)
        hosts.ranks[2].wait("disconnected", 20 * LOST)
        assert hosts.leads(0) and not hosts.leads(1)
        assert not hosts.ranks[0].lines("disconnected")
        network.heal(1)
        hosts.ranks[2].wait("connected", 20 * LOST)
        assert hosts.leads(0) and not hosts.leads(1)
        assert not any(rank.lines("stop") for rank in hosts.ranks)
        for rank in hosts.ranks:
            rank.process.kill()
        hosts.job.end()
