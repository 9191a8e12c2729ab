"""Lost nodes on several hosts, each a network namespace with an address of its own: they are gone without a word."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import netns
import pytest
from agent_support import alive
from node_support import NodeJob

pytestmark = pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "-")
PORT = 29500


@pytest.fixture
def network() -> Iterator[netns.Network]:
    with tempfile.TemporaryDirectory(prefix="tft-net-") as folder, netns.Network(3, Path(folder)) as made:
        yield made


@pytest.fixture
def job(tmp_path: Path, network: netns.Network) -> Iterator[NodeJob]:
    made = NodeJob(tmp_path)
    yield made
    made.end()


def static(node: int, nodes: int = 3) -> tuple[str, ...]:
    return ("--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", "node0",
            "--master-port", str(PORT))  # fmt: skip


@pytest.mark.full
def test_node_0_loses_its_power(job: NodeJob, network: netns.Network) -> None:
    for node in range(3):
        job.start(*static(node), popen=network[node].start)
    first = [job.life(rank) for rank in range(3)]
    assert [each["host"] for each in first] == ["node0", "node1", "node2"]
    for each in first:
        job.provided(each)
    network[0].power_off()
    for node in (1, 2):
        job.said(node, "the job's store is gone")
    os.kill(first[2]["pid"], signal.SIGKILL)  # and while the store is away, another worker dies
    job.said(2, "started again")
    network[0].power_on()
    new = job.start(*static(0), popen=network[0].start)
    for node in (1, 2):
        job.said(node, "the job's store is reached again: another one")
    again = [job.life(0, 1), job.life(2, 1)]
    assert [each["seen"] for each in again] == [[100, 101, 102]] * 2
    assert job.regroup(1, 3) == [{"sum": 18}] * 3
    assert alive(first[1]["pid"]) and len(job.lives()) == 5
    job.order(do="end", status=0)
    assert [job.wait(number) for number in (1, 2, new)] == [0, 0, 0], job.all_output()


def test_a_node_is_cut_off_and_comes_back(job: NodeJob, network: netns.Network) -> None:
    for node in range(2):
        job.start(*static(node, 2), popen=network[node].start)
    first = [job.life(rank) for rank in range(2)]
    for each in first:
        job.provided(each)
    network.cut(1)
    job.said(1, "the job's store is gone")
    network.heal(1)
    job.said(1, "the job's store is reached again: as it was")
    assert job.regroup(1, 2) == [{"sum": 6}] * 2
    assert len(job.lives()) == 2 and all(alive(each["pid"]) for each in first)
    job.order(do="end", status=0)
    assert [job.wait(number) for number in range(2)] == [0, 0], job.all_output()
