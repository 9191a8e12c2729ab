"""TensorBoard of a run that was repaired: a mark at each recovery, and no number twice.

Megatron writes its scalars from the last rank, one for each step that ended. After a rewind steps come again, with the
same numbers to the last bit: those are not written once more. Where a step has another number the second time, the
first was wrong (that may be why everybody went back), and the new one is written. What is measured, as the time of a
step, differs each time and is written once.

TensorBoard's own word for a restart (SessionLog.START) would not do: it drops all points from a step on, also those of
the charts "... vs samples", whose steps are samples. What the predecessor of a newcomer wrote is not known to it.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from mindspeed_tft.engine.types import Commit
from mindspeed_tft.patches.groups import HA_ALL
from mindspeed_tft.recovery.session import Session
from mindspeed_tft.registry import REGISTRY

log = logging.getLogger(__name__)

MODULE = "megatron.training.global_vars"
TEXT, SECONDS, LOST = "tft/recovery", "tft/recovery-seconds", "tft/steps-lost"  # tags
_STEPS_KEPT = 10_000  # of which is known what was written; two for each step, one of them counted in samples
_MEASURED = ("-time", "throughput", "energy/gpu", "power/gpu")  # ends of tags
_LONGEST = 500  # characters of a cause


@REGISTRY.wrap(f"{MODULE}:_set_tensorboard_writer", **HA_ALL)
def set_tensorboard_writer(
    wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    result = wrapped(*args, **kwargs)
    current = writer()
    if current is not None:
        current.add_scalar = Once(current.add_scalar)
        current.add_text = OnceText(current.add_text)
    return result


def writer() -> Any:
    """Megatron's TensorBoard writer; None on ranks that write nothing."""
    return importlib.import_module(MODULE).get_tensorboard_writer()


class Once:
    """In the place of a writer's `add_scalar`: what is there already is not written again."""

    def __init__(self, add_scalar: Callable[..., Any]) -> None:
        self._add_scalar = add_scalar
        self._written: OrderedDict[int, dict[str, float]] = OrderedDict()  # by step

    def __call__(self, tag: str, scalar_value: Any, global_step: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if global_step is not None and self._is_there(tag, scalar_value, global_step):
            return None
        return self._add_scalar(tag, scalar_value, global_step, *args, **kwargs)

    def _is_there(self, tag: str, value: Any, step: int) -> bool:
        try:
            number = float(value)
        except (TypeError, ValueError):  # whatever it is, the writer knows
            return False
        of_step = self._written.get(step)
        if of_step is None:
            of_step = self._written[step] = {}
            if len(self._written) > _STEPS_KEPT:
                self._written.popitem(last=False)
        before = of_step.get(tag)
        if before is not None and (tag.endswith(_MEASURED) or tag.startswith("mem-") or _same(before, number)):
            return True
        of_step[tag] = number
        return False


class OnceText:
    """In the place of a writer's `add_text`: Megatron writes all its arguments each time that it enters training."""

    def __init__(self, add_text: Callable[..., Any]) -> None:
        self._add_text = add_text
        self._last: dict[str, str] = {}  # by tag

    def __call__(self, tag: str, text_string: str, global_step: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if self._last.get(tag) == text_string:
            return None
        self._last[tag] = text_string
        return self._add_text(tag, text_string, global_step, *args, **kwargs)


def _same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


class Mark:
    """A recovery on this rank, from the fault to the step after S."""

    def __init__(self, session: Session[Any], cause: BaseException | None) -> None:
        """`cause`: what ended the training loop; None: this process takes the place of one that died."""
        self._session = session
        self._began = time.monotonic()
        self._cause = "this process takes the place of one that died" if cause is None else words(cause)
        record = session.record
        self._complete = record.step if record.commit is Commit.PASSED else record.step - 1
        self._knows = cause is not None

    def write(self) -> None:
        """Training goes on. Nothing that happens here stops it."""
        try:
            current = writer()
            if current is None:
                return
            step = self._session.record.step
            seconds, lost = time.monotonic() - self._began, max(0, self._complete - step)
            how = self._session.host.recovered_by
            current.add_text(
                TEXT,
                f"**{how}** in {seconds:.1f} s, training goes on after step {step}"
                + (f", {lost} completed steps lost" if self._knows else "")
                + f"\n\n    {self._cause}",
                step,
            )
            current.add_scalar(SECONDS, seconds, step)
            if self._knows:
                current.add_scalar(LOST, lost, step)
            current.flush()
        except Exception as exc:  # a full disk, a writer that is closed
            log.warning("the recovery is not marked in TensorBoard: %r", exc)


def words(cause: BaseException) -> str:
    """The first line of why training stopped. Of a rank that was told to stop, it names the rank at fault."""
    try:
        text = str(cause).strip()
    except Exception:  # of somebody's own exception
        text = ""
    return (text or type(cause).__name__).splitlines()[0][:_LONGEST]
