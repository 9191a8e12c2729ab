"""TaskD's agent, see `mindspeed_tft.taskd.agent`."""

from mindspeed_tft.taskd.agent import init_taskd_agent, register_func, start_taskd_agent

__all__ = ["init_taskd_agent", "register_func", "start_taskd_agent"]
