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
from collections.abc import Sequence

from mindspeed_tft import arguments
from mindspeed_tft.settings import Refused

ENV_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
MARGIN = 5.0  # seconds between the end of our own deadline and the launcher's SIGKILL


def shutdown_seconds(training_words: Sequence[str]) -> int:
    """Seconds that the launcher has to leave to the survivors, from the flags of the training program.

    Raises:
        Refused: the flags cannot be.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arguments.add_flags(parser)
    known, _ = parser.parse_known_args(list(training_words))
    settings, _ = arguments.resolve(known)
    settings.deadlines()
    return math.ceil(settings.tft_deadline + MARGIN)


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun with these arguments (default: the process's); returns the exit status."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from mindspeed_tft.patches import torch_elastic

    parsed = torchrun.parse_args(  # type: ignore[no-untyped-call]
        list(sys.argv[1:] if argv is None else argv)
    )
    try:
        seconds = shutdown_seconds(parsed.training_script_args)
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
