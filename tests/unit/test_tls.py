"""Mutual TLS against real gRPC servers: who gets in, who does not, on which side it is said, and with which words."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import queue
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from control_support import config
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from ports import free_port
from test_control_network import controller, say_hello

from mindspeed_tft.cli.config import resolve
from mindspeed_tft.control import certificates, tls
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.authority import CRL, Authority
from mindspeed_tft.control.candidates import Route
from mindspeed_tft.control.codec import PROTOCOL
from mindspeed_tft.control.config import ControlRefused
from mindspeed_tft.control.tls import KeyAccess, Transport, Untrusted
from mindspeed_tft.control.uplink import METHOD as RELAY
from mindspeed_tft.control.uplink import open_channel

METHOD = "/test/Who"
PEM = serialization.Encoding.PEM
LIMIT = 5.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority.create(tmp_path / "pki")
    made.node("hosta", ["127.0.0.1"])
    made.node("hostb")
    made.operator("ann")
    return made


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What is signed inside expired long ago."""

    @contextlib.contextmanager
    def years() -> Any:
        with monkeypatch.context() as patch:
            then = certificates.now() - datetime.timedelta(days=4000)
            patch.setattr(certificates, "now", lambda: then)
            yield

    return years


def unjudged(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Transport:
    """A process whose own side would not let it start: what the other side says of it is the question."""
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "out_of_date", lambda *_: "")
        patch.setattr(certificates.Revoked, "has", lambda *_: False)
        return Transport(directory)


