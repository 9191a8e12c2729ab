"""Several hosts, pretended on one machine: TCP on loopback, certificates, and what is refused."""

from __future__ import annotations

import datetime
import ipaddress
import os
import queue
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from control_support import DEADLINES, HERE, Job, config, processes, until
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from ports import free_port

from mindspeed_tft.control import tls
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.codec import PROTOCOL
from mindspeed_tft.control.config import ControlConfig, ControlRefused
from mindspeed_tft.control.framing import MAX_FRAME
from mindspeed_tft.control.uplink import METHOD
from mindspeed_tft.engine.incident import EXIT_SAVED

SECOND = 1.0


class Authority:
    """Signs node certificates for the tests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self.certificate = self._sign(self.name, self.key, [], authority=True)

    def node(self, host: str) -> str:
        """A directory as --tft-tls-dir wants it, for one host."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        names = [x509.DNSName(host), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = self._sign(name, key, names)
        directory = self.directory / f"{host}-{id(self)}"
        directory.mkdir(exist_ok=True)
        pem = serialization.Encoding.PEM
        (directory / "ca.crt").write_bytes(self.certificate.public_bytes(pem))
        (directory / "node.crt").write_bytes(certificate.public_bytes(pem))
        (directory / "node.key").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return str(directory)

    def _sign(self, name: object, key: object, names: list[object], authority: bool = False) -> object:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self.name)
            .public_key(key.public_key())  # type: ignore[attr-defined]
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self.key, hashes.SHA256())


def two_hosts(tmp: Path, **values: object) -> tuple[ControlConfig, ControlConfig]:
    common: dict[str, object] = {"local_world_size": 2, "nnodes": 2, "port": free_port(), **values}
    tls_dirs = common.pop("tls_dirs", (None, None))
    first, second = tls_dirs  # type: ignore[misc]
    return (
        config(tmp, 4, node_rank=0, host="hosta", tls_dir=first, **common),
        config(tmp, 4, node_rank=1, host="hostb", tls_dir=second, **common),
    )


