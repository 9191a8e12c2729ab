"""What certificates say: names, dates, who signed them, and which ones are not to be trusted any more.

Reads and judges; makes nothing (`authority` does) and speaks to nobody (`tls` does).
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

OPERATOR = "urn:mindspeed_tft:operator"  # the URI in a certificate that makes its bearer an operator
METRICS = "urn:mindspeed_tft:metrics"  # likewise, who may read the metrics and nothing else
SOON = datetime.timedelta(days=30)  # before its end, from when on a certificate is complained about
_SHORTEST_RSA = 2048  # bits; OpenSSL and BoringSSL refuse shorter ones or will

Id = tuple[bytes, int]  # of a certificate: its issuer's name (DER) and its serial number


class Unfit(ValueError):
    """A certificate, or a list of revoked ones, cannot be used; the text says why, without a remedy."""


@dataclass(frozen=True)
class Revoked:
    """Certificates that are not to be trusted, from lists that an authority of ours has signed."""

    ids: frozenset[Id] = frozenset()
    stale: datetime.datetime | None = None  # a list promised a newer one by then

    def has(self, certificate: x509.Certificate) -> bool:
        return identifier(certificate) in self.ids


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


def identifier(certificate: x509.Certificate) -> Id:
    return certificate.issuer.public_bytes(), certificate.serial_number


def serial(certificate: x509.Certificate) -> str:
    """As people compare it."""
    return f"{certificate.serial_number:x}"


def read_all(pem: bytes) -> list[x509.Certificate]:
    """Every certificate of a PEM file, in its order.

    Raises:
        Unfit: there is none, or one cannot be read.
    """
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise Unfit(f"there is no certificate in it ({error})") from None


def names(certificate: x509.Certificate) -> tuple[str, ...]:
    """DNS names, addresses and URIs; where there is none, the common name. As gRPC tells them of a peer."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return tuple(str(each.value) for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME))
    kinds = (x509.DNSName, x509.IPAddress, x509.UniformResourceIdentifier)
    return tuple(str(each.value) for each in found if isinstance(each, kinds))


def hosts(certificate: x509.Certificate) -> tuple[str, ...]:
    """The names and addresses of hosts among its names."""
    return tuple(name for name in names(certificate) if ":" not in name or _is_address(name))


def names_host(found: Iterable[str], host: str) -> bool:
    """Whether one of these names is that host's. A wildcard names none: it would bind a certificate to no host."""
    return host.lower() in {name.lower() for name in found}


def common_name(certificate: x509.Certificate) -> str:
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else certificate.subject.rfc4514_string()


def is_operator(certificate: x509.Certificate) -> bool:
    return OPERATOR in names(certificate)


def is_reader(certificate: x509.Certificate) -> bool:
    """Of metrics, and of nothing else."""
    return METRICS in names(certificate)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------------------------------- judging


def out_of_date(certificate: x509.Certificate, at: datetime.datetime | None = None) -> str:
    """Why it does not hold at this moment; "" where it does."""
    at = at or now()
    if at > certificate.not_valid_after_utc:
        return f"it expired at {_minute(certificate.not_valid_after_utc)}"
    if at < certificate.not_valid_before_utc:
        return f"it holds from {_minute(certificate.not_valid_before_utc)} on, and it is {_minute(at)} here"
    return ""


def expires_soon(certificate: x509.Certificate, at: datetime.datetime | None = None) -> str:
    """A warning in the last days of its life; "" before."""
    left = certificate.not_valid_after_utc - (at or now())
    if left > SOON:
        return ""
    return f"it expires in {max(0, left.days)} days, at {_minute(certificate.not_valid_after_utc)}"


def way_up(
    chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]
) -> tuple[list[x509.Certificate], bool]:
    """From a certificate, which is the first of its chain, to an authority, if there is one: that with most time left;
    and whether there is."""
    way = [chain[0]]
    for _ in range(len(chain) + 1):
        behind = [authority for authority in authorities if issued_by(way[-1], authority)]
        if behind:
            return [*way, max(behind, key=lambda each: each.not_valid_after_utc)], True
        above = [each for each in chain if each is not way[-1] and issued_by(way[-1], each)]
        if not above:
            break
        way.append(above[0])
    return way, False


