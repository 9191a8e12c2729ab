"""`tftctl`: the operator's command."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import typer

from mindspeed_tft.cli import certs, config, demo, doctor, drill, explain, link, operate, patches, soak

app = typer.Typer(
    name="tftctl",
    help="Fault tolerance for Megatron training: look before a job starts, watch and steer it, rehearse faults, explain"
    " them. Exit statuses are in each command's help; 2: bad arguments.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
BEFORE, RUNNING, AFTERWARDS, REHEARSE = "Before a job", "A running job", "After a fault", "Rehearse faults"
app.command("doctor", context_settings=doctor.CONTEXT, rich_help_panel=BEFORE)(doctor.command)
app.command("config", context_settings=config.CONTEXT, rich_help_panel=BEFORE)(config.command)
app.command("patches", rich_help_panel=BEFORE)(patches.command)
app.add_typer(certs.app, rich_help_panel=BEFORE)
app.command("status", rich_help_panel=RUNNING)(operate.status)
app.command("pause", rich_help_panel=RUNNING)(operate.pause)
app.command("resume", rich_help_panel=RUNNING)(operate.resume)
app.command("dump", rich_help_panel=RUNNING)(operate.dump)
app.command("switch-link", rich_help_panel=RUNNING)(link.switch_link)
app.command("switch-back", rich_help_panel=RUNNING)(link.switch_back)
app.command("explain", rich_help_panel=AFTERWARDS)(explain.command)
app.command("demo", rich_help_panel=REHEARSE)(demo.command)
app.command("drill", context_settings=drill.CONTEXT, rich_help_panel=REHEARSE)(drill.command)
app.command("soak", rich_help_panel=REHEARSE)(soak.command)


@app.callback()
def _prepare() -> None:
    # So that the jobs of a drill are cleaned up when it is asked to end, not only on Ctrl-C.
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    app()
