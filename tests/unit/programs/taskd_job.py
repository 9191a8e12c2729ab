"""A small job with TaskD's worker lines, where documented: after the ranks have met. Rank 1 dies in the middle of it.

    taskd_job.py DIRECTORY

The other rank then waits for it as long as a default store lets it, half an hour: somebody else has to end it.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

STEPS, OF_DEATH = 8, 5


def main(directory: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    from taskd.api.taskd_worker_api import init_taskd_worker, start_taskd_worker

    started = init_taskd_worker(rank, 5000, "pt") and start_taskd_worker()
    (directory / f"rank-{rank}").write_text(f"{started} {os.environ.get('TFT_DEFAULT_PORT')}")
    total = torch.zeros(1)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(minutes=30)) if rank == 0 else None
    for step in range(1, STEPS + 1):
        value = torch.ones(1)
        dist.all_reduce(value)
        total += value
        if step == OF_DEATH:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            assert store is not None
            store.get("never set")
    raise AssertionError("nobody ended this rank")


main(Path(sys.argv[1]))
