"""Metrics of real controllers: the one that leads serves them, and who is not known gets none off loopback."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from control_support import DEADLINES, FakeEngine, Job, config, until
from ports import free_port
from test_endpoint import read, samples

from mindspeed_tft.control import candidate, tls
from mindspeed_tft.control import watchers as module
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.authority import Authority
from mindspeed_tft.control.config import ControlConfig, ControlRefused
from mindspeed_tft.control.seats import HostLink
from mindspeed_tft.control.watchers import Watchers, secured
from mindspeed_tft.engine import types as t
from mindspeed_tft.observe import endpoint, logs, report

NONE = frozenset[str]()  # strategies


def value(port: int, name: str) -> float | None:
    """Of a metric without labels of its own; None: nobody serves, or not this one."""
    try:
        return samples(read(port)).get((name, (("run", "test"),)))
    except OSError:
        return None


def test_the_leader_serves_and_after_its_death_the_next_one(job: Job) -> None:
    port = free_port()
    cfg = config(job.tmp, 2, engine=ControlConfig.engine, metrics_port=port)
    ranks = job.start(cfg, holds=["tp0-pp0/dense/0"])
    for rank in ranks:
        assert rank.wait("started", 20)["ok"], rank.text()
    until(lambda: value(port, "tft_protected") == 1, 10, "metrics")
    assert value(port, "tft_controller_term") == 1
    until(lambda: (value(port, "tft_step") or 0) > 50, 10, "heartbeats")
    assert 0.005 < (value(port, "tft_step_seconds") or 0) < 0.1  # these ranks compute one in some 0.01 s
    assert value(port, "tft_ranks_alive") == 2 and value(port, "tft_hosts_connected") == 1
    until(lambda: len([role for role in job.roles() if role["ready"]]) == 2, 20, "a standby controller")
    os.kill(job.leader(), signal.SIGKILL)
    until(lambda: value(port, "tft_controller_term") == 6, 10, "metrics of the other controller")
    until(lambda: value(port, "tft_protected") == 1, 10, "the ranks at it")
    job.ranks[1].kill()
    for rank in ranks:
        rank.process.wait(20)
    job.end()
    with pytest.raises(OSError):
        read(port)
    last = samples((job.tmp / "incidents" / "metrics.prom").read_text())
    (incident,) = job.incidents()
    assert last["tft_incidents_total", (("outcome", str(incident["outcome"])), ("run", "test"))] == 1
    assert last["tft_protected", (("run", "test"),)] == 0


@pytest.mark.full
def test_a_port_that_is_taken_stops_nothing(job: Job) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        cfg = config(job.tmp, 2, metrics_port=port, otel_endpoint="http://127.0.0.1:9")  # nor is there a collector
        ranks = job.start(cfg)
        for rank in ranks:
            assert rank.wait("started", 20)["ok"], rank.text()
        until(lambda: f"--tft-metrics-port: 127.0.0.1:{port} cannot be used" in job.text(), 10, "the warning")
        job.ranks[1].kill()
        assert job.ranks[0].wait("stop")["epoch"] == 1
        ranks[0].process.wait(20)
        job.end()
    (incident,) = job.incidents()
    assert incident["outcome"] == "dumped"


def port_of(watchers: Watchers) -> int:
    until(lambda: watchers.endpoint is not None and watchers.endpoint.port, 5, "a port")
    assert watchers.endpoint is not None
    return watchers.endpoint.port


@contextmanager
def offered(cfg: ControlConfig, transport: tls.Transport | None = None) -> Iterator[int]:
    """The port at which a controller of this configuration serves."""
    watchers = Watchers(cfg, 1, 0, transport)
    try:
        yield port_of(watchers)
    finally:
        asyncio.run(watchers.end())


def ask(port: int, directory: Path | None, authority: Path) -> int:
    """HTTP status for who has the certificate in this directory."""
    context = ssl.create_default_context(cafile=str(authority / "ca.crt"))
    context.check_hostname = False
    if directory is not None:
        context.load_cert_chain(directory / "node.crt", directory / "node.key")
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=5)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().status
    finally:
        connection.close()


def test_elsewhere_only_who_has_a_certificate_that_holds(tmp_path: Path) -> None:
    authority, stranger = Authority.create(tmp_path / "ca"), Authority.create(tmp_path / "other")
    mine, asker, bad = authority.node("here"), authority.metrics("prometheus"), authority.node("bad")
    other = stranger.node("prometheus")
    cfg = config(tmp_path, metrics_port=0, metrics_host="0.0.0.0", tls_dir=str(mine))
    refused = (OSError, http.client.HTTPException)
    with offered(cfg) as port:
        assert ask(port, asker, mine) == 200
        assert ask(port, bad, mine) == 200
        with pytest.raises(refused):
            ask(port, None, mine)
        with pytest.raises(refused):
            ask(port, other, mine)
        with pytest.raises(refused):
            read(port)  # without TLS
        authority.revoke("bad")  # the list goes into all directories; in force without a restart
        with pytest.raises(refused):
            ask(port, bad, mine)
        assert ask(port, asker, mine) == 200


def test_comments_in_the_file_of_the_authority_are_read_over(tmp_path: Path) -> None:
    mine = Authority.create(tmp_path / "ca").node("here")
    file = mine / "ca.crt"
    file.write_bytes("# made by Jürgen\n".encode() + file.read_bytes())
    with offered(config(tmp_path, metrics_port=0, metrics_host="0.0.0.0", tls_dir=str(mine))) as port:
        assert ask(port, mine, tmp_path / "ca") == 200


def test_files_that_tls_does_not_take_are_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As OpenSSL's own rules may have it, of keys that are too short or algorithms that are too old."""
    authority = Authority.create(tmp_path / "ca")
    mine = authority.node("here")
    cfg = config(tmp_path, metrics_port=0, metrics_host="0.0.0.0", tls_dir=str(mine))

    def fail(*_: object) -> ssl.SSLContext:
        raise ssl.SSLError("key values mismatch")

    with offered(cfg) as port:
        assert ask(port, mine, mine) == 200
        monkeypatch.setattr(endpoint, "tls_context", fail)
        authority.node("here", force=True)
        for _ in range(2):
            assert ask(port, mine, mine) == 200  # with what was read before
    assert caplog.text.count("key values mismatch") == 1
    with pytest.raises(ControlRefused, match=r"--tft-tls-dir: .*key values mismatch"):
        secured(cfg)


