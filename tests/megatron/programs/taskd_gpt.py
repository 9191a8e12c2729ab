"""The job of a drill with TaskD's worker lines, where documented: once Megatron is initialized, before training."""

from __future__ import annotations

from typing import Any

from mindspeed_tft.faults import gpt_job

_plain = gpt_job.model_provider


def model_provider(*args: Any, **kwargs: Any) -> Any:
    """The first that Megatron calls of a program after it is initialized."""
    import torch.distributed as dist
    from taskd.api.taskd_worker_api import init_taskd_worker, start_taskd_worker

    rank = dist.get_rank()
    init_taskd_worker(rank, 5000, "pt")
    print(f"TaskD's worker of rank {rank}: {start_taskd_worker()}", flush=True)
    return _plain(*args, **kwargs)


gpt_job.model_provider = model_provider
if __name__ == "__main__":
    gpt_job.main()
