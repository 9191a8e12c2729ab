"""What adaptors import from the module of the decorator."""

from mindspeed_tft.facade.lifecycle import (
    set_mindio_export_version,
)
from mindspeed_tft.facade.registering import (
    tft_register_exception_handler,
)
from mindspeed_tft.facade.training import (
    get_device,
    get_mindio_export_version,
    tft_exception_handler,
    tft_get_repair_step,
    tft_get_repair_type,
    tft_report_load_ckpt_step,
)

__all__ = [
    "get_device",
    "get_mindio_export_version",
    "set_mindio_export_version",
    "tft_exception_handler",
    "tft_get_repair_step",
    "tft_get_repair_type",
    "tft_register_exception_handler",
    "tft_report_load_ckpt_step",
]