def test_a_key_that_a_service_opens_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the controller's port and the metrics together; also when a new one is there."""
    (tmp_path / "opener_of_metrics.py").write_text(
        "calls = []\ndef unlock(data):\n    calls.append(1)\n    return data\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    authority = Authority.create(tmp_path / "ca")
    mine, reader = authority.node("here"), authority.metrics("prometheus")
    hook = "opener_of_metrics:unlock"
    cfg = config(tmp_path, metrics_port=0, metrics_host="0.0.0.0", tls_dir=str(mine), tls_decrypt=hook)
    transport = tls.Transport(mine, tls.access(cfg))
    with offered(cfg, transport) as port:
        assert ask(port, reader, tmp_path / "ca") == 200
        calls = sys.modules["opener_of_metrics"].calls
        assert len(calls) == 1
        authority.node("here", force=True)
        assert transport.read_again() and ask(port, reader, tmp_path / "ca") == 200
        assert len(calls) == 2


def test_elsewhere_without_tls_only_when_it_was_said_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config(tmp_path, metrics_port=0, metrics_host="0.0.0.0")
    with pytest.raises(ControlRefused, match="--tft-metrics-host: anybody who reaches"):
        secured(cfg)
    watchers = Watchers(cfg, 1, 0)
    until(lambda: "no metrics: --tft-metrics-host" in caplog.text, 5, "the warning")
    assert watchers.endpoint is not None and watchers.endpoint.port == 0
    asyncio.run(watchers.end())
    with (
        caplog.at_level(logging.WARNING),
        offered(config(tmp_path, metrics_port=0, metrics_host="0.0.0.0", insecure=True)),
    ):
        assert "--tft-insecure: anybody who reaches 0.0.0.0:0 may read the metrics" in caplog.text


def test_a_mistake_of_ours_ends_the_metrics_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watchers = Watchers(config(tmp_path, metrics_port=0), 1, 0)
    port = port_of(watchers)
    assert "tft_step" in read(port)
    heartbeat = t.Heartbeat(1.0, 0, 5, "forward")
    watchers.event(heartbeat)
    watchers.event(t.Registered(1.0, None))  # type: ignore[arg-type]
    assert caplog.text.count("metrics and traces end here") == 1
    watchers.event(t.Registered(1.0, None))  # type: ignore[arg-type]
    watchers.action(t.Stop(1, (0,), "x"), 2.0)
    assert caplog.text.count("metrics and traces end here") == 1
    until(lambda: watchers.endpoint is not None and watchers.endpoint.port == 0, 5, "the end")
    with pytest.raises(OSError):
        read(port)  # nothing, rather than numbers that stand still
    asyncio.run(watchers.end())
    assert not (tmp_path / "incidents" / "metrics.prom").exists()


def test_a_mistake_before_the_endpoint_is_there_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = threading.Event()
    monkeypatch.setattr(report, "versions", lambda: {"late": str(late.wait(10))})
    watchers = Watchers(config(tmp_path, metrics_port=0), 1, 0)
    watchers.event(t.Registered(1.0, None))  # type: ignore[arg-type]
    late.set()
    asyncio.run(watchers.end())
    assert watchers.endpoint is not None and watchers.endpoint.port == 0
    watchers.endpoint._thread.join(5)
    assert not watchers.endpoint._thread.is_alive()


def test_what_cannot_be_imported_costs_the_metrics_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "mindspeed_tft.observe.endpoint", None)
    monkeypatch.delattr("mindspeed_tft.observe.endpoint", raising=False)
    watchers = Watchers(config(tmp_path, metrics_port=0), 1, 0)
    watchers.event(t.Heartbeat(1.0, 0, 5, "forward"))
    asyncio.run(watchers.end())
    assert watchers.endpoint is None
    assert "no metrics of this controller" in caplog.text and "training goes on" in caplog.text


