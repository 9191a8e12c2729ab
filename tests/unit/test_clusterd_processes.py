"""A real controller and real relays, ranks without training, and a ClusterD for tests that decides over gRPC."""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_support import DEADLINES, Job, Rank, config, until
from fake_clusterd import ALL, Cluster, Server

from mindspeed_tft.clusterd import words as w
from mindspeed_tft.control import operator_client
from mindspeed_tft.control.authority import Authority
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.control.tls import Transport
from mindspeed_tft.engine.incident import EXIT_SAVED, EXIT_UNSAVED

SHARD = "tp0-pp0/dense/0"


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """`serve(*strategies)`: a ClusterD that allows these."""
    started: list[Server] = []

    def start(*strategies: str, **options: Any) -> Server:
        server = Server(Cluster(strategies or ALL, flush=0.1), **options).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


def steered(job: Job, server: Server, consult: float = 8.0, **values: Any) -> ControlConfig:
    more: dict[str, Any] = {
        "deadlines": replace(DEADLINES, consult=consult, reboot=5.0),
        "engine": "mindspeed_tft.engine.machine:Engine",
        "strategies": ("retry", "recover", "dump"),
        "clusterd": f"http://{server.target}",
        "clusterd_job": "job",
    }
    return config(job.tmp, 2, **{**more, **values})


def begin(job: Job, server: Server, cfg: ControlConfig | None = None, **options: Any) -> list[Rank]:
    """Two ranks that hold the same shard, in step 7, once ClusterD decides."""
    ranks = job.start(cfg or steered(job, server), holds=[SHARD], step=7, **options)
    assert all(rank.wait("started")["ok"] for rank in ranks)
    until(lambda: server.open == 1 and job.registered() == 2, what="a subscription")
    return ranks


def newcomer(job: Job, rank: int) -> Rank:
    """What a launcher starts in the place of a dead process."""
    found = Rank(job.tmp, job.configs[0], rank, rank, holds=[SHARD], step=7, bare=True)
    job.ranks[rank] = found
    return found


def test_a_dead_process_is_replaced_because_clusterd_says_so(job: Job, serve: Callable[..., Server]) -> None:
    server = serve()
    server.hook = lambda _: 2  # it says everything twice
    ranks = begin(job, server)
    ranks[1].kill()
    again = newcomer(job, 1)
    assert [rank.process.wait(15) for rank in (ranks[0], again)] == [0, 0]
    assert [line["kind"] for line in ranks[0].lines("order")] == ["regroup", "repair", "rollback", "resume"]
    job.end()
    assert (server.cluster.log, server.cluster.violations) == (["recover-in-place", "recover 0"], [])
    methods = [report.method.removeprefix("Report") for report in server.cluster.reports]
    assert methods == ["ProcessFault", "StopComplete", "RecoverStrategy", "RecoverStatus"]
    assert server.cluster.reports[0].faults == ((1, w.OTHER),)
    assert server.cluster.reports[2].strategies == ("recover", "dump", "exit")
    (incident,) = job.incidents()
    assert incident["outcome"] == "rebooted"
    assert any("ClusterD decides for recover" in str(line) for line in incident["decision"])  # type: ignore[attr-defined]


def test_a_clusterd_that_is_lost_in_the_midst_leaves_the_decision_to_us(job: Job, serve: Callable[..., Server]) -> None:
    server = serve()

    def vanishes(signal: w.Signal) -> int:
        if signal.kind == w.GLOBAL:
            server.vanish()
        return 1

    server.hook = vanishes
    ranks = begin(job, server, steered(job, server, strategies=("dump",)))
    ranks[1].kill()
    assert ranks[0].process.wait(15) == EXIT_SAVED
    job.end()
    assert job.text().count("Our own rules hold") + job.text().count("our own rules hold") == 1


@pytest.mark.full
@pytest.mark.parametrize("kind", ["", w.STOP, w.GLOBAL, w.CHANGE])
def test_loss_at_every_place(job: Job, serve: Callable[..., Server], kind: str) -> None:
    """And it is back for the next fault: that of a peer, which is repaired as it says."""
    server = serve()
    lost: list[str] = []

    def cuts(signal: w.Signal) -> int:
        if signal.kind == kind and not lost:
            lost.append(kind)
            server.cut()
        return 1

    server.hook = cuts
    ranks = begin(job, server)
    if not kind:
        server.cut()
    ranks[1].kill()
    again = newcomer(job, 1)
    assert [rank.process.wait(20) for rank in (ranks[0], again)] == [0, 0]
    job.end()
    assert [incident["outcome"] for incident in job.incidents()] == ["rebooted"]
    assert server.cluster.violations == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("allowed", "status", "log"),
    [((w.DUMP, w.EXIT), EXIT_SAVED, ["dump", "dump 0"]), ((w.EXIT,), EXIT_UNSAVED, ["exit"])],
)
def test_dump_and_exit(
    job: Job, serve: Callable[..., Server], allowed: tuple[str, ...], status: int, log: list[str]
) -> None:
    server = serve(*allowed)
    ranks = begin(job, server)
    ranks[1].kill()
    assert ranks[0].process.wait(15) == status
    job.end()
    assert (server.cluster.log, server.cluster.violations) == (log, [])


