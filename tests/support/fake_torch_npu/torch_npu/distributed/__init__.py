"""torch_npu.distributed: the backend `hccl`, and what is done to its groups."""

from __future__ import annotations

from typing import Any

import torch

from torch_npu._device import device as _device
from torch_npu.distributed import hccl

hccl.register()


def is_hccl_available() -> bool:
    return True


def reinit_process_group(group: Any = None, rebuild_link: bool = True) -> Any:
    """With `rebuild_link` the communicator of the group is given up; the next communication makes a new one."""
    _device.check()
    _device.note("distributed.reinit_process_group", getattr(group, "group_name", "default"), int(rebuild_link))
    backend = (group or torch.distributed.group.WORLD)._get_backend(hccl.DEVICE)
    if rebuild_link:
        backend._delete_tcpstore_key()
        backend.abort_hccl_comm("reinit")
        return group
    backend.resume_hccl_comm(0)
    return None


torch.distributed.is_hccl_available = is_hccl_available  # type: ignore[attr-defined]
torch.distributed.reinit_process_group = reinit_process_group  # type: ignore[attr-defined]
