"""A rank of the drill's training that measures what its part of a dump allocates on the device. Appends a JSON line for
each order that it carries out to TFT_TEST_BYTES/rankN.jsonl."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mindspeed_tft.faults import gpt_job

gpt_job.prepare(with_plugin=True)
import torch  # noqa: E402

from mindspeed_tft.patches import megatron_shards  # noqa: E402
from mindspeed_tft.patches.megatron_host import MegatronHost  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[2] / "support"))
from device_memory import OnDevice  # noqa: E402


def state_of(host: MegatronHost) -> list[torch.Tensor]:
    return list(megatron_shards.state_tensors(host.model, host.optimizers()))


def measured(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def measure(host: MegatronHost, *args: Any, **kwargs: Any) -> Any:
        tensors = state_of(host)
        with OnDevice(tensors) as seen:
            result = method(host, *args, **kwargs)
        found = {"order": name, "state": size_of(tensors), "touched": seen.touched}
        found.update(allocated=seen.allocated, operations=seen.operations)
        path = Path(os.environ["TFT_TEST_BYTES"]) / f"rank{torch.distributed.get_rank()}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(found) + "\n")
        return result

    return measure


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


for name in ("finish_update", "stage_shards", "write_part"):
    setattr(MegatronHost, name, measured(name, getattr(MegatronHost, name)))
gpt_job.run()
