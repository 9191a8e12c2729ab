"""TaskD's worker, see `mindspeed_tft.taskd.worker`."""

from mindspeed_tft.taskd.worker import destroy_taskd_worker, init_taskd_worker, start_taskd_worker

__all__ = ["destroy_taskd_worker", "init_taskd_worker", "start_taskd_worker"]
