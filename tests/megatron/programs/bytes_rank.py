"""A rank of the drill's training that weighs its memory where all of it exists: at the commit point of the third step,
with gradients final and the update not begun. Writes what it found to TFT_TEST_BYTES/rankN.json.

The second way to count knows nothing of Megatron: all tensors that the garbage collector sees.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindspeed_tft.faults import gpt_job

gpt_job.prepare(with_plugin=True)
import torch  # noqa: E402

from mindspeed_tft.patches.megatron_host import MegatronHost  # noqa: E402

STEP = 3
commit = MegatronHost.commit


def weigh(tensors: Iterable[Any], seen: set[int]) -> int:
    """Bytes of the storages behind these tensors that are not in `seen` yet."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def by_kind(host: MegatronHost) -> dict[str, int]:
    parameters = [parameter for chunk in host.model for parameter in chunk.parameters()]
    buffers = [buffer for chunk in host.model for buffer in chunk.buffers]
    inner = [optimizer.optimizer for optimizer in host.optimizers()]
    mains = [main for optimizer in inner for group in optimizer.param_groups for main in group["params"]]
    states = [
        state for main, optimizer in ((m, o) for o in inner for m in mains) for state in optimizer.state[main].values()
    ]
    seen: set[int] = set()
    return {
        "numel": sum(parameter.numel() for parameter in parameters),
        "parameters": weigh((parameter.data for parameter in parameters), seen),
        "gradients": weigh((buffer.grad_data for buffer in buffers), seen),
        "main parameters": weigh((main.data for main in mains), seen),
        "main gradients": weigh((main.grad for main in mains if main.grad is not None), seen),
        "moments": weigh((state for state in states if torch.is_tensor(state)), seen),
    }


def everything() -> int:
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    grads = [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    return weigh([*found, *grads], set())


def measured_commit(self: MegatronHost, step: int, *wishes: int) -> tuple[int, int, int]:
    if step == STEP:
        gc.collect()
        found = {**by_kind(self), "everything": everything()}
        path = Path(os.environ["TFT_TEST_BYTES"]) / f"rank{torch.distributed.get_rank()}.json"
        path.write_text(json.dumps(found))
    return commit(self, step, *wishes)


MegatronHost.commit = measured_commit  # type: ignore[method-assign]
gpt_job.run()
