"""`tftctl certs`: what it makes, what it refuses, and what it says of what is there."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from mindspeed_tft.cli.main import app
from mindspeed_tft.control import certificates, tls
from mindspeed_tft.control.authority import CRL


@pytest.fixture
def certs(tmp_path: Path) -> Callable[..., Result]:
    """`certs(*words)` in a directory `pki`."""

    def run(*words: str) -> Result:
        wanted = ["--dir", str(tmp_path / "pki")] if words[0] not in ("init", "check") else []
        result = CliRunner().invoke(app, ["certs", *words, *wanted])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    assert run("init", str(tmp_path / "pki")).exit_code == 0
    return run


@contextlib.contextmanager
def days_ago(days: float) -> Iterator[None]:
    """What is signed inside was signed then."""
    with pytest.MonkeyPatch.context() as patch:
        then = certificates.now() - datetime.timedelta(days=days)
        patch.setattr(certificates, "now", lambda: then)
        yield


def certificate(directory: Path) -> Any:
    return certificates.read_all((directory / "node.crt").read_bytes())[0]


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def test_what_is_made(certs: Callable[..., Result], tmp_path: Path) -> None:
    before = os.umask(0)  # the least careful one
    try:
        made = certs("node", "hosta,10.0.0.1,hosta.example.org", "hostb")
    finally:
        os.umask(before)
    assert made.exit_code == 0
    pki = tmp_path / "pki"
    assert made.stdout.splitlines()[:2] == [str(pki / "hosta"), str(pki / "hostb")]
    assert [mode(pki / name) for name in (".", "ca.key", "hosta", "hosta/node.key", "hosta/node.crt")] == [
        "0o700", "0o600", "0o700", "0o600", "0o644"]  # fmt: skip
    assert {path.name for path in (pki / "hosta").iterdir()} == {"ca.crt", "node.crt", "node.key"}
    found = certificate(pki / "hosta")
    assert certificates.names(found) == ("hosta", "10.0.0.1", "hosta.example.org")
    assert isinstance(found.public_key(), ec.EllipticCurvePublicKey)
    assert not certificates.unfit_for(found, server=True) and not certificates.unfit_for(found, server=False)
    for name in ("hosta", "hostb"):
        tls.Transport(pki / name, names=(name,))


def test_an_operator(certs: Callable[..., Result], tmp_path: Path) -> None:
    assert certs("operator", "ann").exit_code == 0
    found = certificate(tmp_path / "pki" / "ann")
    assert certificates.is_operator(found) and certificates.common_name(found) == "ann"
    assert certificates.hosts(found) == ()
    assert "server" in certificates.unfit_for(found, server=True)
    purposes = found.extensions.get_extension_for_class(certificates.x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_who_reads_metrics_does_nothing_else(certs: Callable[..., Result], tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    assert certs("metrics", "prometheus").exit_code == 0 and certs("node", "hosta").exit_code == 0
    found = certificate(pki / "prometheus")
    assert certificates.is_reader(found) and not certificates.is_operator(found)
    assert certificates.hosts(found) == () and certificates.names(found) == (certificates.METRICS,)
    assert not certificates.is_reader(certificate(pki / "hosta"))
    assert "server" in certificates.unfit_for(found, server=True)
    assert certs("check", str(pki / "prometheus")).exit_code == 0
    assert certs("rotate").exit_code == 0
    again = certificate(pki / "prometheus")
    assert again != found and certificates.names(again) == (certificates.METRICS,)


def test_nothing_is_overwritten_unasked(certs: Callable[..., Result], tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    certs("node", "hosta")
    before = {path: path.read_bytes() for path in pki.rglob("*") if path.is_file()}
    for words, part in (
        (("init", str(pki)), "has an authority already"),
        (("node", "hosta"), "has a certificate already"),
    ):
        refused = certs(*words)
        assert refused.exit_code == 2 and part in refused.stderr and "--force" in refused.stderr
    assert {path: path.read_bytes() for path in pki.rglob("*") if path.is_file()} == before
    assert certs("node", "hosta", "--force").exit_code == 0
    assert certs("init", str(pki), "--force").exit_code == 0
    assert certs("check", str(pki)).exit_code == 2, "the host's is of the authority before"


@pytest.mark.parametrize("name", ["a/b", "..", "", "host a"])
def test_names_that_are_none(certs: Callable[..., Result], name: str) -> None:
    refused = certs("node", name)
    assert refused.exit_code == 2
    assert "is no name of a host" in refused.stderr


def test_without_an_authority(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["certs", "node", "hosta", "--dir", str(tmp_path)])
    assert refused.exit_code == 2
    assert f"make an authority with `tftctl certs init {tmp_path}`" in refused.stderr


def test_check_without_the_certificate_of_the_authority(certs: Callable[..., Result], tmp_path: Path) -> None:
    certs("node", "hosta")
    (tmp_path / "pki" / "ca.crt").unlink()
    found = CliRunner().invoke(app, ["certs", "check", str(tmp_path / "pki"), "--json"])
    assert found.exit_code == 2 and isinstance(found.exception, SystemExit)
    assert "ca.crt cannot be read (No such file or directory)" in json.loads(found.stdout)[0]["errors"][0]


def test_revoke_and_what_rotate_makes_of_it(certs: Callable[..., Result], tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    certs("node", "hosta", "hostb")
    first = certificate(pki / "hostb")
    certs("node", "hostb", "--force")  # the earlier one is as good for whoever has its key
    revoked = certs("revoke", "hostb", "--json")
    assert revoked.exit_code == 0
    serials = {one["serial"] for one in json.loads(revoked.stdout)["revoked"]}
    assert serials == {certificates.serial(one) for one in (first, certificate(pki / "hostb"))}
    assert (pki / "hosta" / CRL).read_bytes() == (pki / CRL).read_bytes()
    assert tls.Transport(pki / "hosta").is_revoked(first)
    assert certs("revoke", "hostb").exit_code == 2
    nobody = certs("revoke", "hostx")
    assert "no certificate of 'hostx' is in force; known are hosta, hostb" in nobody.stderr
    rotated = certs("rotate")
    assert "hostb: revoked, so nothing was made for it" in rotated.stdout
    assert certificates.serial(certificate(pki / "hostb")) in serials
    assert certs("node", "hostb", "--force").exit_code == 0
    assert not tls.Transport(pki / "hosta").is_revoked(certificate(pki / "hostb"))


def test_rotate_keeps_names_and_kinds(certs: Callable[..., Result], tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    certs("node", "hosta,10.0.0.1")
    certs("operator", "ann")
    before = {name: (certificate(pki / name), (pki / name / "node.key").read_bytes()) for name in ("hosta", "ann")}
    assert certs("rotate", "--days", "7").exit_code == 0
    for name, (old, key) in before.items():
        new = certificate(pki / name)
        assert certificates.names(new) == certificates.names(old)
        assert new.serial_number != old.serial_number and (pki / name / "node.key").read_bytes() != key
        assert certificates.expires_soon(new)
    assert certs("check", str(pki)).exit_code == 1


def test_a_new_authority_in_three_steps(certs: Callable[..., Result], tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    certs("node", "hosta", "hostb")
    certs("revoke", "hostb")
    early = certs("rotate", "--retire-old")
    assert early.exit_code == 2 and "nothing to retire" in early.stderr
    assert certs("rotate", "--authority").exit_code == 0
    assert len(certificates.read_all((pki / "hosta" / "ca.crt").read_bytes())) == 2
    again = certs("rotate", "--authority")
    assert again.exit_code == 2 and "finish the change first" in again.stderr
    early = certs("rotate", "--retire-old")
    assert early.exit_code == 2 and "run `tftctl certs rotate`" in early.stderr
    assert tls.Transport(pki / "hosta").is_revoked(certificate(pki / "hostb")), "by the old one, which still counts"
    for words in (("rotate",), ("rotate", "--retire-old")):
        assert certs(*words).exit_code == 0
    assert len(certificates.read_all((pki / "hosta" / "ca.crt").read_bytes())) == 1
    assert not list(pki.glob("ca-old*"))
    tls.Transport(pki / "hosta")
    assert certs("rotate", "--authority", "--retire-old").exit_code == 2


def test_check_says_what_is_wrong(certs: Callable[..., Result], tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    certs("node", "hosta", "hostb")
    hosta = pki / "hosta"

    def look(status: int, *words: str, host: str = "hosta") -> str:
        found = certs("check", str(hosta), "--host", host)
        assert found.exit_code == status, found.stdout
        assert all(word in found.stdout for word in words), found.stdout
        return found.stdout

    look(0, "good", "hosta")
    look(2, "it is not for hostb; tftctl certs node hostb", host="hostb")
    key = hosta / "node.key"
    key.chmod(0o644)
    look(1, "can be read by others (mode 644)")
    key.chmod(0o600)
    with days_ago(340):
        certs("node", "hosta", "--force")
    look(1, "it expires in 24 days", "tftctl certs rotate")
    with days_ago(400):
        certs("node", "hosta", "--force")
    look(2, "it expired at", "tftctl certs rotate")
    certs("node", "hosta", "--force")
    good = key.read_bytes()
    key.write_bytes((pki / "hostb" / "node.key").read_bytes())
    look(2, "node.key is not the key of node.crt")
    key.unlink()
    look(2, "cannot be read (No such file or directory)")
    key.write_bytes(good)
    key.chmod(0o600)
    look(0)
    certs("revoke", "hosta")
    look(2, "was revoked")
    found = certs("check", str(pki), "--json")
    assert found.exit_code == 2
    assert {Path(one["directory"]).name: bool(one["errors"]) for one in json.loads(found.stdout)} == {
        "pki": False, "hosta": True, "hostb": False}  # fmt: skip


def test_check_finds_this_host_in_shared_storage(certs: Callable[..., Result], tmp_path: Path) -> None:
    here = os.uname().nodename
    certs("node", here, "another")
    shared = tmp_path / "shared"
    for name in (here, "another"):
        (shared / name).mkdir(parents=True)
        for file in (tmp_path / "pki" / name).iterdir():
            (shared / name / file.name).write_bytes(file.read_bytes())
            (shared / name / file.name).chmod(0o600)
    found = certs("check", str(shared), "--json")
    assert found.exit_code == 0, found.stdout
    assert json.loads(found.stdout)[0]["names"] == [here]


def test_nothing_outlives_its_authority(tmp_path: Path) -> None:
    pki = tmp_path / "short"
    run = CliRunner().invoke
    with days_ago(80):
        assert run(app, ["certs", "init", str(pki), "--days", "100"]).exit_code == 0
    assert run(app, ["certs", "node", "hosta", "-d", str(pki)]).exit_code == 0
    above = certificates.read_all((pki / "ca.crt").read_bytes())[0]
    assert certificate(pki / "hosta").not_valid_after_utc == above.not_valid_after_utc
    found = run(app, ["certs", "check", str(pki / "hosta"), "--host", "hosta"])
    assert found.exit_code == 1 and "the authority behind it" in found.stdout, found.stdout
    assert "it expires in 19 days" in found.stdout and "tftctl certs rotate --authority" in found.stdout
    with days_ago(-30):
        late = run(app, ["certs", "node", "hostb", "-d", str(pki)])
    assert late.exit_code == 2 and "tftctl certs rotate --authority" in late.stderr, late.stderr
