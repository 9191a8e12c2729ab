"""torch_npu.npu: torch.cuda as it is once its names mean the CPU."""

from __future__ import annotations

from typing import Any

import torch

_SAME = """Stream Event ExternalStream stream device current_stream default_stream set_stream current_device set_device
    device_count is_initialized init _lazy_call synchronize empty_cache memory_allocated max_memory_allocated
    memory_reserved max_memory_reserved memory_stats memory_snapshot mem_get_info reset_peak_memory_stats
    reset_max_memory_allocated get_device_properties get_rng_state set_rng_state get_rng_state_all set_rng_state_all
    manual_seed manual_seed_all default_generators is_bf16_supported FloatTensor BFloat16Tensor HalfTensor"""

for _name in _SAME.split():
    globals()[_name] = getattr(torch.cuda, _name)


def is_available() -> bool:
    return False


def get_device_name(*_: Any) -> str:
    return "Ascend910B3"  # MindSpeed tells generations apart by the beginning of the name


def set_option(_: dict[str, Any]) -> None: ...


def set_compile_mode(jit_compile: bool = False) -> None: ...
