"""Questions to the device."""

from __future__ import annotations

from torch_npu._device import DAMAGE
from torch_npu._device import device as _device


def check_uce_in_memory(device_id: int) -> int:
    _device.note("npu.check_uce_in_memory", device_id)
    return DAMAGE


def stress_detect(detect_type: str = "aic") -> int:
    _device.check()
    _device.note("npu.stress_detect", detect_type)
    return 0


def get_cann_version(module: str = "CANN") -> str:
    return "8.5.0"
