"""Mutual TLS between hosts: who we are, whom we trust, and clear words when that does not fit.

A host shows `node.crt` of its `--tft-tls-dir` and takes what an authority in `ca.crt` has signed, unless it is on
`revoked.crl`. All four are read again when they change, so that nothing has to be started anew. gRPC tells a client
nothing of the certificate that it accepted, and little of one that it did not. Therefore a controller is looked at
first (`Transport.look_at`), with words for all that can be wrong, and then that one certificate is all gRPC may trust.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import ssl
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.control import certificates
from mindspeed_tft.control.authority import CRL
from mindspeed_tft.control.certificates import Revoked, Unfit
from mindspeed_tft.control.config import ControlConfig, ControlRefused
from mindspeed_tft.control.lease import Storage

log = logging.getLogger(__name__)

FILES = ("ca.crt", "node.crt", "node.key")
_DAY = 86400.0  # seconds between two warnings of the same
_AGAIN = 60.0  # seconds until files that were refused are tried again as they are: a key service may be back by then
_PEM = serialization.Encoding.PEM


class Untrusted(OSError):
    """The other side does not show what it should, or does not take what we show; the text names the remedy."""


class Context(Protocol):
    """What is asked of a gRPC call: both kinds of servers have it."""

    def peer(self) -> str: ...

    def auth_context(self) -> Any: ...


# ---------------------------------------------------------------------------------------------- of a call


def peer_certificate(context: Context) -> x509.Certificate | None:
    """What the caller showed; None on a Unix socket and without TLS."""
    found = context.auth_context().get("x509_pem_cert")
    return x509.load_pem_x509_certificate(found[0]) if found else None


def peer_names(context: Context) -> tuple[str, ...]:
    """The names in the caller's certificate (DNS names, addresses, URIs; its common name where it has none)."""
    certificate = peer_certificate(context)
    return () if certificate is None else certificates.names(certificate)


def is_operator(context: Context) -> bool:
    """Whether the caller's certificate is an operator's. That it was revoked is for `Transport.barred` to say."""
    return certificates.OPERATOR in peer_names(context)


# ---------------------------------------------------------------------------------------------- how safe


def mode(config: ControlConfig) -> str:
    """ "unix", "tls" or "plain"; what is not safe and was not asked for is refused."""
    if not config.tcp():
        return "unix"
    if config.tls_dir:
        return "tls"
    if config.insecure or is_loopback(config.tcp_host()):
        return "plain"
    raise ControlRefused(
        f"--tft-tls-dir: the controller at {config.tcp_host()} would take orders from anybody who reaches its "
        "port; give a directory with ca.crt, node.crt and node.key (`tftctl certs` makes them), or --tft-insecure on a "
        "network that you trust"
    )


def say_how_safe(config: ControlConfig) -> None:
    """Each host says aloud that it does without."""
    if mode(config) == "plain" and not is_loopback(config.tcp_host()):
        log.warning(
            "*** --tft-insecure: host %s speaks to the controller at %s:%d without encryption or authentication; "
            "anybody on that network can read along, stop this job and command its ranks ***",
            config.host,
            config.tcp_host(),
            config.tcp_port(),
        )


# ---------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class KeyAccess:
    """How an encrypted node.key is opened; neither: it is not encrypted."""

    password_file: str | None = None
    decrypt: str | None = None  # "module:function": bytes of node.key -> bytes of a PEM key


@dataclass(frozen=True)
class Identity:
    """What one process shows and trusts."""

    ca: bytes  # PEM, as the rest
    certificate: bytes  # with the certificates between it and the authority, if there are any
    key: bytes  # not encrypted any more: keep it in memory
    leaf: x509.Certificate
    revoked: Revoked
    locked: bytes = b""  # the key as it lies in its file


def read(tls_dir: str | Path, access: KeyAccess = KeyAccess()) -> tuple[bytes, bytes, bytes]:
    """Authority, certificate and key in a directory, as PEM. The key is not encrypted any more: keep it in memory.

    Raises:
        ControlRefused: a file is missing or unreadable, or they do not belong together.
    """
    return _read_all(Path(tls_dir), access, None)[:3]


