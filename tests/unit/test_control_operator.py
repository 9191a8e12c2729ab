"""Operators over real sockets: real ranks without training, their relay and controllers, and `tftctl`'s client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from control_support import HERE, Job, Rank, config, until
from ports import free_port

from mindspeed_tft.cli import operate
from mindspeed_tft.control import authority, codec, operator_client, tls
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.control.framing import MAX_FRAME
from mindspeed_tft.control.operator import METHOD, MOST, Operators, Service
from mindspeed_tft.control.operator_client import Client, NotAllowed, Reply, Unreachable
from mindspeed_tft.control.uplink import open_channel
from mindspeed_tft.engine import types as t

ENV = {"COLUMNS": "200", "PYTHONPATH": str(HERE.parent.parent)}
OPTIONS = {"operated": True, "seconds": 120.0, "step": 7, "holds": ["tp0-pp0/dense/0"]}


def begun(job: Job, world: int = 2, **values: object) -> list[Rank]:
    values.setdefault("master", str(job.tmp))  # tells it from other jobs of this machine
    ranks = job.start(config(job.tmp, world, engine=ControlConfig.engine, **values), **OPTIONS)
    for rank in ranks:
        assert rank.wait("started", 20)["ok"], rank.text()
    return ranks


def client(job: Job) -> Client:
    return Client(lambda: found(job).routes)


def found(job: Job) -> operator_client.Job:
    (one,) = operator_client.jobs([job.directories()[0].parent])
    return one


def ask(job: Job, kind: str, **args: str) -> Reply:
    """Once training has begun."""
    replies: list[Reply] = []

    def done() -> bool:
        replies.append(client(job).ask(kind, 20.0, **args))
        return "training has not begun" not in replies[-1].text

    until(done, what=f"an answer to {kind}")
    return replies[-1]


def tftctl(job: Job, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(job, *words), env={**os.environ, **ENV}, capture_output=True, text=True, timeout=60)


def command(job: Job, *words: str) -> list[str]:
    return [sys.executable, "-m", "mindspeed_tft.cli.main", *words, "--job", str(job.tmp)]


def test_pause_status_dump_and_resume(job: Job) -> None:
    ranks = begun(job)
    paused = ask(job, "pause", limit="100")
    assert paused.ok, paused
    step = [rank.wait("holds")["step"] for rank in ranks]
    assert paused.data["step"] in step
    told = client(job).ask("status", 5.0).data
    assert (told["state"], told["pause"]["paused"], told["run"]) == ("training", True, "test")
    assert [(rank["rank"], rank["state"], rank["phase"]) for rank in told["ranks"]] == [
        (0, "alive", "held"),
        (1, "alive", "held"),
    ]
    assert told["shards"] == {"tp0-pp0/dense/0": {"ranks": [0, 1], "hosts": ["here"]}}
    saved = ask(job, "dump")
    assert (saved.ok, saved.data["path"]) == (True, f"/save/iter_{ranks[1].wait('save')['step']}")
    assert not any(rank.lines("goes on") for rank in ranks)
    assert ask(job, "resume").ok
    for rank in ranks:
        rank.wait("goes on")
    assert "not paused" in ask(job, "resume").text


@pytest.mark.full
def test_the_command_says_what_it_found_and_ends_with_a_status_of_its_own(job: Job) -> None:
    ranks = begun(job)
    until(lambda: job.registered() == 2)
    answer = tftctl(job, "pause", "--json", "--for", "1h30m")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["data"]["seconds_left"] == 5400.0
    twice = tftctl(job, "pause")
    assert twice.returncode == operate.REFUSED
    assert "the job is paused already, after step" in twice.stderr
    page = tftctl(job, "status")
    assert page.returncode == 0
    for word in ("Job test", "paused after step", "What a fault would lead to now", "tp0-pp0/dense/0", "held", "full"):
        assert word in page.stdout, page.stdout
    watching = subprocess.Popen(
        command(job, "status", "--watch", "--every", "0.2"),
        env={**os.environ, **ENV},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    assert all("test: training, step" in watching.stdout.readline() for _ in range(2))
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=20)
    assert watching.returncode == 0
    assert tftctl(job, "resume").returncode == 0
    job.tmp = job.tmp / "another"
    assert tftctl(job, "status").returncode == operate.NO_JOB
    for rank in ranks:
        rank.wait("goes on")


@pytest.mark.full
def test_ctrl_c_withdraws_the_pause(job: Job) -> None:
    begun(job)
    until(lambda: job.registered() == 2)
    words = command(job, "pause", "--at-step", "1000000000")
    waiting = subprocess.Popen(words, env={**os.environ, **ENV}, stderr=subprocess.PIPE, text=True)
    until(lambda: client(job).ask("status", 5.0).data["pause"]["wished"], 20, "the wish")
    waiting.send_signal(signal.SIGINT)
    _, text = waiting.communicate(timeout=20)
    assert waiting.returncode == operate.INTERRUPTED
    assert "pause: withdrawn" in text
    until(lambda: not client(job).ask("status", 5.0).data["pause"]["wished"], 10, "the end of the wish")


def test_a_rank_that_dies_while_it_is_held_is_an_ordinary_fault(job: Job) -> None:
    ranks = begun(job)
    assert ask(job, "pause").ok
    ranks[1].kill()
    assert ranks[0].process.wait(15) == 75, job.text()
    job.end()
    assert job.incidents()[0]["outcome"] == "dumped"


def test_a_new_leader_knows_of_the_pause_and_ends_it(job: Job) -> None:
    ranks = begun(job)
    assert ask(job, "pause").ok
    until(lambda: len([role for role in job.roles() if role["ready"]]) == 2, 20, "standby controllers")
    before = job.leader()
    os.kill(before, signal.SIGKILL)
    told = client(job).ask("status", 5.0).data  # goes to whoever leads, as soon as somebody does
    assert told["controller"]["pid"] != before
    until(lambda: client(job).ask("status", 5.0).data["pause"]["paused"], 10, "what the ranks tell")
    assert ask(job, "resume").ok
    for rank in ranks:
        rank.wait("goes on")


@pytest.mark.full
def test_who_waits_when_the_leader_dies_gets_his_answer_from_the_next_one(job: Job) -> None:
    begun(job)
    until(lambda: job.registered() == 2)
    until(lambda: len([role for role in job.roles() if role["ready"]]) == 2, 20, "standby controllers")
    step = client(job).ask("status", 5.0).data["step"] + 500  # some seconds away
    replies: list[Reply] = []
    waiting = threading.Thread(target=lambda: replies.append(client(job).ask("pause", 60.0, step=str(step))))
    waiting.start()
    until(lambda: client(job).ask("status", 5.0).data["pause"]["wished"], 10, "the wish")
    os.kill(job.leader(), signal.SIGKILL)
    waiting.join(30)
    assert replies and replies[0].ok and replies[0].data["step"] >= step, replies
    assert ask(job, "resume").ok


def test_a_host_is_no_operator_and_an_operator_needs_a_certificate(job: Job, tmp_path: Path) -> None:
    home = tmp_path / "certificates"
    issuer = authority.Authority.create(home)
    node, person = issuer.node("here", ["127.0.0.1"]), issuer.operator("alice")
    port = free_port()
    begun(job, port=port, tls_dir=str(node))
    until(lambda: job.registered() == 2)
    address = f"127.0.0.1:{port}"
    assert operator_client.client_at(address, Path(person)).ask("status", 5.0).data["run"] == "test"
    with pytest.raises(NotAllowed, match="a host's, not an operator's; make one with `tftctl certs operator"):
        operator_client.client_at(address, Path(node)).ask("pause", 5.0)
    with pytest.raises(Unreachable):
        operator_client.client_at(address, None).ask("pause", 5.0)
    assert not client(job).ask("status", 5.0).data["pause"]["wished"]


@pytest.mark.full
def test_a_controller_that_does_not_lead_names_the_one_that_does(job: Job, tmp_path: Path) -> None:
    """From another host with a certificate; and on a host whose own controller stands by, where one is needed."""
    issuer = authority.Authority.create(tmp_path / "certificates")
    person = Path(issuer.operator("alice"))
    port = free_port()
    for number, host in enumerate(("hosta", "hostb")):
        job.start(
            config(
                job.tmp, 4, local_world_size=2, nnodes=2, node_rank=number, host=host, port=port,
                master=str(job.tmp), engine=ControlConfig.engine, tls_dir=str(issuer.node(host, ["127.0.0.1"])),
            ),
            2 * number, **OPTIONS,
        )  # fmt: skip
    until(lambda: job.registered() == 4, 30, "all ranks")
    until(lambda: any(role["ready"] and not role["leader"] for role in job.roles(1)), 20, "the standby")
    (standby,) = job.roles(1)
    from_afar = operator_client.client_at(str(standby["address"]), person)
    assert from_afar.ask("status", 5.0).data["controller"]["host"] == "hosta"
    beside = Client(lambda: [operator_client.Route(1, f"unix:{standby['unix']}")])
    with pytest.raises(Unreachable, match=f"or give --controller 127.0.0.1:{port} --tls-dir DIR"):
        beside.ask("pause", 5.0)


@pytest.mark.full
def test_an_open_port_takes_no_operator_unless_the_user_said_that_it_may(job: Job) -> None:
    port = free_port()
    begun(job, port=port)
    with pytest.raises(NotAllowed, match="asks for no certificate"):
        operator_client.client_at(f"127.0.0.1:{port}", None).ask("status", 5.0)


def test_a_status_that_takes_long_is_not_taken_for_each_who_asks(tmp_path: Path) -> None:
    class Slow:
        """Counts; each status takes two seconds of the test's clock."""

        now, taken = 100.0, 0

        def status(self) -> dict[str, object]:
            Slow.now, Slow.taken = Slow.now + 2.0, Slow.taken + 1
            return {"ranks": ["x" * 100] * 30_000}

    slow: Any = Slow()
    service = Service(config(tmp_path), None, lambda: Slow.now, lambda: slow, lambda: None, lambda: {"term": 1})
    told = service._status(slow)
    assert service._status(slow) is told
    Slow.now += 18.5
    assert service._status(slow) is not told
    assert Slow.taken == 2
    assert len(told) > 3 and all(message.ByteSize() < MAX_FRAME for message in told), "more than one message may hold"
    assert json.loads(b"".join(message.data for message in told))["term"] == 1
    assert [message.last for message in told].count(True) == 1 and told[-1].last


