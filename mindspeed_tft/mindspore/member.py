"""One rank of a MindSpore job: where it stands, what operators want of it, and its dying gasp.

A rank that waits in a collective of MindSpore cannot be freed: nothing there can be aborted. So the main thread trains,
and waits between two steps if it is wanted; a stop is answered by a thread of its own, with the state that was copied
to host memory at the end of the last step. That thread then ends the process. Decisions are the engine's, as ever.

What a rank says of a step. In a job whose ranks all hold everything, a step that has ended anywhere had the gradients
of all ranks: its end is the commit. Where ranks hold different parts, the end of a step on one rank says nothing of the
others: the commit is the agreement of all ranks that follows the step, and the copy of the step before is kept until
then.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from mindspeed_tft.control.processor import Processor
from mindspeed_tft.engine.incident import EXIT_UNDECIDED
from mindspeed_tft.engine.types import Commit, Deadlines, Order, OrderKind, RankInfo, RankReport, Update
from mindspeed_tft.mindspore import layout, places
from mindspeed_tft.observe import logs
from mindspeed_tft.recovery import files
from mindspeed_tft.recovery.hold import Boundary, HoldBroken, NotDone
from mindspeed_tft.recovery.link import LinkHost, Links

log = logging.getLogger(__name__)

ORDERED = f"{layout.PREFIX}ordered-"  # directories of saves that operators want


class Framework(Protocol):
    """What is asked of MindSpore."""

    def keep(self, step: int) -> None:
        """Copy all parameters to host memory, as the state of the end of `step`; the copy before the last is gone.

        Waits for the device, perhaps for ever: a step is only begun where it is called, and a peer may be lost. Another
        thread may read the copy of the step before meanwhile.
        """

    def write(self, step: int, path: Path) -> str:
        """Write the kept state of `step` as a checkpoint file, and read it back; its sha256.

        Raises:
            DumpError: there is no copy of that step, or the file is not what was written.
        """

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """The highest of each number that any rank brings: a collective of all ranks."""


class Member:
    """The protection of this rank, from the start of training to its end."""

    def __init__(
        self,
        framework: Framework,
        info: RankInfo,
        deadlines: Deadlines,
        save: Path,
        resume: str,
        alone: bool,
        link_host: LinkHost,
        pauses: bool = True,
        dumps: bool = True,
        saves: bool = True,
    ) -> None:
        """
        Args:
            save: the directory of the checkpoints.
            resume: how the user starts this job again, in words.
            alone: each rank of the job holds all of its state.
            pauses: operators may hold the ranks between two steps.
            saves: operators may have a checkpoint written.
            dumps: each step is kept for a dying gasp; otherwise a fault ends the job without one.
        """
        self.info, self.save, self._framework, self._deadlines = info, save, framework, deadlines
        self._resume, self._alone, self._pauses, self._link_host = resume, alone, pauses, link_host
        self._dumps, self._saves = dumps, saves
        self.settle: Callable[[], object] = lambda: None  # done before this rank is held
        self._lock = threading.Lock()  # of what a report says
        self._step, self._commit, self._update = 0, Commit.PASSED, Update.DONE
        self._frozen = False  # it has been reported: nothing but an order changes it
        self._fault = ""
        self._saved = -1  # the last step that this run has saved or loaded
        self._gasp: threading.Thread | None = None
        self.link: Processor
        self.boundary: Boundary

    def connect(self, link: Processor) -> None:
        """Speak through this processor, whose stops come to `stopped`."""
        self.link = link
        self.boundary = Boundary(link, lambda: link.stopping, self._deadlines.order, self._all_agree)
        links = Links(self._link_host, link.tell_link)
        self.boundary.works[OrderKind.LINK] = links.carry_out

    # ------------------------------------------------------------------------------------------------ the step path

    def begin(self, step: int) -> None:
        """Training begins after `step`: 0, or the one that was loaded."""
        if self._dumps:
            self._framework.keep(step)
        self._saved = step if step else -1
        self._stand(step, Commit.PASSED, Update.DONE)

    def step_begin(self, step: int) -> None:
        self._stand(step, Commit.ENTERED if self._alone else Commit.NONE, Update.UNTOUCHED)
        self.link.step, self.link.phase = step, "forward-backward"

    def step_end(self, step: int, leaves: bool) -> None:
        """A step has ended on this rank: keep it, agree with all ranks, and do what operators want. `leaves`: training
        ends here."""
        self._wait_if_frozen()
        if self._dumps:
            self._framework.keep(step)  # without the lock, for who answers a stop while this waits for a lost peer
        done = (Commit.PASSED, Update.DONE) if self._alone else (Commit.ENTERED, Update.UNTOUCHED)
        self._stand(step, *done)
        self.link.phase = "commit"
        self._agree(step)
        self._stand(step, Commit.PASSED, Update.DONE)
        self.link.phase = "between-steps"
        try:
            self.boundary.reach(step, lambda: self._save_now(step), leaves, self._settle)
        except HoldBroken:
            self._park()

    def _settle(self) -> None:
        self.settle()

    def _agree(self, step: int) -> None:
        offer = self.boundary.offer(step) if self._pauses else (0, 0, 0)
        highest, lowest, *wanted = self._framework.agree([step, -step, *offer])
        if highest != -lowest:
            raise RuntimeError(f"ranks end different steps, from {-lowest} to {highest}: they do not train together")
        hold, save, limit = wanted
        self.boundary.agree(hold, save if self._saves else 0, limit)

    def _all_agree(self, mine: bool) -> bool:
        return self._framework.agree([int(not mine)]) == [0]

    def _stand(self, step: int, commit: Commit, update: Update) -> None:
        with self._lock:
            if not self._frozen:
                self._step, self._commit, self._update = step, commit, update
        self._wait_if_frozen()

    def _wait_if_frozen(self) -> None:
        if self._frozen:
            self._park()

    def _park(self) -> NoReturn:
        """The other thread answers for this rank, and ends the process; it has a deadline."""
        while True:
            time.sleep(3600)

    # ------------------------------------------------------------------------------------------------ saving in peace

    def _save_now(self, step: int) -> Path:
        """The checkpoint of the step that has just ended, by all ranks together. Complete on all before it appears.

        Raises:
            NotDone: it could not be written, on all ranks alike. Training goes on.
        """
        if not self._saves:
            raise NotDone("a job under TrainFaultTolerance has no checkpoint of ours; use the callback FaultTolerance")
        if not self._dumps:
            self._framework.keep(step)
        directory = self.save / f"{ORDERED}{step:07d}"
        try:
            self._together(lambda: self._make_room(directory) if self.info.rank == 0 else None)
            self._together(lambda: self._write(step, self.info.part, directory) if self._claims(directory) else None)
            self._together(lambda: self._publish_all(step, directory) if self.info.rank == 0 else None)
        except NotDone:
            if self.info.rank == 0:
                shutil.rmtree(directory, ignore_errors=True)  # half a checkpoint would keep a full disk full
            raise
        self._saved = step
        return layout.checkpoint(self.save, step)

    def _together(self, part: Callable[[], object]) -> None:
        """This rank's part of something; then whether it went well on all of them."""
        why = ""
        try:
            part()
        except (OSError, files.DumpError) as exc:
            why = f"{type(exc).__name__}: {exc}"
        if self._framework.agree([int(bool(why))])[0]:
            raise NotDone(why or "another rank could not; its log says why")

    @staticmethod
    def _make_room(directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)  # of a save that a fault broke off
        directory.mkdir(parents=True)

    def _publish_all(self, step: int, directory: Path) -> None:
        suffix = files.fragment(directory, "").suffix
        parts = sorted(path.stem.removeprefix("manifest-") for path in directory.glob(f"manifest-*{suffix}"))
        self._publish(step, directory, parts)

    def _claims(self, directory: Path) -> bool:
        """Whether this rank is the first of its part to come."""
        try:
            os.close(os.open(directory / f".claim-{self.info.part}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    def _write(self, step: int, part: str, directory: Path) -> dict[Path, str]:
        checkpoint = layout.checkpoint(directory, step)
        checkpoint.mkdir(parents=True, exist_ok=True)
        path = layout.part_file(checkpoint, part)
        hashes = {path: self._framework.write(step, path)}
        files.write_fragment(directory, part, checkpoint, hashes)
        return hashes

    def _publish(self, step: int, directory: Path, parts: Sequence[str]) -> Path:
        final = layout.checkpoint(self.save, step)
        files.publish(
            directory, layout.checkpoint(directory, step), final, layout.tracker(self.save), step, list(parts),
            {"written_by": "mindspeed_tft"},
        )  # fmt: skip
        return final

    # ------------------------------------------------------------------------------------------------ a fault

    def terminated(self, name: str) -> bool:
        """A signal asks this rank to end: a fault of the job, but this rank's state is whole. False: unprotected."""
        if not self.link.connected:
            return False
        if not self.link.stopping:
            self._fault = f"received {name}"
            self.link.fault("terminated", f"rank {self.info.rank} received {name}", own=True)
        return True

    def failed(self, exc: BaseException) -> None:
        """Training ended with an exception on the main thread. Returns only where there is nobody who could decide."""
        if not (self.link.connected or self.link.wait_connected(self._deadlines.stop)):
            log.error("rank %d: no controller, so no dump: the job ends as it would without us", self.info.rank)
            return
        if not self.link.stopping:
            traceback.print_exception(exc)
            self._fault = "".join(traceback.format_exception_only(exc)).strip()
            self.link.fault("exception", self._fault, own=True)
            if not self.link.wait_stop(self._deadlines.stop):
                log.error("rank %d: nobody answers within %g s", self.info.rank, self._deadlines.stop)
                return
        self._park()

    def stopped(self, _epoch: int, _reason: str) -> None:
        """Everybody is told to stop. Called by a thread of the processor, which has other things to do."""
        if self._gasp is None:
            self._gasp = threading.Thread(target=self._answer, name="tft-gasp", daemon=True)
            self._gasp.start()

    def _answer(self) -> None:
        try:
            self._obey()
        except BaseException:  # nobody else is left who could end this process
            log.exception("rank %d: the answer to a stop failed", self.info.rank)
            self._leave(EXIT_UNDECIDED, "")

    def _obey(self) -> None:
        with self._lock:
            self._frozen = True
        link, deadlines = self.link, self._deadlines
        link.phase = "stopped"
        limit = time.monotonic() + deadlines.patience()
        reported, heard = -1, time.monotonic()
        while time.monotonic() < limit:
            heard = time.monotonic() if link.connected else heard
            if time.monotonic() - heard > deadlines.stop:
                self._leave(EXIT_UNDECIDED, f"rank {self.info.rank}: the controller is gone, nobody can decide")
            if link.stop_epoch != reported:
                reported = link.stop_epoch
                self._report(reported)
            if (order := link.next_order(0.2)) is not None:
                self._carry_out(order)
        self._leave(EXIT_UNDECIDED, f"rank {self.info.rank}: no decision within the deadline (tft_deadline)")

    def _report(self, epoch: int) -> None:
        where = (self.info.rank, self._step, self._commit, self._update)
        self.link.report(RankReport(*where, self._fault, trusted=self._dumps, epoch=epoch))

    def _carry_out(self, order: Order) -> None:
        if order.kind is OrderKind.EXIT:
            self.link.order_done(order.id, True)
            self._leave(int(str(order.payload["code"])), str(order.payload.get("words", "")))
        try:
            result = self._act(order.kind, dict(order.payload))
        except Exception as exc:  # whatever it is, the engine has to know and to plan again
            log.exception("rank %d: order %s failed", self.info.rank, order.kind.value)
            self.link.order_done(order.id, False, f"{type(exc).__name__}: {exc}")
            return
        self.link.order_done(order.id, True, "", result)

    def _act(self, kind: OrderKind, payload: dict[str, Any]) -> dict[str, str]:
        if kind is OrderKind.FINISH_UPDATE:
            return self._finish(int(payload["step"]))
        directory = layout.attempt(self.save, str(payload["directory"]))
        if kind is OrderKind.DISCARD:
            files.discard(directory)
            return {}
        step = int(payload["step"])
        if kind is OrderKind.STAGE_SHARDS:
            path = self._staged(directory, self.info.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            return {"sha256": self._framework.write(self._shown(step), path)}
        if kind is OrderKind.WRITE_PART:
            return self._write_part(step, str(payload["part"]), dict(payload["sources"]), directory)
        if kind is OrderKind.PUBLISH:
            return self._publish_dump(step, [str(part) for part in payload["parts"]], directory)
        raise files.DumpError(f"a job of MindSpore cannot carry out the order {kind.value}")

    def _finish(self, step: int) -> dict[str, str]:
        """The step had ended here, and others passed its commit. In the middle of a step parameters are torn."""
        if self._alone or self._step != step or self._commit is Commit.NONE:
            raise files.DumpError(f"step {step} has not ended on this rank, and cannot end without the others")
        self._commit, self._update = Commit.PASSED, Update.DONE
        return {}

    def _shown(self, step: int) -> int:
        """The same step, if this rank has shown that its copy of it is the state of the job."""
        before = self._step == step + 1 and self._update is Update.UNTOUCHED
        if before or (self._step == step and self._update is Update.DONE):
            return step
        raise files.DumpError(f"cannot give step {step}: at step {self._step}, update {self._update.value}")

    @staticmethod
    def _staged(directory: Path, rank: int) -> Path:
        return directory / f"staged-{rank}.ckpt"

    def _write_part(self, step: int, part: str, sources: dict[str, str], directory: Path) -> dict[str, str]:
        if part != self.info.part or len(sources) != 1:
            raise files.DumpError(f"rank {self.info.rank} writes part {self.info.part} alone, not {part}")
        (source,) = sources.values()
        if source == "self":
            hashes = self._write(self._shown(step), part, directory)
        else:
            staged = self._staged(directory, int(source.removeprefix("rank:")))
            checkpoint = layout.checkpoint(directory, step)
            path = layout.part_file(checkpoint, part)
            content = staged.read_bytes()
            hashes = {path: files.write_verified(path, lambda file: file.write(content))}
            files.write_fragment(directory, part, checkpoint, hashes)
        return {"files": str(len(hashes)), "bytes": str(sum(path.stat().st_size for path in hashes))}

    def _publish_dump(self, step: int, parts: list[str], directory: Path) -> dict[str, str]:
        final = layout.checkpoint(self.save, step)
        told = {"path": str(final), "resume": self._resume}
        if self._saved == step and layout.latest(self.save) == step and final.is_dir():
            files.discard(directory)
            return {**told, "exists": "1"}
        self._publish(step, directory, parts)
        return told

    def _leave(self, code: int, message: str) -> NoReturn:
        """End this process at once: the main thread may be in a collective that never ends."""
        if message:
            logs.say(message, sys.stderr)
        places.leave_status(os.environ, self.info.rank, code)
        self.link.close()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
