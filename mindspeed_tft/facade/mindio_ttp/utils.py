"""When the last update ran, and whether a memory error can have spread through it."""

from mindspeed_tft.facade.training import (
    tft_can_do_uce_repair,
    tft_set_update_end_time,
    tft_set_update_start_time,
)

__all__ = [
    "tft_can_do_uce_repair",
    "tft_set_update_end_time",
    "tft_set_update_start_time",
]
