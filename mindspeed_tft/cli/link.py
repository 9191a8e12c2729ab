"""`tftctl switch-link`, `switch-back`: all collectives of a running job over another network interface."""

from __future__ import annotations

from typing import Annotated

import typer

from mindspeed_tft.cli.operate import ControllerOption, JobOption, JsonOption, TimeoutOption, TlsOption, duration, run

_PATIENCE = 600.0


def switch_link(
    link: Annotated[
        str,
        typer.Argument(
            metavar="LINK",
            help="A network interface of all hosts, or several with commas between, such as eth1. On NPUs: main or"
            " backup. `default`: the one that the job chose at its start.",
        ),
    ],
    job: JobOption = None,
    controller: ControllerOption = None,
    tls_dir: TlsOption = None,
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Move all collectives to another link while the job runs: before maintenance of a switch, or away from a bad one.

    All ranks are held between two steps, every process group is built anew on the link and tested with an all-reduce,
    and training goes on. If a host cannot use the link, nothing is changed; if it does not work, the link before is put
    back, and the answer says why. The control plane and the job's store stay where they are.

    Exit status: 0 moved, 2 bad arguments, 3 no job here, 4 several jobs (name one with --job), 5 no controller answers,
    6 not allowed, 7 refused, or not moved, for the reason printed, 8 not moved within --timeout (default 10m), 130
    interrupted: it is withdrawn, unless ranks move already.
    """
    _ask("switch-link", {"link": link}, job, controller, tls_dir, as_json, timeout)


def switch_back(
    job: JobOption = None,
    controller: ControllerOption = None,
    tls_dir: TlsOption = None,
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Move all collectives to the link that they used before the last switch. Said twice, it changes nothing.

    Everything is as with `tftctl switch-link`.

    Exit status: as `tftctl switch-link`.
    """
    _ask("switch-back", {}, job, controller, tls_dir, as_json, timeout)


def _ask(
    kind: str,
    args: dict[str, str],
    job: JobOption,
    controller: ControllerOption,
    tls_dir: TlsOption,
    as_json: bool,
    timeout: TimeoutOption,
) -> None:
    patience = duration(timeout, "--timeout") if timeout else _PATIENCE
    run(kind, job, controller, tls_dir, as_json, patience, args)
