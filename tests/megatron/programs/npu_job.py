"""The drill's job as a script for NPUs begins: torch_npu first, its translation of CUDA's names, and nccl for hccl.

The runs of stock Megatron that it is compared with are those of every drill: on plain CPUs, without torch_npu.
"""

from __future__ import annotations

import importlib
import sys

from mindspeed_tft.faults import gpt_job

if __name__ == "__main__" and sys.argv[1:2] == [gpt_job.WITH_PLUGIN]:
    importlib.import_module("torch_npu")
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    sys.argv = ["nccl" if word == "gloo" else word for word in sys.argv]

if __name__ == "__main__":
    gpt_job.main()
