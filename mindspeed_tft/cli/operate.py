"""`tftctl status`, `pause`, `resume`, `dump`: look at a running job, and steer it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.live import Live

from mindspeed_tft.cli import consoles
from mindspeed_tft.cli import status as pages
from mindspeed_tft.control import operator_client as found
from mindspeed_tft.control.config import ControlRefused

NO_JOB, SEVERAL, UNREACHABLE, NOT_ALLOWED, REFUSED, LATE, INTERRUPTED = 3, 4, 5, 6, 7, 8, 130
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_STATUS_PATIENCE = 30.0
_RESUME_PATIENCE = 120.0
_STEP_PATIENCE = 86400.0  # for a step that may be far away

JobOption = Annotated[
    Optional[str],  # noqa: UP045  typer reads this annotation on Python 3.10 as well
    typer.Option("--job", metavar="RUN", help="Run id of the job, if there are several on this host."),
]
ControllerOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--controller", metavar="HOST:PORT", help="A controller on another host; needs --tls-dir."),
]
TlsOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="DIR", help="An operator's ca.crt, node.crt and node.key (`tftctl certs operator NAME`)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as one JSON object.")]
TimeoutOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="TIME", help="How long to wait, as 90, 90s, 10m or 2h. What is not done by then is withdrawn."
    ),
]


class Stopped(Exception):
    """The command ends here: an exit status, and what to say."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def duration(text: str, option: str) -> float:
    """Seconds of `90`, `90s`, `30m`, `1h30m`."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not parts or "".join(number + unit for number, unit in parts) != text.strip():
        raise typer.BadParameter(f"{option} {text!r}: expected a time such as 90, 90s, 30m or 1h30m")
    return sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)


def client(job: str | None, controller: str | None, tls_dir: Path | None) -> found.Client:
    """The way to the job that is meant."""
    if controller is not None:
        try:
            return found.client_at(controller, tls_dir)
        except ControlRefused as error:
            raise typer.BadParameter(str(error).replace("--tft-tls-dir", "--tls-dir")) from None
    every = found.here(job or "")
    if not every:
        where = ", ".join(map(str, found.meeting_places())) or "no meeting place"
        named = f"no job {job!r}" if job else "no job"
        raise Stopped(
            NO_JOB,
            f"{named} of this user has a controller on this host (looked below {where}). On a host of the job it is "
            "found; from elsewhere name a controller: --controller HOST:PORT --tls-dir DIR",
        )
    if len(every) > 1:
        lines = "".join(f"\n  --job {one.run}@{one.key}" for one in every)
        raise Stopped(SEVERAL, f"{len(every)} jobs have controllers on this host; name one:{lines}")
    return found.client_of(every[0])


@contextmanager
def _ending(as_json: bool) -> Iterator[None]:
    """Every end of a command that is none in peace, as an exit status and one line."""
    try:
        yield
    except Stopped as stopped:
        _fail(stopped.status, str(stopped), as_json)
    except found.Unreachable as error:
        _fail(UNREACHABLE, str(error), as_json)
    except found.NotAllowed as error:
        _fail(NOT_ALLOWED, f"not allowed: {error}", as_json)


def _fail(status: int, text: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"ok": False, "text": text}))
    else:
        consoles.make(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(status)


# ------------------------------------------------------------------------------------------- status


def status(
    job: JobOption = None,
    controller: ControllerOption = None,
    tls_dir: TlsOption = None,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option(help="Again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="With --watch: seconds between two looks.")] = 1.0,
    ranks: Annotated[bool, typer.Option("--ranks", help="Each rank and each shard, however many there are.")] = False,
) -> None:
    """Show a running job: ranks, hosts, step, holders of each shard, protection, and what a fault would lead to now.

    Exit status: 0 shown, 2 bad arguments, 3 no job here, 4 several jobs (name one with --job), 5 no controller answers,
    6 not allowed.
    """
    with _ending(as_json):
        way = client(job, controller, tls_dir)

        def look() -> dict[str, Any]:
            return way.ask("status", _STATUS_PATIENCE).data

        if watch:
            _watch(look, every, as_json, ranks)
        elif as_json:
            print(json.dumps(look(), indent=1))
        else:
            consoles.make().print(pages.page(look(), ranks))


def _watch(look: Callable[[], dict[str, Any]], every: float, as_json: bool, ranks: bool) -> None:
    console = consoles.make()
    try:
        if as_json or not console.is_terminal:
            while True:
                told = look()
                print(json.dumps(told) if as_json else pages.line(told), flush=True)
                time.sleep(every)
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(pages.page(look(), ranks), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        return


# ------------------------------------------------------------------------------------------- steering


def pause(
    job: JobOption = None,
    controller: ControllerOption = None,
    tls_dir: TlsOption = None,
    as_json: JsonOption = False,
    at_step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, metavar="N", help="Hold the ranks after step N. Default: after the step that is computed."),
    ] = None,
    hold_for: Annotated[
        str, typer.Option("--for", metavar="TIME", help="Then they go on by themselves, as 90s, 30m or 2h.")
    ] = "1h",
    timeout: TimeoutOption = None,
) -> None:
    """Hold all ranks between two steps, the same two on all of them. `tftctl resume` lets them go on.

    Nothing ends while it is paused: processes, memory and connections stay, faults are handled as ever. Ctrl-C, and
    the end of --timeout (default 10m, with --at-step 24h), withdraw a pause that has not come true.

    Exit status: 0 paused, 2 bad arguments, 3 no job here, 4 several jobs (name one with --job), 5 no controller
    answers, 6 not allowed, 7 refused, for the reason printed, 8 not paused within --timeout and withdrawn, 130
    interrupted and withdrawn.
    """
    args = {"step": str(at_step) if at_step else "", "limit": f"{duration(hold_for, '--for'):g}"}
    patience = duration(timeout, "--timeout") if timeout else _STEP_PATIENCE if at_step else 600.0
    run("pause", job, controller, tls_dir, as_json, patience, args)


def resume(
    job: JobOption = None,
    controller: ControllerOption = None,
    tls_dir: TlsOption = None,
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Let a paused job train on. A pause that has not come true yet is withdrawn.

    Exit status: 0 it trains, 2 bad arguments, 3 no job here, 4 several jobs (name one with --job), 5 no controller
    answers, 6 not allowed, 7 refused, for the reason printed, 8 not all ranks have gone on within --timeout.
    """
    patience = duration(timeout, "--timeout") if timeout else _RESUME_PATIENCE
    run("resume", job, controller, tls_dir, as_json, patience, {})