def _read_all(directory: Path, access: KeyAccess, known: Identity | None) -> tuple[bytes, bytes, bytes, bytes]:
    """As `read`, and the key as it lies there. One that is the same as in `known` is not opened again."""
    ca, certificate, locked = (_read_file(directory / name) for name in FILES)
    opened = known is not None and known.locked == locked
    key = known.key if known is not None and opened else _open_key(directory / FILES[2], locked, access)
    try:
        authorities, chain = certificates.read_all(ca), certificates.read_all(certificate)
        if _public(serialization.load_pem_private_key(key, None)) != _public(chain[0]):
            raise Unfit("node.key is not the key of node.crt")
        if why := certificates.weakness(chain[0]) or certificates.chain_break(chain, authorities):
            raise Unfit(f"node.crt: {why}")
    except (Unfit, ValueError, TypeError) as error:
        raise ControlRefused(
            f"--tft-tls-dir: {', '.join(FILES)} in {directory} are no certificates that belong together ({error}); "
            "make them again (`tftctl certs node`) and copy them here"
        ) from None
    return ca, certificate, key, locked


def load(directory: Path, access: KeyAccess = KeyAccess(), known: Identity | None = None) -> Identity:
    """What is in a directory, and good at this moment.

    Args:
        known: what is in use; the end of its certificates is no reason to miss what else has changed.

    Raises:
        ControlRefused: as `read`; the certificate has expired, does not hold yet, or was revoked.
    """
    ca, certificate, key, locked = _read_all(directory, access, known)
    chain = certificates.read_all(certificate)
    leaf = chain[0]
    first = certificates.first_to_end(chain, certificates.read_all(ca))
    in_use = [] if known is None else certificates.read_all(known.certificate + b"\n" + known.ca)
    if first not in in_use and (why := certificates.out_of_date(first)):
        raise ControlRefused(
            f"--tft-tls-dir: {directory / FILES[1]} does not hold: {certificates.which(first, leaf)}{why}; make new "
            f"ones ({certificates.renewal(first, leaf)}) and copy them here, or set the clock of this host"
        )
    revoked = _read_revoked(directory / CRL, [*certificates.read_all(ca), *chain[1:]])
    if revoked.has(leaf):
        raise ControlRefused(
            f"--tft-tls-dir: {directory / FILES[1]} was revoked; make this host a new one (`tftctl certs node HOST "
            "--force`) and copy it here"
        )
    return Identity(ca, certificate, key, leaf, revoked, locked)


def access(config: ControlConfig) -> KeyAccess:
    return KeyAccess(config.tls_key_password_file, config.tls_decrypt)


def directory_of(tls_dir: str, host: str) -> Path:
    """Where the files of this host are: in the directory, or in one of its name in it, if that is on shared storage."""
    own = Path(tls_dir) / host
    return own if host and (own / FILES[1]).exists() else Path(tls_dir)


