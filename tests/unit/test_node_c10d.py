"""c10d rendezvous: nodes come and go in a job that trains, and nobody is restarted for it."""

from __future__ import annotations

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


def command(port: int, *, hosts: bool, nodes: str = "2") -> tuple[str, ...]:
    """`hosts`: told, because launchers of one machine would all believe that the store is theirs to host."""
    conf = f"is_host={int(hosts)},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    return ("--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "toy", "--rdzv-conf",
            conf, "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1")  # fmt: skip


def numbers(job: NodeJob, facts: list[dict[str, object]]) -> list[int]:
    """Which launcher has started each of these lives."""
    pids = [launcher.pid for launcher in job.launchers]
    return [pids.index(int(str(each["ppid"]))) for each in facts]


def test_a_node_that_comes_waits_and_takes_the_place_of_one_that_dies(
    job: NodeJob, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    host = job.start(*command(port, hosts=True, nodes="2:3"))
    other = job.start(*command(port, hosts=False, nodes="2:3"))
    first = [job.life(0), job.life(1)]
    by_rank = numbers(job, first)
    for each in first:
        job.provided(each)
    late = job.start(*command(port, hosts=False, nodes="2:3"))
    job.said(late, "training has begun, and all 2 nodes are there: this launcher waits for the place of one")
    job.said(by_rank[0], "waits to join: training goes on without it")
    lost = by_rank.index(other)
    job.kill(other)
    again = job.life(lost, 1)
    assert numbers(job, [again]) == [late] and again["seen"] == [100, 101]
    assert job.regroup(1, 2) == [{"sum": 6}] * 2
    assert alive(first[1 - lost]["pid"]) and job.lives() == {"life-0-0", "life-1-0", f"life-{lost}-1"}
    spare = job.start(*command(port, hosts=False, nodes="2:3"))
    job.said(spare, "this launcher waits for the place of one")
    job.order(do="end", status=0)
    assert [job.wait(number) for number in (host, late, spare)] == [0, 0, 0], job.all_output()
    assert "the job is over, and this launcher was not needed" in job.output(spare)
    assert "looks for it" not in job.output(spare), "it was told, before the host of the store left"


@pytest.mark.full  # a quarter of a minute, mostly of waiting
def test_the_host_of_the_rendezvous_is_lost_and_a_spare_is_there(
    job: NodeJob, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    host = job.start(*command(port, hosts=True))
    other = job.start(*command(port, hosts=False))
    first = [job.life(0), job.life(1)]
    for each in first:
        job.provided(each)
    spare = job.start(*command(port, hosts=False))
    job.said(spare, "this launcher waits for the place of one")
    lost = numbers(job, first).index(host)
    job.kill(host)
    job.said(other, "the job's store is gone")
    job.said(spare, "this spare launcher looks for it")
    new = job.start(*command(port, hosts=True))
    job.said(other, "the job's store is reached again: another one")
    again = job.life(lost, 1)
    taken = numbers(job, [again])[0]
    assert taken in (spare, new) and again["seen"] == [100, 101]
    assert job.regroup(1, 2) == [{"sum": 6}] * 2
    assert alive(first[1 - lost]["pid"]) and len(job.lives()) == 3
    job.order(do="end", status=0)
    assert [job.wait(number) for number in (other, spare, new)] == [0, 0, 0], job.all_output()
    left = spare + new - taken
    assert "the job is over, and this launcher was not needed" in job.output(left)


@pytest.mark.full
def test_those_who_find_the_new_store_before_the_survivors_do_not_begin_a_job_of_their_own(
    job: NodeJob, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    host = job.start(*command(port, hosts=True))
    other = job.start(*command(port, hosts=False))
    first = [job.life(0), job.life(1)]
    for each in first:
        job.provided(each)
    lost = numbers(job, first).index(host)
    job.launchers[other].send_signal(signal.SIGSTOP)
    job.kill(host)
    fresh = [job.start(*command(port, hosts=True)), job.start(*command(port, hosts=False))]
    early = [job.other_life(first[rank], rank) for rank in range(2)]  # two are as many as the job needs
    assert sorted(numbers(job, early)) == fresh
    job.launchers[other].send_signal(signal.SIGCONT)
    again = job.life(lost, 1)
    (taken,) = numbers(job, [again])
    assert taken in fresh and again["seen"] == [100, 101]
    job.said(sum(fresh) - taken, "training has begun, and all 2 nodes are there")
    job.until(lambda: not any(alive(each["pid"]) for each in early), "what they had begun is over")
    assert alive(first[1 - lost]["pid"]) and job.regroup(1, 2) == [{"sum": 6}] * 2
    job.order(do="end", status=0)
    assert [job.wait(number) for number in (other, *fresh)] == [0, 0, 0], job.all_output()


@pytest.mark.full  # a quarter of a minute, mostly of waiting
def test_with_restarts_of_all_workers_nodes_are_replaced_and_may_ask_for_one(
    job: NodeJob, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    start = ("--max-restarts", "2")
    host = job.start(*start, *command(port, hosts=True))
    other = job.start(*start, *command(port, hosts=False))
    first = [job.life(0), job.life(1)]
    for each in first:
        job.provided(each)
    job.order(do="die", rank=numbers(job, first).index(other), status=77)  # it is not started again alone
    second = [job.next_start(each, rank) for rank, each in enumerate(first)]
    assert not any(alive(each["pid"]) for each in first) and sorted(numbers(job, second)) == [host, other]
    for each in second:
        job.provided(each, generation=1)
    lost = numbers(job, second).index(other)
    job.kill(other)
    new = job.start(*start, *command(port, hosts=False))
    again = job.life(lost, 1)
    assert numbers(job, [again]) == [new] and (again["store"], again["seen"]) == (second[lost]["store"], [100, 101])
    assert alive(second[1 - lost]["pid"]) and job.regroup(1, 2) == [{"sum": 6}] * 2
    job.order(do="die", rank=lost, status=77)  # the one that came later has the same right
    third = [job.next_start(each, rank) for rank, each in enumerate(second)]
    assert sorted(numbers(job, third)) == [host, new] and [each["seen"] for each in third] == [[100, 101]] * 2
    job.order(do="end", status=0)
    assert [job.wait(host), job.wait(new)] == [0, 0], job.all_output()
