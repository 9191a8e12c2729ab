"""`tftctl doctor`: before a job starts, whether its hosts and the ways between them are as it needs them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Optional

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.cli import consoles
from mindspeed_tft.control.config import DEFAULT_PORT, ControlRefused
from mindspeed_tft.doctor import meeting, names, probe
from mindspeed_tft.doctor.channel import Channel, ChannelError
from mindspeed_tft.doctor.findings import Finding, Level
from mindspeed_tft.doctor.job import Job, describe
from mindspeed_tft.doctor.meeting import Host, Met
from mindspeed_tft.doctor.peer import Peer, greet
from mindspeed_tft.doctor.probe import Failed, Secure
from mindspeed_tft.doctor.survey import Report, Survey, Way

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": False}
RED, USAGE = 1, 2  # exit statuses
SERVE = "serve"
_COLOURS = {Level.GREEN: "green", Level.YELLOW: "yellow", Level.RED: "red"}
_MATRIX = 16  # hosts up to which the ways are shown as a matrix
# Where launchers say which of several nodes this is, and how many there are.
_NODE = ("GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX", "VC_TASK_INDEX")
_NODES = ("GROUP_WORLD_SIZE", "SLURM_NNODES")


@dataclass(frozen=True)
class Wanted:
    """What was asked for, beside what the job says."""

    hosts: tuple[str, ...] = ()
    point: tuple[str, int] | None = None
    node: int | None = None
    wait: float = 60.0
    strict: bool = False
    as_json: bool = False
    under_torchrun: bool = False


def command(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045  typer reads this annotation on Python 3.10 as well
        typer.Argument(
            metavar="[serve] [-- TRAINING FLAGS]",
            help="serve: answer a doctor on another host. After `--`: the flags of the training program.",
            show_default=False,
            autocompletion=lambda: [SERVE],
        ),
    ] = None,
    hosts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="A,B[:PORT],...",
            help="All hosts of the job, the first one first. On each, but for this one, `tftctl doctor serve` runs.",
        ),
    ] = None,
    rendezvous: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="HOST[:PORT]",
            help="Instead of --hosts: the same command is started on all hosts (srun, mpirun), and they meet there: at "
            "the address of the first one. Default port: --port.",
        ),
    ] = None,
    nodes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(metavar="N", help="Hosts that meet at --rendezvous. Default: what Slurm says."),
    ] = None,
    node_rank: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="R",
            help="Number of this host; 0 is the first one, and shows the report. Default: what Slurm or Kubernetes "
            "says, else 0 where --rendezvous is an address of this host.",
        ),
    ] = None,
    port: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            max=65535,
            help=f"TCP port of the controllers, as --tft-controller-port ({DEFAULT_PORT} with several hosts). Doctors "
            "meet there, so that it is tried as well.",
        ),
    ] = None,
    tls_dir: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="DIR", help="As --tft-tls-dir: the doctors then talk, and try all ways, with it."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="As --tft-insecure: hosts meet without certificates.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds for one attempt to reach a host.")] = 3.0,
    wait: Annotated[
        float, typer.Option(min=0.0, max=86400.0, help="Seconds until all hosts have to be at --rendezvous.")
    ] = 60.0,
    serve_for: Annotated[
        float, typer.Option("--for", min=1.0, max=86400.0, metavar="SECONDS", help="How long `serve` answers.")
    ] = 3600.0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for what is yellow, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; how it goes on is told on stderr.")] = False,
    pretend_clock: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Preflight: versions, flags, names, ports, certificates, directories, limits, and every way between all hosts.

    One host: `tftctl doctor -- FLAGS`. Several: `tftctl doctor serve` on each and `tftctl doctor --hosts A,B,C` on one;
    or the same command on all, `srun tftctl doctor --rendezvous HOST`; or by the launcher of the job, `torchrun ... -m
    mindspeed_tft.doctor -- FLAGS`. Nothing that a job uses is changed.

    Exit status: 0 green, or yellow without --strict; 1 red; 2 bad arguments. Each host ends with the status of all.
    """
    given = list(words or ())
    serving = given[:1] == [SERVE]
    given = given[1:] if serving else given
    if given and not given[0].startswith("-"):
        raise typer.BadParameter(f"{given[0]!r}: expected `serve`, or flags of the training after `--`")
    if hosts and rendezvous:
        raise typer.BadParameter("--hosts and --rendezvous are two ways to find the hosts; give one")
    try:
        count = _count(hosts, rendezvous, nodes)
        several = _open(hosts, rendezvous, serving)
        job = job_of(
            given,
            count,
            several=several,
            port=port,
            tls_dir=tls_dir,
            insecure=insecure,
            timeout=timeout,
            skew=pretend_clock,
        )
        point = meeting.split(rendezvous, job.controller_port) if rendezvous else None
        listed = tuple(filter(None, (hosts or "").split(",")))
        for text in listed:
            meeting.split(text, job.controller_port)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if serving:
        raise typer.Exit(serve(job, serve_for))
    node = _number(os.environ, _NODE) if node_rank is None else node_rank
    raise typer.Exit(run(job, Wanted(listed, point, node, wait, strict, as_json)))


