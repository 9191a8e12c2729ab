"""Stop and restart, and tensors whose memory failed."""

from __future__ import annotations

from typing import Any

import torch

from torch_npu._device import device as _device


def stop_device(device_id: int) -> int:
    _device.note("npu.stop_device", device_id)
    _device.stop()
    return 0


def restart_device(device_id: int, rebuild_all_resources: int = False) -> None:
    _device.note("npu.restart_device", device_id, int(rebuild_all_resources))
    _device.restart()


def update_npu_tensor_to_safe(tensor_obj: Any) -> None:
    if not isinstance(tensor_obj, torch.Tensor):
        raise RuntimeError(f"param type should be Tensor, could not be {type(tensor_obj)}")
    _device.check()
    _device.note("npu._recovery.update_npu_tensor_to_safe", tensor_obj.numel())
