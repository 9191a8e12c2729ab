"""A rank's part in a recovery where an adaptor's callbacks do the work: `recovery.session` with those in its orders.

What a rank knows of its state is less than with patches of our own. Only the end of an update is told, with the number
of the step; that all ranks had final gradients is known no earlier. So between two updates a rank stands at the step
after the last one, uncommitted; within one, and when it was torn out of one, it is no source.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_tft.engine.repair import INTACT as INTACT_RESULT
from mindspeed_tft.engine.repair import LOADED
from mindspeed_tft.engine.types import Commit, Deadlines, OrderKind, Update
from mindspeed_tft.facade import callbacks as calls
from mindspeed_tft.facade import shards
from mindspeed_tft.facade.callbacks import CallbackHost
from mindspeed_tft.facade.gate import Gate
from mindspeed_tft.facade.words import FORCE_STOP, NotServed, RepairType
from mindspeed_tft.recovery.files import DumpError
from mindspeed_tft.recovery.hold import HoldBroken
from mindspeed_tft.recovery.session import Link, Session

log = logging.getLogger(__name__)

ONE = {0: Update.UNTOUCHED}  # a rank's optimizers update together


def _never() -> Path:
    raise NotServed("a checkpoint that an operator wants", "no callback saves one while training goes on", "leave it")


class ForceStop(RuntimeError):
    """Raised in an adaptor's training loop when training has to stop. Its text is what adaptors look for."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{FORCE_STOP}: training was stopped ({where})")


