"""The controller's side: its life, and what a cluster platform says to it."""

from mindspeed_tft.facade.lifecycle import (
    tft_destroy_controller,
    tft_init_controller,
    tft_start_controller,
)
from mindspeed_tft.facade.platform_side import (
    tft_notify_controller_change_strategy,
    tft_notify_controller_dump,
    tft_notify_controller_on_global_rank,
    tft_notify_controller_prepare_action,
    tft_notify_controller_stop_train,
    tft_register_mindx_callback,
)
from mindspeed_tft.facade.training import (
    tft_query_high_availability_switch,
)

__all__ = [
    "tft_destroy_controller",
    "tft_init_controller",
    "tft_notify_controller_change_strategy",
    "tft_notify_controller_dump",
    "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action",
    "tft_notify_controller_stop_train",
    "tft_query_high_availability_switch",
    "tft_register_mindx_callback",
    "tft_start_controller",
]