def controller(cfg: ControlConfig, tmp: Path) -> subprocess.Popen[str]:
    """The controller alone, not detached."""
    file = tmp / "config.json"
    file.write_text(cfg.to_json())
    env = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent.parent}"}
    command = [sys.executable, "-m", "mindspeed_tft.control.controller_main", "--starting", "--config", str(file)]
    return subprocess.Popen(
        [*command, "--socket", str(tmp / "c.sock")],
        env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_two_hosts_with_certificates(job: Job, record_property: pytest.RecordProperty) -> None:
    authority = Authority(job.tmp)
    a, b = two_hosts(job.tmp, tls_dirs=(authority.node("hosta"), authority.node("hostb")))
    ranks = job.start(a) + job.start(b, first=2)
    assert all(rank.wait("started")["ok"] for rank in ranks), job.text()
    at = ranks[3].kill()
    seconds = max(float(str(rank.wait("stop")["at"])) - at for rank in ranks[:3])
    record_property("stop_seconds", seconds)
    assert seconds < SECOND
    assert [rank.process.wait(10) for rank in ranks[:3]] == [1, 1, 1]
    job.end()
    assert job.incidents()[0]["outcome"] == "dumped"


def test_a_whole_host_is_lost(job: Job) -> None:
    """Its relay dies with its ranks: nobody there can tell, the survivors' broken collectives do."""
    deadlines = replace(DEADLINES, stop=1.0, exit=1.0)
    a, b = two_hosts(job.tmp, deadlines=deadlines, engine=ControlConfig.engine)
    options = {"step": 7, "holds": ["tp0-pp0/dense/0"], "peer_fault": str(job.tmp / "broken")}
    ranks = job.start(a, **options) + job.start(b, first=2, **options)
    for rank in ranks:
        assert rank.wait("started")["ok"]
    until(lambda: job.registered() == 4)
    job.crashed.add(1)
    os.kill(job.only("host_main", 1), signal.SIGKILL)
    for rank in ranks[2:]:
        rank.kill()
    (job.tmp / "broken").touch()
    assert [rank.process.wait(10) for rank in ranks[:2]] == [EXIT_SAVED, EXIT_SAVED]
    job.end()
    assert job.incidents()[0]["step"] == 6
    assert set(job.incidents()[0]["engine"]["silent"]) == {"2", "3"}  # type: ignore[index]


def test_all_ranks_of_a_host_are_replaced(job: Job) -> None:
    """Its relay ends with them, and the first newcomer starts another one."""
    a, b = two_hosts(job.tmp, engine=ControlConfig.engine, strategies=("dump", "recover"))
    options = {"step": 7, "holds": ["tp0-pp0/dense/0"]}
    ranks = job.start(a, **options) + job.start(b, first=2, **options)
    for rank in ranks:
        assert rank.wait("started")["ok"]
    for rank in ranks[2:]:
        rank.kill()
        rank.process.wait(10)
    until(lambda: not processes(job.directories()[1], "host_main"), what="end of the relay")
    job.start(b, first=2, **options)
    assert [rank.process.wait(20) for rank in job.ranks.values()] == [0, 0, 0, 0], job.text()
    job.end()
    (incident,) = job.incidents()
    assert incident["outcome"] == "rebooted"
    assert set(incident["engine"]["replaced"]) == {"2", "3"}  # type: ignore[index,call-overload]


def test_a_certificate_for_another_host_is_refused(job: Job) -> None:
    authority = Authority(job.tmp)
    a, b = two_hosts(job.tmp, tls_dirs=(authority.node("hosta"), authority.node("elsewhere")), start=4.0)
    job.start(a)
    second = job.start(b, first=2, start=2.0)
    until(job.roles)
    failed = second[0].wait("failed")
    assert failed["type"] == "ControlRefused"
    assert "node.crt is for elsewhere, 127.0.0.1, and the others want to see hostb; make one" in str(failed["text"])
    ca, certificate, key = tls.read(b.tls_dir or "")
    stranger = grpc.ssl_channel_credentials(ca, key, certificate)  # as a relay would that says nothing of it
    answer = say_hello(f"127.0.0.1:{a.port}", stranger, host="hostb")
    assert "its certificate is for elsewhere, 127.0.0.1, not for host hostb" in answer.refused.reason
    until(lambda: "refused a host: its certificate is for elsewhere" in job.text(), 5)


def test_peers_without_a_certificate_of_ours_are_refused(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path)
    cfg = config(tmp_path, 1, port=free_port(), host="hosta", tls_dir=authority.node("hosta"), start=5.0)
    process = controller(cfg, tmp_path)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        ca = (Path(cfg.tls_dir or "") / "ca.crt").read_bytes()
        _, certificate, key = tls.read(stranger.node("hosta"))
        _, own_certificate, own_key = tls.read(cfg.tls_dir or "")
        address = f"127.0.0.1:{cfg.port}"
        for credentials in (
            grpc.ssl_channel_credentials(ca),
            grpc.ssl_channel_credentials(ca, key, certificate),
            None,
        ):
            with pytest.raises(grpc.RpcError) as refused:
                say_hello(address, credentials)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        good = grpc.ssl_channel_credentials(ca, own_key, own_certificate)
        assert say_hello(address, good).WhichOneof("body") == "welcome"
    finally:
        process.kill()
        process.communicate(timeout=5)


def say_hello(
    address: str,
    credentials: grpc.ChannelCredentials | None,
    run: str = "test",
    protocol: int = PROTOCOL,
    host: str = "hosta",
    lease: str = "",
) -> wire.HostOrders:
    channel = grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
    with channel:
        call = channel.stream_stream(
            METHOD,
            request_serializer=wire.HostSays.SerializeToString,
            response_deserializer=wire.HostOrders.FromString,
        )
        hello = wire.HostSays(hello=wire.HostHello(protocol=protocol, host=host, node_rank=0, run=run, lease=lease))
        says: queue.SimpleQueue[wire.HostSays | None] = queue.SimpleQueue()
        says.put(hello)
        try:  # as a relay does, the stream stays open until it was answered
            return next(call(iter(says.get, None), timeout=5))
        finally:
            says.put(None)


def test_a_relay_of_another_job_is_refused(tmp_path: Path) -> None:
    cfg = config(tmp_path, 1, port=free_port(), start=5.0)
    process = controller(cfg, tmp_path)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        answer = say_hello(f"127.0.0.1:{cfg.port}", None, run="another")
        assert "belongs to job 'another'" in answer.refused.reason
        answer = say_hello(f"127.0.0.1:{cfg.port}", None, protocol=PROTOCOL - 1)
        assert f"it speaks protocol {PROTOCOL - 1}, this controller speaks {PROTOCOL}" in answer.refused.reason
        for lease in ("x", "leadership-/../../x"):  # it would be a directory
            answer = say_hello(f"127.0.0.1:{cfg.port}", None, lease=lease)
            assert answer.refused.reason == f"{lease!r} is no name of a lease"
        with pytest.raises(grpc.RpcError) as refused:  # a message that is too long is not read
            say_hello(f"127.0.0.1:{cfg.port}", None, run="x" * (MAX_FRAME + 1))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert say_hello(f"127.0.0.1:{cfg.port}", None).WhichOneof("body") == "welcome"
    finally:
        process.kill()
        process.communicate(timeout=5)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        process = controller(config(tmp_path, 1, port=sock.getsockname()[1]), tmp_path)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 2
    (line,) = err.strip().splitlines()
    assert "--tft-controller-port" in line and "in use" in line and "choose another port" in line
    assert "ready" not in out


def test_a_taken_port_reaches_the_rank_that_started_it(job: Job) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        (rank,) = job.start(config(job.tmp, 1, port=sock.getsockname()[1], start=2.0))
        failed = rank.wait("failed")
    assert failed["type"] == "ControlRefused"
    assert "--tft-controller-port" in str(failed["text"])


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ({"nnodes": 1}, "unix"),
        ({"nnodes": 1, "controller_host": "10.0.0.1"}, "unix"),
        ({"nnodes": 1, "controller_host": "10.0.0.1", "port": 1}, "plain"),
        ({"nnodes": 2, "controller_host": "10.0.0.1", "tls_dir": "/certs"}, "tls"),
        ({"nnodes": 2, "controller_host": "10.0.0.1", "insecure": True}, "plain"),
        ({"nnodes": 2, "controller_host": "localhost"}, "plain"),
        ({"nnodes": 2, "controller_host": "10.0.0.1"}, None),
        ({"nnodes": 2, "controller_host": "localhost.example.org"}, None),
        ({"nnodes": 2, "controller_host": "127.example.org"}, None),
        ({"nnodes": 2, "controller_host": "0.0.0.0"}, None),
    ],
)
def test_what_is_safe_enough(tmp_path: Path, values: dict[str, object], mode: str | None) -> None:
    cfg = config(tmp_path, 2, **values)
    if mode is None:
        with pytest.raises(ControlRefused, match=r"--tft-tls-dir.*--tft-insecure"):
            tls.mode(cfg)
    else:
        assert tls.mode(cfg) == mode


