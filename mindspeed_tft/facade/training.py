"""The functions of `mindio_ttp` that an adaptor calls while it trains, and while it recovers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_tft.facade import texts
from mindspeed_tft.facade.process import process
from mindspeed_tft.facade.words import Action, FacadeError, NotServed, ReportState, refuse


def tft_set_optimizer_replica(rank: int, replica_info: Sequence[Mapping[str, Any]]) -> None:
    """What this rank holds: [{"rank_list", "replica_cnt", "replica_shift"}], dense and then experts. It takes part in
    the job from here on.

    Raises:
        FacadeError, NotServed: see `shards.read`; called twice, or too early.
    """
    process().set_optimizer_replica(rank, replica_info)


def tft_set_dp_group_info(rank: int, dp_rank_list: Sequence[int]) -> None:
    """The original data-parallel list: for elastic training alone, which is refused, so it is only checked.

    Raises:
        FacadeError: the rank is not in it.
    """
    if rank not in dp_rank_list:
        raise FacadeError(f"tft_set_dp_group_info: rank {rank} is not in {list(dp_rank_list)}")


def tft_exception_handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the training function: after a fault that was repaired it is called again with the same arguments.

    Raises:
        TypeError: not callable.
    """
    if not callable(func):
        raise TypeError(f"tft_exception_handler decorates a function, not a {type(func).__name__}")

    @functools.wraps(func)
    def protected(*args: Any, **kwargs: Any) -> Any:
        return process().run(func, args, kwargs)

    return protected


def tft_start_updating_os(backup_step: int = -1) -> None:
    """All ranks have final gradients, and this one updates its optimizer now.

    Raises:
        RuntimeError: "FORCE STOP", training was stopped.
        NotServed: a step in local copies.
    """
    if backup_step != -1:
        reason = "there are no local copies of optimizer states"
        raise NotServed("tft_start_updating_os with backup_step", reason, "leave backup_step out")
    process().session("tft_start_updating_os").update_starts()


def tft_end_updating_os(step: int) -> None:
    """This rank's optimizer has the state of `step`, 1 or more.

    Raises:
        FacadeError: no such step.
    """
    if step < 1:
        raise FacadeError(f"tft_end_updating_os: step {step}; the first one is 1")
    process().session("tft_end_updating_os").update_ended(step)


def tft_start_copy_os() -> None:
    """Raises: NotServed."""
    raise refuse("tft_start_copy_os")


def tft_pause_train(cur_step: int) -> None:
    """The training loop has ended `cur_step`. Returns when it is to go on: `tftctl pause` holds all ranks here, after
    the same step.

    Raises:
        FacadeError: a step below 0.
        RuntimeError: "FORCE STOP", training was stopped.
    """
    if cur_step < 0:
        raise FacadeError(f"tft_pause_train: step {cur_step}; there is none below 0")
    process().session("tft_pause_train").boundary_of(cur_step)


def tft_set_step_args(args: Any) -> None:
    """What callbacks are given as `train_args`, where the training function is not decorated."""
    process().callbacks.train_args = args


def tft_report_error(state: ReportState, error_code: str = "") -> None:
    """Where the training function is not decorated: this rank left it, and why. RS_UNKNOWN ends this process after the
    dump.

    Raises:
        FacadeError: a newcomer's word from a process that is none.
        NotServed: RS_STEP_FINISH.
    """
    process().report_error(ReportState(state), error_code)


def tft_wait_next_action() -> Action:
    """Take part in the recovery on the calling thread. RETRY: train on after `tft_get_repair_step()`. A job that does
    not go on ends here, with status 75 or 76."""
    return process().wait_next_action()


def tft_get_repair_step() -> int:
    """The step to which the last recovery went back; 0: there was none."""
    known = process().known
    return known.repaired_to if known is not None else 0


def tft_get_repair_type() -> str:
    """ "retry", "recover" or "dump", of the recovery that goes on or was the last; "unknow": there was none."""
    known = process().known
    return (known.repair_type if known is not None else "") or "unknow"


def tft_is_reboot_node() -> bool:
    """Whether this process was started in the place of one that died."""
    return process().reborn


def tft_get_reboot_type() -> str:
    """ "arf": there is no other kind here."""
    return "arf"


def tft_reset_limit_step() -> None:
    """Nothing to reset: no rank is locked to a step. What a stop has closed opens when training goes on."""
    process().session("tft_reset_limit_step")


def tft_report_load_ckpt_step(step: int) -> None:
    """A repair callback has loaded the checkpoint of `step`.

    Raises:
        FacadeError: a step below 1.
    """
    if step < 1:
        raise FacadeError(f"tft_report_load_ckpt_step: step {step}; a checkpoint is of 1 or later")
    process().session("tft_report_load_ckpt_step").loaded = step


def tft_query_high_availability_switch() -> bool:
    """Whether a controller hears this rank."""
    return process().connected


def get_device() -> int:
    """The number of this rank's device on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_mindio_export_version() -> str:
    """What `set_mindio_export_version` was given; "" before."""
    return process().export


def tft_set_update_start_time(time_us: int | None = None) -> None:
    """When the last update began, in microseconds of the device's clock; None: now. Where the device has no clock it is
    not known, and a memory error that tells its time counts as one that may have spread."""
    process().window.start = process().moment() if time_us is None else time_us


def tft_set_update_end_time(time_us: int | None = None) -> None:
    """When it ended; as `tft_set_update_start_time`."""
    process().window.end = process().moment() if time_us is None else time_us


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Whether a memory error at that time (microseconds) cannot have spread through the last update. Without times of
    its own, the window that was set counts."""
    window = process().window
    start = window.start if start_time is None else start_time
    end = window.end if end_time is None else end_time
    return texts.repairable(hbm_error_time, start, end)
