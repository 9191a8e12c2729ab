"""Static rendezvous: a lost node is started with the same command, and takes its place in the running job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_support import alive
from node_support import NodeJob


@pytest.fixture
def job(tmp_path: Path) -> Iterator[NodeJob]:
    made = NodeJob(tmp_path)
    yield made
    made.end()


def command(port: int, node: int, nodes: int = 2, workers: int = 1) -> tuple[str, ...]:
    return ("--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(workers), "--master-addr",
            "127.0.0.1", "--master-port", str(port))  # fmt: skip


def test_node_1_is_replaced(job: NodeJob, free_ports: Callable[[int], list[int]]) -> None:
    (port,) = free_ports(1)
    job.start(*command(port, 0))
    job.start(*command(port, 1))
    first = [job.life(0), job.life(1)]
    assert [each["seen"] for each in first] == [[100, 101]] * 2
    job.kill(1)
    job.start(*command(port, 1))
    job.said(2, "training has begun: the workers of this node take the place of node 1 of 2")
    again = job.life(1, 1)
    assert again["seen"] == [100, 101], "from the journal"
    assert (again["store"], again["attempt"]) == (first[1]["store"], first[1]["attempt"])
    assert job.regroup(1, 2) == [{"sum": 6}] * 2
    assert alive(first[0]["pid"]) and job.lives() == {"life-0-0", "life-1-0", "life-1-1"}
    job.order(do="end", status=0)
    assert [job.wait(0), job.wait(2)] == [0, 0], job.all_output()
    said = job.output(0) + job.output(2)
    assert "is gone" not in said and "exit barrier" not in said, "the new launcher counts, however late it came"


def test_node_0_is_replaced_and_its_store(job: NodeJob, free_ports: Callable[[int], list[int]]) -> None:
    (port,) = free_ports(1)
    job.start(*command(port, 0))
    job.start(*command(port, 1))
    first = [job.life(0), job.life(1)]
    job.provided(first[1])
    job.kill(0)
    job.said(1, "the job's store is gone")
    job.start(*command(port, 0))
    job.said(2, "training has begun: the workers of this node take the place of node 0 of 2")
    job.said(1, "the job's store is reached again")
    assert job.life(0, 1)["seen"] == [100, 101], "from the journal that node 1 has kept"
    assert job.regroup(1, 2) == [{"sum": 6}] * 2
    assert alive(first[1]["pid"]) and job.lives() == {"life-0-0", "life-1-0", "life-0-1"}
    job.order(do="end", status=0)
    assert [job.wait(1), job.wait(2)] == [0, 0], job.all_output()


@pytest.mark.full
def test_a_node_too_many_waits_for_the_end_of_the_one_whose_place_it_wants(
    job: NodeJob, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    for node in (0, 1):
        job.start(*command(port, node))
    first = [job.life(0), job.life(1)]
    job.provided(first[1])
    extra = job.start(*command(port, 1))
    held = f"the place of node 1 is held by {os.uname().nodename}"
    job.said(extra, f"{held} (launcher {job.launchers[1].pid}), which lives")
    assert job.life(1, 1)["seen"] == [100, 101], "its worker is ready, and waits"
    job.kill(1)
    last = job.start(*command(port, 1))
    job.said(last, f"{held} (launcher {job.launchers[extra].pid})")
    job.order(do="end", status=0)
    assert [job.wait(number) for number in (0, extra, last)] == [0, 0, 0], job.all_output()
    # Its worker may have been ready, and was told to leave; or its start-up was cut short.
    said = ("the place of node 1 was not needed", "this launcher was not needed")
    assert any(f"the job is over, and {each}" in job.output(last) for each in said)
    assert "was not needed" not in job.output(extra) + job.output(0)


@pytest.mark.full
def test_after_a_restart_of_all_workers_a_lost_node_is_replaced_as_before(
    job: NodeJob, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    for node in (0, 1):
        job.start("--max-restarts", "1", *command(port, node))
    first = [job.life(0), job.life(1)]
    for each in first:
        job.provided(each)
    job.order(do="end", status=75)  # saved, and left: for that nobody is started again alone
    second = [job.next_start(each, rank) for rank, each in enumerate(first)]
    assert [each["attempt"] for each in second] == ["1", "1"] and [each["seen"] for each in second] == [[100, 101]] * 2
    job.provided(second[1], generation=1)
    job.kill(1)
    new = job.start("--max-restarts", "1", *command(port, 1))
    again = job.life(1, 1)
    assert (again["attempt"], again["store"], again["seen"]) == ("1", second[1]["store"], [100, 101])
    assert job.regroup(1, 2) == [{"sum": 6}] * 2
    job.order(do="end", status=75)  # and the restarts are used up, those of the new launcher too
    assert [job.wait(0), job.wait(new)] == [1, 1], job.all_output()


def test_those_who_find_the_new_store_before_the_survivor_do_not_begin_a_job_of_their_own(
    job: NodeJob, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    for node in (0, 1):
        job.start(*command(port, node))
    first = [job.life(0), job.life(1)]
    job.provided(first[1])
    job.launchers[1].send_signal(signal.SIGSTOP)
    job.kill(0)
    fresh = [job.start(*command(port, node)) for node in (0, 1)]
    early = [job.other_life(first[rank], rank) for rank in range(2)]  # two are as many as the job needs
    job.launchers[1].send_signal(signal.SIGCONT)
    for number in fresh:
        job.said(number, "the workers of this node start anew")
    assert [job.life(rank, 1)["seen"] for rank in range(2)] == [[100, 101]] * 2
    assert not any(alive(each["pid"]) for each in early) and alive(first[1]["pid"])
    job.said(fresh[1], f"the place of node 1 is held by {os.uname().nodename} (launcher {job.launchers[1].pid})")
    job.order(do="end", status=0)
    assert [job.wait(number) for number in (1, *fresh)] == [0, 0, 0], job.all_output()


def test_without_a_store_a_regroup_ends_and_a_dead_worker_is_started_again(
    job: NodeJob, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    for node in (0, 1):
        job.start(*command(port, node, workers=2))
    first = [job.life(rank) for rank in range(4)]
    job.provided(first[3])
    job.kill(0)
    said = job.regroup(1, 2, seconds=2.0)
    assert all(f"nobody serves the job's store at 127.0.0.1:{port}" in each["error"] for each in said), said
    os.kill(first[3]["pid"], signal.SIGKILL)
    job.said(1, "started again")
    assert job.launchers[1].poll() is None and alive(first[2]["pid"])


def test_control_without_reboot_a_lost_node_is_not_replaced(
    job: NodeJob, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    for node in (0, 1):
        job.start(*command(port, node), flags=("--enable-high-availability",))
    assert job.life(1)["store"] == ""
    job.kill(1)
    job.start(*command(port, 1), flags=("--enable-high-availability",))
    job.order(do="end", status=75)
    assert job.wait(0) == 1 and "takes the place" not in job.output(2)
