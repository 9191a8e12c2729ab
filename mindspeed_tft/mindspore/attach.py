"""Gives each `Model.train` of a process the callback, without a line in its script: for trainers that nobody edits.

What is named in MS_ENABLE_TFT decides; without it nothing is attached. Checkpoints go to TFT_MS_SAVE. Where there is
one already, the first call loads it, and the data go on behind it: the steps of a run are those of all its calls, one
after the other.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wrapt

from mindspeed_tft.mindspore import switches
from mindspeed_tft.settings import Refused

log = logging.getLogger(__name__)

SAVE = "TFT_MS_SAVE"
DEFAULT = "tft_checkpoints"

_protection: Any = None  # of this process: a rank has one for all calls of `Model.train`
_behind = 0  # steps of the loaded state that the calls so far have not had


def attach() -> bool:
    """Wrap `Model.train`; False where MS_ENABLE_TFT turns nothing on that a training process does.

    Raises:
        Refused: a switch that is not served.
    """
    found = switches.read(os.environ)
    if not found.named or not found.any:
        return False
    wrapt.wrap_function_wrapper("mindspore.train.model", "Model.train", _train)
    return True


def save_directory(environ: Mapping[str, str]) -> Path:
    return Path(environ.get(SAVE) or DEFAULT)


def _train(wrapped: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from mindspeed_tft.mindspore.callback import FaultTolerance

    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    given = bound.arguments.get("callbacks")
    callbacks = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    if not any(isinstance(one, FaultTolerance) for one in callbacks):
        global _protection, _behind
        first = _protection is None
        if first:
            _protection = FaultTolerance(save_directory(os.environ))
        if first and not _resumes_itself(bound.arguments):
            _behind = _protection.resume(model.train_network)
        # First in the row: what other callbacks save at the end of a step comes after the step was agreed on.
        bound.arguments["callbacks"] = [_protection, *callbacks]
        if _behind:
            data = bound.arguments["train_dataset"]
            _check_data(data, _behind)
            here = int(bound.arguments["epoch"]) * int(data.get_dataset_size())
            done, _behind = min(_behind, here), max(0, _behind - here)
            if not _finish_epoch(wrapped, done, bound):
                return None
    return wrapped(*bound.args, **bound.kwargs)


def _resumes_itself(arguments: Mapping[str, Any]) -> bool:
    """Whether the trainer has loaded a state and placed its data already."""
    data = arguments.get("train_dataset")
    return bool(arguments.get("initial_epoch")) or bool(getattr(data, "get_init_step", lambda: 0)())


def _check_data(data: Any, done: int) -> None:
    """
    Raises:
        Refused: data that cannot begin behind a batch.
    """
    if not hasattr(data, "skip"):
        raise Refused(
            "MS_ENABLE_TFT",
            f"a checkpoint of step {done} is there, and {type(data).__name__} cannot begin behind it",
            "use a dataset of mindspore.dataset, or FaultTolerance.resume in the script",
        )


def _finish_epoch(wrapped: Any, done: int, bound: inspect.BoundArguments) -> bool:
    """Train what is left of the epoch in which step `done` was; the others stay in `bound`. False: there are none."""
    data, last = bound.arguments["train_dataset"], int(bound.arguments["epoch"])
    epoch, batches = divmod(done, int(data.get_dataset_size()))
    if batches and epoch < last:
        arguments = {**bound.arguments, "epoch": epoch + 1, "initial_epoch": epoch, "train_dataset": data.skip(batches)}
        wrapped(**arguments)
        epoch += 1
    bound.arguments["initial_epoch"] = epoch
    return epoch < last
