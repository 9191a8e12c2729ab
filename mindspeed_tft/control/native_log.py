"""What gRPC's core says in a controller: a line in its own words for every connection that fails, straight to stderr.

Under a flood that would be the whole log. Here the same lines are counted, and what is worth knowing is said once a
minute: how many were refused in the TLS handshake, why, and what to do.
"""

from __future__ import annotations

import collections
import fcntl
import logging
import os
import re
import sys
import threading
import time

log = logging.getLogger(__name__)

SAY = 60.0  # seconds between two lines about the same
_F_SETPIPE_SZ = 1031
_PIPE = 1 << 20  # bytes
_FAILED = re.compile(r"Handshake failed with (?:fatal )?error \w+: (.*)")
_LEVEL = re.compile(r"([IWEF])\d{4} ")
_SERIOUS = "EF"
# A part of the reason -> what that is, and what to do.
_AUTHORITY = "a certificate of an authority that is not in ca.crt here: copy the same ca.crt to all hosts"
_REASONS = (
    ("certificate has expired", "an expired certificate: make new ones (`tftctl certs rotate`) and copy them there"),
    ("not yet valid", "a certificate that does not hold yet: compare the clocks of the hosts"),
    ("unable to get local issuer", _AUTHORITY),
    ("self signed", _AUTHORITY),
    ("self-signed", _AUTHORITY),
    ("certificate signature failure", _AUTHORITY),
    ("DID_NOT_RETURN_A_CERTIFICATE", "no certificate: a stranger, or --tft-tls-dir is missing on that host"),
    ("CERTIFICATE", "a certificate that is not taken: `tftctl certs check` on that host says more"),
    ("", "something that is not TLS, or ends in the middle: a stranger, or a host with --tft-insecure"),
)


class Digest:
    """Counts handshakes that failed. Times are seconds on one monotonic clock."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._said: dict[str, float] = {}

    def line(self, text: str, now: float) -> list[str]:
        """Takes a line of gRPC's core; what is to be logged because of it."""
        if found := _FAILED.search(text):
            meaning = next(words for part, words in _REASONS if part in found.group(1))
            self._counts[meaning] += 1
            return self._due(meaning, now)
        level = _LEVEL.match(text)
        if level is not None and level.group(1) in _SERIOUS:
            kind = f"gRPC: {text.partition('] ')[2] or text}"[:200]
            key = re.sub(r"\d+", "0", kind)
            if now - self._said.get(key, -SAY) >= SAY and len(self._said) < 1000:
                self._said[key] = now
                return [kind]
        return []

    def _due(self, meaning: str, now: float) -> list[str]:
        if now - self._said.get(meaning, -SAY) < SAY:
            return []
        self._said[meaning] = now
        count = self._counts.pop(meaning)
        many = "a connection" if count == 1 else f"{count} connections"
        return [f"refused {many} to the port of the controller that showed {meaning}"]


def divert() -> None:
    """From now on gRPC's core writes to a thread of ours. What Python writes goes where it went before."""
    before = sys.stderr
    kept = os.dup(before.fileno())
    out, into = os.pipe()
    os.set_blocking(into, False)  # what nobody has time to read is lost: gRPC must never wait for its log
    try:
        fcntl.fcntl(into, _F_SETPIPE_SZ, _PIPE)
    except OSError:
        log.debug("the pipe of gRPC's log keeps its usual size")
    sys.stderr = open(kept, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 (it stays)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(sys.stderr)
    os.dup2(into, 2)
    os.close(into)
    threading.Thread(target=_read, args=(out, Digest()), name="tft-native-log", daemon=True).start()


def _read(out: int, digest: Digest) -> None:
    with open(out, encoding="utf-8", errors="backslashreplace") as lines:
        for text in lines:
            for words in digest.line(text.rstrip(), time.monotonic()):
                log.warning("%s", words)
