"""Plain CPUs with gloo: the platform of the demo, of the tests, and of development on any machine.

Megatron is written for CUDA. `install` lets such a program run on the CPU, by the mapping in `cuda_names`; `uninstall`
undoes it. Importing this module changes nothing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from mindspeed_tft.platforms import cuda_names
from mindspeed_tft.platforms.base import Platform
from mindspeed_tft.platforms.cuda_names import install, installed, uninstall

__all__ = ["CpuPlatform", "install", "installed", "uninstall"]


class CpuPlatform(Platform):
    """Nothing runs behind the back of the calling thread, so an online repair has nothing to stop, restart or make
    safe: the defaults hold. A failed memory page is told by a signal that names no tensor, hence damage is "some"."""

    name = "cpu"
    backend = "gloo"
    device_type = "cpu"

    def why_unavailable(self) -> str | None:
        return None

    def description(self) -> str:
        return f"{platform.machine()} CPU, {os.cpu_count()} cores shared by {cuda_names.ranks_here()} ranks"

    def synchronize(self) -> None:
        """Nothing to wait for: the CPU has done its work when the call returns."""

    def beside(self) -> Callable[[], AbstractContextManager[Any]]:
        return nullcontext

    def rng_state(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)

    def memory_allocated(self) -> int:
        """Resident memory of this process: the CPU's allocator keeps no count of its tensors."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
