"""The drill's job on the recording device where it is broken, and on plain CPUs where it is not: what a recovery on
that device ends in is compared with runs that know nothing of it. Both are told nccl, which a checkpoint keeps."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from mindspeed_tft.faults import gpt_job


def _on_gloo() -> None:
    """Without the device: its stand-in is not found, and the groups that it would have are on gloo."""
    sys.path = [place for place in sys.path if not place.endswith("fake_torch_npu")]
    real = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "backend": "gloo"})

    dist.init_process_group = init_process_group


if __name__ == "__main__":
    sys.argv = ["nccl" if word == "gloo" else word for word in sys.argv]
    if sys.argv[1:2] == [gpt_job.WITHOUT_PLUGIN]:
        _on_gloo()
    gpt_job.main()
