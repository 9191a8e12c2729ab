"""Real Megatron, and a ClusterD for tests that decides: what it orders is done, and the run ends byte for byte as if
nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_clusterd import ALL, Cluster, Server

from mindspeed_tft.clusterd import words as w
from mindspeed_tft.faults.plans import Plan
from mindspeed_tft.faults.rehearsal import Report, rehearse
from mindspeed_tft.faults.spec import parse_fault, parse_layout

from .conftest import Quiet

pytestmark = [pytest.mark.megatron, pytest.mark.full]


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*strategies: str) -> Server:
        started.append(Server(Cluster(strategies or ALL, job="drill")).start())
        return started[-1]

    yield start
    for server in started:
        server.stop()


def drill(server: Server, work: Path, references: Path, *faults: str, nodes: int = 1) -> Report:
    plan = Plan(
        parse_layout("dp4"),
        tuple(parse_fault(fault) for fault in faults),
        preset="recover",
        launcher="tftrun",
        nodes=nodes,
        clusterd=f"http://{server.target}",
        takes_nodes=nodes > 1,
    )
    return rehearse(plan, work, references, Quiet())


def test_what_it_decides_is_exact(serve: Callable[..., Server], tmp_path: Path, references: Path) -> None:
    """A memory fault is retried in place, a dead process is started again: one after the other, in one job."""
    server = serve()
    report = drill(server, tmp_path, references, "uce@2:5:backward", "kill@1:8:backward")
    assert (report.verdict.value, report.reasons) == ("exact", ()), report.tail
    assert report.processes_restarted == (1,)
    (compared,) = report.evidence.comparisons
    assert compared.tensors > 30 and compared.bytes > 1_000_000 and compared.different == 0
    log = (tmp_path / "broken.log").read_text()
    assert server.cluster.log == ["retry", "retry 0", "recover-in-place", "recover 0"], log[-3000:]
    assert server.cluster.events == 2
    assert server.cluster.violations == []
    assert [recovery.strategy for recovery in report.evidence.recoveries] == ["retry", "recover"]


def test_a_node_that_it_takes_away(serve: Callable[..., Server], tmp_path: Path, references: Path) -> None:
    """One rank dies, and its whole node has to go: the other rank, which is well, leaves, too, and so does the
    launcher. Ranks of a node that is started in its place take over; those of the first node keep their processes."""
    server = serve(w.RECOVER, w.DUMP, w.EXIT)
    server.cluster.leaving = (1,)
    report = drill(server, tmp_path, references, "kill@2:7:backward", nodes=2)
    assert (report.verdict.value, report.reasons) == ("exact", ()), report.tail
    assert report.processes_restarted == (2, 3)
    (compared,) = report.evidence.comparisons
    assert compared.tensors > 30 and compared.different == 0
    assert server.cluster.log == ["recover", "recover 0"]
    assert (server.cluster.events, server.cluster.violations) == (1, [])
    log = (tmp_path / "broken.log").read_text()
    assert "rank 3 leaves with its node" in log
    assert log.count("----- node 1 -----") == 1


def test_its_exit_is_one(serve: Callable[..., Server], tmp_path: Path, references: Path) -> None:
    """The control of the test above: it is asked, and obeyed, where we would have gone on."""
    server = serve("exit")
    report = drill(server, tmp_path, references, "kill@1:8:backward")
    assert report.verdict.value != "exact"
    assert (server.cluster.log, server.cluster.violations) == (["exit"], [])
    assert "decided for an exit without a dump" in (tmp_path / "broken.log").read_text()