def test_nobody_waits_for_what_is_read_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that hangs while packages are looked at: the controller leads meanwhile, and ends."""
    late = threading.Event()
    monkeypatch.setattr(report, "versions", lambda: {"late": str(late.wait(10))})
    monkeypatch.setattr(module, "_LAST", 0.05)
    watchers = Watchers(config(tmp_path, world=1, metrics_port=0), 1, 0)
    watchers.event(t.Registered(1.0, t.RankInfo(0, "here", 10, "p", 0, ("p/0",))))
    watchers.event(t.Heartbeat(1.0, 0, 5, "forward"))
    assert watchers.endpoint is None
    asyncio.run(watchers.end())
    late.set()  # it goes on after all, when nobody wants it any more: the port is given back
    until(lambda: watchers.endpoint is not None and not watchers.endpoint._thread.is_alive(), 5, "the end")
    kept = tmp_path / "incidents" / "metrics.prom"
    until(kept.exists, 5, "the last numbers")
    assert samples(kept.read_text())["tft_step", (("run", "test"),)] == 5  # nothing of the time before was lost


def test_relays_go_before_metrics_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one leads: their ranks are unprotected until they are there, and a port may take a second to close."""
    told: list[tuple[bool, bool]] = []

    async def reign() -> None:
        leader = candidate.Candidate(config(tmp_path), 0, tmp_path, lambda *_: FakeEngine(DEADLINES, 2, 0, 0, "", NONE),
                                     starting=False)  # fmt: skip
        task = asyncio.ensure_future(asyncio.sleep(30))
        visit = candidate._Visit(HostLink(wire.HostHello(host="here")), task, 0.0, True, None)
        leader._visits.add(visit)

        async def lead_on(_: object) -> str:
            assert visit.welcomed and not visit.dismissed and leader._controller is not None
            leader._controller.epoch = 7
            assert logs.fields() == {"epoch": 7}
            return "another one has term 2"

        async def end(_: object) -> None:
            await asyncio.sleep(0)
            told.append((visit.dismissed, task.cancelled()))

        monkeypatch.setattr(leader, "_lead_on", lead_on)
        monkeypatch.setattr(Watchers, "end", end)
        assert await leader._reign(1) is None
        assert not logs.fields()  # its lines are those of a job that it does not know any more

    asyncio.run(reign())
    logs.unbind()
    assert told == [(True, True)]


def test_without_a_wish_there_is_nothing(tmp_path: Path) -> None:
    watchers = Watchers(config(tmp_path), 1, 0)
    watchers.event(t.Heartbeat(1.0, 0, 5, "forward"))
    assert watchers.endpoint is None
    asyncio.run(watchers.end())