@contextlib.asynccontextmanager
async def serving(transport: Transport | None) -> AsyncIterator[int]:
    """A server that tells callers why they may not speak for the host that they name, or who they are."""

    async def who(host: bytes, context: Any) -> bytes:
        why = transport.refusal(context, host.decode()) if transport is not None else ""
        kind = "operator" if tls.is_operator(context) else "host"
        return (why or f"{kind} {' '.join(tls.peer_names(context))}").encode()

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handlers = {"Who": grpc.unary_unary_rpc_method_handler(who)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    if transport is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", transport.server_credentials())
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


async def ask(transport: Transport | None, port: int, host: str, name: str = "hosta") -> str:
    async with open_channel(Route(0, f"127.0.0.1:{port}", name), transport, LIMIT) as (channel, _):
        answer: bytes = await channel.unary_unary(METHOD)(host.encode(), timeout=LIMIT)
        return answer.decode()


def renew(transport: Transport, directory: Path) -> None:
    """It has read what is there now; its thread may have been faster than we are."""
    transport.read_again()
    found = transport.identity
    assert (found.ca, found.certificate) == tuple((directory / name).read_bytes() for name in ("ca.crt", "node.crt"))
    if (directory / CRL).exists():
        assert found.revoked == certificates.read_revoked(
            (directory / CRL).read_bytes(), certificates.read_all(found.ca)
        )


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


def test_a_certificate_speaks_for_its_host_only(authority: Authority) -> None:
    server, client = (Transport(authority.directory / name) for name in ("hosta", "hostb"))
    operator, reader = Transport(authority.directory / "ann"), Transport(authority.metrics("prometheus"))

    async def main() -> None:
        async with serving(server) as port:
            assert await ask(client, port, "hostb") == "host hostb"
            assert await ask(client, port, "HOSTB") == "host hostb"
            assert await ask(client, port, "hostb", name="") == "host hostb"  # by the address that the user gave
            refused = await ask(client, port, "hosta")
            assert refused == ("its certificate is for hostb, not for host hosta; make one for that name (`tftctl "
                               "certs node hosta`) and copy it there")  # fmt: skip
            for host in ("prometheus", certificates.METRICS):
                refused = await ask(reader, port, host)
                assert f"its certificate is for {certificates.METRICS}, not for host {host}; make" in refused
            for host in ("hosta", "ann", certificates.OPERATOR):  # which is the name in his certificate
                assert "its certificate is an operator's" in await ask(operator, port, host)

    run(main())


def test_operators_are_known_by_their_certificate(authority: Authority) -> None:
    server, operator = Transport(authority.directory / "hosta"), Transport(authority.directory / "ann")
    seen: list[tuple[bool, tuple[str, ...]]] = []

    async def main() -> None:
        async def who(_: bytes, context: Any) -> bytes:
            seen.append((tls.is_operator(context), tls.peer_names(context)))
            return b""

        service = grpc.aio.server()
        handlers = {"Who": grpc.unary_unary_rpc_method_handler(who)}
        service.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        port = service.add_secure_port("127.0.0.1:0", server.server_credentials())
        await service.start()
        reader = Transport(authority.metrics("prometheus"))
        for transport in (operator, Transport(authority.directory / "hostb"), reader):
            await ask(transport, port, "")
        await service.stop(0)

    run(main())
    assert seen == [(True, (certificates.OPERATOR,)), (False, ("hostb",)), (False, (certificates.METRICS,))]


def test_an_operator_is_no_controller(authority: Authority) -> None:
    """Nobody who may ask a controller may pretend to be one."""
    server, client = Transport(authority.directory / "ann"), Transport(authority.directory / "hostb")

    async def main() -> None:
        async with serving(server) as port:
            with pytest.raises(Untrusted, match="not trusted"):
                await ask(client, port, "hostb", name="ann")

    run(main())


def test_who_is_an_operator_is_nothing_else(authority: Authority) -> None:
    """A certificate of somebody else's authority may carry the names of hosts besides, and state no purpose."""
    made = Transport(authority.directory / "hostb").identity
    client, server = Transport(authority.directory / "hostb"), Transport(authority.directory / "hosta")
    both = authority.directory / "both"
    shutil.copytree(authority.directory / "hosta", both)
    key = serialization.load_pem_private_key((both / "node.key").read_bytes(), None)
    signer = serialization.load_pem_private_key((authority.directory / "ca.key").read_bytes(), None)
    names = [x509.UniformResourceIdentifier(certificates.OPERATOR), x509.DNSName("hosta"), x509.DNSName("hostb")]
    leaf = (
        x509.CertificateBuilder(made.leaf.issuer, made.leaf.subject, key.public_key(), 77)  # type: ignore[arg-type]
        .not_valid_before(made.leaf.not_valid_before_utc)
        .not_valid_after(made.leaf.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    )
    (both / "node.crt").write_bytes(leaf.public_bytes(PEM))
    operator = Transport(both)

    async def main() -> None:
        async with serving(server) as port:
            assert "its certificate is an operator's" in await ask(operator, port, "hostb")
        async with serving(operator) as port:
            with pytest.raises(Untrusted, match="cannot be a controller's: it is an operator's"):
                await ask(client, port, "hostb")

    run(main())


@pytest.mark.parametrize("side", ["server", "client"])
def test_another_authority(authority: Authority, tmp_path: Path, side: str) -> None:
    other = Authority.create(tmp_path / "other")
    other.node("hosta", ["127.0.0.1"])
    other.node("hostb")
    mine, theirs = authority.directory, other.directory
    server = Transport((theirs if side == "server" else mine) / "hosta")
    if side == "client":  # it trusts the server, and is not trusted
        shutil.copy(mine / "hosta" / "ca.crt", tmp_path / "server.crt")
        both = (mine / "hosta" / "ca.crt").read_bytes() + (theirs / "hostb" / "ca.crt").read_bytes()
        (theirs / "hostb" / "ca.crt").write_bytes(both)
    client = Transport((mine if side == "server" else theirs) / "hostb")
    words = (
        "does not take the certificate of this host; compare ca.crt there"
        if side == "client"
        else "copy the same ca.crt"
    )

    async def main() -> None:
        async with serving(server) as port:
            with pytest.raises(Untrusted, match=words):
                await ask(client, port, "hostb")

    run(main())


@pytest.mark.parametrize("side", ["server", "client"])
def test_an_expired_certificate(
    authority: Authority, long_ago: Any, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    name = "hosta" if side == "server" else "hostb"
    with long_ago():
        authority.node(name, ["127.0.0.1"], force=True)
    with pytest.raises(ControlRefused, match=r"it expired at .*tftctl certs rotate"):
        Transport(authority.directory / name)
    expired = unjudged(monkeypatch, authority.directory / name)
    server = expired if side == "server" else Transport(authority.directory / "hosta")
    client = expired if side == "client" else Transport(authority.directory / "hostb")
    words = r"has expired\); make new ones \(`tftctl certs rotate`\)" if side == "server" else r"because it expired at"

    async def main() -> None:
        async with serving(server) as port:
            with pytest.raises(Untrusted, match=words):
                await ask(client, port, "hostb")

    run(main())


def test_a_server_with_another_name(authority: Authority) -> None:
    server, client = Transport(authority.directory / "hosta"), Transport(authority.directory / "hostb")

    async def main() -> None:
        async with serving(server) as port:
            with pytest.raises(Untrusted, match=r"not valid for 'elsewhere'\); make one that carries elsewhere"):
                await ask(client, port, "hostb", name="elsewhere")

    run(main())


def test_a_server_without_tls(authority: Authority) -> None:
    client = Transport(authority.directory / "hostb")

    async def main() -> None:
        async with serving(None) as port:
            with pytest.raises(Untrusted, match=r"speaks no TLS .*--tft-insecure"):
                await ask(client, port, "hostb")

    run(main())


def test_a_revoked_client_is_refused_without_a_restart(authority: Authority) -> None:
    server, client = Transport(authority.directory / "hosta"), Transport(authority.directory / "hostb")

    async def main() -> None:
        async with serving(server) as port:
            assert await ask(client, port, "hostb") == "host hostb"
            assert authority.revoke("hostb")
            renew(server, authority.directory / "hosta")
            refused = await ask(client, port, "hostb")
            assert "was revoked; make it a new one (`tftctl certs node hostb --force`)" in refused
            assert not client.read_again()  # its own files are of no use any more
            authority.node("hostb", force=True)
            renew(client, authority.directory / "hostb")
            assert await ask(client, port, "hostb") == "host hostb"

    run(main())


def test_a_revoked_server_is_refused_without_a_restart(authority: Authority) -> None:
    server, client = Transport(authority.directory / "hosta"), Transport(authority.directory / "hostb")

    async def main() -> None:
        async with serving(server) as port:
            assert await ask(client, port, "hostb") == "host hostb"
            authority.revoke("hosta")
            renew(client, authority.directory / "hostb")
            with pytest.raises(Untrusted, match="was revoked; make it a new one"):
                await ask(client, port, "hostb")

    run(main())


def test_who_holds_a_channel_trusts_one_certificate_only(authority: Authority) -> None:
    """Between the look and the channel nobody can come with a certificate that was revoked."""
    client = Transport(authority.directory / "hostb")
    seen = certificates.read_all((authority.directory / "hosta" / "node.crt").read_bytes())[0]
    authority.node("hosta", ["127.0.0.1"], force=True)  # another one, by the same authority, for the same name
    server = Transport(authority.directory / "hosta")

    async def main() -> None:
        async with serving(server) as port:
            for certificate, welcome in ((seen, False), (server.identity.leaf, True)):
                credentials = client.channel_credentials(certificate)
                async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
                    try:
                        assert await channel.unary_unary(METHOD)(b"hostb", timeout=LIMIT) and welcome
                    except grpc.aio.AioRpcError as error:
                        assert not welcome and "CERTIFICATE_VERIFY_FAILED" in str(error.details())

    run(main())


def test_certificates_and_authority_change_without_a_restart(authority: Authority) -> None:
    server, client = Transport(authority.directory / "hosta"), Transport(authority.directory / "hostb")
    both = ((server, authority.directory / "hosta"), (client, authority.directory / "hostb"))

    async def main() -> None:
        async with serving(server) as port:

            async def works() -> str:
                assert await ask(client, port, "hostb") == "host hostb"
                look = await client.look_at(f"127.0.0.1:{port}", "hosta", LIMIT)
                return certificates.common_name_of(look.issuer)

            first = await works()
            authority.replace()
            for upgraded in both:  # one after the other, and all the time they speak
                renew(*upgraded)
                assert await works() == first
            authority.rotate()
            renew(*both[0])
            second = await works()
            assert second != first
            renew(*both[1])
            await works()
            authority.retire()
            for upgraded in both:
                renew(*upgraded)
                assert await works() == second

    run(main())


def test_files_that_do_not_fit_change_nothing(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    transport = Transport(authority.directory / "hosta")
    before = transport.identity
    (authority.directory / "hosta" / "node.crt").write_text("half a file")
    assert not transport.read_again() and not transport.read_again()
    assert transport.identity is before
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "those read before stay in force" in record.getMessage() and "tftctl certs node" in record.getMessage()


def test_the_end_of_the_own_certificate_hides_no_change(
    authority: Authority, long_ago: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with long_ago():
        authority.node("hosta", force=True)
    transport = unjudged(monkeypatch, authority.directory / "hosta")
    theirs = Transport(authority.directory / "hostb").identity.leaf
    authority.revoke("hostb")
    assert transport.read_again()
    assert transport.is_revoked(theirs)


def test_a_list_of_revoked_that_nobody_signed_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority.create(tmp_path / "other")
    other.node("x")
    other.revoke("x")
    for text, words in ((other.directory.joinpath(CRL).read_bytes(), "was signed by nobody in ca.crt"),
                        (b"revoked: hostb\n", "does not end as PEM does"),
                        (b"", "there is no list of revoked certificates in it")):  # fmt: skip
        (authority.directory / "hosta" / CRL).write_bytes(text)
        with pytest.raises(ControlRefused, match=words):
            Transport(authority.directory / "hosta")


def test_what_only_openssl_refuses_changes_nothing(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    """A key that is too short for it, of an authority that is not ours."""
    directory = authority.directory / "hosta"
    transport = Transport(directory)
    before = transport.identity
    key = ec.generate_private_key(ec.SECP192R1())
    signer = serialization.load_pem_private_key((authority.directory / "ca.key").read_bytes(), None)
    old = (
        x509.CertificateBuilder(before.leaf.issuer, before.leaf.subject, key.public_key(), 78)
        .not_valid_before(before.leaf.not_valid_before_utc)
        .not_valid_after(before.leaf.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("hosta")]), critical=False)
        .sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    )
    (directory / "node.crt").write_bytes(old.public_bytes(PEM))
    plain = serialization.NoEncryption()
    (directory / "node.key").write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, plain))
    assert not transport.read_again() and transport.identity is before
    assert "those read before stay in force: --tft-tls-dir: OpenSSL does not take" in caplog.text
    with pytest.raises(ControlRefused, match="OpenSSL does not take"):
        Transport(directory)


@pytest.mark.parametrize("how", ["emptied", "removed"])
def test_a_list_that_is_lost_lifts_nothing(authority: Authority, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """A copy empties a file before it fills it, and a directory may come without one."""
    theirs = Transport(authority.directory / "hostb").identity.leaf
    authority.revoke("hostb")
    own = authority.directory / "hosta"
    transport = Transport(own)
    assert transport.is_revoked(theirs)
    whole = (own / CRL).read_bytes()
    if how == "emptied":
        (own / CRL).write_bytes(b"")
    else:
        (own / CRL).unlink()
    assert not transport.read_again() and transport.is_revoked(theirs)
    assert "copy it" in caplog.text and "those read before stay in force" in caplog.text
    (own / CRL).write_bytes(whole)
    transport.read_again()
    assert transport.is_revoked(theirs)


# ---------------------------------------------------------------------------------------------- keys


def lock(key: Path, password: bytes) -> bytes:
    """Encrypts a key file; what was in it."""
    plain = key.read_bytes()
    loaded: Any = serialization.load_pem_private_key(plain, None)
    encryption = serialization.BestAvailableEncryption(password)
    key.write_bytes(loaded.private_bytes(PEM, serialization.PrivateFormat.PKCS8, encryption))
    return plain


def test_an_encrypted_key(authority: Authority, tmp_path: Path) -> None:
    directory = authority.directory / "hosta"
    lock(directory / "node.key", b"open sesame")
    password = tmp_path / "password"
    password.write_text("open sesame\n")
    with pytest.raises(ControlRefused, match=r"is encrypted; give its password with --tft-tls-key-password-file"):
        Transport(directory)
    with pytest.raises(ControlRefused, match=r"--tft-tls-key-password-file: .*/none cannot be read"):
        Transport(directory, KeyAccess(str(tmp_path / "none")))
    server = Transport(directory, KeyAccess(str(password)))
    assert b"ENCRYPTED" not in server.identity.key
    client = Transport(authority.directory / "hostb")

    async def main() -> None:
        async with serving(server) as port:
            assert await ask(client, port, "hostb") == "host hostb"

    run(main())
    password.write_text("open barley")
    with pytest.raises(ControlRefused, match=r"--tft-tls-key-password-file: the password in .* does not open"):
        Transport(directory, KeyAccess(str(password)))
    with pytest.raises(ControlRefused, match=r"--tft-tls-key-password-file: .* is not encrypted; leave the flag out"):
        Transport(authority.directory / "hostb", KeyAccess(str(password)))


def test_a_key_that_a_function_opens(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = authority.directory / "hosta"
    key = directory / "node.key"
    key.write_bytes(bytes(byte ^ 0x5A for byte in key.read_bytes()))
    (tmp_path / "vault_of_ours.py").write_text(
        "calls = []\n"
        "def unlock(data):\n"
        "    calls.append(len(data))\n"
        "    return bytes(byte ^ 0x5A for byte in data)\n"
        "def broken(data):\n"
        "    raise RuntimeError('no such key slot')\n"
        "def wrong(data):\n"
        "    return 'a string'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    transport = Transport(directory, KeyAccess(decrypt="vault_of_ours:unlock"))
    assert not transport.read_again()
    assert sys.modules["vault_of_ours"].calls == [len(key.read_bytes())]
    for hook, words in (
        ("vault_of_ours", "names no function; write module:function"),
        ("vault_of_ours:absent", "vault_of_ours:absent cannot be found"),
        ("no_such_module:unlock", "no_such_module:unlock cannot be found"),
        ("vault_of_ours:broken", r"vault_of_ours:broken failed at .*\(RuntimeError\); it gets"),  # not its text
        ("vault_of_ours:wrong", "returned str, not bytes"),
    ):
        with pytest.raises(ControlRefused, match=f"--tft-tls-decrypt: .*{words}"):
            Transport(directory, KeyAccess(decrypt=hook))


def test_certificates_of_somebody_elses_authority(tmp_path: Path) -> None:
    """RSA, with an authority in between, as large sites have it; nothing of it was made by us."""
    at = datetime.datetime.now(datetime.timezone.utc)
    keys = {name: rsa.generate_private_key(65537, 2048) for name in ("root", "between", "hosta")}

    def sign(name: str, by: str, extension: x509.ExtensionType) -> x509.Certificate:
        builder = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by)]),
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
            keys[name].public_key(),
            x509.random_serial_number(),
            at - datetime.timedelta(hours=1),
            at + datetime.timedelta(days=100),
        )
        authority = name != "hosta"
        builder = builder.add_extension(x509.BasicConstraints(authority, None), critical=True)
        return builder.add_extension(extension, critical=False).sign(keys[by], hashes.SHA256())

    identifier = {name: x509.SubjectKeyIdentifier.from_public_key(key.public_key()) for name, key in keys.items()}
    root, between = sign("root", "root", identifier["root"]), sign("between", "root", identifier["between"])
    leaf = sign("hosta", "between", x509.SubjectAlternativeName([x509.DNSName("hosta")]))
    (tmp_path / "ca.crt").write_bytes(root.public_bytes(PEM))
    (tmp_path / "node.crt").write_bytes(leaf.public_bytes(PEM) + between.public_bytes(PEM))
    traditional = serialization.PrivateFormat.TraditionalOpenSSL
    (tmp_path / "node.key").write_bytes(keys["hosta"].private_bytes(PEM, traditional, serialization.NoEncryption()))
    transport = Transport(tmp_path, names=("hosta",))

    async def main() -> None:
        async with serving(transport) as port:
            assert await ask(transport, port, "hosta") == "host hosta"

    run(main())


def test_a_function_that_opens_keys_is_asked_seldom(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a key service: it is not asked for a list of revoked ones, nor each second after it has failed."""
    directory = authority.directory / "hosta"
    (tmp_path / "service_of_ours.py").write_text(
        "calls, down = [], []\n"
        "def unlock(data):\n"
        "    calls.append(1)\n"
        "    if down:\n"
        "        raise RuntimeError('down')\n"
        "    return data\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    transport = Transport(directory, KeyAccess(decrypt="service_of_ours:unlock"))
    service = sys.modules["service_of_ours"]
    authority.revoke("hostb")
    assert transport.read_again() and len(service.calls) == 1
    service.down.append(1)
    authority.node("hosta", ["127.0.0.1"], force=True)
    assert [transport.read_again() for _ in range(10)] == [False] * 10 and len(service.calls) == 2
    service.down.clear()
    later = time.monotonic() + 61.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert transport.read_again() and len(service.calls) == 3
    assert transport.identity.certificate == (directory / "node.crt").read_bytes()
    assert not transport.read_again() and len(service.calls) == 3


# ---------------------------------------------------------------------------------------------- settings


def test_what_is_wrong_with_a_directory_is_said_at_start_up(authority: Authority, tmp_path: Path) -> None:
    cfg = config(tmp_path, 2, nnodes=2, port=1, host="hosta", controller_host="10.1.2.3",
                 tls_dir=str(authority.directory / "hosta"))  # fmt: skip
    assert tls.transport(cfg) is not None
    with pytest.raises(ControlRefused, match=r"want to see 10\.1\.2\.3; .*tftctl certs node hosta,10\.1\.2\.3 --force"):
        tls.transport(cfg, first=True)
    shared = config(tmp_path, 2, nnodes=2, port=1, host="hostb", tls_dir=str(authority.directory))
    transport = tls.transport(shared)  # shared storage with the files of all hosts
    assert transport is not None and certificates.names(transport.identity.leaf) == ("hostb",)
    os.replace(authority.directory / "hostb" / "node.key", authority.directory / "hosta" / "node.key")
    with pytest.raises(ControlRefused, match=r"node\.key is not the key of node\.crt"):
        tls.transport(cfg)
    authority.revoke("ann")
    with pytest.raises(ControlRefused, match="was revoked"):
        Transport(authority.directory / "ann")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--tft-tls-key-password-file p", "there is no key without --tft-tls-dir"),
        ("--tft-tls-decrypt m:f", "there is no key without --tft-tls-dir"),
        ("--tft-tls-dir d --tft-tls-decrypt m:f --tft-tls-key-password-file p", "opens the same key"),
        ("--tft-tls-dir d --tft-tls-decrypt m", "'m' names no function"),
        ("--tft-tls-dir d --tft-tls-decrypt m:f", ""),
        ("--tft-tls-dir d --tft-tls-key-password-file p", ""),
    ],
)
def test_flags_that_do_not_fit_together(words: str, reason: str) -> None:
    refusals = resolve(["--enable-high-availability", *words.split()], {}).refusals
    assert [reason in refusal.reason for refusal in refusals] == ([True] if reason else []), refusals


def test_every_host_says_aloud_that_it_is_insecure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    common = {"nnodes": 2, "node_rank": 1, "host": "hostb", "port": 4000}
    tls.say_how_safe(config(tmp_path, 2, controller_host="127.0.0.1", **common))
    tls.say_how_safe(config(tmp_path, 2, controller_host="10.0.0.1", tls_dir="/certs", **common))
    assert not caplog.records
    tls.say_how_safe(config(tmp_path, 2, controller_host="10.0.0.1", insecure=True, **common))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        "--tft-insecure: host hostb speaks to the controller at 10.0.0.1:4000 without encryption" in record.getMessage()
    )


def test_a_key_that_others_can_read_is_complained_about(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    key = authority.directory / "hosta" / "node.key"
    Transport(key.parent)
    assert not caplog.records
    key.chmod(0o640)
    Transport(key.parent)
    assert f"chmod 600 {key}" in caplog.text


@pytest.mark.parametrize(("days", "level"), [(20, logging.WARNING), (40, None)])
def test_the_end_of_a_certificate_is_announced(
    authority: Authority, caplog: pytest.LogCaptureFixture, days: int, level: int | None
) -> None:
    authority.node("hosta", days=days, force=True)
    transport = Transport(authority.directory / "hosta")
    assert [record.levelno for record in caplog.records] == ([level] if level else [])
    transport.read_again()
    assert len(caplog.records) == (1 if level else 0), "once a day"


def test_the_end_of_an_authority_is_announced_too(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate above it ends all trust in a host's own, also where that one names a later day."""
    made = Authority.create(tmp_path / "short", days=20)
    directory = made.node("hosta")
    (leaf, above) = (certificates.read_all((directory / name).read_bytes())[0] for name in ("node.crt", "ca.crt"))
    assert leaf.not_valid_after_utc == above.not_valid_after_utc, "no later than what it is worth"
    theirs = Transport(authority.directory / "hostb").identity.leaf
    Transport(directory)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"the authority behind it, {certificates.common_name(above)!r}: it expires in 19 days" in caplog.text
    assert "`tftctl certs rotate --authority`" in caplog.text
    signer = serialization.load_pem_private_key((made.directory / "ca.key").read_bytes(), None)
    gone = (  # the same authority's certificate, of a time that is over
        x509.CertificateBuilder(above.subject, above.subject, above.public_key(), 5)
        .not_valid_before(above.not_valid_before_utc - datetime.timedelta(days=60))
        .not_valid_after(above.not_valid_before_utc - datetime.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    )
    transport = Transport(directory)
    (directory / "ca.crt").write_bytes(gone.public_bytes(PEM))
    with pytest.raises(ControlRefused, match=r"the authority behind it, .*: it expired at .* rotate --authority`"):
        Transport(directory)
    assert not transport.read_again() and "those read before stay in force" in caplog.text
    running = unjudged(monkeypatch, directory)  # since before it expired
    made.node("hostb")
    made.revoke("hostb")
    (directory / "ca.crt").write_bytes(gone.public_bytes(PEM))  # which it brought up to date
    assert running.read_again() and len(running.identity.revoked.ids) == 1, "what has ended hides no change"
    assert not running.read_again() and "nobody can come back" in caplog.text
    (directory / "ca.crt").write_bytes(gone.public_bytes(PEM) + above.public_bytes(PEM))
    assert certificates.first_to_end([leaf], [gone, above]) == above, "the one that holds counts"
    assert transport.read_again() and not transport.is_revoked(theirs)


# ---------------------------------------------------------------------------------------------- a controller


def test_a_host_that_is_revoked_is_cut_off_at_once(authority: Authority, tmp_path: Path) -> None:
    """Its stream is open already, and nothing is started again."""
    cfg = config(tmp_path, 1, port=free_port(), host="hosta", tls_dir=str(authority.directory / "hosta"), start=5.0)
    process = controller(cfg, tmp_path)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        ca, certificate, key = tls.read(authority.directory / "hostb")
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        options = (("grpc.ssl_target_name_override", "hosta"),)
        with grpc.secure_channel(f"127.0.0.1:{cfg.port}", credentials, options) as channel:
            call = channel.stream_stream(
                RELAY,
                request_serializer=wire.HostSays.SerializeToString,
                response_deserializer=wire.HostOrders.FromString,
            )
            says: queue.SimpleQueue[wire.HostSays | None] = queue.SimpleQueue()
            says.put(wire.HostSays(hello=wire.HostHello(protocol=PROTOCOL, host="hostb", node_rank=0, run="test")))
            stream = call(iter(says.get, None), timeout=10)
            assert next(stream).WhichOneof("body") == "welcome"
            authority.revoke("hostb")
            refused = next(found for found in stream if found.WhichOneof("body") == "refused").refused.reason
            assert "was revoked; make it a new one (`tftctl certs node hostb --force`)" in refused
            assert all(found.WhichOneof("body") == "beat" for found in stream), "and the stream ends"
            says.put(None)
        answer = say_hello(f"127.0.0.1:{cfg.port}", credentials, host="hostb")
        assert "was revoked" in answer.refused.reason
    finally:
        process.kill()
        _, err = process.communicate(timeout=5)
    assert "host hostb is heard no longer: its certificate" in err
