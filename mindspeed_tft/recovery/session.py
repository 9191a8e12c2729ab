"""One rank's part in a recovery: stamp the steps, stop when told, report, carry out orders, leave.

The session holds no knowledge of the framework (that is `Host`) and takes no decision (that is the engine, behind the
processor). It runs on the main thread; the only thing that another thread does here is to abort communication.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from mindspeed_tft.engine.incident import EXIT_UNDECIDED
from mindspeed_tft.engine.repair import DIGEST
from mindspeed_tft.engine.types import Commit, Deadlines, LinkState, Order, OrderKind, RankInfo, RankReport, Update
from mindspeed_tft.groups import CommunicationAborted
from mindspeed_tft.observe import logs
from mindspeed_tft.recovery import files
from mindspeed_tft.recovery.frames import release
from mindspeed_tft.recovery.halt import Halt
from mindspeed_tft.recovery.hold import Boundary, HoldBroken, Line
from mindspeed_tft.recovery.host import Host
from mindspeed_tft.recovery.link import Links
from mindspeed_tft.recovery.record import SmallState, StepRecord
from mindspeed_tft.recovery.stamps import Stamps
from mindspeed_tft.recovery.transfers import Courier

log = logging.getLogger(__name__)

# After a memory error the device is asked what was hit.
_KIND_OF_DAMAGE = {"none": "memory-low", "some": "memory", "lost": "device"}

WHOLE = "whole"  # where the manifest of a dump expects a part: the files that belong to none
DUMP_PREFIX = ".tft-dump-"  # hidden beside the checkpoints: no tool that lists them takes it for one


class WrongNumbers(RuntimeError):
    """Results that cannot be right, or that cannot be told to be right. What the last updates made of them is in the
    state of every rank."""

    def __init__(self, text: str, mine: bool) -> None:
        """`mine`: this rank has seen them; otherwise it was told by those that did."""
        super().__init__(text)
        self.mine = mine


class ShardChanged(RuntimeError):
    """A shard of this rank does not have the hash that it had after its last update: a bit of its memory flipped."""


class Link(Line, Protocol):
    """The part of `control.processor.Processor` that a session uses."""

    step: int
    checkpoint: int
    one_way: bool

    @property
    def connected(self) -> bool: ...
    def wait_connected(self, timeout: float) -> bool: ...
    @property
    def stop_epoch(self) -> int: ...
    @property
    def parked(self) -> str: ...
    def fault(self, kind: str, message: str, own: bool) -> None: ...
    def report(self, report: RankReport) -> None: ...
    def tell_link(self, state: LinkState) -> None: ...
    def wait_stop(self, timeout: float, after: int = 0) -> bool: ...
    def resumed(self) -> None: ...
    def close(self, timeout: float = 5.0) -> None: ...


HostT = TypeVar("HostT", bound=Host)


class Session(Generic[HostT]):
    """The fault-tolerance state of this rank, from the start of training to its end."""

    def __init__(
        self,
        host: HostT,
        link: Link,
        deadlines: Deadlines,
        resume: Callable[[int], str],
        classify: Callable[[str], str] = lambda _text: "exception",
        stamps: Stamps | None = None,
        halt: Halt | None = None,
    ) -> None:
        """`resume(step)` words the command that resumes from the checkpoint of a step; `classify(text)` names the
        kind of fault behind the text of an exception; `stamps` are the hashes of this rank's shards, None: without;
        `halt` is the device that stops with a stop, None: it is none that does."""
        self.host, self.link, self.deadlines, self._resume, self._classify = host, link, deadlines, resume, classify
        self.info: RankInfo = host.info()
        self.record = StepRecord()
        self.stamps = stamps or Stamps(dict, "never")
        self._halt = halt
        self._saved: dict[int, dict[str, str]] = {}  # hashes of the shards when a step was saved
        self._unusable: set[int] = set()  # steps of checkpoints from which something else was loaded
        self._fault = ""
        self._broken: BaseException | None = None  # what ended the training loop
        self._asked = False  # to end, by a signal
        self._updating = False
        self._deferred: Exception | None = None
        self._damaged = False  # this rank's tensors may be wrong, until they came from other holders
        self._epoch = 0  # of the groups
        self._resumed = 0  # the last stop that was answered by training on
        self.first_step = False  # training goes on after a repair: its first step has not ended yet
        self._looking = False  # for a controller, after a fault
        self._newcomer = False  # in the place of a process that died, and without its state so far
        self._given: SmallState | None = None  # by a rank of the same part
        self.boundary = Boundary(link, lambda: self._stopping, deadlines.order, host.all_agree, host.notices)
        self.links = Links(host, link.tell_link)
        self.boundary.works[OrderKind.LINK] = self._relink

    # ----------------------------------------------------------------------------- stamps on the step path

    def train_begin(self, step: int, optimizers: int) -> None:
        """Training begins after `step` (0, or the step that was loaded): that step is complete on this rank."""
        self._stand_at(step, optimizers)
        self.stamps.changed()

    def _stand_at(self, step: int, optimizers: int) -> None:
        self.record = StepRecord(step, Commit.PASSED, updates=dict.fromkeys(range(optimizers), Update.DONE))

    def step_begin(self, step: int, optimizers: int) -> None:
        """Training of `step` begins: keep the small state, from which a broken step is left behind."""
        self.record.begin(step, self.host.small_state(step - 1), optimizers)
        self.link.step, self.link.phase = step, "forward-backward"

    def commit(self, skipped: bool = False) -> None:
        """Enter the commit point: this rank's gradients are final (or the step is skipped everywhere)."""
        record = self.record
        record.skipped = skipped
        record.commit = Commit.ENTERED
        self.link.phase = "commit"
        self.boundary.agree(*self.host.commit(record.step, *self.boundary.offer(record.step)))
        record.commit = Commit.PASSED
        self.link.phase = "update"

    def update_begin(self, index: int) -> None:
        self._updating = True
        self.stamps.changing()
        self.record.updates[index] = Update.DIRTY

    def update_end(self, index: int) -> None:
        self.record.updates[index] = Update.DONE
        if self.record.update is Update.DONE:
            self.stamps.changed()
        self._updating = False
        self.link.phase = "param-gather"
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            raise deferred

    def defer(self, exc: Exception) -> bool:
        """Keep an exception of a signal handler until the local update is over. False: none goes on now."""
        if self._updating:
            self._deferred = exc
        return self._updating

    def step_end(self) -> None:
        self.link.phase = "between-steps"
        self.first_step = False

    def saving(self, step: int) -> None:
        """The framework is about to write its checkpoint of `step`: is this rank's state what it was?

        Raises:
            ShardChanged: it is not.
        """
        now = self._digests()  # none where they cannot be taken: the save itself will meet a broken device
        if why := _differing(self.stamps.known, now):
            raise ShardChanged(why)
        self.stamps.keep(now)
        self._saved[step] = now
        self._unusable.discard(step)

    # ----------------------------------------------------------------------------- a fault

    @property
    def _stopping(self) -> bool:
        return self.link.stop_epoch > self._resumed

    @property
    def resumed(self) -> int:
        """The last stop that was answered by training on; 0: none."""
        return self._resumed

    @property
    def ending(self) -> bool:
        """A stop came, or this rank was asked to end: training does not go on as it was."""
        return self._stopping or self._asked

    def terminated(self, name: str) -> bool:
        """A signal asks this rank to end: a fault of the job, but this rank's state is whole. False: unprotected."""
        if not self.link.connected and not self._looking:
            return False
        if not self._asked:  # also a rank that is stopped and waits: whoever asks will not wait for long
            self._asked = True
            if not self._stopping:
                self._fault = f"received {name}"
            self.link.fault("terminated", f"rank {self.info.rank} received {name}", own=True)
        return True

    def recover(self, exc: BaseException, outside: bool = False) -> None:
        """What a rank does when training ended with an exception: report and obey. Returns when training is to go on
        with the step after the last completed one; otherwise ends the process.

        Args:
            outside: the exception has left the training loop for good, so this rank cannot train on.

        Raises:
            BaseException: `exc` itself, when no controller protects this job.
        """
        if not self.protected():
            log.error("rank %d: no controller, so no recovery: the job ends as it would without us", self.info.rank)
            raise exc
        text = str(exc) if isinstance(exc, WrongNumbers) else "".join(traceback.format_exception_only(exc)).strip()
        kind = self._kind_of(exc, text)
        if outside and kind != "precision":
            kind = "exception"
        if kind in ("peer", "stopped"):  # the second is what some devices raise on a rank that was told to stop
            if not self._stopping:
                self.link.fault("peer", text, own=False)
        elif self._asked and kind == "exception":
            log.warning("rank %d: on its way out: %s", self.info.rank, text)  # its loaders were asked to end as well
        else:
            traceback.print_exception(exc)
            if isinstance(exc, ShardChanged):  # what the device knows of it, or does not, changes nothing
                self._damaged = True
            elif kind == "memory":
                release(exc)
                kind = self._kind_of_damage()
            self._fault = text
            self._damaged = self._damaged or kind in ("memory", "corrupted", "device")
            self.link.fault("memory" if kind == "memory-low" else kind, text, own=True)
        self._broken = exc  # let go of when training is to go on; on the way out nobody needs the memory
        self._updating = False
        self._obey()

    def protected(self) -> bool:
        """Whether a controller leads, or one that was lost is back soon: it may have died together with a rank."""
        if self.link.connected:
            return True
        self._looking = True
        try:
            return self.link.wait_connected(self.deadlines.stop)
        finally:
            self._looking = False

    def _kind_of(self, exc: BaseException, text: str) -> str:
        if isinstance(exc, WrongNumbers):
            return "precision" if exc.mine else "peer"
        if isinstance(exc, ShardChanged):
            return "memory"
        return "peer" if isinstance(exc, (CommunicationAborted, HoldBroken)) else self._classify(text)

    def _kind_of_damage(self) -> str:
        """What a memory fault has hit. A device that does not say so is believed to be broken."""
        try:
            return _KIND_OF_DAMAGE[self.host.damage()]
        except Exception:
            log.exception("rank %d: the device does not tell what of its memory is damaged", self.info.rank)
            return "device"

    def join(self) -> None:
        """Take part in the recovery that this process was started for. Returns when training is to go on.

        While another process has the place of this rank, it waits as a spare, for as long as the controller says so.
        """
        self._newcomer = self._damaged = True
        self._obey()

    def report(self) -> None:
        """Say where this rank stands. Nothing changes that, but an order."""
        record = self.record
        begun = record.commit is not Commit.NONE  # forward and backward are over, their randomness is drawn
        checkpoints = tuple(step for step in self.host.checkpoints() if step not in self._unusable)
        digests = self._digests()
        stamps = self.stamps.known  # without those that are of other tensors, as was just found
        self.stamps.keep({shard: digest for shard, digest in digests.items() if shard not in stamps})
        self.link.report(
            RankReport(
                rank=self.info.rank,
                step=record.step,
                commit=record.commit,
                update=record.update,
                fault=self._fault,
                trusted=not self._damaged,
                epoch=self.link.stop_epoch if self._stopping else 0,
                rng_start=self.host.rng_digest(record.start) if record.start else "",
                rng_end=self._rng_end() if begun else "",
                checkpoints=checkpoints,
                digests=digests,
                stamps={shard: stamp for shard, stamp in stamps.items() if shard in digests},
                saved={
                    f"{step}|{shard}": digest
                    for step in checkpoints
                    for shard, digest in self._saved.get(step, {}).items()
                },
            )
        )

    def _rng_end(self) -> str:
        try:
            return self.host.rng_digest(self.host.small_state(self.record.step))
        except RuntimeError as exc:  # a device does not let memory be read that has failed
            log.warning("rank %d: its random state cannot be told now: %s", self.info.rank, exc)
            return ""

    def _digests(self) -> dict[str, str]:
        """Hashes of the shards as they are; none before training, where they are of no step, or are not to be read."""
        states = set(self.record.updates.values())
        if self._damaged or Update.DIRTY in states or len(states) != 1:
            return {}
        return self._hashes()

    def _hashes(self) -> dict[str, str]:
        try:
            return self.stamps.now()
        except RuntimeError as exc:  # a device that was stopped gives nothing away
            log.warning("rank %d: the hashes of its shards cannot be taken now: %s", self.info.rank, exc)
            return {}

    def _still(self, shards: Collection[str], wanted: Mapping[str, str]) -> None:
        """What was given away, or taken, is what the engine knows as right.

        Raises:
            DumpError: a shard has another hash.
        """
        known = {shard: wanted[shard] for shard in shards if shard in wanted}
        if known and (why := _differing(known, self._hashes(), "it should have")):
            raise files.DumpError(why)

    def _obey(self) -> None:
        self.link.phase = "stopped"
        self.boundary.forget()
        self.host.stopped()
        deadlines = self.deadlines
        patience = deadlines.patience(recovers=True)
        limit = time.monotonic() + patience
        self.link.wait_stop(self.deadlines.stop, after=self._resumed)
        reported = -1
        heard = time.monotonic()
        while time.monotonic() < limit:
            heard = time.monotonic() if self.link.connected else heard
            if self.link.parked:
                limit = time.monotonic() + patience
                if self._asked:
                    self._leave(0, f"rank {self.info.rank}: a spare process was asked to end")
            if time.monotonic() - heard > deadlines.stop:
                why = f"rank {self.info.rank}: the controller is gone, nobody can decide"
                self._leave(0 if self.link.parked else EXIT_UNDECIDED, why)
            if self.link.stop_epoch != reported:
                reported = self.link.stop_epoch
                self._restart_device()
                self.report()
            order = self.link.next_order(0.2)
            if order is not None and self._carry_out(order):
                return
        self._leave(EXIT_UNDECIDED, f"rank {self.info.rank}: no decision within the deadline (--tft-deadline)")

    def _restart_device(self) -> None:
        """Before anything of it is read, or computed by it: an update may have to be finished, a shard to be saved."""
        if self._halt is None or not self._stopping:
            return
        try:
            self._halt.restart(self.link.stop_epoch, self.deadlines.stop)
        except Exception as exc:  # whatever a device says
            log.exception("rank %d: its device does not go on after the stop", self.info.rank)
            self._damaged, self._fault = True, f"the device does not go on after the stop: {exc}"
            self.link.fault("device", self._fault, own=True)

    def _carry_out(self, order: Order) -> bool:
        """True when training is to go on."""
        payload = order.payload
        if order.kind is OrderKind.EXIT:
            self.link.order_done(order.id, True)
            self._leave(int(str(payload["code"])), str(payload.get("words", "")))
        try:
            result = self._action(order.kind, payload)
        except Exception as exc:  # whatever it is, the engine has to know and to plan again
            log.exception("rank %d: order %s failed", self.info.rank, order.kind.value)
            self._note_damage(exc)
            self.link.order_done(order.id, False, f"{type(exc).__name__}: {exc}")
            return False
        self.link.order_done(order.id, True, "", result)
        return order.kind is OrderKind.RESUME

    def _note_damage(self, exc: Exception) -> None:
        """A device-memory fault can strike while an order is carried out, too."""
        if isinstance(exc, CommunicationAborted):
            return  # its text quotes why everybody was stopped, which may be another rank's memory fault
        text = f"{type(exc).__name__}: {exc}"
        kind = self._classify(text)
        if kind in ("memory", "corrupted"):
            self._damaged, self._fault = True, text
        if kind in ("memory", "memory-low", "corrupted", "link"):
            self.link.fault("memory" if kind == "memory-low" else kind, text, own=True)

    def _action(self, kind: OrderKind, payload: dict[str, Any]) -> dict[str, str]:
        if kind is OrderKind.FINISH_UPDATE:
            return self._finish_update(int(payload["step"]))
        if kind is OrderKind.STAGE_SHARDS:
            directory = self._directory(payload)
            shards = [str(shard) for shard in payload["shards"]]
            staged = self.host.stage_shards(shards, directory)
            self._still(shards, dict(payload.get("digests", {})))
            return staged
        if kind is OrderKind.WRITE_PART:
            return self._write_part(payload)
        if kind is OrderKind.PUBLISH:
            return self._publish(payload)
        if kind is OrderKind.DISCARD:
            files.discard(self._directory(payload))
            return {}
        if kind is OrderKind.REGROUP:
            self._epoch = int(payload["epoch"])
            self.links.settle(payload.get("link"))
            self.host.regroup(self._epoch, self.links.state.name)
            return {}
        if kind is OrderKind.REPAIR:
            transfers = [str(transfer) for transfer in payload["transfers"]]
            return self._repair(int(payload["step"]), transfers, dict(payload.get("digests", {})))
        if kind is OrderKind.ROLLBACK:
            return self._roll_back(int(payload["step"]), bool(payload.get("newcomers")))
        if kind is OrderKind.LOAD:
            return self._load(int(payload["step"]), bool(payload.get("newcomers")))
        if kind is OrderKind.RESUME:
            self._resumed, self._fault = self._epoch, ""  # a stop that came since is not answered
            self.first_step, self._newcomer, self._given = True, False, None
            self.link.step, self.link.phase = self.record.step, "between-steps"
            self.link.resumed()
            return {}
        raise ValueError(f"unknown order {kind}")

    def _relink(self, order: Order) -> dict[str, str]:
        """While this rank is held."""
        self.first_step = True  # over new groups: audited as after a repair, where they were built anew
        return self.links.carry_out(order)

    def _repair(self, step: int, transfers: list[str], digests: Mapping[str, str]) -> dict[str, str]:
        """Send and take shards, in the order in which all ranks have them: nobody waits for somebody who waits.
        `digests`: the right ones, by shard, as far as they are known."""
        courier = Courier(self.host, self.info.rank, lambda: self._state_of(step))
        for transfer in transfers:
            courier.carry(transfer)
        self._given = courier.small or self._given
        self._still([*courier.given, *courier.taken], digests)
        if set(self.info.holds) <= set(courier.taken):
            self.record.given(step)
            self._damaged = False
        if taken := [shard for shard in courier.taken if shard in self.info.holds]:
            now = self._hashes()
            self.stamps.keep({shard: now[shard] for shard in taken if shard in now})
        return {"taken": ",".join(taken), **courier.told}

    def _roll_back(self, step: int, joined: bool) -> dict[str, str]:
        if self._damaged:
            raise files.DumpError("this rank's memory was damaged and not repaired")
        self._release()
        if self._newcomer:
            self.host.take_place(self._small_state_of_another(step))
        else:
            self.host.roll_back(self._state_of(step), again=self.record.step == step + 1)
        if joined:
            self.host.forget_first_times()
        now = self._hashes()
        if why := _differing(self.stamps.known, now):
            raise files.DumpError(why)
        self._stand_at(step, len(self.record.updates))
        return {}

    def _small_state_of_another(self, step: int) -> SmallState:
        if self._given is None or self._given.step != step:
            has = "none" if self._given is None else f"that of step {self._given.step}"
            raise files.DumpError(f"a newcomer needs the small state of step {step} from another rank, and has {has}")
        return self._given

    def _load(self, step: int, joined: bool) -> dict[str, str]:
        self._release()
        self._damaged = True  # what is half loaded is no state
        self.stamps.moved()
        self.host.load(step)
        if joined:
            self.host.forget_first_times()
        now = self._hashes()
        if why := _differing(self._saved.get(step, {}), now, f"it had when step {step} was saved", counted=False):
            self._unusable.add(step)  # the next try takes an older one
            raise files.DumpError(why)
        self.stamps.keep(now)
        self._saved = {saved: digests for saved, digests in self._saved.items() if saved <= step}
        self._stand_at(step, len(self.record.updates))
        self._damaged = False
        return {}

    def _release(self) -> None:
        if self._broken is not None:
            release(self._broken)
            self._broken = None

    def _finish_update(self, step: int) -> dict[str, str]:
        record = self.record
        if record.step != step or record.commit is Commit.NONE:
            raise files.DumpError(f"asked to finish step {step}, but stands at step {record.step} ({record.commit})")
        record.commit = Commit.PASSED
        self.host.finish_update(record)
        if record.update is not Update.DONE:
            raise files.DumpError(f"the update of step {step} is {record.update.value}")
        digests = self._digests()
        self.stamps.keep(digests)
        told = {DIGEST + shard: digest for shard, digest in digests.items()}
        return {"rng_end": self.host.rng_digest(self.host.small_state(step)), **told}

    def _state_of(self, step: int) -> SmallState:
        record = self.record
        if record.step == step + 1 and record.start is not None and record.update is Update.UNTOUCHED:
            return record.start
        if record.step == step and record.update is Update.DONE:
            return self.host.small_state_after(record) if record.start else self.host.small_state(step)
        raise files.DumpError(f"cannot give step {step}: at step {record.step}, update {record.update.value}")

    def _directory(self, payload: dict[str, Any]) -> Path:
        """The directory of an attempt. Orders come over a socket: they may only name a dump of ours inside --save."""
        name = str(payload["directory"])
        if Path(name).name != name or not name.startswith(DUMP_PREFIX):
            raise files.DumpError(f"{name!r} is not the name of a dump directory ({DUMP_PREFIX}...)")
        return self.host.save_directory() / name

    def _write_part(self, payload: dict[str, Any]) -> dict[str, str]:
        step, part, directory = int(payload["step"]), str(payload["part"]), self._directory(payload)
        sources = dict(payload["sources"])
        hashes = self.host.write_part(self._state_of(step), part, sources, directory)
        self._still([shard for shard, source in sources.items() if source == "self"], dict(payload.get("digests", {})))
        files.write_fragment(directory, part, self.host.checkpoint_directory(directory, step), hashes)
        return {"files": str(len(hashes)), "bytes": str(sum(path.stat().st_size for path in hashes))}

    def _exists(self, step: int) -> bool:
        """Whether the framework itself has saved this step already, to the end, and in this run: a checkpoint of that
        step which was there before belongs to another one."""
        if self.host.saved_step() != step:
            return False
        base = self.host.save_directory()
        tracker, checkpoint = self.host.tracker(base), self.host.checkpoint_directory(base, step)
        return tracker.is_file() and tracker.read_text().strip() == str(step) and checkpoint.is_dir()

    def _publish(self, payload: dict[str, Any]) -> dict[str, str]:
        step, directory, base = int(payload["step"]), self._directory(payload), self.host.save_directory()
        final = self.host.checkpoint_directory(base, step)
        result = {"path": str(final), "resume": self._resume(step)}
        if self._exists(step):  # only the publisher asks: others may have left that save a moment earlier or later
            files.discard(directory)
            return {**result, "exists": "1"}
        parts = [str(part) for part in payload["parts"]]
        checkpoint = self.host.checkpoint_directory(directory, step)
        if whole := self.host.complete(step, parts, directory):
            files.write_fragment(directory, WHOLE, checkpoint, whole)
            parts.append(WHOLE)
        files.publish(
            directory, checkpoint, final, self.host.tracker(base), step, parts,
            {"written_by": "mindspeed_tft"},
        )  # fmt: skip
        self._sweep(directory)
        return result

    def _sweep(self, directory: Path) -> None:
        """Earlier attempts of this job that nobody could discard, because all who knew them are dead."""
        job = directory.name.rsplit("-", 2)[0]
        for left in directory.parent.glob(f"{job}-*"):
            try:
                files.discard(left)
            except files.DumpError as exc:
                log.warning("%s", exc)  # the checkpoint is published; what is left costs space only

    def _leave(self, code: int, message: str) -> NoReturn:
        """End this process at once: threads that are stuck in an aborted operation must not hold it."""
        if message:
            logs.say(message, sys.stderr)
        self.link.close()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _differing(
    wanted: Mapping[str, str],
    found: Mapping[str, str],
    when: str = "it had after its last update",
    counted: bool = True,
) -> str:
    """Which shard has another hash than the one that is wanted; "" when none has. Without `counted`, the numbers of
    updates are not compared: a checkpoint may keep them in another place."""
    for shard, digest in sorted(wanted.items()):
        now = found.get(shard, digest)
        if now != digest and (counted or now.partition(":")[0] != digest.partition(":")[0]):
            return f"shard {shard} has hash {now}, and not the one that {when}, {digest}"
    return ""
