"""`torchrun --logs-specs mindspeed_tft`: worker reboot under an unmodified torchrun.

torchrun loads the class named by its entry point (pyproject.toml) into its own process, before it makes an agent. Logs
are torch's own.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from mindspeed_tft.patches import torch_elastic


class RebootLogsSpecs(DefaultLogsSpecs):
    """torch's default, whose creation teaches the launcher of this process to start single workers again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch_elastic.install()
        super().__init__(*args, **kwargs)
