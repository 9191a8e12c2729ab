"""All functions of TaskD's roles."""

from mindspeed_tft.taskd.agent import init_taskd_agent, register_func, start_taskd_agent
from mindspeed_tft.taskd.manager import init_taskd_manager, start_taskd_manager
from mindspeed_tft.taskd.proxy import destroy_taskd_proxy, init_taskd_proxy
from mindspeed_tft.taskd.worker import destroy_taskd_worker, init_taskd_worker, start_taskd_worker

__all__ = [
    "init_taskd_manager",
    "start_taskd_manager",
    "init_taskd_worker",
    "start_taskd_worker",
    "destroy_taskd_worker",
    "init_taskd_agent",
    "start_taskd_agent",
    "register_func",
    "init_taskd_proxy",
    "destroy_taskd_proxy",
]