def _count(hosts: str | None, rendezvous: str | None, nodes: int | None) -> int:
    """How many hosts the job has.

    Raises:
        ValueError: it is not known.
    """
    if hosts:
        return len([host for host in hosts.split(",") if host])
    if not rendezvous:
        return 1
    found = _number(os.environ, _NODES) if nodes is None else nodes
    if found is None or found < 1:
        raise ValueError("--rendezvous: how many hosts will come there? Give --nodes N")
    return found


def _number(environ: Mapping[str, str], variables: Sequence[str]) -> int | None:
    return next((int(environ[name]) for name in variables if environ.get(name, "").isdigit()), None)


def _open(hosts: str | None, rendezvous: str | None, serving: bool) -> bool:
    """Whether other hosts are meant: not where all names are loopback's."""
    places = [*(hosts or "").split(","), rendezvous or ""]
    real = [meeting.split(place, 1)[0] for place in places if place]
    return serving or not all(map(is_loopback, real))


def job_of(
    words: list[str],
    nodes: int,
    *,
    several: bool,
    port: int | None = None,
    tls_dir: str | None = None,
    insecure: bool = False,
    timeout: float = 3.0,
    skew: float = 0.0,
) -> Job:
    """The job with these flags in this environment.

    Args:
        several: other hosts are meant, not only other addresses of this one.

    Raises:
        ValueError: other hosts are meant, and nobody has said how they know each other.
    """
    job = describe(
        words, os.environ, nodes=nodes, port=port, tls_dir=tls_dir, insecure=insecure, timeout=timeout, skew=skew
    )
    if job.tls_dir is not None or job.insecure:
        return job
    if several:
        raise ValueError(
            "doctors of several hosts would take questions from anybody: give --tls-dir with ca.crt, node.crt and "
            "node.key, as the job will have it, or --insecure on a network that you trust"
        )
    return describe(words, os.environ, nodes=nodes, port=port, timeout=timeout, bind="127.0.0.1", skew=skew)


def run(job: Job, wanted: Wanted) -> int:
    """Find the hosts, ask them, show what was found; returns the exit status."""
    console = consoles.make(stderr=wanted.as_json)
    try:
        contexts = probe.secure(job)
    except ControlRefused as error:
        if job.nodes > 1:
            return _end(_only("tls", error), wanted, console)
        contexts = None  # one host: it is one finding of several
    with _saying(console) as say:
        if wanted.point is not None and not _is_first(wanted):
            return _follow(job, contexts, wanted, say)
        try:
            report = _survey(job, contexts, wanted, say)
        except ControlRefused as error:
            report = _only("ports", error)
    return _end(report, wanted, console)


def _only(check: str, error: ControlRefused) -> Report:
    """Of a host that comes no further than that."""
    text, _, remedy = str(error).partition("; ")
    return Report([names.own_name()], [Finding(check, Level.RED, text, remedy, names.own_name())])


def _end(report: Report, wanted: Wanted, console: Console) -> int:
    if wanted.as_json:
        print(json.dumps(report.as_data(), indent=2))
    else:
        show(report, console if console.is_terminal else consoles.for_tables())
    return RED if report.level > (Level.GREEN if wanted.strict else Level.YELLOW) else 0


def _is_first(wanted: Wanted) -> bool:
    assert wanted.point is not None
    return meeting.is_here(wanted.point[0]) if wanted.node is None else wanted.node == 0


def _survey(job: Job, contexts: Secure | None, wanted: Wanted, say: meeting.Say) -> Report:
    """
    Raises:
        ControlRefused: the hosts have no place to meet.
    """
    with contextlib.ExitStack() as stack:
        here: Host | None = None
        met, listed = Met(), list(wanted.hosts)
        if wanted.point is not None:
            met = meeting.gather(job, contexts, wanted.point, wanted.wait, say)
        own = next((host for host in listed if ":" not in host and meeting.is_here(host)), None)
        if own is not None or not listed:
            here = stack.enter_context(meeting.this_host(job, contexts, own or names.own_name()))
        if listed:
            others = [host for host in listed if host != own]
            met = meeting.visit(job, contexts, others, say)
        for host in met.hosts:
            stack.enter_context(host.channel)
        if here is not None:
            here.asked = own
            met.hosts.insert(listed.index(own) if own is not None else 0, here)
        meeting.unique(met.hosts)
        rendezvous = not wanted.under_torchrun
        return Survey(job, met, say, rendezvous=rendezvous, ports=wanted.point is None).run()