def first_to_end(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> x509.Certificate:
    """What ends all trust in a certificate, which is the first of its chain: itself, or one above that ends earlier or
    does not hold now."""
    way, _ = way_up(chain, authorities)
    way = way[::-1]  # of two that end together the upper one: a new one below would end no later
    return next((each for each in way if out_of_date(each)), min(way, key=lambda each: each.not_valid_after_utc))


def which(one: x509.Certificate, leaf: x509.Certificate) -> str:
    """Before words about what `first_to_end` found."""
    return "" if one == leaf else f"the authority behind it, {common_name(one)!r}: "


def renewal(one: x509.Certificate, leaf: x509.Certificate) -> str:
    """The command that makes another one."""
    return "`tftctl certs rotate`" if one == leaf else "`tftctl certs rotate --authority`, and the two steps after it"


def chain_break(chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> str:
    """Why no authority stands behind a certificate, which is the first of its chain; "" where one does."""
    way, whole = way_up(chain, authorities)
    if whole:
        return ""
    at = way[-1]
    known = ", ".join(sorted({repr(common_name(authority)) for authority in authorities}))
    return f"it was signed by {common_name_of(at.issuer)!r}, which is none of the authorities in ca.crt ({known})"


def issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def common_name_of(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else name.rfc4514_string()


def weakness(certificate: x509.Certificate) -> str:
    """Why its key is not one that is taken; "" where it is."""
    key = certificate.public_key()
    if isinstance(key, rsa.RSAPublicKey):
        return f"its RSA key has {key.key_size} bits only" if key.key_size < _SHORTEST_RSA else ""
    if isinstance(key, ec.EllipticCurvePublicKey):
        return ""
    return f"its key is neither EC nor RSA ({type(key).__name__})"


def unfit_for(certificate: x509.Certificate, server: bool) -> str:
    """Why it may not be shown by a server, or by a client; "" where it may. One that states no purpose fits all."""
    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ""
    wanted = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    return "" if wanted in uses else f"its purposes do not include {'server' if server else 'client'} authentication"


# ---------------------------------------------------------------------------------------------- revoked


def read_revoked(pem: bytes, authorities: Sequence[x509.Certificate]) -> Revoked:
    """The certificates on lists (CRL, PEM, one after the other) of these authorities.

    Raises:
        Unfit: there is no list in it, one cannot be read, or none of the authorities has signed it.
    """
    ids: set[Id] = set()
    promised: list[datetime.datetime] = []
    for block in _blocks(pem):
        try:
            crl = x509.load_pem_x509_crl(block)
        except ValueError as error:
            raise Unfit(f"a list of revoked certificates cannot be read ({error})") from None
        signers = [each.public_key() for each in authorities if each.subject == crl.issuer]
        if not any(_signed(crl, key) for key in signers):
            raise Unfit(f"the list of revoked certificates of {common_name_of(crl.issuer)!r} was signed by nobody in "
                        "ca.crt")  # fmt: skip
        issuer = crl.issuer.public_bytes()
        ids |= {(issuer, each.serial_number) for each in crl}
        if crl.next_update_utc is not None:
            promised.append(crl.next_update_utc)
    earliest = min(promised, default=None)
    return Revoked(frozenset(ids), earliest if earliest is not None and earliest < now() else None)


def _blocks(pem: bytes) -> list[bytes]:
    end = b"-----END X509 CRL-----"
    parts = pem.split(end)
    if parts[-1].strip():
        raise Unfit("a list of revoked certificates does not end as PEM does")
    if len(parts) == 1:  # half copied; it must not lift what was revoked
        raise Unfit("there is no list of revoked certificates in it")
    return [part + end + b"\n" for part in parts[:-1]]


def _signed(crl: x509.CertificateRevocationList, key: Any) -> bool:
    try:
        return crl.is_signature_valid(key)
    except (ValueError, TypeError):  # another kind of key
        return False


def _minute(at: datetime.datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC"
