"""`tftctl`: the operator's command."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import typer

from mindspeed_tft.cli import certs, config, demo, doctor, drill, explain, link, operate, patches, soak

app = typer.Typer(
    name="tftctl",
    help="Fault tolerance for Megatron training: rehearse faults and look at what happened.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
app.command("status")(operate.status)
app.command("pause")(operate.pause)
app.command("resume")(operate.resume)
app.command("dump")(operate.dump)
app.command("drill", context_settings=drill.CONTEXT)(drill.command)
app.command("demo")(demo.command)
app.command("soak")(soak.command)
app.command("config", context_settings=config.CONTEXT)(config.command)
app.command("patches")(patches.command)
app.command("switch-link")(link.switch_link)
app.command("switch-back")(link.switch_back)
app.command("explain")(explain.command)
app.add_typer(certs.app)
app.command("doctor", context_settings=doctor.CONTEXT)(doctor.command)


@app.callback()
def _prepare() -> None:
    # So that the jobs of a drill are cleaned up when it is asked to end, not only on Ctrl-C.
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    app()
