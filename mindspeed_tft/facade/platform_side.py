"""The functions of `mindio_ttp` with which a cluster platform talks to its controller. None is served: in our jobs the
engine decides, from what the ranks report, and no platform is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_tft.facade.words import refuse


def tft_register_mindx_callback(action: str, func: Callable[..., Any]) -> int:
    """Raises: NotServed."""
    raise refuse("tft_register_mindx_callback")


def tft_notify_controller_stop_train(
    fault_ranks: Mapping[int, int], stop_type: str = "stop", timeout: int | None = None
) -> int:
    """Raises: NotServed."""
    raise refuse("tft_notify_controller_stop_train")


def tft_notify_controller_on_global_rank(fault_ranks: Mapping[int, int], time: int = 1) -> int:
    """Raises: NotServed."""
    raise refuse("tft_notify_controller_on_global_rank")


def tft_notify_controller_prepare_action(action: str, fault_ranks: Mapping[int, int] | None = None) -> int:
    """Raises: NotServed."""
    raise refuse("tft_notify_controller_prepare_action")


def tft_notify_controller_change_strategy(strategy: str, params: str = "") -> int:
    """Raises: NotServed."""
    raise refuse("tft_notify_controller_change_strategy")


def tft_notify_controller_dump() -> int:
    """Raises: NotServed."""
    raise refuse("tft_notify_controller_dump")
