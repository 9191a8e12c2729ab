"""Processes that knock, hosts that are lost and those that come back: real processes, real engine."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
from control_support import DEADLINES, Job, Rank, config, processes, until
from ports import free_port

from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.engine.incident import EXIT_REBORN, EXIT_SAVED

HERE = replace(DEADLINES, heartbeat_lost=1.0, stop=4.0, reboot=20.0)
OPTIONS: dict[str, object] = {"step": 7, "holds": ["tp0-pp0/dense/0"]}


class Hosts:
    """Hosts a and b with two ranks each, and as many others as are wanted with the node rank of b."""

    def __init__(self, job: Job, strategies: tuple[str, ...] = ("dump", "recover"), seconds: float = 30.0):
        self.job, self.seconds = job, seconds
        self.values: dict[str, object] = {
            "deadlines": HERE,
            "local_world_size": 2,
            "nnodes": 2,
            "port": free_port(),
            "engine": ControlConfig.engine,
            "strategies": strategies,
        }
        self.fault = job.tmp / "broken"
        self.a = job.start(config(job.tmp, 4, host="hosta", node_rank=0, **self.values), **self.options())
        self.b = self.another("hostb")
        for rank in (*self.a, *self.b):
            assert rank.wait("started")["ok"], job.text()
        until(lambda: job.registered() == 4, what="the job trains")

    def options(self, **more: object) -> dict[str, object]:
        return {**OPTIONS, "peer_fault": str(self.fault), "seconds": self.seconds, **more}

    def another(self, host: str, **more: object) -> list[Rank]:
        # A meeting place of its own, although it is the same machine.
        cfg = config(self.job.tmp, 4, host=host, node_rank=1, run_id=f"{self.job.tmp}-{host}", **self.values)
        ranks = self.job.start(cfg, first=2, **self.options(**more))
        for rank in ranks:
            self.job.ranks[len(self.job.ranks) + 100] = rank  # that of the same rank stays known, too
        return ranks

    def relay(self, node: int) -> int:
        return self.job.only("host_main", node)


def codes(ranks: list[Rank], seconds: float = 20.0) -> list[int]:
    return [rank.process.wait(seconds) for rank in ranks]


def test_a_process_that_knocks_on_its_own_host_is_a_spare(job: Job) -> None:
    cfg = config(job.tmp, 3, deadlines=HERE, engine=ControlConfig.engine, strategies=("dump", "recover"))
    ranks = job.start(cfg, **OPTIONS)
    for rank in ranks:
        assert rank.wait("started")["ok"]
    spares = [Rank(job.tmp, cfg, 1, bare=True, **OPTIONS) for _ in range(2)]
    job.ranks.update({100: spares[0], 101: spares[1]})
    for spare in spares:
        assert spare.wait("started")["ok"]
        holder = ranks[1].process.pid
        assert spare.wait("parked")["why"] == f"process {holder} on host here has its place and lives"
    assert not any(rank.lines("stop") for rank in ranks)
    for spare in spares:
        assert job.text().count(f"rank 1: process {spare.process.pid} on host here is parked") == 1
    os.kill(job.only("host_main"), signal.SIGKILL)  # and whoever finds the next one first: the holder keeps its place
    for rank in (*ranks, *spares):
        rank.wait("disconnected")
        rank.wait("connected")
    time.sleep(5 * HERE.heartbeat)
    assert not any(rank.lines("stop") for rank in ranks), job.text()
    ranks[1].kill()
    assert codes([ranks[0], ranks[2]]) == [0, 0], job.text()
    # One of them trained on to the end of the job, the other one was not needed.
    until(lambda: all(spare.process.poll() is not None for spare in spares), 10)
    kinds = sorted([str(line["kind"]) for line in spare.lines("order")] for spare in spares)
    assert kinds == [["exit"], ["regroup", "repair", "rollback", "resume"]]
    assert codes(spares) == [0, 0]
    job.end()
    (incident,) = job.incidents()
    assert incident["outcome"] == "rebooted"


def test_a_spare_host_takes_the_place_of_one_that_is_lost(job: Job) -> None:
    hosts = Hosts(job)
    spares = hosts.another("hostc", bare=True)
    for spare in spares:
        spare.wait("parked")
    time.sleep(2 * HERE.heartbeat_lost)  # two streams of one node rank do not push each other out
    assert "silent" not in job.text() and "FAULT TOLERANCE IS OFF" not in job.text()
    assert all(len(spare.lines("parked")) == 1 for spare in spares)
    job.crashed.add(1)
    os.kill(hosts.relay(1), signal.SIGKILL)
    for rank in hosts.b:
        rank.kill()
    hosts.fault.touch()  # the survivors' collectives break
    assert codes([*hosts.a, *spares]) == [0, 0, 0, 0], job.text()
    job.end()
    (incident,) = job.incidents()
    assert incident["outcome"] == "rebooted"
    assert set(incident["engine"]["replaced"]) == {"2", "3"}  # type: ignore[index,call-overload]
    assert job.text().count("which was parked, takes the place") == 2


@pytest.mark.full
def test_at_the_end_of_the_job_a_spare_host_ends_too(job: Job) -> None:
    hosts = Hosts(job, seconds=8.0)
    spares = hosts.another("hostc", bare=True, seconds=30.0)
    for spare in spares:
        spare.wait("parked")
    assert codes([*hosts.a, *hosts.b, *spares]) == [0] * 6, job.text()
    for spare in spares:
        (order,) = spare.lines("order")
        words = f"rank {spare.rank} leaves: it is not needed, the job has ended (finished)"
        assert order["payload"] == {"code": 0, "words": words}
    job.end()
    assert not job.incidents()


def test_a_spare_is_one_under_another_controller_too(job: Job) -> None:
    cfg = config(job.tmp, 3, deadlines=HERE, engine=ControlConfig.engine, strategies=("dump", "recover"))
    ranks = job.start(cfg, **OPTIONS)
    for rank in ranks:
        assert rank.wait("started")["ok"]
    spare = job.ranks[100] = Rank(job.tmp, cfg, 1, bare=True, **OPTIONS)
    spare.wait("parked")
    first = job.leader()
    os.kill(first, signal.SIGKILL)
    until(lambda: any(role["leader"] and role["pid"] != first for role in job.roles()), what="another leader")
    until(lambda: job.text().count(f"process {spare.process.pid} on host here is parked") == 2, what="parked again")
    assert not any(rank.lines("stop") for rank in ranks), job.text()
    ranks[1].kill()
    assert codes([ranks[0], ranks[2], spare]) == [0, 0, 0], job.text()
    job.end()
    (incident,) = job.incidents()
    assert incident["outcome"] == "rebooted"


def test_a_newcomer_is_one_under_another_controller_too(job: Job) -> None:
    """It came to the first one. The second must not take it for a process that has its state."""
    cfg = config(job.tmp, 3, deadlines=HERE, engine=ControlConfig.engine, strategies=("dump", "recover"))
    ranks = job.start(cfg, **OPTIONS)
    for rank in ranks:
        assert rank.wait("started")["ok"]
    ranks[1].kill()
    ranks[1].process.wait(10)
    fresh = job.ranks[100] = Rank(job.tmp, cfg, 1, bare=True, report_after=2.0, **OPTIONS)
    fresh.wait("stop")
    first = job.leader()
    os.kill(first, signal.SIGKILL)
    assert codes([ranks[0], ranks[2], fresh]) == [0, 0, 0], job.text()
    kinds = [str(line["kind"]) for line in fresh.lines("order")]
    assert kinds == ["regroup", "repair", "rollback", "resume"]
    assert fresh.lines("order")[2]["payload"]["newcomers"] == ["1"]  # type: ignore[index]
    job.end()
    (incident,) = job.incidents()
    assert incident["outcome"] == "rebooted"
    assert set(incident["engine"]["replaced"]) == {"1"}  # type: ignore[index,call-overload]


def test_a_host_that_is_lost_in_a_stop_is_waited_for(job: Job) -> None:
    """It says nothing, and is not taken for one that only keeps silent: there is no way on without that one."""
    hosts = Hosts(job)
    job.crashed.add(1)
    os.kill(hosts.relay(1), signal.SIGKILL)
    for rank in hosts.b:
        rank.kill()
    hosts.fault.touch()  # the survivors' collectives break
    for rank in hosts.a:
        rank.wait("stop")
    until(lambda: "waiting for newcomers for ranks 2, 3" in str(job.events()), 10, "wait for newcomers")
    fresh = hosts.another("hostd", bare=True)
    assert codes([*hosts.a, *fresh]) == [0, 0, 0, 0], job.text()
    job.end()
    (incident,) = job.incidents()
    assert incident["outcome"] == "rebooted"
    assert not incident["engine"]["silent"]  # type: ignore[index,call-overload]


def test_a_lost_host_is_no_silent_one_in_a_dump_either(job: Job) -> None:
    hosts = Hosts(job, strategies=("dump",))
    job.crashed.add(1)
    os.kill(hosts.relay(1), signal.SIGKILL)
    for rank in hosts.b:
        rank.kill()
    hosts.fault.touch()
    assert codes(hosts.a) == [EXIT_SAVED, EXIT_SAVED], job.text()
    job.end()
    (incident,) = job.incidents()
    engine = incident["engine"]
    assert set(engine["lost"]) == {"2", "3"}  # type: ignore[index,call-overload]
    assert "its host hostb is gone" in engine["lost"]["2"]  # type: ignore[index,call-overload]
    assert not engine["silent"]  # type: ignore[index,call-overload]


def test_a_host_that_is_cut_off_for_a_while_loses_nothing(job: Job) -> None:
    hosts = Hosts(job)
    relay = hosts.relay(1)
    os.kill(relay, signal.SIGSTOP)
    try:
        for rank in hosts.b:
            rank.wait("disconnected")
        time.sleep(2 * HERE.heartbeat_lost)
    finally:
        os.kill(relay, signal.SIGCONT)
    for rank in hosts.b:
        rank.wait("connected")
    time.sleep(HERE.heartbeat_lost)
    assert not any(rank.lines("stop") for rank in (*hosts.a, *hosts.b)), job.text()
    hosts.b[0].kill()  # it is protected as before
    for rank in hosts.a:
        rank.wait("stop")


@pytest.mark.full
def test_who_comes_back_after_it_was_replaced_is_sent_off(job: Job) -> None:
    hosts = Hosts(job)
    relay = hosts.relay(1)
    os.kill(relay, signal.SIGSTOP)
    try:
        spares = hosts.another("hostc", bare=True, report_after=60.0)  # its start-up takes long
        for spare in spares:
            spare.wait("stop", 20)
    finally:
        os.kill(relay, signal.SIGCONT)
    assert codes(hosts.b) == [0, 0], job.text()
    for old, new in zip(hosts.b, spares, strict=True):
        (order,) = old.lines("order")
        why = f"process {new.process.pid} on host hostc took its place while it was out of reach"
        assert order["payload"] == {"code": 0, "words": f"rank {old.rank} leaves: {why}"}
        assert job.text().count(f"process {old.process.pid} on host hostb is sent off: {why}") == 1


@pytest.mark.full
def test_who_comes_back_before_it_was_replaced_is_started_again(job: Job) -> None:
    hosts = Hosts(job)
    relay = hosts.relay(1)
    os.kill(relay, signal.SIGSTOP)
    try:
        hosts.fault.touch()
        until(lambda: "waiting for newcomers for ranks 2, 3" in str(job.events()), 10, "wait for newcomers")
    finally:
        os.kill(relay, signal.SIGCONT)
    assert codes(hosts.b) == [EXIT_REBORN, EXIT_REBORN], job.text()
    until(lambda: not processes(job.directories()[1], "host_main"), what="end of the relay")
    fresh = hosts.another("hostb", bare=True)  # by their launcher
    assert codes([*hosts.a, *fresh]) == [0, 0, 0, 0], job.text()
