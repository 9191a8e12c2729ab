"""The one import: `import mindspeed_tft.adaptor`, after `import torch` (and after MindSpeed's, where it is used).

It queues the patch of Megatron's argument parser and, on a machine with neither NPU nor GPU, the CPU platform; both
take effect when Megatron is imported. Nothing else happens unless a flag turns a feature on.
"""

from __future__ import annotations

import os
import sys

from mindspeed_tft import arguments, platforms
from mindspeed_tft.patches import megatron_arguments, mindspeed  # noqa: F401  (importing declares)
from mindspeed_tft.patches.groups import PARSER
from mindspeed_tft.registry import REGISTRY


def _install() -> None:
    rank = int(os.environ.get("RANK", "0"))
    platform = arguments.or_exit(lambda: platforms.select(arguments.early_platform(sys.argv[1:])), rank)
    if platform.name == "cpu":
        from mindspeed_tft import on_cpu

        on_cpu.install_before_megatron()
    mindspeed.install(REGISTRY, arguments.add_flags)
    REGISTRY.activate(PARSER)


_install()
