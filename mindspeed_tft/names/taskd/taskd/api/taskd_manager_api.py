"""TaskD's manager, see `mindspeed_tft.taskd.manager`."""

from mindspeed_tft.taskd.manager import init_taskd_manager, start_taskd_manager

__all__ = ["init_taskd_manager", "start_taskd_manager"]
