"""TaskD's agent for PyTorch: torchrun, taught by an import line that image builds put into `torch/distributed/run.py`.

Here it brings what `torchrun --logs-specs mindspeed_tft` brings (a dead worker is started again alone), the proxy of
this node, and TaskD's port as the one where several nodes meet. Workers that import torchrun are left alone.
"""

from __future__ import annotations

import os
import sys

from mindspeed_tft.control import keepers
from mindspeed_tft.control.config import ENV_JOB, ENV_PORT, ControlRefused, ControlUnavailable
from mindspeed_tft.settings import Refused
from mindspeed_tft.taskd import proxy, words

_WORKER = "TORCHELASTIC_RUN_ID"  # in the environment of what a torchrun has started


def install() -> None:
    """Teach the torchrun of this process; again is harmless."""
    if _WORKER in os.environ:
        return
    from mindspeed_tft.patches import torch_elastic

    try:
        torch_elastic.install()
        os.environ.setdefault(ENV_PORT, str(words.MANAGER_PORT))
        if os.environ.get(ENV_JOB) and keepers.ENV_DOOR not in os.environ:
            proxy.keep_for_children(os.environ[ENV_JOB])
    except (Refused, ValueError, ControlRefused, ControlUnavailable) as exc:
        sys.exit(f"mindspeed_tft: error: {exc}")
