"""TaskD's proxy, see `mindspeed_tft.taskd.proxy`."""

from mindspeed_tft.taskd.proxy import destroy_taskd_proxy, init_taskd_proxy

__all__ = ["destroy_taskd_proxy", "init_taskd_proxy"]