def _public(key: Any) -> bytes:
    found: bytes = key.public_key().public_bytes(_PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return found


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ControlRefused(
            f"--tft-tls-dir: {path} cannot be read ({error.strerror}); the directory needs {', '.join(FILES)} on "
            "every host (`tftctl certs` makes them)"
        ) from None


def _read_revoked(path: Path, signers: list[x509.Certificate]) -> Revoked:
    try:
        return certificates.read_revoked(path.read_bytes(), signers)
    except FileNotFoundError:
        return Revoked()
    except (OSError, Unfit) as error:
        raise ControlRefused(
            f"--tft-tls-dir: {path}: {error}; copy it again from where `tftctl certs revoke` wrote it"
        ) from None


def _open_key(path: Path, locked: bytes, access: KeyAccess) -> bytes:
    if access.decrypt:
        return _decrypt(path, locked, access.decrypt)
    password = None
    if access.password_file:
        try:
            password = Path(access.password_file).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise ControlRefused(
                f"--tft-tls-key-password-file: {access.password_file} cannot be read ({error.strerror}); put the "
                "password of node.key there, readable by this user alone"
            ) from None
    try:
        key = serialization.load_pem_private_key(locked, password)
    except TypeError:  # a password for a key without one, or none for one that has
        if password is not None:
            raise ControlRefused(f"--tft-tls-key-password-file: {path} is not encrypted; leave the flag out") from None
        raise ControlRefused(
            f"--tft-tls-dir: {path} is encrypted; give its password with --tft-tls-key-password-file, or a function "
            "that opens it with --tft-tls-decrypt"
        ) from None
    except ValueError as error:
        if password is not None:
            raise ControlRefused(
                f"--tft-tls-key-password-file: the password in {access.password_file} does not open {path} ({error}); "
                "correct it"
            ) from None
        raise ControlRefused(
            f"--tft-tls-dir: {path} is no private key ({error}); make the files again (`tftctl certs node`)"
        ) from None
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _decrypt(path: Path, locked: bytes, hook: str) -> bytes:
    """Runs the user's function; whatever is wrong with it is said under the flag's name."""
    flag, (module, _, name) = "--tft-tls-decrypt", hook.partition(":")
    if not (module and name):
        raise ControlRefused(f"{flag}: {hook!r} names no function; write module:function")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ControlRefused(
            f"{flag}: {hook} cannot be found ({error}); the module has to be on PYTHONPATH of the launcher"
        ) from None
    try:
        opened = function(locked)
    except Exception as error:  # its text may quote the key, and goes to logs and to a doctor on another host
        raise ControlRefused(
            f"{flag}: {hook} failed at {path} ({type(error).__name__}); it gets the bytes of node.key and returns the "
            "key as PEM; let it log what was wrong"
        ) from None
    if not isinstance(opened, bytes):
        raise ControlRefused(
            f"{flag}: {hook} returned {type(opened).__name__}, not bytes; it returns the key as PEM, without a password"
        )
    return opened


# ---------------------------------------------------------------------------------------------- transport


class Transport:
    """One process's side of mutual TLS. Its files are read at once, and again when they changed (`watch`)."""

    def __init__(self, directory: Path, access: KeyAccess = KeyAccess(), names: tuple[str, ...] = ()) -> None:
        """
        Args:
            names: that the certificate has to carry.

        Raises:
            ControlRefused: something of it does not fit.
        """
        self._directory, self._access, self._names = directory, access, names
        self._seen = self._stamp()
        self._refused, self._try_again = self._seen, 0.0
        self._next_warning = 0.0
        self._fresh = False  # the server has not been given the latest certificate
        self._storage: Storage | None = None
        self._reading = threading.Lock()
        self._take(self._read())

    @property
    def identity(self) -> Identity:
        return self._identity

    def watch(self) -> None:
        """Sees to it that files that changed are read, soon: without waiting for the storage. Call it now and then, in
        an event loop."""
        self._storage = self._storage or Storage()
        if not self._storage.busy:
            self._storage.submit(self.read_again)

    def read_again(self) -> bool:
        """Reads files that changed; False where none did, or what is there now cannot be used: that is said once, and
        what was read before stays in force."""
        with self._reading:
            return self._read_again()

    def _read_again(self) -> bool:
        self._warn()
        stamp = self._stamp()
        if stamp == self._seen or (stamp == self._refused and time.monotonic() < self._try_again):
            return False
        try:
            if stamp[-1] is None and self._seen[-1] is not None:
                raise ControlRefused(
                    f"--tft-tls-dir: {self._directory / CRL} is gone, and what it revoked stays so; copy it there again"
                )
            identity = self._read(self._identity)
            self._take(identity)
        except ControlRefused as error:
            self._try_again = time.monotonic() + _AGAIN
            if stamp != self._refused:
                self._refused = stamp
                log.error("the changed files are not used, those read before stay in force: %s", error)
            return False
        self._seen, self._fresh, self._next_warning = stamp, True, 0.0
        log.info(
            "read %s again: certificate %s, valid until %s, %d revoked ones",
            self._directory,
            certificates.serial(identity.leaf),
            identity.leaf.not_valid_after_utc.date(),
            len(identity.revoked.ids),
        )
        return True

    def is_revoked(self, certificate: x509.Certificate) -> bool:
        return self._identity.revoked.has(certificate)

    # ---------------------------------------------------------------------------------- as a server

    def server_credentials(self) -> grpc.ServerCredentials:
        """Asks every client for a certificate; shows the latest one of ours."""
        changed: Any = self._changed  # its stubs do not know that None stands for no change
        return grpc.dynamic_ssl_server_credentials(self._shown(), changed, require_client_authentication=True)

    def _shown(self) -> grpc.ServerCertificateConfiguration:
        found = self._identity
        return grpc.ssl_server_certificate_configuration([(found.key, found.certificate)], root_certificates=found.ca)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks at every handshake, and there may be thousands a second: no file is touched here."""
        if not self._fresh:
            return None
        self._fresh = False
        return self._shown()

    def refusal(self, context: Context, host: str) -> str:
        """Why the caller may not speak for a host; "" where it may. On a Unix socket whoever gets in is this user."""
        if context.peer().startswith("unix:"):
            return ""
        certificate = peer_certificate(context)
        if certificate is None:
            return "it showed no certificate"
        if certificates.is_operator(certificate):
            return "its certificate is an operator's, who asks and is no host; make one with `tftctl certs node`"
        if not certificates.names_host(certificates.hosts(certificate), host):
            found = certificates.names(certificate)
            return (
                f"its certificate is for {', '.join(found)}, not for host {host}; make one for that name "
                f"(`tftctl certs node {host}`) and copy it there"
            )
        return self.barred_certificate(certificate)

    def barred(self, context: Context) -> str:
        """Why nobody with the caller's certificate gets in, whatever it wants; "" otherwise."""
        certificate = peer_certificate(context)
        return "" if certificate is None else self.barred_certificate(certificate)

    def barred_certificate(self, certificate: x509.Certificate) -> str:
        if not self.is_revoked(certificate):
            return ""
        name = certificates.common_name(certificate)
        return (
            f"its certificate {certificates.serial(certificate)} for {name} was revoked; make it a new one (`tftctl "
            f"certs node {name} --force`) and copy it there"
        )

    # ---------------------------------------------------------------------------------- as a client

    async def look_at(self, address: str, name: str, limit: float) -> x509.Certificate:
        """The certificate of the server at an address, once all is well: an authority of ours stands behind it, it
        holds now, carries the name and is not revoked, and the server takes ours.

        Args:
            address: "host:port".
            name: that it has to carry; "": the host of the address.
            limit: seconds that this may take.

        Raises:
            Untrusted: something is not well.
            OSError: nobody is there.
            asyncio.TimeoutError: no answer in time.
        """
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        return await asyncio.wait_for(self._look_at(host, int(port), name or host), limit)

    async def _look_at(self, host: str, port: int, name: str) -> x509.Certificate:
        try:
            reader, writer = await asyncio.open_connection(host, port, ssl=self._ssl, server_hostname=name)
        except ssl.SSLCertVerificationError as error:
            raise Untrusted(_why_not_trusted(error, name)) from None
        except ssl.SSLError as error:
            raise Untrusted(_why_no_tls(error)) from None
        except ConnectionResetError:
            raise Untrusted("it ended the connection before it showed a certificate; is that the controller?") from None
        try:
            found = x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
            if self.is_revoked(found):
                raise Untrusted(self.barred_certificate(found))
            why = "it is an operator's" if certificates.is_operator(found) else ""
            if why := why or certificates.unfit_for(found, server=True):
                raise Untrusted(f"its certificate cannot be a controller's: {why}")
            try:  # its first word comes when it has taken our certificate, and only then
                word = await reader.read(1)
            except (ssl.SSLError, ConnectionResetError):
                word = b""
            if not word:
                raise Untrusted(self._why_not_taken())
            return found
        finally:
            writer.transport.abort()

    def _why_not_taken(self) -> str:
        leaf = self._identity.leaf
        remedy = (
            f"compare ca.crt there with the authority of node.crt here ({certificates.common_name_of(leaf.issuer)!r}), "
            "and the clocks of both hosts (`tftctl certs check`)"
        )
        why = certificates.out_of_date(leaf) or certificates.unfit_for(leaf, server=False)
        return f"it does not take the certificate of this host{f', because {why}' if why else ''}; {remedy}"

    def channel_credentials(self, server: x509.Certificate) -> grpc.ChannelCredentials:
        """For a channel to the server with this very certificate, and to no other."""
        found = self._identity
        return grpc.ssl_channel_credentials(server.public_bytes(_PEM), found.key, found.certificate)

    # ---------------------------------------------------------------------------------- files

    def _read(self, known: Identity | None = None) -> Identity:
        identity = load(self._directory, self._access, known)
        found = certificates.names(identity.leaf)
        for name in self._names:
            if not certificates.names_host(found, name):
                raise ControlRefused(
                    f"--tft-tls-dir: {self._directory / FILES[1]} is for {', '.join(found)}, and the others want to "
                    f"see {name}; make one that carries it (`tftctl certs node {','.join(self._names)} --force`) and "
                    "copy it here"
                )
        return identity

    def _take(self, identity: Identity) -> None:
        self._ssl = _client_context(identity)
        self._identity = identity
        self._warn()

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Changes with every change of a file."""
        found: list[tuple[int, int, int] | None] = []
        for name in (*FILES, CRL):
            try:
                status = os.stat(self._directory / name)
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                found.append(None)
        return tuple(found)

    def _warn(self) -> None:
        """What will be a trouble, once a day."""
        now = time.monotonic()
        if now < self._next_warning:
            return
        self._next_warning = now + _DAY
        leaf, chain = self._identity.leaf, certificates.read_all(self._identity.certificate)
        first = certificates.first_to_end(chain, certificates.read_all(self._identity.ca))
        remedy = f"{certificates.renewal(first, leaf)}, and copy the files to this host: they are read again"
        path = f"{self._directory / FILES[1]}: {certificates.which(first, leaf)}"
        if why := certificates.out_of_date(first):
            log.error("%s%s; who is connected stays, nobody can come back; %s", path, why, remedy)
        elif why := certificates.expires_soon(first):
            log.warning("%s%s; %s", path, why, remedy)
        if stale := self._identity.revoked.stale:
            log.warning("%s promised a newer list by %s; copy it here", self._directory / CRL, stale.date())
        key = self._directory / FILES[2]
        try:
            mode_bits = stat.S_IMODE(os.stat(key).st_mode)
        except OSError:
            return
        if mode_bits & 0o077:
            log.warning("%s can be read by others (mode %o); chmod 600 %s", key, mode_bits, key)


def transport(config: ControlConfig, first: bool = False) -> Transport | None:
    """As the settings say; None without TLS.

    Args:
        first: for the first controller, which the others know by the address that the user gave.

    Raises:
        ControlRefused: what is there does not fit.
    """
    if mode(config) != "tls" or config.tls_dir is None:
        return None
    names: tuple[str, ...] = ()
    if config.nnodes > 1:
        names = tuple(dict.fromkeys((config.host, *((config.tcp_host(),) if first else ()))))
    return Transport(directory_of(config.tls_dir, config.host), access(config), names)


def _client_context(identity: Identity) -> ssl.SSLContext:
    try:
        return _make_context(identity)
    except (ssl.SSLError, ValueError) as error:
        raise ControlRefused(
            f"--tft-tls-dir: OpenSSL does not take {', '.join(FILES)} ({error}); keys that are too short and "
            "signatures that are too old are refused: make them again (`tftctl certs node`)"
        ) from None


def _make_context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=identity.ca.decode("ascii", "ignore"))
    context.set_alpn_protocols(["h2"])
    fd = os.memfd_create("tft-key", os.MFD_CLOEXEC)  # it takes files only, and the key may have to stay out of them
    with open(fd, "wb") as file:
        file.write(identity.certificate + b"\n" + identity.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    return context


def _why_not_trusted(error: ssl.SSLCertVerificationError, name: str) -> str:
    why = error.verify_message or str(error)
    for part, remedy in (
        ("expired", "make new ones (`tftctl certs rotate`) and copy them there"),
        ("not yet valid", "compare the clocks of both hosts"),
        ("mismatch", f"make one that carries {name} (`tftctl certs node HOST,{name}`) and copy it there"),
        ("issuer", "ca.crt here does not have its authority: copy the same ca.crt to all hosts"),
        ("self-signed", "ca.crt here does not have its authority: copy the same ca.crt to all hosts"),
        ("self signed", "ca.crt here does not have its authority: copy the same ca.crt to all hosts"),
    ):
        if part in why.lower():
            return f"its certificate is not trusted ({why.rstrip('.')}); {remedy}"
    return f"its certificate is not trusted ({why.rstrip('.')}); `tftctl certs check` on that host says more"


def _why_no_tls(error: ssl.SSLError) -> str:
    reason = error.reason or str(error)
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING"):
        return f"it speaks no TLS ({reason}); was it started with --tft-insecure, or is that another program?"
    return f"no secure connection comes about ({reason}); `tftctl certs check` on both hosts says more"


def explain(code: grpc.StatusCode | None, details: str | None) -> str:
    """Why a stream to a controller ended, in words that follow its name."""
    name = "unknown" if code is None else code.name
    return f"cannot be reached or left ({name}: {details or 'no details'})"
