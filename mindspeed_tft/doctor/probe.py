"""One way from this host to another: who listens, who tries, and why it failed, in words that name the remedy.

Who listens answers a word that only the hosts of this survey know, so that a stranger on the same port is not taken for
a host. With certificates both sides show theirs, as controllers and relays do.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hmac
import os
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cryptography import x509

from mindspeed_tft.control import certificates, tls
from mindspeed_tft.doctor.certificates import identity
from mindspeed_tft.doctor.job import Job
from mindspeed_tft.doctor.names import addresses_of

ADDRESSES = 3  # of one name that are tried
AT_ONCE = 32  # attempts, and answers, of one host at the same time
_ANSWER = b"tft-doctor "
_WELCOME = b"\n"
_LINE = 256  # bytes; nobody who belongs here says more


class Why(str, Enum):
    OK = "ok"
    NAME = "no address"
    REFUSED = "refused"
    FILTERED = "timeout"
    UNREACHABLE = "unreachable"
    BROKEN = "ended"
    MUTE = "no answer"
    STRANGER = "stranger"
    NO_TLS = "no TLS"
    AUTHORITY = "other authority"
    DATES = "certificate dates"
    WRONG_NAME = "certificate name"
    REVOKED = "certificate revoked"
    REJECTED = "certificate rejected"


# What to do, for the places of `here` and `there`.
REMEDIES = {
    Why.OK: "",
    Why.NAME: "put {there} into DNS or /etc/hosts of {here}",
    Why.REFUSED: "start what should listen on {there}; a firewall that rejects looks the same",
    Why.FILTERED: "open TCP from {here} to {there}, for all ports above 1023 (gloo takes free ones), in firewalls and "
    "security groups",
    Why.UNREACHABLE: "correct the routes between {here} and {there}, or choose another interface (GLOO_SOCKET_IFNAME)",
    Why.BROKEN: "look for a proxy or a firewall between {here} and {there} that ends connections",
    Why.MUTE: "look whether {there} is overloaded, or something else listens on that port",
    Why.STRANGER: "stop what listens on {there}, or choose another port",
    Why.NO_TLS: "give {there} its --tls-dir as well",
    Why.AUTHORITY: "make the certificates of {here} and {there} with one authority (tftctl certs), and copy its "
    "ca.crt to both",
    Why.DATES: "make new certificates (tftctl certs rotate), and compare the clocks of {here} and {there}",
    Why.REVOKED: "make {there} a new one (tftctl certs node HOST --force) and copy it there",
    Why.WRONG_NAME: "make a certificate for that name (tftctl certs node NAME)",
    Why.REJECTED: "look at node.crt of {here}: it has to be made by the authority in ca.crt of {there}, and be valid",
}


@dataclass(frozen=True)
class Outcome:
    """What came of one attempt."""

    why: Why
    text: str = ""  # of what went wrong
    seconds: float = 0.0  # of the attempt as a whole

    def as_data(self) -> dict[str, Any]:
        return {"why": self.why.value, "text": self.text, "seconds": self.seconds}

    @staticmethod
    def from_data(data: dict[str, Any]) -> Outcome:
        return Outcome(Why(data["why"]), str(data["text"]), float(data["seconds"]))


@dataclass(frozen=True)
class Target:
    """A port of another host."""

    host: str  # its name in the report
    address: str  # name or address to connect to
    port: int
    names: tuple[str, ...] = ()  # of which its certificate has to carry one; () any
    what: str = ""  # which of its ports, in words

    def as_data(self) -> dict[str, Any]:
        return {"host": self.host, "address": self.address, "port": self.port, "names": self.names, "what": self.what}

    @staticmethod
    def from_data(data: dict[str, Any]) -> Target:
        names = tuple(str(name) for name in data["names"])
        return Target(str(data["host"]), str(data["address"]), int(data["port"]), names, str(data["what"]))


@dataclass(frozen=True)
class Secure:
    """Contexts of the two sides, from the same three files as those of controllers and relays."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    ours: tls.Identity


def secure(job: Job) -> Secure | None:
    """Nothing without a directory.

    Raises:
        ControlRefused: its files do not serve.
    """
    found = identity(job)
    if found is None:
        return None
    return Secure(_context(found, ssl.PROTOCOL_TLS_CLIENT), _context(found, ssl.PROTOCOL_TLS_SERVER), found)


