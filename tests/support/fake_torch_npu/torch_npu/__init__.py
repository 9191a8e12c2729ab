"""A torch_npu over CPU tensors, for tests; see the README beside it. The core is here: device, streams, hccl.

Every name is explicit: what is not here raises AttributeError, as a version that does not have it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mindspeed_tft import on_cpu

on_cpu.install()  # the names of CUDA, before anybody binds them

from torch_npu import distributed, npu  # noqa: E402, F401  (the first registers the backend)

__version__ = "2.7.1+fake"

torch.npu = npu  # type: ignore[attr-defined]
sys.modules["torch.npu"] = npu


def _itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


torch.Tensor.npu = _itself  # type: ignore[attr-defined]
torch.nn.Module.npu = _itself  # type: ignore[assignment]
