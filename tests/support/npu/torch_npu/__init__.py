"""torch_npu over CPU tensors, for MindSpeed without an NPU; see the README beside it.

Devices called "cuda" are mapped to the CPU by the plugin's own `on_cpu`, which has nothing to do with fault tolerance;
`torch.npu` is the mapped torch.cuda under another name. What is not here raises AttributeError, but operators
(`npu_*`), which MindSpeed looks up at import, raise only when they are called.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.cpp_extension

from mindspeed_tft import on_cpu
from mindspeed_tft.platforms import cuda_names

on_cpu.install()
_cuda_on_cpu = cuda_names._on_cpu


def _on_cpu(device: Any) -> Any:
    """As for the names of CUDA. torch itself knows no "npu", so that the word stands in arguments alone."""
    return torch.device("cpu") if isinstance(device, str) and device.startswith("npu") else _cuda_on_cpu(device)


cuda_names._on_cpu = _on_cpu

from torch_npu import npu, operators  # noqa: E402  (they need the mapping)

__version__ = "2.6.0"

float8_e4m3fn = torch.float8_e4m3fn
float8_e5m2 = torch.float8_e5m2
float8_e8m0fnu = torch.float8_e8m0fnu
hifloat8 = torch.uint8
float4_e2m1fn_x2 = torch.uint8
float4_e1m2fn_x2 = torch.uint8
unsupported_dtype: list[torch.dtype] = []

torch.npu = npu  # type: ignore[attr-defined]
sys.modules["torch.npu"] = npu


def _same(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor


torch.Tensor.npu = _same  # type: ignore[attr-defined]
torch.Tensor.is_npu = property(lambda _self: True)  # type: ignore[attr-defined]
torch.nn.Module.npu = _same  # type: ignore[assignment]


class _Options:
    """Of groups of hccl. Without `hccl_config`, as in old releases, MindSpeed leaves a group's options alone."""


_C = types.SimpleNamespace(
    _distributed_c10d=types.SimpleNamespace(ProcessGroupHCCL=types.SimpleNamespace(Options=_Options))
)
profiler = types.ModuleType("torch_npu.profiler")
sys.modules["torch_npu.profiler"] = profiler


# Operators that MindSpeed compiles at first use: it wants a path of CANN, and then torch to build the sources.
os.environ.setdefault("ASCEND_HOME_PATH", str(Path(__file__).parent))


def _load(name: str, *_: Any, **__: Any) -> Any:
    if name in operators.COMPILED:
        return operators.COMPILED[name]
    raise NotImplementedError(f"torch_npu in place of an NPU: operator {name!r} would have to be compiled")


torch.utils.cpp_extension.load = _load


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.lstrip("_").startswith("npu_"):
        raise AttributeError(f"torch_npu in place of an NPU has no {name!r}")
    if hasattr(operators, name):
        found: Callable[..., Any] = getattr(operators, name)
        return found

    def not_here(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"torch_npu in place of an NPU has no operator {name}")

    not_here.__name__ = name
    return not_here
