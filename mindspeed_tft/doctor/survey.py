"""Who asks all hosts, and judges what they say of themselves and of the ways between them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.doctor import clocks, names, peer, probe, storage
from mindspeed_tft.doctor.channel import ChannelError, Message
from mindspeed_tft.doctor.clocks import Offset, RoundTrip
from mindspeed_tft.doctor.findings import Finding, Level, worst
from mindspeed_tft.doctor.job import Job
from mindspeed_tft.doctor.meeting import Host, Met, Say
from mindspeed_tft.doctor.probe import Outcome, Target, Why

TRIPS = 9  # questions for the time, to each host
LOOK = 60.0  # seconds in which a host looks at itself; a hanging file system ends it
_SHOWN = 4  # hosts that are named where several have the same trouble
_ALL_WAYS = 64  # hosts up to which a report has every way; above it has those that failed


@dataclass(frozen=True)
class Way:
    """From one host to another; `what` names the port of it that was tried."""

    here: str
    there: str
    what: str
    outcome: Outcome


@dataclass
class Report:
    """All that was found."""

    hosts: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    ways: list[Way] = field(default_factory=list)
    offsets: dict[str, Offset] = field(default_factory=dict)
    tried: int = 0  # ways, also those that `ways` leaves out

    @property
    def level(self) -> Level:
        return worst(self.findings)

    def as_data(self) -> dict[str, Any]:
        return {
            "verdict": self.level.name.lower(),
            "hosts": self.hosts,
            "findings": [finding.as_data() for finding in self.findings],
            "ways": [
                {"from": way.here, "to": way.there, "what": way.what, **way.outcome.as_data()} for way in self.ways
            ],
            "ways_tried": self.tried,
            "clocks": {
                host: {"seconds": offset.seconds, "bound": offset.bound} for host, offset in self.offsets.items()
            },
        }


class Survey:
    """Asks hosts that were met. A host that stops answering is left out from then on, and named."""

    def __init__(self, job: Job, met: Met, say: Say, rendezvous: bool, ports: bool = True) -> None:
        """
        Args:
            rendezvous: whether the port of torchrun's rendezvous is to be tried, on the first host.
            ports: whether the controllers' port on it is free is still to be seen.
        """
        self._job, self._met, self._say, self._rendezvous, self._ports = job, met, say, rendezvous, ports
        self._hosts = list(met.hosts)
        self._named = [host.asked for host in met.hosts if host.asked is not None]
        self.report = Report(hosts=[*(host.name for host in met.hosts), *(lost.name for lost in met.missing)])
        self.report.findings += met.findings

    def run(self) -> Report:
        """Every question, one after the other; then all hosts are told the verdict and go."""
        steps: dict[str, Callable[[], None]] = {
            "every host looks at itself": self._look,
            "comparing clocks": self._compare_clocks,
            "trying every way between hosts": self._try_ways,
            "looking for shared directories": self._share,
        }
        self._name_missing()
        for number, (text, step) in enumerate(steps.items()):
            if self._hosts and (number == 0 or len(self.report.hosts) > 1):
                self._say(text)
                step()
        for host in self._hosts:
            with contextlib.suppress(ChannelError):
                host.channel.send({"do": "bye", "verdict": self.report.level.name.lower()}, peer.SEND)
        return self.report

    # --------------------------------------------------------------------------------------------- asking

    def _ask(self, questions: Mapping[str, Message], timeout: float) -> dict[str, Any]:
        """Ask hosts by their names, all at once; the answers of those that gave one."""
        answers: dict[str, Any] = {}
        asked = [host for host in self._hosts if host.name in questions]

        def one(host: Host) -> Any:
            host.channel.send(questions[host.name], peer.SEND)
            return host.channel.receive(timeout)

        if not asked:
            return answers
        with concurrent.futures.ThreadPoolExecutor(min(2 * probe.AT_ONCE, len(asked))) as pool:
            for host, future in [(host, pool.submit(one, host)) for host in asked]:
                try:
                    said = future.result()
                except ChannelError as error:
                    self._hosts.remove(host)
                    self._red("hosts", str(error), "look at what the doctor says there", host.name)
                    continue
                if "is" in said:
                    answers[host.name] = said["is"]
                else:
                    doing = questions[host.name]["do"]
                    self._red("hosts", f"could not {doing}: {said.get('failed')}", "look at that host", host.name)
        return answers

    def _red(self, check: str, text: str, remedy: str, host: str = "") -> None:
        self.report.findings.append(Finding(check, Level.RED, text, remedy, host))

    def _green(self, check: str, text: str) -> None:
        self.report.findings.append(Finding(check, Level.GREEN, text))

    # -------------------------------------------------------------------------------------------- looking

    def _name_missing(self) -> None:
        for lost in self._met.missing:
            remedy = probe.REMEDIES[lost.why.why].format(here="this host", there=lost.name)
            if lost.why.why is Why.REFUSED:
                remedy = f"start `tftctl doctor serve` on {lost.name}; a firewall that rejects looks the same"
            self._red("hosts", f"{lost.name} cannot be asked: {lost.why.text}", remedy)

    def _look(self) -> None:
        first = self._hosts[0].name
        questions = {
            host.name: {
                "do": "look",
                "words": list(self._job.words) if host.asked is not None else None,
                "nodes": self._job.nodes,
                "hosts": self._named,
                "first": host.name == first,
                "rendezvous": self._rendezvous,
                "port": self._ports and host.here,
            }
            for host in self._hosts
        }
        answers = self._ask(questions, LOOK)
        for name, answer in answers.items():
            for data in answer["findings"]:
                self.report.findings.append(Finding.from_data(data, name))
        self._compare_versions({name: answer["versions"] for name, answer in answers.items()})

    def _compare_versions(self, versions: Mapping[str, Mapping[str, str]]) -> None:
        """A step is the same on all ranks only where the same code computes it."""
        wrong = False
        for package in next(iter(versions.values()), {}):
            by_version: dict[str, list[str]] = {}
            for host, found in versions.items():
                by_version.setdefault(found.get(package, ""), []).append(host)
            if len(by_version) > 1:
                wrong = True
                text = "; ".join(f"{version or 'none'} on {some(found)}" for version, found in by_version.items())
                self._red(
                    "versions", f"{package} is not the same on all hosts: {text}", "install one version everywhere"
                )
        if len(versions) > 1 and not wrong:
            self._green("versions", f"the same on all {len(versions)} hosts")

    # --------------------------------------------------------------------------------------------- clocks

    def _compare_clocks(self) -> None:
        offsets = self.report.offsets
        for host in list(self._hosts):
            trips: list[RoundTrip] = []
            try:
                for _ in range(TRIPS):
                    sent = time.time()
                    host.channel.send({"do": "clock"}, peer.SEND)
                    told = float(host.channel.receive(peer.SEND)["is"])
                    trips.append(RoundTrip(sent, told, time.time()))
            except (ChannelError, KeyError, TypeError, ValueError) as error:
                self._hosts.remove(host)
                self._red(
                    "clocks", f"it does not tell the time: {error}", "look at what the doctor says there", host.name
                )
                continue
            offsets[host.name] = clocks.offset(trips)
        apart = clocks.farthest(offsets)
        if apart is None:
            return
        text = f"{apart.ahead} is ahead of {apart.behind} by {_seconds(apart.seconds)} (+- {_seconds(apart.bound)})"
        remedy = f"set the clocks by NTP or PTP (chronyc tracking), {apart.ahead} and {apart.behind} first"
        if apart.surely > clocks.GREAT:
            self._red("clocks", f"{text}: new certificates are not valid yet where it is earlier", remedy)
        elif apart.surely > clocks.SLIGHT:
            text += ": the times in incidents of these hosts cannot be compared"
            self.report.findings.append(Finding("clocks", Level.YELLOW, text, remedy))
        else:
            self._green("clocks", f"at most {_seconds(apart.seconds + apart.bound)} apart on {len(offsets)} hosts")

    # ----------------------------------------------------------------------------------------------- ways

    def _try_ways(self) -> None:
        if len(self._hosts) + len(self._met.missing) < 2:
            return
        word = secrets.token_hex(16)
        ports = self._ask({host.name: {"do": "listen", "word": word, "port": 0} for host in self._hosts}, peer.SEND)
        reached = {host.name: _targets(host, int(ports[host.name])) for host in self._hosts if host.name in ports}
        if self._rendezvous:
            self._listen_for_rendezvous(word, reached)
        knocks = [lost.target for lost in self._met.missing if lost.target is not None]
        wanted: dict[str, list[Target]] = {}
        for number, host in enumerate(self._hosts):  # each begins behind itself: not all at the same one
            order = [*self._hosts[number + 1 :], *self._hosts[:number]]
            wanted[host.name] = [target for other in order for target in reached.get(other.name, ())] + knocks
        longest = max(peer.longest_attempts(len(targets), self._job.timeout) for targets in wanted.values())
        questions = {
            name: {"do": "try", "targets": [target.as_data() for target in targets]} for name, targets in wanted.items()
        }
        for name, answer in self._ask(questions, longest).items():
            for target, data in zip(wanted[name], answer, strict=True):
                self._note(Way(name, target.host, target.what, Outcome.from_data(data)))
        self._judge_ways()

    def _listen_for_rendezvous(self, word: str, reached: dict[str, list[Target]]) -> None:
        first, port = self._hosts[0], names.rendezvous_port(self._job)
        if first.name not in reached or _taken(self.report.findings, port):
            return
        if first.name in self._ask({first.name: {"do": "listen", "word": word, "port": port}}, peer.SEND):
            data = reached[first.name][0]
            what = f"port {port} of the rendezvous"
            reached[first.name].append(Target(first.name, data.address, port, data.names, what))

    def _note(self, way: Way) -> None:
        self.report.tried += 1
        if way.outcome.why is not Why.OK or len(self.report.hosts) <= _ALL_WAYS:
            self.report.ways.append(way)

    def _judge_ways(self) -> None:
        """A line for each host that cannot be reached and each reason, with those from which it cannot."""
        failed: dict[tuple[str, Why, str], list[Way]] = {}
        for way in self.report.ways:
            if way.outcome.why is not Why.OK:
                failed.setdefault((way.there, way.outcome.why, way.what), []).append(way)
        for (there, why, what), ways in failed.items():
            others = len(self._hosts) - (there in {host.name for host in self._hosts})
            everybody = len(ways) == others > 1
            here = "every other host" if everybody else some([way.here for way in ways])
            self._red(
                "ways",
                f"{here} -> {there}, {what}: {why.value}: {ways[0].outcome.text}",
                probe.REMEDIES[why].format(here=here, there=there),
            )
        if not failed:
            slowest = max((way.outcome.seconds for way in self.report.ways), default=0.0)
            self._green(
                "ways",
                f"all {self.report.tried} ways between {len(self._hosts)} hosts are open (slowest {_seconds(slowest)})",
            )

    # --------------------------------------------------------------------------------------------- shared

    def _share(self) -> None:
        """What the first host writes, all others see; it takes a file with a name that nobody has seen."""
        if len(self._hosts) < 2:
            return
        first, others = self._hosts[0], self._hosts[1:]
        for flag, path in storage.directories(self._job).items():
            name = storage.MARK + secrets.token_hex(8)
            if not self._ask({first.name: {"do": "mark", "flag": flag, "name": name}}, LOOK):
                continue
            seen = self._ask({host.name: {"do": "sees", "flag": flag, "name": name} for host in others}, LOOK)
            blind = [host for host, found in seen.items() if not found]
            if blind:
                self._red(
                    "shared",
                    f"{flag} {path}: what {first.name} writes there is not seen by {some(blind)}",
                    _NOT_SHARED[flag],
                )
            elif seen:
                self._green("shared", f"{flag} {path} is one directory on all {len(seen) + 1} hosts")


_NOT_SHARED = {
    "--save": "give a directory of a file system that all hosts mount: a checkpoint of several hosts is in one",
    "--tft-incident-dir": "give a directory that all hosts mount: if one of two is lost, the other needs a lease there",
}


def _targets(host: Host, port: int) -> list[Target]:
    """The ways to a host: by the name that the user gave, and by the address that gloo will tell the others."""
    said, names = host.said, tuple(filter(None, (str(host.said["host"]), host.asked)))
    data = said.get("data")
    found = []
    if host.asked is not None:
        found.append(Target(host.name, host.asked, port, names, "by name"))
    known = host.asked is not None and (is_loopback(str(data)) or _same(host.asked, str(data)))
    if data is not None and not known:
        found.append(Target(host.name, str(data), port, names, "by the address that gloo takes"))
    return found


def _same(name: str, address: str) -> bool:
    try:
        return address in names.addresses_of(name)
    except OSError:
        return False


def _taken(findings: list[Finding], port: int) -> bool:
    return any(f.check == "ports" and f.level is Level.RED and f"port {port} " in f.text for f in findings)


def some(hosts: list[str]) -> str:
    """The first few by name, and how many more there are."""
    more = len(hosts) - _SHOWN
    return ", ".join(hosts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