def _context(ours: tls.Identity, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # compared by `_judge`, because a host may have one of several names
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ours.ca.decode("ascii", "ignore"))
    fd = os.memfd_create("tft-doctor", os.MFD_CLOEXEC)  # it takes files only, and the key may have been encrypted
    with open(fd, "wb") as file:
        file.write(ours.certificate + b"\n" + ours.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    return context


class Failed(Exception):
    """A connection that did not come about, or did not last."""

    def __init__(self, why: Why, text: str) -> None:
        super().__init__(text)
        self.why = why


def connect(target: Target, contexts: Secure | None, timeout: float) -> socket.socket:
    """A connection whose other side has shown a certificate, where there are certificates.

    Args:
        timeout: seconds for the name, for each of its addresses, and for TLS.

    Raises:
        Failed: with the reason.
    """
    try:
        connection = _open(target, timeout)
    except OSError as error:
        raise Failed(*explain(error, target, timeout)) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if contexts is None:
        return connection
    try:
        wrapped = contexts.client.wrap_socket(connection)
    except TimeoutError:
        connection.close()
        text = f"{target.address}:{target.port} takes connections, but says nothing of TLS within {timeout:g} s"
        raise Failed(Why.MUTE, text) from None
    except OSError as error:
        connection.close()
        raise Failed(*explain(error, target, timeout)) from None
    try:
        _judge(wrapped, target, contexts.ours)
        _wait_to_be_let_in(wrapped, target, timeout)
    except Failed:
        wrapped.close()
        raise
    return wrapped


def _wait_to_be_let_in(connection: ssl.SSLSocket, target: Target, timeout: float) -> None:
    """Until the other side has said that it takes our certificate: with TLS 1.3 a client is ready before that, and who
    writes at once may never read why he was refused."""
    place = f"{target.address}:{target.port}"
    try:
        said = connection.recv(1)
    except TimeoutError:
        raise Failed(Why.MUTE, f"{place} takes TLS connections, and says nothing within {timeout:g} s") from None
    except OSError as error:
        raise Failed(*explain(error, target, timeout)) from None
    if said != _WELCOME:
        raise Failed(Why.STRANGER if said else Why.BROKEN, f"something else than a doctor listens at {place}")


def let_in(connection: socket.socket, contexts: Secure | None) -> socket.socket:
    """The other side of `connect`, with the timeout that the connection has.

    Raises:
        OSError: who came shows no certificate that we take, or none in time.
    """
    if contexts is None:
        return connection
    wrapped = contexts.server.wrap_socket(connection, server_side=True)
    shown = wrapped.getpeercert(binary_form=True)
    assert shown is not None, "a certificate is required"
    certificate = x509.load_der_x509_certificate(shown)
    if contexts.ours.revoked.has(certificate) or certificates.is_reader(certificate):
        wrapped.close()
        raise PermissionError(f"the certificate of {certificates.common_name(certificate)} may not ask doctors")
    wrapped.sendall(_WELCOME)
    return wrapped


def _open(target: Target, timeout: float) -> socket.socket:
    """To the first of its addresses that answers."""
    last: OSError = socket.gaierror(socket.EAI_NONAME, "no address")
    for address in addresses_of(target.address, timeout)[:ADDRESSES]:
        try:
            return socket.create_connection((address, target.port), timeout)
        except OSError as error:
            last = error
    raise last


def _judge(connection: ssl.SSLSocket, target: Target, ours: tls.Identity) -> None:
    """What the library does not: revoked certificates, and several names of which one is enough."""
    shown = connection.getpeercert(binary_form=True)
    assert shown is not None, "a certificate is required"
    certificate = x509.load_der_x509_certificate(shown)
    place = f"the certificate at {target.address}:{target.port}"
    if ours.revoked.has(certificate):
        raise Failed(Why.REVOKED, f"{place} was revoked")
    names = certificates.names(certificate)
    if target.names and not any(certificates.names_host(names, name) for name in target.names):
        wanted = " or ".join(dict.fromkeys(target.names))
        raise Failed(Why.WRONG_NAME, f"{place} is for {', '.join(names) or 'nobody'}, not for {wanted}")


_CODES = {
    errno.ECONNREFUSED: (Why.REFUSED, "nobody listens there"),
    errno.ENETUNREACH: (Why.UNREACHABLE, "there is no route to its network"),
    errno.EHOSTUNREACH: (Why.UNREACHABLE, "there is no route to it, or it is off"),
    errno.EACCES: (Why.UNREACHABLE, "this host's own rules forbid it"),
    errno.EPERM: (Why.UNREACHABLE, "this host's own firewall forbids it"),
    errno.EINVAL: (Why.UNREACHABLE, "this host's routes drop it"),
    errno.EADDRNOTAVAIL: (Why.UNREACHABLE, "this host has no address that could reach it"),
}


def explain(error: OSError, target: Target, timeout: float) -> tuple[Why, str]:
    """Why a connection did not come about, or broke."""
    place = f"{target.address}:{target.port}"
    if isinstance(error, socket.gaierror):
        return Why.NAME, f"{target.address} has no address ({str(error.strerror).lower()})"
    if isinstance(error, TimeoutError):  # of connecting; within TLS it is the other side that says nothing
        return Why.FILTERED, f"{place} does not answer within {timeout:g} s: packets are filtered or lost"
    if isinstance(error, ssl.SSLError):
        return _explain_tls(error, place)
    why, text = _CODES.get(error.errno or 0, (Why.BROKEN, str(error.strerror or error).lower()))
    return why, f"{place}: {text}"


_DATES = (9, 10)  # codes of OpenSSL: not valid yet, expired
_ALERTS = ("UNKNOWN_CA", "CERTIFICATE", "DECRYPT_ERROR", "ACCESS_DENIED")


def _explain_tls(error: ssl.SSLError, place: str) -> tuple[Why, str]:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _DATES:
            return Why.DATES, f"the certificate at {place} is not valid now ({error.verify_message})"
        return Why.AUTHORITY, f"the certificate at {place} is not signed by our ca.crt ({error.verify_message})"
    reason = error.reason or str(error)
    if "WRONG_VERSION" in reason or "HTTP_REQUEST" in reason:
        return Why.NO_TLS, f"{place} does not speak TLS"
    if "ALERT" in reason and any(word in reason for word in _ALERTS):
        return Why.REJECTED, f"{place} does not accept our certificate ({reason.replace('_', ' ').lower()})"
    return Why.BROKEN, f"{place} ended the TLS handshake ({reason.replace('_', ' ').lower()})"


def attempt(target: Target, word: str, contexts: Secure | None, timeout: float) -> Outcome:
    """Try one way.

    Args:
        word: to be answered; "": being connected, with TLS where it is used, is enough.
    """
    began = time.monotonic()
    try:
        with connect(target, contexts, timeout) as connection:
            if word:
                _ask(connection, word, target, timeout)
    except Failed as failure:
        return Outcome(failure.why, str(failure), time.monotonic() - began)
    return Outcome(Why.OK, "", time.monotonic() - began)


def _ask(connection: socket.socket, word: str, target: Target, timeout: float) -> None:
    place = f"{target.address}:{target.port}"
    try:
        connection.sendall(f"{word}\n".encode())
        answer = read_line(connection, time.monotonic() + timeout)
    except TimeoutError:
        raise Failed(Why.MUTE, f"{place} takes connections, but does not answer within {timeout:g} s") from None
    except OSError as error:
        raise Failed(*explain(error, target, timeout)) from None
    if answer == b"":
        raise Failed(Why.BROKEN, f"{place} ended the connection")
    if not answer.startswith(_ANSWER):
        raise Failed(Why.STRANGER, f"something else than a doctor listens at {place}")


def read_line(connection: socket.socket, end: float, limit: int = _LINE) -> bytes:
    """Bytes until a newline, without it; what there is when the other side ends or has said `limit` bytes.

    Raises:
        TimeoutError: not by `end`, of the monotonic clock.
        OSError: the connection broke.
    """
    found = bytearray()
    while not found.endswith(b"\n") and len(found) < limit:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        byte = connection.recv(1)
        if not byte:
            break
        found += byte
    return bytes(found).rstrip(b"\n")


def attempts(targets: list[Target], word: str, contexts: Secure | None, timeout: float) -> list[Outcome]:
    """All of them, some at a time, in their order."""
    if not targets:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(AT_ONCE, len(targets))) as pool:
        return list(pool.map(lambda target: attempt(target, word, contexts, timeout), targets))


