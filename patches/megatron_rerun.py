"""megatron.core.rerun_state_machine: Megatron's verdict on wrong numbers becomes a fault that is repaired online.

Megatron computes a step again whose loss or gradient norm is not a number, and then ends the job: with a checkpoint of
the step before if the result came again, without one if it did not. With online repair on, and a checkpoint that is
known to be good, all ranks go back to that instead and train on. Without one Megatron ends the job as it always did.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from mindspeed_tft import runtime
from mindspeed_tft.patches.groups import HA
from mindspeed_tft.recovery.session import WrongNumbers
from mindspeed_tft.registry import REGISTRY

MODULE = "megatron.core.rerun_state_machine"
Arguments = tuple[Any, ...]


def repairs() -> Any:
    """The session of a rank whose faults are repaired online; else None."""
    session = runtime.session()
    if session is None or not runtime.online() or not session.link.connected:
        return None
    return session


@REGISTRY.wrap(f"{MODULE}:RerunStateMachine.should_checkpoint_and_exit", **HA)
def should_checkpoint_and_exit(
    wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]
) -> Any:
    """The verdict is the same on all ranks, and so is what is made of it."""
    result = wrapped(*args, **kwargs)
    session = runtime.session()
    if not result[1] or session is None:
        return result
    completed = session.record.step - 1  # the step that wrong numbers were found in is not committed
    way_back = repairs() is not None and any(step < completed for step in session.host.checkpoints())
    if not session.host.all_agree(way_back):
        return result
    text = f"wrong numbers in step {completed + 1}: Megatron's rerun would end the job with exit status {result[2]}"
    raise WrongNumbers(text, mine=bool(instance.rerun_requested))


@REGISTRY.wrap(f"{MODULE}:RerunStateMachine.validate_result", **HA)
def validate_result(wrapped: Callable[..., Any], instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Without the rerun (`--rerun-mode disabled`) a wrong result is an error at once, on the rank that has it."""
    disabled = instance.get_mode() == importlib.import_module(MODULE).RerunMode.DISABLED
    if not disabled or repairs() is None:
        return wrapped(*args, **kwargs)
    try:
        return wrapped(*args, **kwargs)
    except RuntimeError as exc:
        raise WrongNumbers(str(exc), mine=True) from exc
