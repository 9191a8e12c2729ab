"""The job beside this file with TaskD's worker lines, where they are documented: before `model.train`."""

from __future__ import annotations

from typing import Any

import job
from mindspore.communication import get_rank


class Model(job.Model):  # type: ignore[misc]
    """The last that the script makes before it trains."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from taskd.api.taskd_worker_api import init_taskd_worker, start_taskd_worker

        rank = get_rank()
        init_taskd_worker(rank, 5000, "ms")
        print(f"TaskD's worker of rank {rank}: {start_taskd_worker()}", flush=True)


job.Model = Model
job.main()
