"""Fault tolerance for jobs of MindSpore (`docs/mindspore.md`): the same controller, relay and `tftctl` as for Megatron.

    from mindspeed_tft.mindspore import FaultTolerance

    model.train(epochs, dataset, callbacks=[FaultTolerance(save="checkpoints")])

Optional: nothing of a Megatron job imports it, and it imports no torch. MindSpore itself is imported with the first
name that is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_tft.mindspore.callback import FaultTolerance as FaultTolerance

__all__ = ["FaultTolerance"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from mindspeed_tft.mindspore import callback

        return getattr(callback, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