def test_only_so_many_wait_and_each_once() -> None:
    fed: list[t.Event] = []
    operators = Operators(fed.append)
    assert operators.ask(t.Asked(1.0, "a", "dump")) is not None
    assert operators.ask(t.Asked(2.0, "a", "dump")) is None
    assert sum(operators.ask(t.Asked(3.0, f"b{number}", "dump")) is not None for number in range(100)) == MOST - 1
    operators.leave("a", 4.0)
    operators.leave("a", 5.0)
    operators.leave("b0")
    assert fed[-1] == t.Withdrawn(4.0, "a"), "who has his answer withdraws nothing"


def test_who_asked_is_who_the_certificate_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And nobody writes lines into the log of operators that are not ours."""
    issuer = authority.Authority.create(tmp_path / "certificates")
    server, person = (tls.Transport(path) for path in (issuer.node("hosta"), issuer.operator("alice")))
    fed: list[t.Event] = []

    def feed(event: t.Event) -> None:
        fed.append(event)
        operators.hear(t.Answer("1\\n", False, "no\nroot at host hosta asks: resume"))

    operators = Operators(feed)
    leading: Any = type("Leading", (), {"operators": operators})
    service = Service(config(tmp_path), server, lambda: 1.0, lambda: leading, lambda: None, dict)
    words = {"id": "1\n", "kind": "dump\x1b[2J", "who": "bob\noperator root"}
    request = wire.OperatorAsks(protocol=codec.PROTOCOL, args={"path": "a\r\nb" + "c" * 500}, **words)

    async def main() -> wire.OperatorHears:
        listens = grpc.aio.server()
        listens.add_generic_rpc_handlers((service.handler(),))
        port = listens.add_secure_port("127.0.0.1:0", server.server_credentials())
        await listens.start()
        try:
            route = operator_client.Route(0, f"127.0.0.1:{port}", "hosta")
            async with open_channel(route, person, 5.0) as (channel, _):
                ask = channel.unary_stream(
                    METHOD,
                    request_serializer=wire.OperatorAsks.SerializeToString,
                    response_deserializer=wire.OperatorHears.FromString,
                )
                return [word async for word in ask(request, timeout=5.0)][-1]
        finally:
            await listens.stop(0)

    answer = asyncio.run(main())
    assert answer.text == "no\nroot at host hosta asks: resume", "what is no log is told as it is"
    (event,) = fed
    assert isinstance(event, t.Asked)
    assert (event.who, event.kind) == ("alice (bob\\noperator root)", "dump\\x1b[2J")
    assert event.args["path"].startswith("a\\r\\nbccc")
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("control.operator")]
    assert lines[0].startswith("operator alice (bob\\noperator root) at ipv4:127.0.0.1:") and len(lines[0]) < 400
    assert lines[1] == r"operator alice (bob\noperator root): dump\x1b[2J: no\nroot at host hosta asks: resume"
    assert len(lines) == 2 and all(line.isprintable() for line in lines)


def test_what_peers_say_is_one_line_of_a_log() -> None:
    assert codec.line("höst a\u00a0") == "höst a\u00a0"
    assert codec.line("a\nb\x1b[0m\x00\u2028\ud800") == r"a\nb\x1b[0m\x00\u2028\ud800"
    assert codec.line("x" * 300).startswith("x" * 200 + "... (100 ")
    assert len(codec.line("\n" * 10**6)) < 250


def test_without_a_job_there_is_nobody_to_ask(tmp_path: Path) -> None:
    assert operator_client.jobs([tmp_path]) == []
    with pytest.raises(Unreachable, match="no controller of this job is left"):
        Client(list).ask("status", 1.0)
    with pytest.raises(tls.ControlRefused, match="expected HOST:PORT"):
        operator_client.client_at("nowhere", None)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("1h30m", 5400), ("0.5h", 1800)])
def test_times(text: str, seconds: float) -> None:
    assert operate.duration(text, "--for") == seconds


@pytest.mark.parametrize("text", ["", "soon", "5x", "-3", "1h-2m", "1 h"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(Exception, match="expected a time such as") as caught:
        operate.duration(text, "--for")
    assert "--for" in str(caught.value)