class CallbackSession(Session[CallbackHost]):
    """All methods are for the training thread, but `come_out`."""

    def __init__(
        self,
        host: CallbackHost,
        link: Link,
        deadlines: Deadlines,
        classify: Callable[[str], str],
        gate: Gate,
        clean_before_dump: bool,
        share_device: Callable[[], None] = lambda: None,
    ) -> None:
        """`clean_before_dump`: the clean callback is called before a save as well. `share_device` makes the device of
        this rank current on the thread that calls it."""
        super().__init__(host, link, deadlines, resume=lambda _step: "", classify=classify)
        self.gate, self.clean_before_dump, self._share_device = gate, clean_before_dump, share_device
        self.completed = 0  # the last step of which this rank knows that it is complete; 0: none in this process
        self.repaired_to = 0  # S of the last recovery, for `tft_get_repair_step`
        self.loaded = 0  # the step of the checkpoint that a repair callback has loaded, as it told
        self.repair_type = ""  # "retry", "recover", "dump": of the recovery that goes on, or was the last
        self._memory = self._torn = False  # this rank's own fault: of device memory; in the middle of an update
        self._asked_memory = False  # the clean callback has looked at that fault: a device tells of it once
        self._cleaned = 0  # epoch of the last clean callback, and what it answered
        self._clean_result = calls.WHOLE
        self._stand_after(0)

    # ------------------------------------------------------------------------------------------ stamps

    def _stand_after(self, step: int) -> None:
        """`step` is complete, and nothing is known of the next."""
        self.completed = step
        self.record.begin(step + 1, self.host.small_state(step), len(ONE))
        self.record.commit = Commit.ENTERED  # perhaps; nobody takes it for evidence
        self.link.step, self.link.phase = step + 1, "forward-backward"

    def update_starts(self) -> None:
        """The adaptor's ranks have all come out of the barrier before this update.

        Raises:
            ForceStop: too late, training has been stopped.
        """
        if not self.gate.enter(self.resumed):
            raise ForceStop("before an update")
        self.link.phase = "update"

    def update_ended(self, step: int) -> None:
        """`step`: the last one whose update is complete, the one before in an update that only converts."""
        if step < self.completed:
            log.warning("the end of an update of step %d is told after that of step %d", step, self.completed)
        self._stand_after(step)
        self.gate.leave()

    def boundary_of(self, step: int) -> None:
        """The adaptor's loop has ended `step`, also where it was skipped and nothing was updated. Held here, where
        operators want it.

        Raises:
            ForceStop: training has been stopped.
        """
        if step > self.completed and not self.gate.updating:
            self._stand_after(step)
        if self.gate.closing(self.resumed):
            raise ForceStop(f"after step {step}")
        hold, _, limit = self.boundary.offer(step)
        while hold:
            self.boundary.agree(hold, 0, limit)
            try:
                self.boundary.reach(step, _never, leaves=False, settle=lambda: self.host.callbacks.call("stream_sync"))
            except HoldBroken:
                raise ForceStop(f"held after step {step}") from None
            hold, _, limit = self.boundary.offer(step)  # told anew, because the others were held after another step

    # ------------------------------------------------------------------------------------------ a stop

    def come_out(self, epoch: int, reason: str) -> None:
        """On the control plane's thread: let an update end, then let the adaptor free the training thread."""
        if not self.gate.close(epoch, self.deadlines.stop / 2):
            log.warning("rank %d: its update did not end in time; it is stopped in the middle", self.info.rank)
        try:
            if self.host.callbacks.train_args is not None and not self._newcomer:
                self._share_device()
                self.host.callbacks.call("stop")
        except Exception as exc:
            log.exception("rank %d: the stop callback failed", self.info.rank)
            self.link.fault("device", f"the stop callback failed: {type(exc).__name__}: {exc}", own=True)
        finally:
            self.gate.stopped(epoch)
        log.info("rank %d is stopped: %s", self.info.rank, reason)

    # ------------------------------------------------------------------------------------------ a fault

    def recover(self, exc: BaseException, outside: bool = False) -> None:
        """As in the base class; the text of an exception counts only where it is a RuntimeError, as adaptors expect."""
        torn = self.gate.arrive()
        if not self.protected():
            log.error("rank %d: no controller, so no recovery: the job ends as it would without us", self.info.rank)
            raise exc
        text = "".join(traceback.format_exception_only(exc)).strip()
        kind = self._classify(text) if isinstance(exc, RuntimeError) and not outside else "exception"
        if kind != "stopped" and not (self._asked and kind == "exception"):
            traceback.print_exception(exc)
        self._broken = exc
        self.announce(kind, text, torn)
        self.obey()

    def announce(self, kind: str, text: str, torn: bool = False) -> None:
        """Say that this rank has left training, and why. `torn`: out of the middle of an update."""
        if torn and not self._damaged:
            log.warning("rank %d: its update of step %d was broken off", self.info.rank, self.completed + 1)
        self._torn = self._torn or torn
        self._damaged = self._damaged or torn or kind in ("memory", "corrupted")
        if kind in ("memory", "corrupted"):
            self._memory, self._asked_memory = True, False
        if kind == "stopped":
            if not self._stopping:
                self.link.fault("peer", text, own=False)
            return
        if self._asked and kind == "exception":
            return  # on its way out already
        if kind in ("memory", "link") and not self.completed:
            kind, text = "exception", f"{text} (before the first completed step, so that there is none to go back to)"
        self._fault = text
        self.link.fault(kind, text, own=True)

    def obey(self) -> None:
        """Carry out orders. Returns when training is to go on; otherwise ends the process."""
        self._obey()
        self.gate.depart()

    def join(self) -> None:
        self.gate.arrive()
        super().join()
        self.gate.depart()

    # ------------------------------------------------------------------------------------------ orders

    def _action(self, kind: OrderKind, payload: dict[str, Any]) -> dict[str, str]:
        if kind is OrderKind.WRITE_PART:
            return self._save(int(payload["step"]), [str(group) for group in payload["groups"]])
        if kind is OrderKind.PUBLISH:
            self.host.callbacks.call("rename", int(payload["step"]))
            return {"path": "", "resume": ""}
        if kind is OrderKind.DISCARD:
            log.warning("what the save callback wrote of a failed save stays where it is: no callback removes it")
            return {}
        if kind is OrderKind.REGROUP:
            return self._clean_and_rebuild(int(payload["epoch"]), [int(rank) for rank in payload.get("newcomers", ())])
        if kind is OrderKind.REPAIR:
            return self._give_or_take(int(payload["step"]), [str(transfer) for transfer in payload["transfers"]])
        if kind is OrderKind.ROLLBACK:
            return self._back_to(int(payload["step"]))
        if kind is OrderKind.LOAD:
            return self._load_newest()
        found = super()._action(kind, payload)
        if kind is OrderKind.RESUME:
            self._memory = self._torn = False
            self._stand_after(int(payload["step"]))
        return found

    def _note_damage(self, exc: Exception) -> None:
        super()._note_damage(exc)
        if self._classify(f"{type(exc).__name__}: {exc}") in ("memory", "corrupted"):
            self._memory, self._asked_memory = True, False

    def _clean(self, kind: str) -> int:
        """The clean callback, once for a stop, and after the stop callback.

        Raises:
            DumpError: it failed, or says that this device cannot be used.
        """
        self.repair_type = kind
        epoch = self.link.stop_epoch
        if not self.gate.wait_stopped(epoch, self.deadlines.stop):
            raise DumpError("the stop callback has not returned")
        if self._cleaned == epoch:
            return self._clean_result
        result = self.host.callbacks.call("clean", self._memory and not self._asked_memory)
        self._clean_result = calls.WHOLE if result is None else int(result)
        if self._clean_result not in (calls.WHOLE, calls.INTACT):
            why = f"the clean callback answered {result}: the device of this rank cannot be used"
            self.link.fault("device", why, own=True)
            raise DumpError(why)
        self._cleaned, self._asked_memory = epoch, True
        return self._clean_result

    def _clean_and_rebuild(self, epoch: int, newcomers: list[int]) -> dict[str, str]:
        self._epoch = epoch
        found = {}
        if self._newcomer:
            self.repair_type = "recover"
        elif self._clean("recover" if newcomers else "retry") == calls.INTACT and self._memory and not self._torn:
            self._damaged = False
            found = {INTACT_RESULT: "the clean callback says that no live tensor was hit"}
        self._release()
        if newcomers:
            self.host.callbacks.call("rebuild_group", newcomers)
        return found

    def _give_or_take(self, step: int, transfers: list[str]) -> dict[str, str]:
        taking = RepairType.RT_UCE_HIGHLEVEL if self._memory and not self._newcomer else RepairType.RT_RECV_REPAIR
        call = shards.repair_call(self.info.rank, transfers, taking)
        if not call.error_ranks:
            return {}  # before a load: what no optimizer owns comes with the checkpoint, or not at all
        rebuild = bool(call.taken) and taking is RepairType.RT_UCE_HIGHLEVEL
        self.host.callbacks.call("repair", step, rebuild, call.error_ranks, call.info)
        if set(self.info.holds) <= set(call.taken):
            self._damaged = False
            self.record.given(step)
        return {"taken": ",".join(call.taken)} if call.taken else {}

    def _load_newest(self) -> dict[str, str]:
        """All ranks together: the repair callback loads, and tells the step; the rollback callback does the rest."""
        self._damaged, self.loaded = True, 0
        rebuild = self._memory and not self._newcomer
        info = shards.load_info(len(self.info.holds), rebuild)
        self.host.callbacks.call("repair", self.completed, rebuild, [], info)
        if self.loaded < 1:
            raise DumpError("the repair callback loaded no checkpoint: it did not call tft_report_load_ckpt_step")
        self._damaged = False
        self._back_to(self.loaded)
        return {LOADED: str(self.loaded)}

    def _back_to(self, step: int) -> dict[str, str]:
        if self._damaged:
            raise DumpError("this rank's memory was damaged and not repaired")
        if step < 1:
            raise DumpError("no step is complete yet: an adaptor has nothing to go back to")
        self.repaired_to = step
        self.host.callbacks.call("rollback", step)
        self._stand_at(step, len(ONE))
        return {}

    def _save(self, step: int, groups: list[str]) -> dict[str, str]:
        if self._damaged:
            raise DumpError("this rank's memory is damaged")
        if self.completed != step:
            raise DumpError(f"asked to save step {step}, but stands after step {self.completed}")
        if self.clean_before_dump:
            self._clean("dump")
        elif not self.gate.wait_stopped(self.link.stop_epoch, self.deadlines.stop):
            raise DumpError("the stop callback has not returned")
        self.repair_type, self.repaired_to = "dump", step
        self.host.callbacks.call("save_ckpt", step, shards.save_info(groups))
        return {}

    def _release(self) -> None:
        super()._release()
        gc.collect()

    def _leave(self, code: int, message: str) -> NoReturn:
        try:
            self.host.callbacks.call("exit")
        except Exception:
            log.exception("rank %d: the exit callback failed", self.info.rank)
        super()._leave(code, message)


__all__ = ["CallbackSession", "ForceStop"]