def test_insecure_is_accepted_and_said(tmp_path: Path) -> None:
    cfg = config(tmp_path, 1, port=free_port(), controller_host="0.0.0.0", insecure=True, start=0.2)
    process = controller(cfg, tmp_path)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "ready" in out
    assert "--tft-insecure: anybody" in err


def test_off_loopback_without_certificates_does_not_start(tmp_path: Path) -> None:
    process = controller(config(tmp_path, 2, nnodes=2, port=free_port(), controller_host="0.0.0.0"), tmp_path)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "--tft-tls-dir" in err


def test_a_missing_certificate_is_named(tmp_path: Path) -> None:
    directory = Path(Authority(tmp_path).node("hosta"))
    (directory / "node.key").unlink()
    with pytest.raises(ControlRefused, match=r"node\.key cannot be read \(No such file"):
        tls.transport(config(tmp_path, 1, port=1, tls_dir=str(directory)))


def test_broken_certificates_are_named(tmp_path: Path) -> None:
    directory = Path(Authority(tmp_path).node("hosta"))
    (directory / "node.key").write_text("no key at all")
    process = controller(config(tmp_path, 1, port=free_port(), tls_dir=str(directory)), tmp_path)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "--tft-tls-dir" in err


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_controller_address_that_is_not_ours(tmp_path: Path, host: str) -> None:
    cfg = config(tmp_path, 1, port=free_port(), controller_host=host, insecure=True)
    process = controller(cfg, tmp_path)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "TTP_ADDR" in err
