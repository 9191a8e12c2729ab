"""Makes a small certificate authority in a directory: its own certificate, one for each host, one for each operator.

    DIR/ca.crt ca.key        the authority; two certificates in ca.crt while a new one takes over
    DIR/ca-old.crt .key      the one that goes, for as long as it is trusted
    DIR/issued.json          all that was ever signed, so that it can be revoked
    DIR/revoked.crl          what was
    DIR/HOST/ ...            ca.crt, node.crt, node.key, revoked.crl: the directory for --tft-tls-dir on that host

EC keys on P-256, for both authority and hosts. Every write is complete or not there, keys are readable by their owner
alone. Nothing here is needed on a host that trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import ipaddress
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mindspeed_tft.control import certificates
from mindspeed_tft.control.certificates import METRICS, OPERATOR

CA_DAYS, NODE_DAYS = 3650, 365
_SKEW = datetime.timedelta(hours=1)  # that the clocks of two hosts may differ
_PLAIN_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_PEM = serialization.Encoding.PEM
_CA, _OLD = "ca", "ca-old"
CRL = "revoked.crl"
_ISSUED = "issued.json"


class AuthorityError(ValueError):
    """The directory, or what is asked of it, does not fit; the text says why and names the remedy."""


@dataclass(frozen=True)
class Issued:
    """One certificate that was signed."""

    name: str  # of the host, operator or reader of metrics
    kind: str  # "node", "operator" or "metrics"
    serial: str  # hexadecimal
    issuer: str  # serial number of the authority's certificate
    ends: str  # ISO 8601, UTC
    revoked: str = ""  # when, likewise


@dataclass(frozen=True)
class _Signer:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


class Authority:
    """An authority that is there already; `create` makes one."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            AuthorityError: there is none, or it cannot be read.
        """
        self.directory = directory
        self._signer = self._read(_CA)
        self._old = self._read(_OLD) if (directory / f"{_OLD}.crt").exists() else None

    @staticmethod
    def create(directory: Path, days: int = CA_DAYS, force: bool = False) -> Authority:
        """Makes the directory and the authority's key in it.

        Raises:
            AuthorityError: there is one already, and not `force`.
        """
        _make_directory(directory)
        if not force and (directory / f"{_CA}.key").exists():
            raise AuthorityError(
                f"{directory} has an authority already, and what it signed would be worth nothing with another one; "
                "take another directory, `tftctl certs rotate --authority` for a change without an interruption, or "
                "--force"
            )
        for name in (f"{_OLD}.crt", f"{_OLD}.key", CRL, _ISSUED):
            (directory / name).unlink(missing_ok=True)
        _write_signer(directory, _CA, _make_signer(days))
        return Authority(directory)

    # ---------------------------------------------------------------------------------- issue

    def node(self, host: str, others: Sequence[str] = (), days: int = NODE_DAYS, force: bool = False) -> Path:
        """A certificate for a host under its name (as `uname -n` tells it) and other names and addresses; the directory
        that is to be copied there.

        Raises:
            AuthorityError: the host has one and not `force`, or a name is none.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = [_general_name(name) for name in dict.fromkeys((host, *others))]
        return self._issue("node", host, names, uses, key, days, force)

    def operator(self, name: str, days: int = NODE_DAYS, force: bool = False) -> Path:
        """A certificate with which somebody may steer the job from another host; the directory for his --tls-dir.

        Raises:
            AuthorityError: as `node`.
        """
        return self._person("operator", name, OPERATOR, days, force)

    def metrics(self, name: str, days: int = NODE_DAYS, force: bool = False) -> Path:
        """A certificate with which Prometheus may read the metrics and do nothing else; the directory for its
        tls_config.

        Raises:
            AuthorityError: as `node`.
        """
        return self._person("metrics", name, METRICS, days, force)

    def _person(self, kind: str, name: str, uri: str, days: int, force: bool) -> Path:
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(uri)]
        return self._issue(kind, name, names, [ExtendedKeyUsageOID.CLIENT_AUTH], key, days, force)

    def _issue(
        self,
        kind: str,
        name: str,
        names: Sequence[x509.GeneralName],
        uses: Sequence[x509.ObjectIdentifier],
        key: ec.EllipticCurvePrivateKey,
        days: int,
        force: bool,
    ) -> Path:
        directory = self.directory / _plain(name)
        if not force and (directory / "node.crt").exists():
            raise AuthorityError(
                f"{directory} has a certificate already; `tftctl certs rotate` makes a new one with the same names, "
                "--force one with these"
            )
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        above = self._signer.certificate
        if certificates.now() > above.not_valid_after_utc:
            raise AuthorityError(
                f"{self.directory / _CA}.crt: {certificates.out_of_date(above)}; make another one: `tftctl certs "
                "rotate --authority`"
            )
        builder = _builder(subject, above.subject, key, days, above.not_valid_after_utc).add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        builder = builder.add_extension(_key_usage(signs=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.add_extension(_authority_id(self._signer.certificate), critical=False).sign(
            self._signer.key, hashes.SHA256()
        )
        self._remember(
            Issued(
                name,
                kind,
                certificates.serial(certificate),
                certificates.serial(self._signer.certificate),
                certificate.not_valid_after_utc.isoformat(),
            )
        )  # before anybody can use it
        _make_directory(directory)
        _write(directory / "node.key", _private(key), 0o600)
        _write(directory / "node.crt", certificate.public_bytes(_PEM), 0o644)
        self._hand_out(directory)
        return directory

    # ---------------------------------------------------------------------------------- change

    def rotate(self, days: int = NODE_DAYS) -> list[Path]:
        """New keys and certificates for all hosts and operators, with the names that they have; their directories.
        Whose certificate was revoked gets no other one by this."""
        found = []
        revoked = {one.serial for one in self.issued() if one.revoked}
        for directory in self.holders():
            (old, *_) = certificates.read_all((directory / "node.crt").read_bytes())
            if certificates.serial(old) in revoked:
                continue
            if certificates.is_operator(old):
                found.append(self.operator(directory.name, days, force=True))
            elif certificates.is_reader(old):
                found.append(self.metrics(directory.name, days, force=True))
            else:
                found.append(self.node(directory.name, certificates.hosts(old), days, force=True))
        return found

    def replace(self, days: int = CA_DAYS) -> list[Path]:
        """A new authority beside the old one. Both are trusted until `retire`; the certificates of hosts stay as they
        are until `rotate`. The directories that changed.

        Raises:
            AuthorityError: an earlier change is not finished.
        """
        if self._old is not None:
            raise AuthorityError(
                f"{self.directory} has two authorities already; finish the change first: `tftctl certs rotate`, copy, "
                "`tftctl certs rotate --retire-old`, copy"
            )
        _write_signer(self.directory, _OLD, self._signer)
        self._old, self._signer = self._signer, _make_signer(days)
        _write_signer(self.directory, _CA, self._signer)
        return self._hand_out_all()

    def retire(self) -> list[Path]:
        """The old authority is not trusted any more; the directories that changed.

        Raises:
            AuthorityError: there is no old one, or it stands behind a certificate that is in use.
        """
        if self._old is None:
            raise AuthorityError(f"{self.directory} has one authority only; there is nothing to retire")
        for directory in self.holders():
            (certificate, *_) = certificates.read_all((directory / "node.crt").read_bytes())
            revoked = certificates.serial(certificate) in {one.serial for one in self.issued() if one.revoked}
            if not revoked and not certificates.issued_by(certificate, self._signer.certificate):
                raise AuthorityError(
                    f"{directory} has a certificate of the old authority, which nobody would take any more; run "
                    "`tftctl certs rotate` and copy the directories first"
                )
        for kind in ("crt", "key"):
            (self.directory / f"{_OLD}.{kind}").unlink()
        self._old = None
        self._write_revoked()
        return self._hand_out_all()

    def revoke(self, name: str) -> list[Issued]:
        """Nothing that was signed for this host or operator is to be trusted any more; what that was.

        Raises:
            AuthorityError: nothing was, or all of it is revoked or expired.
        """
        at = certificates.now()
        issued = self.issued()
        hit = [one for one in issued if one.name == name and not one.revoked and one.ends > at.isoformat()]
        if not hit:
            known = ", ".join(sorted({one.name for one in issued})) or "nobody"
            raise AuthorityError(f"no certificate of {name!r} is in force; known are {known}")
        done = [dataclasses.replace(one, revoked=at.isoformat()) if one in hit else one for one in issued]
        self._write_issued(done)
        self._write_revoked()
        self._hand_out_all()
        return hit

    # ---------------------------------------------------------------------------------- files

    def holders(self) -> list[Path]:
        """The directories of hosts and operators."""
        return sorted(path.parent for path in self.directory.glob("*/node.crt"))

    def issued(self) -> list[Issued]:
        path = self.directory / _ISSUED
        if not path.exists():
            return []
        try:
            return [Issued(**one) for one in json.loads(path.read_text())]
        except (ValueError, TypeError) as error:
            raise AuthorityError(f"{path} cannot be read ({error}); restore it, it says what can be revoked") from None

    def _remember(self, one: Issued) -> None:
        self._write_issued([*self.issued(), one])

    def _write_issued(self, issued: Sequence[Issued]) -> None:
        text = json.dumps([dataclasses.asdict(one) for one in issued], indent=1) + "\n"
        _write(self.directory / _ISSUED, text.encode(), 0o600)

    def _write_revoked(self) -> None:
        """A list of each authority, even an empty one: one that is missing says nothing."""
        issued, at, lists = self.issued(), certificates.now(), b""
        for signer in self._signers():
            mine = certificates.serial(signer.certificate)
            builder = x509.CertificateRevocationListBuilder().issuer_name(signer.certificate.subject)
            builder = builder.last_update(at).next_update(signer.certificate.not_valid_after_utc)
            for one in issued:
                if one.revoked and one.issuer == mine:
                    entry = x509.RevokedCertificateBuilder().serial_number(int(one.serial, 16))
                    entry = entry.revocation_date(datetime.datetime.fromisoformat(one.revoked))
                    builder = builder.add_revoked_certificate(entry.build())
            lists += builder.sign(signer.key, hashes.SHA256()).public_bytes(_PEM)
        _write(self.directory / CRL, lists, 0o644)

    def _signers(self) -> Iterator[_Signer]:
        yield self._signer
        if self._old is not None:
            yield self._old

    def _hand_out_all(self) -> list[Path]:
        found = self.holders()
        for directory in found:
            self._hand_out(directory)
        return found

    def _hand_out(self, directory: Path) -> None:
        trusted = b"".join(signer.certificate.public_bytes(_PEM) for signer in self._signers())
        _write(directory / "ca.crt", trusted, 0o644)
        if (self.directory / CRL).exists():
            _write(directory / CRL, (self.directory / CRL).read_bytes(), 0o644)

    def _read(self, name: str) -> _Signer:
        certificate, key = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        try:
            found = certificates.read_all(certificate.read_bytes())[0]
            loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        except OSError as error:
            raise AuthorityError(
                f"{error.filename} cannot be read ({error.strerror}); make an authority with `tftctl certs init "
                f"{self.directory}`"
            ) from None
        except (ValueError, TypeError) as error:
            raise AuthorityError(f"{certificate} and {key.name} are no authority ({error}); restore them") from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != found.public_key():
            raise AuthorityError(f"{key} is not the key of {certificate.name}; restore it")
        return _Signer(found, loaded)


# ---------------------------------------------------------------------------------------------- certificates


def _make_signer(days: int) -> _Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    # No two authorities have one name: a certificate and a list name their issuer by it.
    name = f"mindspeed_tft authority {certificates.now():%Y-%m-%d} {secrets.token_hex(3)}"
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, subject, key, days).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    builder = builder.add_extension(_key_usage(signs=True), critical=True)
    return _Signer(builder.sign(key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    days: int,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    """`latest`: the end of the one who signs, after which it is worth nothing."""
    if days < 1:
        raise AuthorityError(f"--days {days}: a certificate holds for a day or more")
    at = certificates.now()
    end = at + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - _SKEW)
        .not_valid_after(end if latest is None else min(end, latest))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _authority_id(certificate: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    found = certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(found)


def _key_usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(_plain(text))


def _plain(name: str) -> str:
    """A name that may stand in a certificate, and for a directory."""
    if not _PLAIN_NAME.fullmatch(name):
        raise AuthorityError(f"{name!r} is no name of a host or operator: letters, digits, '.', '-' and '_' make one")
    return name


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write_signer(directory: Path, name: str, signer: _Signer) -> None:
    _write(directory / f"{name}.key", _private(signer.key), 0o600)
    _write(directory / f"{name}.crt", signer.certificate.public_bytes(_PEM), 0o644)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AuthorityError(f"{directory} cannot be made ({error.strerror})") from None


def _write(path: Path, data: bytes, mode: int) -> None:
    """Complete as soon as it has its name; never readable by more than `mode` says."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)  # whatever the umask
            file.write(data)
            file.flush()
            os.fsync(fd)
        os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise AuthorityError(f"{path} cannot be written ({error.strerror})") from None
