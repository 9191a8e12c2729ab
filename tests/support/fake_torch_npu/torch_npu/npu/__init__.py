"""torch_npu.npu: the namespace of torch.cuda, which means the CPU here, and what only an NPU has."""

from __future__ import annotations

import time
from typing import Any

import torch

from torch_npu._device import device as _device
from torch_npu.npu import utils as utils
from torch_npu.npu._recovery import restart_device as restart_device
from torch_npu.npu._recovery import stop_device as stop_device
from torch_npu.npu.utils import check_uce_in_memory as check_uce_in_memory
from torch_npu.npu.utils import get_cann_version as get_cann_version
from torch_npu.npu.utils import stress_detect as stress_detect

_SAME = """Stream ExternalStream stream device current_stream default_stream current_device set_device device_count
is_initialized init empty_cache memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_stats
memory_snapshot mem_get_info reset_peak_memory_stats get_device_properties get_rng_state set_rng_state get_rng_state_all
set_rng_state_all manual_seed manual_seed_all default_generators is_bf16_supported FloatTensor BFloat16Tensor HalfTensor
""".split()
for _name in _SAME:
    globals()[_name] = getattr(torch.cuda, _name)


def is_available() -> bool:
    return True


def get_device_name(device_name: Any = None) -> str:
    return "Ascend910B3"


def synchronize(device: Any = None) -> None:
    _device.check()


def set_stream(stream: Any) -> None:
    _device.note("npu.set_stream")
    torch.cuda.set_stream(stream)


def _lazy_init() -> None:
    pass


class Event(torch.cuda.Event):  # type: ignore[misc]  # the CPU's, from the mapping
    """With the moment that the device reached it, in microseconds."""

    def record(self, stream: Any = None) -> None:
        _device.check()
        self._reached = time.time_ns() // 1000
        super().record(stream)

    def recorded_time(self) -> int:
        _device.check()
        return self._reached


def _comm_switch_nic(ranks: list[int], useBackup: list[bool]) -> bool:
    _device.check()
    _device.note("npu._comm_switch_nic", list(ranks), [int(each) for each in useBackup])
    return True
