"""Controllers that die, as real processes: another one leads, with all that a recovery needs."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from control_support import DEADLINES, Job, Rank, config, processes, until
from ports import free_port
from test_control_network import Authority

from mindspeed_tft.control.candidate import EPOCHS
from mindspeed_tft.control.config import ControlConfig

REBOOT = {"engine": ControlConfig.engine, "strategies": ("dump", "recover")}
OPTIONS = {"step": 7, "holds": ["tp0-pp0/dense/0"]}


def started(ranks: list[Rank]) -> list[Rank]:
    for rank in ranks:
        assert rank.wait("started", 20)["ok"], rank.text()
    return ranks


def standby(job: Job, count: int, node: int = 0) -> None:
    """So many controllers of a host are up, and could take over."""
    until(lambda: len([role for role in job.roles(node) if role["ready"]]) == count, 20, "standby controllers")


def kill(job: Job, rank: int) -> None:
    job.ranks[rank].kill()
    job.ranks[rank].process.wait(10)


def test_a_dead_leader_is_replaced_and_the_next_loss_is_repaired(job: Job) -> None:
    cfg = config(job.tmp, 3, **REBOOT)
    ranks = started(job.start(cfg, **OPTIONS))
    standby(job, 2)
    first = job.leader()
    os.kill(first, signal.SIGKILL)
    seconds = until(lambda: "leads now" in job.text(), 5, "another leader")
    assert seconds < 1.0
    assert job.leader() != first
    assert not any(rank.lines("disconnected") for rank in ranks), "protection was missed by a rank"
    assert "FAULT TOLERANCE IS OFF" not in job.text()
    assert "controller 1 on host here leads now, term 6" in job.text()
    kill(job, 1)
    job.ranks[1] = Rank(job.tmp, cfg, 1, **OPTIONS)
    assert [rank.process.wait(20) for rank in job.ranks.values()] == [0, 0, 0], job.text()
    stops = {int(str(line["epoch"])) for rank in (ranks[0], ranks[2]) for line in rank.lines("stop")}
    assert stops == {6 * EPOCHS + 1}
    job.end()
    (incident,) = job.incidents()
    assert (incident["outcome"], incident["step"]) == ("rebooted", 6)


def test_a_leader_that_dies_in_an_incident_is_replaced_and_the_incident_decided_anew(job: Job) -> None:
    cfg = config(job.tmp, 3, **REBOOT)
    ranks = started(job.start(cfg, **OPTIONS))
    standby(job, 2)
    kill(job, 1)
    for rank in (ranks[0], ranks[2]):
        assert rank.wait("stop")["epoch"] == 1
    until(lambda: len([event for event in job.events() if event["what"] == "Reported"]) == 2)  # a newcomer is awaited
    os.kill(job.leader(), signal.SIGKILL)
    for rank in (ranks[0], ranks[2]):
        assert rank.wait("stop", count=2)["epoch"] == 6 * EPOCHS + 1
    job.ranks[1] = Rank(job.tmp, cfg, 1, **OPTIONS)
    assert [rank.process.wait(20) for rank in job.ranks.values()] == [0, 0, 0], job.text()
    job.end()
    (incident,) = job.incidents()
    assert (incident["outcome"], incident["step"]) == ("rebooted", 6)
    assert set(incident["engine"]["replaced"]) == {"1"}  # type: ignore[index,call-overload]


def test_all_controllers_die_and_come_back(job: Job) -> None:
    ranks = started(job.start(config(job.tmp, 2, engine=ControlConfig.engine), **OPTIONS))
    standby(job, 2)
    for role in job.roles():
        os.kill(int(str(role["pid"])), signal.SIGKILL)
    for rank in ranks:
        rank.wait("disconnected")
        rank.wait("connected")
    assert job.text().count("FAULT TOLERANCE IS OFF on this host") == 1
    assert "was started again" in job.text()
    assert "fault tolerance is on again" in job.text()
    kill(job, 1)
    assert ranks[0].process.wait(15) == 75, job.text()
    job.end()
    assert job.incidents()[0]["outcome"] == "dumped"


def test_a_frozen_leader_is_obeyed_no_more(job: Job) -> None:
    ranks = started(job.start(config(job.tmp, 2, **REBOOT), **OPTIONS))
    standby(job, 2)
    frozen = job.leader()
    os.kill(frozen, signal.SIGSTOP)
    try:
        until(lambda: "leads now" in job.text(), 15, "another leader")
    finally:
        os.kill(frozen, signal.SIGCONT)
    until(lambda: [role["pid"] for role in job.roles() if role["leader"]] != [frozen], 5)
    until(lambda: "leads no more" in job.text(), 5)
    assert job.leader() != frozen
    assert not any(rank.lines("stop") for rank in ranks)
    standby(job, 2)
    assert len({role["term"] for role in job.roles()}) == 1
    os.kill(job.leader(), signal.SIGKILL)  # the one that was frozen serves again
    until(lambda: job.text().count("leads now") == 2, 10)
    assert job.leader() == frozen


def hosts(tmp: Path, count: int, **values: object) -> list[ControlConfig]:
    authority = Authority(tmp)
    common: dict[str, object] = {"local_world_size": 1, "nnodes": count, "port": free_port(), **REBOOT, **values}
    names = [f"host{chr(ord('a') + node)}" for node in range(count)]
    return [
        config(tmp, count, node_rank=node, host=name, tls_dir=authority.node(name), **common)
        for node, name in enumerate(names)
    ]


def beats(lease: Path) -> int:
    """How often the leader has said that it lives."""
    return int(lease.read_text())


def lose(job: Job, node: int) -> None:
    """All processes of a host end at once."""
    job.crashed.add(node)
    pids = processes(job.directories()[node])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # so that none sees another one's end
    job.ranks[node].kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    job.ranks[node].process.wait(10)


@pytest.mark.parametrize("count", [2, 3])
def test_the_leaders_host_is_lost(job: Job, count: int) -> None:
    """With two hosts, the one that is left leads by the lease in the shared directory; with three by majority."""
    deadlines = replace(DEADLINES, heartbeat_lost=1.0, stop=6.0)
    cfgs = hosts(job.tmp, count, deadlines=deadlines, strategies=("dump",))
    options = {**OPTIONS, "peer_fault": str(job.tmp / "broken")}
    ranks = started([rank for node, cfg in enumerate(cfgs) for rank in job.start(cfg, first=node, **options)])
    for node in range(count):
        standby(job, 1, node)
    leases = job.tmp / "incidents"
    until(lambda: any(beats(path) > 10 for path in leases.glob("leadership-*/lease-1")), what="signs of life")
    assert "leads now" not in job.text()
    lose(job, 0)
    (job.tmp / "broken").touch()  # the others' collectives fail
    until(lambda: "controller 1 on host hostb leads now" in job.text(), 15, "another leader")
    assert [rank.process.wait(20) for rank in ranks[1:]] == [75] * (count - 1), job.text()
    job.end()
    assert job.incidents()[0]["outcome"] == "dumped"
