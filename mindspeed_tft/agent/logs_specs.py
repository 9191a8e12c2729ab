"""`torchrun --logs-specs mindspeed_tft`: worker reboot under an unmodified torchrun.

torchrun loads the class named by its entry point (pyproject.toml) into its own process, before it makes an agent. Logs
are torch's own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from mindspeed_tft.agent.tftrun import settings_of, want_standby
from mindspeed_tft.patches import torch_elastic
from mindspeed_tft.settings import Refused


class RebootLogsSpecs(DefaultLogsSpecs):
    """torch's default, whose creation teaches the launcher of this process to start single workers again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            want_standby(settings_of(_training_words()), os.environ)
            torch_elastic.install()
        except (Refused, ValueError) as exc:
            sys.exit(f"mindspeed_tft: error: {exc}")
        super().__init__(*args, **kwargs)


def _training_words() -> list[str]:
    """The flags of the training program, as this torchrun reads its own command line."""
    found: list[str] = torchrun.parse_args(sys.argv[1:]).training_script_args  # type: ignore[no-untyped-call]
    return found
