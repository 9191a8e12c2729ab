"""Megatron on a plain CPU, without the plugin.

The program itself is not changed; it only has to say so before it imports Megatron:

    from mindspeed_tft import on_cpu
    on_cpu.install_before_megatron()

Fault tolerance is not part of it: a run that uses this module alone is the stock run that others are compared with.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

from mindspeed_tft.patches import megatron_on_cpu
from mindspeed_tft.platforms import cpu

__all__ = ["install", "install_before_megatron"]


def install() -> None:
    """Make torch's CUDA names mean the CPU, and prepare Megatron's modules for it. Again is harmless."""
    cpu.install()
    megatron_on_cpu.install()


def install_before_megatron() -> None:
    """Run `install` right before the first import of `megatron`, or now when it is imported already.

    So a process that never imports Megatron (a data loader's worker, a controller) keeps torch as it is.
    """
    if "megatron" in sys.modules:
        install()
    elif not any(isinstance(finder, _InstallFirst) for finder in sys.meta_path):
        sys.meta_path.insert(0, _InstallFirst())


class _InstallFirst(importlib.abc.MetaPathFinder):
    """Finds nothing: being asked for `megatron` is the signal."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "megatron":
            sys.meta_path.remove(self)
            install()
        return None
