"""A host that answers: what it is asked about itself, and the ways from it to others that it is asked to try."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mindspeed_tft.doctor import names, probe, software, storage, system
from mindspeed_tft.doctor.certificates import check_tls
from mindspeed_tft.doctor.channel import PROTOCOL, Channel, ChannelError, Message
from mindspeed_tft.doctor.findings import Finding
from mindspeed_tft.doctor.job import Job, describe
from mindspeed_tft.doctor.probe import Listener, Secure, Target

SILENCE = 600.0  # seconds in which who asks says nothing: he is gone
FIRST = 120.0  # seconds until the first question to who serves: who asks looks for all hosts before, dead ones too
GRACE = 60.0  # seconds after its time in which who serves answers on
SEND = 10.0  # seconds to say something


def check_host(job: Job, contexts: Secure | None = None) -> Iterator[Finding]:
    """All that can be seen on one host alone, but for ports."""
    yield from software.check_versions()
    yield from software.check_flags(job)
    yield from software.check_environment(job)
    yield from software.check_launcher(job)
    yield from names.check_own_name(job)
    yield from names.check_interfaces(job)
    yield from system.check_files()
    yield from system.check_shared_memory()
    yield from system.check_processes()
    yield from check_tls(job, None if contexts is None else contexts.ours)
    yield from storage.check_writable(job)
    yield from storage.check_space(job)
    yield from storage.check_deadline(job)


def hello(job: Job, node: int | None) -> Message:
    """What either side says first."""
    return {
        "hello": PROTOCOL,
        "host": names.own_name(),
        "node": node,
        "data": names.data_address(job),
        "tls": job.tls_dir is not None,
        "pid": os.getpid(),
    }


def longest_attempts(targets: int, timeout: float) -> float:
    """Seconds that a host may take for so many attempts: for each a name, its addresses, TLS and an answer."""
    return math.ceil(targets / probe.AT_ONCE) * (probe.ADDRESSES + 3) * timeout + SEND


class Peer:
    """Serves one who asks."""

    def __init__(self, job: Job, contexts: Secure | None) -> None:
        self._job, self._contexts = job, contexts
        self._own = job  # as this host was started, whatever the one who asks says of his
        self._listeners: list[Listener] = []
        self._word = ""
        self._marks: list[tuple[str, str]] = []
        self._answers: dict[str, Callable[[Message], Any]] = {
            "look": self._look,
            "clock": self._clock,
            "listen": self._listen,
            "try": self._try,
            "mark": self._mark,
            "sees": self._sees,
        }

    def serve(self, channel: Channel, until: float | None = None) -> Message:
        """Answers until told to stop; what it was told last. What it opened and left is gone afterwards.

        Args:
            until: on the monotonic clock, where others may want to ask: by then somebody has to have begun, and ends
                soon afterwards.

        Raises:
            ChannelError: who asks is gone.
        """
        limit = SILENCE if until is None else min(FIRST, until - time.monotonic())
        try:
            while True:
                message = channel.receive(limit)
                limit = SILENCE if until is None else min(SILENCE, until + GRACE - time.monotonic())
                if message.get("do") == "bye":
                    return message
                channel.send(self._answer(message), SEND)
        finally:
            self._tidy()

    def _answer(self, message: Message) -> Message:
        answer = self._answers.get(str(message.get("do")))
        if answer is None:
            return {"failed": f"this version cannot {message.get('do')!r}"}
        try:
            return {"is": answer(message)}
        except (OSError, ValueError, KeyError, TypeError) as error:
            return {"failed": f"{type(error).__name__}: {error}"}

    def _tidy(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for path, name in self._marks:
            with contextlib.suppress(OSError):  # the directory is gone, and the mark with it
                storage.unmark(path, name)
        self._marks.clear()

    def _look(self, message: Message) -> Any:
        """Take over the flags of the job, where it is told some, and look at this host."""
        words, nodes = message.get("words"), int(message["nodes"])
        job = self._job
        if words is not None:
            job = describe(
                [str(word) for word in words],
                job.environ,
                port=job.port,
                insecure=job.insecure,
                timeout=job.timeout,
                bind=job.bind,
                skew=job.skew,
            ).with_keys_of(self._own)
        self._job = job = replace(job, nodes=nodes)
        found = [*check_host(job, self._contexts), *names.check_hosts([str(name) for name in message["hosts"]])]
        if message["first"]:
            found += names.check_ports(job, rendezvous=bool(message["rendezvous"]), controller=bool(message["port"]))
        return {"findings": [finding.as_data() for finding in found], "versions": software.versions()}

    def _clock(self, message: Message) -> float:
        return time.time() + self._job.skew

    def _listen(self, message: Message) -> int:
        self._word = str(message["word"])
        port = int(message["port"])
        self._listeners.append(Listener(self._word, self._contexts, self._job.timeout, port, self._job.bind))
        return self._listeners[-1].port

    def _try(self, message: Message) -> Any:
        targets = [Target.from_data(data) for data in message["targets"]]
        known = [target for target in targets if target.what != KNOCK]
        knocks = [target for target in targets if target.what == KNOCK]
        outcomes = dict(zip(known, probe.attempts(known, self._word, self._contexts, self._job.timeout), strict=True))
        outcomes |= zip(knocks, probe.attempts(knocks, "", self._contexts, self._job.timeout), strict=True)
        return [outcomes[target].as_data() for target in targets]

    def _mark(self, message: Message) -> None:
        path, name = storage.directories(self._job)[str(message["flag"])], str(message["name"])
        storage.mark(path, name)
        self._marks.append((path, name))

    def _sees(self, message: Message) -> bool:
        return storage.sees(storage.directories(self._job)[str(message["flag"])], str(message["name"]))


KNOCK = "the doctor's port"  # of a host that could not be asked: being connected is all that is tried


def greet(channel: Channel, job: Job, node: int | None, timeout: float) -> Message:
    """Say who we are, and hear who the other side is.

    Raises:
        ChannelError: it is no doctor, or not one that we understand.
    """
    channel.send(hello(job, node), timeout)
    said = channel.receive(timeout)
    fits = isinstance(said.get("host"), str) and all(
        key in said and (said[key] is None or isinstance(said[key], kind))
        for key, kind in (("node", int), ("data", str))
    )
    if said.get("hello") != PROTOCOL or not fits:
        raise ChannelError(f"{channel.name} is no doctor of this version; install the same version on all hosts")
    return said
