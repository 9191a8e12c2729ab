"""Metrics of real controllers: the one that leads serves them, and who is not known gets none off loopback."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from control_support import Job, config, until
from ports import free_port
from test_endpoint import read, samples

from mindspeed_tft.control.authority import Authority
from mindspeed_tft.control.config import ControlConfig, ControlRefused
from mindspeed_tft.control.watchers import Watchers, secured
from mindspeed_tft.engine import types as t


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


@contextmanager
def offered(cfg: ControlConfig) -> Iterator[int]:
    """The port at which a controller of this configuration serves."""
    watchers = Watchers(cfg, 1, 0)
    assert watchers.endpoint is not None
    until(lambda: watchers.endpoint is not None and watchers.endpoint.port, 5, "a port")
    try:
        yield watchers.endpoint.port
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
    mine, asker, bad = (authority.node(name) for name in ("here", "prometheus", "bad"))
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
    heartbeat = t.Heartbeat(1.0, 0, 5, "forward")
    watchers.event(heartbeat)
    watchers.event(t.Registered(1.0, None))  # type: ignore[arg-type]
    assert caplog.text.count("metrics and traces end here") == 1
    watchers.event(t.Registered(1.0, None))  # type: ignore[arg-type]
    watchers.action(t.Stop(1, (0,), "x"), 2.0)
    assert caplog.text.count("metrics and traces end here") == 1
    asyncio.run(watchers.end())


def test_without_a_wish_there_is_nothing(tmp_path: Path) -> None:
    watchers = Watchers(config(tmp_path), 1, 0)
    watchers.event(t.Heartbeat(1.0, 0, 5, "forward"))
    assert watchers.endpoint is None
    asyncio.run(watchers.end())
