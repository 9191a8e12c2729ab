"""The job of a drill with TaskD's worker lines, where documented: once Megatron is initialized, before training."""

from __future__ import annotations

import functools
from typing import Any

from mindspeed_tft.faults import gpt_job

_plain = gpt_job.datasets_provider


@functools.wraps(_plain)  # with its mark, for which Megatron looks
def datasets_provider(*args: Any, **kwargs: Any) -> Any:
    """What every Megatron calls of a program after it is initialized, on each rank."""
    import torch.distributed as dist
    from taskd.api.taskd_worker_api import init_taskd_worker, start_taskd_worker

    rank = dist.get_rank()
    init_taskd_worker(rank, 5000, "pt")
    print(f"TaskD's worker of rank {rank}: {start_taskd_worker()}\n", end="", flush=True)
    return _plain(*args, **kwargs)


gpt_job.datasets_provider = datasets_provider
if __name__ == "__main__":
    gpt_job.main()
