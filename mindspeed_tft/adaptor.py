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


def _wanted_platform(argv: list[str]) -> str:
    """The platform must stand before Megatron is imported, long before Megatron parses its arguments."""
    for position, word in enumerate(argv):
        if word == "--tft-platform" and position + 1 < len(argv):
            return argv[position + 1]
        if word.startswith("--tft-platform="):
            return word.split("=", 1)[1]
    return "auto"


def _install() -> None:
    rank = int(os.environ.get("RANK", "0"))
    platform = arguments.or_exit(lambda: platforms.select(_wanted_platform(sys.argv[1:])), rank)
    if platform.name == "cpu":
        from mindspeed_tft import on_cpu

        on_cpu.install_before_megatron()
    mindspeed.install(REGISTRY, arguments.add_flags)
    REGISTRY.activate(PARSER)


_install()