def _follow(job: Job, contexts: Secure | None, wanted: Wanted, say: meeting.Say) -> int:
    """On every host but the first: go there, answer, and say what came of it."""
    assert wanted.point is not None
    try:
        channel, said = meeting.come(job, contexts, wanted.point, wanted.node, wanted.wait, say)
        with channel:
            last = Peer(job, contexts).serve(channel)
    except Failed as failure:
        here, there = names.own_name(), wanted.point[0]
        remedy = probe.REMEDIES[failure.why].format(here=here, there=there)
        if failure.why is probe.Why.REFUSED:
            remedy = f"start the doctor on {there} at the same time; a firewall that rejects looks the same"
        print(f"tftctl doctor: red: {here} cannot meet the others: {failure}. Remedy: {remedy}.", file=sys.stderr)
        return RED
    except ChannelError as error:
        print(f"tftctl doctor: red: {error}", file=sys.stderr)
        return RED
    verdict = str(last.get("verdict"))
    print(f"tftctl doctor: {verdict}; the report is on {said['host']}", file=sys.stderr)
    bad = ("red", "yellow") if wanted.strict else ("red",)
    return RED if verdict in bad else 0


def serve(job: Job, seconds: float) -> int:
    """Answer doctors of other hosts for so long, one after the other."""
    try:
        contexts = probe.secure(job)
        listener = probe.listen(job.bind, job.controller_port)
    except ControlRefused as error:
        print(f"tftctl doctor: red: {error}", file=sys.stderr)
        return RED
    except OSError as error:
        taken = names.explain_taken(job.controller_port, error)
        print(
            f"tftctl doctor: red: port {job.controller_port} is taken ({taken}). Remedy: stop what listens there, or "
            "choose another --port.",
            file=sys.stderr,
        )
        return RED
    if contexts is None:
        print("tftctl doctor: --insecure: whoever reaches this port may ask this host", file=sys.stderr)
    print(
        f"tftctl doctor: {names.own_name()} answers at port {job.controller_port} for {seconds:g} s",
        file=sys.stderr,
        flush=True,
    )
    end = time.monotonic() + seconds
    with listener:
        while (left := end - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection, address = listener.accept()
            except TimeoutError:
                break
            _answer(connection, str(address[0]), job, contexts, end)
    return 0


def _answer(connection: socket.socket, address: str, job: Job, contexts: Secure | None, end: float) -> None:
    connection.settimeout(job.timeout)
    try:
        connection = probe.let_in(connection, contexts)
        with Channel(connection, address) as channel:
            greet(channel, job, None, job.timeout)
            last = Peer(job, contexts).serve(channel, end)
        print(f"tftctl doctor: {address} asked: {last.get('verdict')}", file=sys.stderr, flush=True)
    except (OSError, ChannelError) as error:
        connection.close()
        print(f"tftctl doctor: {address} asked nothing: {error}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _saying(console: Console) -> Iterator[meeting.Say]:
    """Tells what goes on: a line that changes on a terminal, lines elsewhere."""
    if console.is_terminal:
        with console.status("looking at this host") as status:
            yield lambda text: status.update(escape(text))
    else:
        yield lambda text: print(f"doctor: {text}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------- show


def show(report: Report, console: Console) -> None:
    """Findings by what they are about, the same ones of several hosts in one line; then the matrix of ways."""
    table = Table(
        title=f"Doctor: {len(report.hosts)} host{'s' * (len(report.hosts) != 1)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in ("", "check", "host", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for finding, hosts in _together(report):
        colour = _COLOURS[finding.level]
        table.add_row(
            f"[{colour}]{finding.level.name.lower()}[/]",
            finding.check,
            escape(hosts),
            escape(finding.text),
            escape(finding.remedy),
        )
    console.print(table)
    if report.ways and len(report.hosts) <= _MATRIX:
        console.print(_matrix(report))
    colour = _COLOURS[report.level]
    counts = ", ".join(f"{sum(f.level is level for f in report.findings)} {level.name.lower()}" for level in Level)
    console.print(f"[{colour}]{report.level.name.lower()}[/]: {counts}", highlight=False)


def _together(report: Report) -> Iterator[tuple[Finding, str]]:
    """What is worse last, where it is read; each text once, with the hosts that say it."""
    same: dict[tuple[Any, ...], list[Finding]] = {}
    for finding in report.findings:
        same.setdefault((finding.level, finding.check, finding.text, finding.remedy), []).append(finding)
    for found in sorted(same.values(), key=lambda group: group[0].level):
        hosts = [finding.host for finding in found if finding.host]
        everybody = len(hosts) == len(report.hosts) > 1
        yield found[0], "all" if everybody else ", ".join(hosts)


def _matrix(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("from | to")
    for there in report.hosts:
        table.add_column(escape(there), overflow="fold")
    ways: dict[tuple[str, str], list[Way]] = {}
    for way in report.ways:
        ways.setdefault((way.here, way.there), []).append(way)
    for here in report.hosts:
        table.add_row(escape(here), *(_cell(here, there, ways.get((here, there), [])) for there in report.hosts))
    return table


def _cell(here: str, there: str, ways: list[Way]) -> str:
    if here == there:
        return "-"
    if not ways:
        return "[yellow]not tried[/]"
    failed = [way.outcome.why.value for way in ways if way.outcome.why is not probe.Why.OK]
    if failed:
        return f"[red]{', '.join(dict.fromkeys(failed))}[/]"
    return f"[green]{max(way.outcome.seconds for way in ways) * 1000:.1f} ms[/]"