def dump(
    job: JobOption = None,
    controller: ControllerOption = None,
    tls_dir: TlsOption = None,
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Write the framework's own checkpoint now, in --save, and keep training (or keep being paused).

    Exit status: 0 saved, 2 bad arguments, 3 no job here, 4 several jobs (name one with --job), 5 no controller answers,
    6 not allowed, 7 refused, or failed, for the reason printed, 8 not saved within --timeout (default 10m), 130
    interrupted: it is withdrawn, unless the ranks save already.
    """
    patience = duration(timeout, "--timeout") if timeout else 600.0
    run("dump", job, controller, tls_dir, as_json, patience, {})


def run(
    kind: str,
    job: str | None,
    controller: str | None,
    tls_dir: Path | None,
    as_json: bool,
    patience: float,
    args: dict[str, str],
) -> None:
    """Ask for something that takes its time, show how it gets on, and end with the exit status of the answer."""
    with _ending(as_json):
        way = client(job, controller, tls_dir)
        console = consoles.make(stderr=True)
        try:
            with console.status(f"{kind}: asking") if console.is_terminal and not as_json else _silent():
                reply = way.ask(kind, patience, _teller(console, kind, as_json), **{k: v for k, v in args.items() if v})
        except KeyboardInterrupt:
            raise Stopped(INTERRUPTED, f"{kind}: withdrawn, unless it came true at this very moment") from None
        if as_json:
            print(json.dumps(asdict(reply)))
        elif reply.ok:
            consoles.make().print(reply.text, markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(f"{kind}: {reply.text}", markup=False, highlight=False, soft_wrap=True)
    if not reply.ok:
        raise typer.Exit(LATE if reply.late else REFUSED)


@contextmanager
def _silent() -> Iterator[None]:
    yield


def _teller(console: Console, kind: str, as_json: bool) -> Callable[[str, int, int], None]:
    def tell(text: str, _done: int, _of: int) -> None:
        if not as_json:
            console.print(f"{kind}: {text}", markup=False, highlight=False, soft_wrap=True)
            sys.stderr.flush()

    return tell
