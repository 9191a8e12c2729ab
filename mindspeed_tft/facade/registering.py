"""The functions of `mindio_ttp` that take an adaptor's callbacks. `ctx` is handed back to the callback as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tft.facade.process import process
from mindspeed_tft.facade.words import refuse


def tft_register_stop_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(train_args, ctx), on a thread of its own: free the training thread from what it waits for."""
    process().callbacks.register("stop", func, ctx)


def tft_register_clean_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(is_uce_error, train_args, ctx) -> 0 usable, 1 not usable, 2 usable and no live tensor was hit."""
    process().callbacks.register("clean", func, ctx)


def tft_register_rebuild_group_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(fault_ranks, train_args, ctx): build all groups anew, with the processes that were started again."""
    process().callbacks.register("rebuild_group", func, ctx)


def tft_register_repair_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(step, need_rebuild, error_ranks, repair_info, train_args, ctx): give shards, or take them."""
    process().callbacks.register("repair", func, ctx)


def tft_register_rollback_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(step, train_args, ctx): everything but the shards back to the end of `step`."""
    process().callbacks.register("rollback", func, ctx)


def tft_register_save_ckpt_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(step, [{"type": 0 | 1, "ranks": [...]}], train_args, ctx): save, together with all `ranks` and no others."""
    process().callbacks.register("save_ckpt", func, ctx)


def tft_register_rename_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(step, train_args) on one rank, when all saves are complete."""
    process().callbacks.register("rename", func, ctx)


def tft_register_stream_sync_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(), before this rank is held: wait for what the device was given."""
    process().callbacks.register("stream_sync", func, ctx)


def tft_register_exit_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(ctx), before this process leaves a job that does not go on."""
    process().callbacks.register("exit", func, ctx)


def tft_register_exception_handler(fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]) -> None:
    """RuntimeErrors with this text are faults of this type, the name of a ReportState.

    Raises:
        FacadeError: no such type, or one that no text can mean; an empty pattern.
    """
    process().rules.register(fault_pattern, fault_type, fault_handle)


def tft_register_decrypt_handler(func: Callable[[str], str]) -> None:
    """Raises: NotServed."""
    raise refuse("tft_register_decrypt_handler")


def tft_register_zit_downgrade_rebuild_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Raises: NotServed."""
    raise refuse("tft_register_zit_downgrade_rebuild_handler")


def tft_register_zit_upgrade_rebuild_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Raises: NotServed."""
    raise refuse("tft_register_zit_upgrade_rebuild_handler")


def tft_register_zit_upgrade_repair_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Raises: NotServed."""
    raise refuse("tft_register_zit_upgrade_repair_handler")


def tft_register_zit_upgrade_rollback_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """Raises: NotServed."""
    raise refuse("tft_register_zit_upgrade_rollback_handler")
