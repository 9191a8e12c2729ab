"""TaskD's worker: the processor of a training process.

Under our adaptor a rank has one already, and that is it. A program of another kind gets one here. It has no steps that
could be saved, so all that is done for it is what TaskD's agents do at a manager's word: when a rank dies the incident
names it, and the others end with one status instead of waiting for it.

TaskD's worker also profiles, within a limit of the disk. Nothing is profiled here, so nothing is written.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import NoReturn

from mindspeed_tft import settings as settings_module
from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.control import launch, processor
from mindspeed_tft.control.config import ControlConfig, ControlUnavailable
from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.incident import EXIT_UNDECIDED
from mindspeed_tft.observe import logs
from mindspeed_tft.recovery import launcher
from mindspeed_tft.settings import Refused, Settings
from mindspeed_tft.taskd import words

log = logging.getLogger(__name__)

_INIT = "init_taskd_worker"
_RANKS, _DISK = 4096, 1 << 40
ENV_LOGS = "TASKD_LOG_PATH"


class Worker:
    """A processor for a program that has none."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stopped = threading.Event()
        self._failed = False
        self._link: processor.Processor | None = None

    def start(self) -> bool:
        """True when a controller hears this rank. False: the program runs without protection.

        Raises:
            ControlRefused, Refused: a setting has to be corrected.
        """
        found, _ = settings_module.build([*settings_module.from_environment(os.environ)])
        config = _config(found)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        try:
            path = launch.ensure_host(config, self._rank, local_rank)
        except (ControlUnavailable, OSError) as exc:
            log.warning("*** rank %d runs WITHOUT protection: %s ***", self._rank, exc)
            return False
        self._link = processor.Processor(
            path,
            config.deadlines,
            on_stop=lambda _epoch, _reason: self._stopped.set(),
            revive=launch.reviver(config, local_rank),
        )
        info = t.RankInfo(self._rank, config.host, os.getpid(), "program", self._rank, ())
        threading.Thread(target=self._obey, args=(config.deadlines,), name="tft-taskd-worker", daemon=True).start()
        self._catch_uncaught()
        atexit.register(self.leave)
        return self._link.start(info, config.start)

    def leave(self) -> None:
        """This rank ends in the ordinary way: the others need not wait for it. Again is harmless."""
        link, self._link = self._link, None
        if link is not None and not self._stopped.is_set():
            if not self._failed:
                link.goodbye()
            link.close()

    def _obey(self, deadlines: t.Deadlines) -> None:
        """After a stop: say that there is nothing here to save, and end when told to, or when nobody can decide."""
        self._stopped.wait()
        link = self._link
        assert link is not None
        limit = time.monotonic() + deadlines.patience()
        reported, heard = 0, time.monotonic()
        while time.monotonic() < limit:
            heard = time.monotonic() if link.connected else heard
            if time.monotonic() - heard > deadlines.stop:
                self._end(EXIT_UNDECIDED, f"rank {self._rank}: the controller is gone, nobody can decide")
            if reported < link.stop_epoch:
                reported = link.stop_epoch
                link.report(t.RankReport(self._rank, 1, t.Commit.NONE, t.Update.UNTOUCHED, epoch=reported))
            order = link.next_order(deadlines.heartbeat)
            if order is None:
                continue
            if order.kind is t.OrderKind.EXIT:
                link.order_done(order.id, True, "done", {})
                told = str(order.payload.get("words") or f"rank {self._rank} is told to end")
                self._end(int(str(order.payload["code"])), told)
            link.order_done(order.id, False, "this program has no state of a step")
        self._end(EXIT_UNDECIDED, f"rank {self._rank}: no decision within the deadline")

    def _end(self, code: int, why: str) -> NoReturn:
        """At once: the main thread may be in a collective that never ends."""
        log.warning("%s", why)
        if self._link is not None:
            self._link.close()
        logging.shutdown()
        os._exit(code)

    def _catch_uncaught(self) -> None:
        previous = sys.excepthook

        def handle(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
            self._failed = True  # this is no ordinary end
            previous(kind, exc, trace)

        sys.excepthook = handle


_rank, _framework = -1, "pt"
_worker: Worker | None = None


def _config(found: Settings) -> ControlConfig:
    config = ControlConfig.from_env(
        found.deadlines(launcher.patience(launcher.words())),
        os.path.abspath(os.environ.get(ENV_LOGS) or "taskd_log"),
        job={"program": os.path.basename(sys.argv[0])},
    )
    if config.nnodes > 1 and not is_loopback(config.controller_host):
        raise Refused(
            _INIT,
            f"{config.nnodes} nodes would talk to the controller without authentication, and this program has no flags"
            " that name certificates",
            "import mindspeed_tft.adaptor in a Megatron program, with --tft-tls-dir, or use one node",
        )
    return config


def init_taskd_worker(rank_id: int, upper_limit_of_disk_in_mb: int = 5000, framework: str = "pt") -> bool:
    """Say which rank this process is, once the ranks have met and before training.

    Args:
        rank_id: the global rank, as in RANK.
        upper_limit_of_disk_in_mb: MB that a profile may take; there is none.
        framework: "pt", or "ms".

    Raises:
        Refused: a value that cannot be.
    """
    global _rank, _framework
    rank = words.number(_INIT, "rank_id", rank_id, 0, _RANKS - 1)
    words.number(_INIT, "upper_limit_of_disk_in_mb", upper_limit_of_disk_in_mb, 0, _DISK)
    if framework not in ("pt", "ms"):
        raise Refused(f"{_INIT} 'framework'", f"{framework!r} is unknown", "write 'pt' or 'ms'")
    told = os.environ.get("RANK")
    if framework == "pt" and told is not None and told != str(rank):
        raise Refused(f"{_INIT} 'rank_id'", f"{rank} contradicts RANK={told}", "pass torch.distributed.get_rank()")
    _rank, _framework = rank, framework
    return True


def start_taskd_worker() -> bool:
    """Take part: True when the controller of the job hears this process; in MindSpore, when it will as soon as
    `Model.train` is called.

    Raises:
        RuntimeError: `init_taskd_worker` was not called.
        ControlRefused, Refused: a setting has to be corrected.
    """
    global _worker
    if _rank < 0:
        raise RuntimeError(f"start_taskd_worker: {_INIT} was not called before")
    own = processor.of_this_process()
    if own is not None:
        log.info("rank %d: its processor is TaskD's worker", _rank)
        return own.connected
    logs.bind(rank=_rank, host=os.uname().nodename)
    logs.install("text")
    if _framework == "ms":
        return _attach()
    _worker = Worker(_rank)
    return _worker.start()


def _attach() -> bool:
    """A training process of MindSpore gets its part with the callback, when it trains."""
    from mindspeed_tft.mindspore import attach

    attached = attach.attach()
    if not attached:
        log.warning(
            "rank %d runs WITHOUT protection: MS_ENABLE_TFT turns nothing on that a training process does", _rank
        )
    return attached


def destroy_taskd_worker() -> bool:
    """Take part no more. What our adaptor has started goes on until the process ends. False: nothing was started."""
    global _worker
    worker, _worker = _worker, None
    if worker is None:
        return False
    worker.leave()
    return True
