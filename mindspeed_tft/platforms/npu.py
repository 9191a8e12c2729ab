"""Huawei Ascend NPUs, by torch_npu and hccl. All calls into torch_npu are in this module.

torch_npu is imported inside functions only: where there is no NPU it is not installed, and where there is one it takes
seconds and touches the device.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from mindspeed_tft.platforms.base import Platform


class NpuPlatform(Platform):
    name = "npu"
    backend = "hccl"
    device_type = "npu"

    def why_unavailable(self) -> str | None:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        try:
            npu = _npu()
        except Exception as error:  # without a working CANN it fails in many ways: the reason is passed on
            return f"torch_npu cannot be imported ({type(error).__name__}: {error})"
        return None if npu.is_available() else "torch_npu finds no usable NPU"

    def description(self) -> str:
        return str(_npu().get_device_name())

    def synchronize(self) -> None:
        _npu().synchronize()

    def rng_state(self) -> torch.Tensor:
        state: torch.Tensor = _npu().get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        _npu().set_rng_state(state)

    def memory_allocated(self) -> int:
        return int(_npu().memory_allocated())


def _npu() -> Any:
    """`torch_npu.npu`, which torch knows as `torch.npu` once torch_npu is imported."""
    import torch_npu

    return torch_npu.npu