class Listener:
    """Answers the word on one port until it is closed."""

    def __init__(self, word: str, contexts: Secure | None, timeout: float, port: int, address: str) -> None:
        """
        Args:
            port: 0: any free one.
            address: "": all of this host.

        Raises:
            OSError: it cannot be had.
        """
        self._word, self._contexts, self._timeout = word, contexts, timeout
        self._socket = listen(address, port)
        self.port = int(self._socket.getsockname()[1])
        self._pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE, thread_name_prefix="doctor-answers")
        threading.Thread(target=self._accept, name="doctor-listens", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            try:
                self._pool.submit(self._answer, connection)
            except RuntimeError:  # closed meanwhile
                connection.close()
                return

    def _answer(self, connection: socket.socket) -> None:
        """Whatever a stranger does costs it its connection, and us a thread for some seconds."""
        connection.settimeout(self._timeout)
        with connection, contextlib.suppress(OSError), let_in(connection, self._contexts) as wrapped:
            said = read_line(wrapped, time.monotonic() + self._timeout)
            if hmac.compare_digest(said, self._word.encode()):
                wrapped.sendall(_ANSWER + b"\n")


def listen(address: str, port: int) -> socket.socket:
    """A listening socket, on IPv4 and IPv6 where no address is given and both are there.

    Raises:
        OSError: it cannot be had.
    """
    if not address and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    family = socket.getaddrinfo(address or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family, backlog=1024)
