"""The real one makes the names of CUDA mean the NPU, and nccl mean hccl. The former is done here with the import of
torch_npu, as they mean the CPU; the latter is left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)  # a CPU has no index
        if isinstance(kwargs.get("backend"), str):
            kwargs["backend"] = kwargs["backend"].replace("nccl", "hccl")
        elif args and isinstance(args[0], str):
            args = (args[0].replace("nccl", "hccl"), *args[1:])
        return function(*args, **kwargs)

    return call


for _name in ("init_process_group", "new_group"):
    _function = _wrapped(getattr(dist, _name))
    setattr(dist, _name, _function)
    setattr(dist.distributed_c10d, _name, _function)
