"""What MindSpore's `TrainFaultTolerance` imports. The gate of TSP is served, everything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tft.facade.words import Action, OptimizerType, RepairType, ReportState
from mindspeed_tft.mindspore.mindio import gate, refused

_processor: tuple[int, int] | None = None


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Rank 0 announces the controller, which is a process of its own and comes up with `tft_start_processor`."""


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """Its address and port are those of MS_TFT_IP and MS_TFT_PORT, which MindSpore read as well."""


def tft_destroy_controller() -> None:
    """It ends by itself when its ranks are gone."""


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """This process is a rank. What else is enabled is asked of MS_ENABLE_TFT, and refused by it."""
    global _processor
    _processor = rank, world_size


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Connect this rank.

    Raises:
        NotServed: MS_ENABLE_TFT wants more than TSP.
        FacadeError: `tft_init_processor` was not called.
    """
    gate.start(*(_processor or (-1, 0)))


def tft_destroy_processor() -> None:
    """This rank says goodbye when its process ends."""


def tft_is_reboot_node() -> bool:
    """No process is started again alone in a job of MindSpore."""
    return False


def tft_set_step_args(args: Any) -> None:
    """Not needed: no handler is called with them."""


def tft_register_stream_sync_handler(func: Callable[[], object], ctx: Any = None) -> None:
    """func(), before this rank is held."""
    gate.synchronize(func)


def tft_pause_train(cur_step: int) -> None:
    """The end of a step, at which operators may hold this rank."""
    gate.pause(cur_step)


def tft_report_error(state: int, error_code: str = "") -> None:
    """This rank left training with an exception: all ranks end, as nothing is repaired or saved under TSP alone."""
    gate.failed()


def tft_wait_next_action() -> int:
    """Asked after a report that nobody answered: the exception goes on."""
    return int(Action.EXIT.value)


tft_get_reboot_type = refused("tft_get_reboot_type")
tft_get_repair_step = refused("tft_get_repair_step")
tft_get_repair_type = refused("tft_get_repair_type")
tft_can_do_uce_repair = refused("tft_can_do_uce_repair")
tft_set_optimizer_replica = refused("tft_set_optimizer_replica")
tft_end_updating_os = refused("tft_end_updating_os")
tft_start_updating_os = refused("tft_start_updating_os")
tft_reset_limit_step = refused("tft_reset_limit_step")
tft_register_save_ckpt_handler = refused("tft_register_save_ckpt_handler")
tft_register_rename_handler = refused("tft_register_rename_handler")
tft_register_exit_handler = refused("tft_register_exit_handler")
tft_register_stop_handler = refused("tft_register_stop_handler")
tft_register_clean_handler = refused("tft_register_clean_handler")
tft_register_repair_handler = refused("tft_register_repair_handler")
tft_register_rebuild_group_handler = refused("tft_register_rebuild_group_handler")

__all__ = [
    "Action",
    "OptimizerType",
    "RepairType",
    "ReportState",
    *sorted(name for name in list(globals()) if name.startswith("tft_")),
]
