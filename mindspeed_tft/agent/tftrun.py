"""`tftrun`: torchrun's own command line, where one dead worker does not end the others at once.

A worker that can join the running job again is started again alone (`patches.torch_elastic`).

Where that is not possible, torchrun sends SIGTERM to the others and SIGKILL 30 seconds later. That is enough for a
small model only, so `tftrun` allows what the job's own deadline (`--tft-deadline`) needs. Everything else is
torchrun's: all of its arguments, its rendezvous, its restarts, its exit status.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import MutableMapping, Sequence

from mindspeed_tft import arguments
from mindspeed_tft.agent import spare
from mindspeed_tft.settings import Refused, Settings

ENV_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
MARGIN = 5.0  # seconds between the end of our own deadline and the launcher's SIGKILL


def settings_of(training_words: Sequence[str]) -> Settings:
    """What the flags of the training program, the environment and a preset say.

    Raises:
        Refused: the flags cannot be.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arguments.add_flags(parser)
    known, _ = parser.parse_known_args(list(training_words))
    settings, _ = arguments.resolve(known)
    settings.deadlines()
    return settings


def shutdown_seconds(settings: Settings) -> int:
    """Seconds that the launcher has to leave to the survivors."""
    return math.ceil(settings.tft_deadline + MARGIN)


def want_standby(settings: Settings, environ: MutableMapping[str, str]) -> None:
    """Ask for a warm standby where the job can use one; the environment of this launcher has the last word."""
    if settings.enable_worker_reboot and settings.tft_warm_standby:
        environ.setdefault(spare.ENV_STANDBY, "1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments (default: the process's); returns the exit status."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from mindspeed_tft.patches import torch_elastic

    parsed = torchrun.parse_args(  # type: ignore[no-untyped-call]
        list(sys.argv[1:] if argv is None else argv)
    )
    try:
        settings = settings_of(parsed.training_script_args)
        seconds = shutdown_seconds(settings)
        want_standby(settings, os.environ)
        torch_elastic.install()
    except (Refused, ValueError) as exc:
        print(f"tftrun: error: {exc}", file=sys.stderr)
        return 2
    if not hasattr(parsed, "shutdown_timeout"):
        print(f"tftrun: this torch cannot wait longer than 30 s for survivors (wanted {seconds} s)", file=sys.stderr)
    elif parsed.shutdown_timeout is None and ENV_SHUTDOWN not in os.environ:
        parsed.shutdown_timeout = seconds
    try:
        torchrun.run(parsed)  # type: ignore[no-untyped-call]
    except ChildFailedError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
