"""Processor time of the controller's layers in one process, without sockets, for `controller.py`."""

from __future__ import annotations

import contextlib
import gc
import io
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from controller_job import STEPS_APART, Host, Job, Shape, Tally, make_config, make_engine, newcomer, report

from mindspeed_tft.control import codec
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.controller import Controller
from mindspeed_tft.control.seats import HostLink
from mindspeed_tft.engine import types as t
from mindspeed_tft.observe.incident import Recorder


def engine_alone(shape: Shape, repeats: int) -> list[float]:
    """Processor seconds of the engine, by repeat."""
    engine, infos, found = make_engine(shape), {info.rank: info for info in shape.infos()}, []
    for info in infos.values():
        engine.handle(t.Registered(0.0, info))
    step = 1
    for repeat in range(repeats):
        step, victim, spent = step + STEPS_APART, (repeat * 37 + 5) % shape.ranks, 0.0
        for rank in infos:
            engine.handle(t.Heartbeat(0.0, rank, step, "forward-backward"))
        old, infos[victim] = infos[victim], newcomer(infos[victim])
        events: deque[t.Event] = deque([t.RankLost(0.0, victim, "killed", old.pid)])
        events.append(t.Registered(0.0, infos[victim], bare=True))
        stopped: dict[int, int] = {}
        recovered = False
        while events:
            event = events.popleft()
            begin = time.thread_time()
            actions = engine.handle(event)
            spent += time.thread_time() - begin
            for action in actions:
                recovered = recovered or isinstance(action, t.Recovered)
                if isinstance(action, t.Stop):
                    stopped.update(dict.fromkeys(action.ranks, action.epoch))
                elif isinstance(action, t.Order):
                    events.append(t.OrderDone(0.0, action.rank, action.id, True))
            if not events and len(stopped) == shape.ranks:
                events += [t.Reported(0.0, report(rank, step, stopped[rank], rank == victim)) for rank in stopped]
                stopped = {}
        if not recovered:
            raise SystemExit(f"the engine alone did not recover: {engine.state}")
        found.append(spent)
    return found


class Unrecorded(Recorder):
    """Writes nothing: shows what writing costs."""

    def event(self, event: t.Event) -> None:
        pass

    def action(self, action: t.Action, at: float) -> None:
        pass

    def recovered(self, recovered: t.Recovered, at: float, engine: dict[str, object]) -> Path:
        return Path("nowhere")


class WithoutSockets:
    """The controller of a job in this process: bytes in, bytes out, by direct calls."""

    def __init__(self, job: Job, recorder: Recorder, folder: Path) -> None:
        self._job, self._recorder = job, recorder
        self._controller = Controller(make_config(job.shape, folder), make_engine(job.shape), recorder)
        self._links = {host.number: HostLink(host.greeting()) for host in job.hosts}
        self._outside = 0.0  # seconds spent on simulated ranks
        for link in self._links.values():
            self._controller.enter(link)
        self._say([(host, host.hellos()) for host in job.hosts])

    def repair(self, repeat: int) -> float:
        """Processor seconds of one."""
        job = self._job
        tally = job.next_fault(repeat, t.OrderKind.RESUME)
        self._say([(host, host.beats(job.step)) for host in job.hosts])
        self._outside, begin = 0.0, time.process_time()
        self._say([(job.scene, message) for message in job.scene.loses(job.victim)])
        with self._not_counted():
            reports = [(host, message) for host in job.hosts for message in host.reports(job.step)]
        self._say(reports)
        self._recorder.flush()
        spent = time.process_time() - begin - self._outside
        if "last order" not in tally.at:
            raise SystemExit(f"the controller without sockets did not end a repair: {tally}")
        return spent

    def _say(self, said: Sequence[tuple[Host, wire.HostSays]]) -> None:
        """All that follows from these words."""
        while said:
            with self._not_counted():
                packed = [(host, message.SerializeToString()) for host, message in said]
            for host, data in packed:
                self._controller.hear(self._links[host.number], codec.parse(wire.HostSays, data))
            answers = [(host, message.SerializeToString()) for host in self._job.hosts for message in self._out(host)]
            with self._not_counted():
                said = [
                    (host, answer) for host, data in answers for answer in host.hear(codec.parse(wire.HostOrders, data))
                ]

    def _out(self, host: Host) -> Iterator[wire.HostOrders]:
        queue = self._links[host.number].out
        while not queue.empty():
            yield queue.get_nowait()

    @contextlib.contextmanager
    def _not_counted(self) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self._outside += time.thread_time() - begin


def measure_layers(shape: Shape, repeats: int) -> dict[str, list[float]]:
    """Processor seconds of a repair in the engine, in all but recorder and wire, and in all but the wire."""
    gc.disable()  # the real controller has its own thresholds: what collecting costs there is in the last layer
    found = {"engine": engine_alone(shape, repeats)}
    words = io.StringIO()  # to the user of a job that is none
    with tempfile.TemporaryDirectory(prefix="tft-bench-") as folder, contextlib.redirect_stderr(words):
        for name, kind in {"codec": Unrecorded, "recorder": Recorder}.items():
            job = Job(shape)
            for host in job.hosts:
                host.tally = Tally(shape.ranks, t.OrderKind.RESUME)
            alone = WithoutSockets(job, kind(folder, "benchmark"), Path(folder))
            found[name] = [alone.repair(repeat) for repeat in range(repeats)]
    gc.enable()
    return found