@pytest.mark.full
def test_a_link_is_repaired(job: Job, serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve()
    ranks = begin(job, server, peer_fault=str(tmp_path / "broken"))
    (tmp_path / "broken").touch()
    assert [rank.process.wait(15) for rank in ranks] == [0, 0]
    job.end()
    assert (server.cluster.log, server.cluster.violations) == (["retry", "retry 0"], [])


@pytest.mark.full
def test_a_memory_fault_that_only_clusterd_knows(job: Job, serve: Callable[..., Server]) -> None:
    server = serve()
    ranks = begin(job, server)
    server.send(server.cluster.fault({1: w.MEMORY}))
    assert [rank.process.wait(15) for rank in ranks] == [0, 0]
    job.end()
    assert (server.cluster.log, server.cluster.violations) == (["retry", "retry 0"], [])
    (incident,) = job.incidents()
    repair = incident["engine"]["repairs"][0]  # type: ignore[index]
    assert repair["transfers"] == [f"{SHARD}|0|1"]
    assert repair["damaged"] == {"1": "its memory may be damaged"}


@pytest.mark.full
def test_save_and_exit_and_the_end_of_the_job(job: Job, serve: Callable[..., Server]) -> None:
    server = serve()
    ranks = begin(job, server)
    server.send(server.cluster.fault({}, w.SAVE_AND_EXIT))
    assert [rank.process.wait(15) for rank in ranks] == [EXIT_SAVED, EXIT_SAVED]
    job.end()
    assert (server.cluster.log, server.cluster.violations) == (["dump 0"], [])


@pytest.mark.full
def test_kill_master_saves_first(job: Job, serve: Callable[..., Server]) -> None:
    server = serve()
    ranks = begin(job, server)
    server.send([(0.0, w.Signal("end", w.KILL_MASTER))])
    assert [rank.process.wait(15) for rank in ranks] == [EXIT_SAVED, EXIT_SAVED]


@pytest.mark.full
def test_no_decision_in_time_and_one_that_comes_late(job: Job, serve: Callable[..., Server]) -> None:
    server = serve()
    server.hook = lambda signal: 0 if signal.kind == w.GLOBAL else 1
    ranks = begin(job, server, steered(job, server, consult=1.0))
    ranks[1].kill()
    until(lambda: "did not decide within 1 s" in job.text(), what="our own decision")
    (there,) = operator_client.jobs([job.directories()[0].parent])
    told = operator_client.Client(lambda: there.routes).ask("status", 5.0).data
    assert told["manager"] == {"name": f"ClusterD at {server.target} (plain)", "job": "job", "place": "alone"}
    assert told["state"] == "waiting"
    late = w.Signal(server.cluster.uuid, w.CHANGE, ("change_strategy",), strategy=w.EXIT)
    server.send([(0.0, late)])
    until(lambda: "is ignored" in job.text(), what="a word on the late decision")
    again = newcomer(job, 1)
    assert [rank.process.wait(15) for rank in (ranks[0], again)] == [0, 0]


@pytest.mark.full
def test_pause_and_go_on(job: Job, serve: Callable[..., Server]) -> None:
    server = serve()
    ranks = begin(job, server, operated=True)
    server.send(server.cluster.pause())
    for rank in ranks:
        rank.wait("holds")
    until(lambda: server.cluster.log == ["pause 0"], what="the pause")
    server.send(server.cluster.go_on())
    for rank in ranks:
        rank.wait("goes on")
    until(lambda: server.cluster.log == ["pause 0", "continue 0"], what="the end of the pause")
    assert server.cluster.violations == []


@pytest.mark.full
def test_the_next_controller_is_the_client(job: Job, serve: Callable[..., Server]) -> None:
    server = serve()
    ranks = begin(job, server)
    os.kill(job.leader(), signals.SIGKILL)
    until(lambda: server.subscriptions == 2 and job.registered() == 2, 20, "a second subscription")
    for rank in ranks:
        until(lambda rank=rank: len(rank.lines("connected")) >= 1, 20, "protection")  # type: ignore[misc]
    ranks[1].kill()
    again = newcomer(job, 1)
    assert [rank.process.wait(20) for rank in (ranks[0], again)] == [0, 0]
    assert server.cluster.violations == []


@pytest.mark.full
@pytest.mark.parametrize("trusted", [True, False])
def test_tls_to_a_clusterd_that_has_it(job: Job, serve: Callable[..., Server], tmp_path: Path, trusted: bool) -> None:
    """One whose authority nobody knows gives no orders."""
    known, other = Authority.create(tmp_path / "known"), Authority.create(tmp_path / "other")
    ours = known.node("here", ["127.0.0.1"])
    theirs = (known if trusted else other).node("clusterd", ["127.0.0.1"])
    server = serve(w.DUMP, w.EXIT, credentials=Transport(theirs).server_credentials())
    ready = {"clusterd": f"https://{server.target}", "tls_dir": str(ours), "strategies": ("dump",)}
    ranks = job.start(steered(job, server, **ready), holds=[SHARD], step=7)
    assert all(rank.wait("started")["ok"] for rank in ranks)
    until(lambda: server.open == 1 if trusted else "its certificate is not trusted" in job.text(), what="a word on it")
    ranks[1].kill()
    assert ranks[0].process.wait(15) == EXIT_SAVED
    assert (server.cluster.log == ["dump", "dump 0"], server.subscriptions > 0) == (trusted, trusted)


@pytest.mark.full
def test_beside_a_taskd_nobody_is_asked(job: Job, serve: Callable[..., Server]) -> None:
    server = serve()
    cfg = steered(job, server, clusterd_taskd=server.target, strategies=("dump",))
    ranks = job.start(cfg, holds=[SHARD], step=7)
    assert all(rank.wait("started")["ok"] for rank in ranks)
    until(lambda: "a TaskD manager listens" in job.text(), what="a refusal")
    ranks[1].kill()
    assert ranks[0].process.wait(15) == EXIT_SAVED
    assert server.subscriptions == 0
