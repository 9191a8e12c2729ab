"""Seconds in which the controller leads a job of many ranks through a fault, and what it costs while nothing happens.

    python benchmarks/controller.py [--ranks 256,1024,4096,16384] [--per-host 8] [--repeats 3] [--json FILE] [--quick]

The controller is the real process, reached over real gRPC on loopback, and so are the relays' streams: all in this
process, each with a connection of its own. Ranks are simulated: they compute nothing and answer at once. In each repeat
one rank is lost and another process takes its place (a worker reboot, without the time that the process would
take). Times are from the word that the rank is lost

    stop         until the last rank has its stop
    first order  from the first report (all are said at once) until the last rank has its first order, REGROUP
    repair       until the last rank has its last order, RESUME; all ranks answer each order at once

and, at the end of each job, from a rank's word that it was asked to end until the last rank has its order to leave: a
dump, with orders to stage, write and publish. Wall times contain the work of this process, which costs as much as the
controller's and shares the machine with it: they are upper bounds. Processor times are the controller's alone, with all
that it does until the incident is written.

The share of each layer is measured in this process, without sockets: the engine alone; with seats, codec and protobuf
around it; with the recorder of incidents. What is left of the real controller's time is gRPC, its event loop and the
collector. A size that the real controller does not carry is shown with these layers alone, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import io
import json
import os
import platform
import resource
import secrets
import select
import statistics
import subprocess
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

import grpc
import psutil
from rich.console import Console
from rich.table import Table

from mindspeed_tft.control import codec, launch, tasks
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.candidates import Candidates
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.control.controller import Controller
from mindspeed_tft.control.seats import HostLink
from mindspeed_tft.control.uplink import OPTIONS, Uplink, UplinkKeeper
from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.machine import Engine
from mindspeed_tft.observe.incident import EVENTS_FILE, Recorder
from mindspeed_tft.replica.holders import shard_of
from mindspeed_tft.settings import Settings

SIZES, QUICK = (256, 1024, 4096, 16384), (256,)
PARTS = 32  # model parts, at most
REPLICAS = 2
WIDTH = 120  # of a report that goes into a file
LIMIT = 300.0  # seconds for any one thing to happen; a controller that needs longer is broken
DIGEST = "5" * 64  # of the random state, the same on all ranks
STEPS_APART = 10  # from one repeat to the next: the engine takes faults of neighbouring steps for one that comes again
SETTINGS = Settings(enable_high_availability=True, enable_hbmfault_repair=True, enable_worker_reboot=True)
STRATEGIES = SETTINGS.strategies()
LAYERS = {
    "engine": "engine",
    "codec": "seats, codec, protobuf",
    "recorder": "recorder",
    "wire": "gRPC, event loop, collector",
}


# ----------------------------------------------------------------------------------------------- the simulated job


@dataclass(frozen=True)
class Shape:
    """A job of so many ranks."""

    ranks: int
    per_host: int
    heartbeat: float  # seconds

    @property
    def hosts(self) -> int:
        return self.ranks // self.per_host

    @property
    def deadlines(self) -> t.Deadlines:
        return replace(SETTINGS.deadlines(), heartbeat=self.heartbeat)

    def infos(self) -> list[t.RankInfo]:
        parts = min(PARTS, self.ranks // 8)
        return [self._info(rank, parts) for rank in range(self.ranks)]

    def _info(self, rank: int, parts: int) -> t.RankInfo:
        dp_rank, part = divmod(rank, parts)
        shard = f"tp{part}-pp0/dense/{shard_of(dp_rank, self.ranks // parts, REPLICAS)}"
        return t.RankInfo(rank, f"host{rank // self.per_host}", 1000 + rank, f"tp{part}-pp0", dp_rank, (shard,))


def newcomer(info: t.RankInfo) -> t.RankInfo:
    """Another process in the place of this one."""
    return replace(info, pid=info.pid + 100_000)


def report(rank: int, step: int, epoch: int, bare: bool) -> t.RankReport:
    """The fault came before the commit of `step`; `bare`: a newcomer speaks."""
    step, rng = (0, "") if bare else (step, DIGEST)
    return t.RankReport(rank, step, t.Commit.NONE, t.Update.UNTOUCHED, "", not bare, rng, "", epoch)


class Tally:
    """When the last rank had its stop, its first order and its last one. Seconds on the clock of this process."""

    def __init__(self, ranks: int, last: t.OrderKind, on_change: Callable[[str], None] = lambda _: None) -> None:
        self.at: dict[str, float] = {}
        self.orders: Counter[str] = Counter()
        self._ranks, self._last, self._on_change = ranks, last.value, on_change
        self._had: dict[str, set[int]] = {"stop": set(), "first order": set(), "last order": set()}

    def stopped(self, rank: int) -> None:
        self._book("stop", rank)

    def ordered(self, rank: int, kind: str) -> None:
        self.orders[kind] += 1
        self._book("first order", rank)
        if kind == self._last:
            self._book("last order", rank)

    def _book(self, what: str, rank: int) -> None:
        had = self._had[what]
        had.add(rank)
        if len(had) == self._ranks and what not in self.at:
            self.at[what] = time.perf_counter()
            self._on_change(what)

    def __str__(self) -> str:
        counts = ", ".join(f"{what}: {len(had)} of {self._ranks} ranks" for what, had in self._had.items())
        return f"{counts}; orders {dict(self.orders)}"


class SimRank:
    """A rank that computes nothing."""

    def __init__(self, info: t.RankInfo, bare: bool = False) -> None:
        """`bare`: it stands for another process."""
        self.info, self.epoch, self.bare, self._seq = info, 0, bare, 0
        self._session = secrets.token_hex(8)

    def hello(self) -> wire.FromRank:
        return self._word(codec.hello(self._session, self.info, self.epoch, bare=self.bare))

    def beat(self) -> wire.FromRank:
        return self._word(codec.says(t.Heartbeat(0.0, self.info.rank, 0, "forward-backward")))

    def says(self, event: t.Event) -> wire.FromRank:
        self._seq += 1
        return self._word(codec.says(event, self._seq))

    def lost(self) -> wire.FromRank:
        event = t.RankLost(0.0, self.info.rank, "killed by signal 9 (SIGKILL)", self.info.pid)
        return codec.lost_to_wire(event, self._session, codec.info_to_wire(self.info))

    def _word(self, says: wire.RankSays) -> wire.FromRank:
        return wire.FromRank(rank=self.info.rank, session=self._session, says=says)


class Host:
    """A relay with its ranks: what it says and hears. How that travels is not known here.

    As a real one, it passes on at once and one by one what ranks say, but for heartbeats.
    """

    def __init__(self, number: int, infos: Sequence[t.RankInfo]) -> None:
        self.number = number
        self.ranks = {info.rank: SimRank(info) for info in infos}
        self.tally: Tally | None = None
        self._beats = wire.HostSays()

    def greeting(self) -> wire.HostHello:
        name = f"host{self.number}"
        return wire.HostHello(protocol=codec.PROTOCOL, host=name, node_rank=self.number, pid=1, run="benchmark")

    def hellos(self) -> wire.HostSays:
        return wire.HostSays(ranks=[rank.hello() for rank in self.ranks.values()])

    def beats(self, step: int) -> wire.HostSays:
        """A heartbeat of each rank. Made once and changed: all else would keep this process busy."""
        if not self._beats.ranks:
            self._beats.ranks.extend(rank.beat() for rank in self.ranks.values())
        for word in self._beats.ranks:
            word.says.heartbeat.step, word.says.heartbeat.pulse = step, step
        said = wire.HostSays()
        said.CopyFrom(self._beats)
        return said

    def loses(self, number: int) -> list[wire.HostSays]:
        """A rank is gone, and another process is there for it."""
        gone = self.ranks[number].lost()
        rank = self.ranks[number] = SimRank(newcomer(self.ranks[number].info), bare=True)
        self._beats.Clear()
        return [wire.HostSays(ranks=[gone]), wire.HostSays(ranks=[rank.hello()])]

    def must_end(self, number: int) -> list[wire.HostSays]:
        """A rank was asked to end by a signal: a dump."""
        event = t.FaultSeen(0.0, number, "terminated", "received SIGTERM", own=True)
        return [wire.HostSays(ranks=[self.ranks[number].says(event)])]

    def reports(self, step: int) -> list[wire.HostSays]:
        said = (
            rank.says(t.Reported(0.0, report(number, step, rank.epoch, rank.bare)))
            for number, rank in self.ranks.items()
        )
        return [wire.HostSays(ranks=[word]) for word in said]

    def hear(self, message: wire.HostOrders) -> list[wire.HostSays]:
        """What the ranks answer to it, at once."""
        assert self.tally is not None
        kind = message.WhichOneof("body")
        if kind == "stop":
            for number in message.stop.ranks:
                self.ranks[number].epoch = message.stop.epoch
                self.tally.stopped(number)
        elif kind == "order":
            order = message.order
            self.tally.ordered(order.rank, order.kind)
            self.ranks[order.rank].bare = False
            event = t.OrderDone(0.0, order.rank, order.id, True, "", {"path": "/save/iter", "resume": "run it again"})
            return [wire.HostSays(ranks=[self.ranks[order.rank].says(event)])]
        return []


class Job:
    """All hosts of a job, between two faults."""

    def __init__(self, shape: Shape) -> None:
        infos, per = shape.infos(), shape.per_host
        self.shape, self.step = shape, 1
        self.hosts = [Host(number, infos[number * per : (number + 1) * per]) for number in range(shape.hosts)]

    def next_fault(self, repeat: int, last: t.OrderKind, on_change: Callable[[str], None] = lambda _: None) -> Tally:
        """Everybody computes a later step, and is watched from now on."""
        self.step += STEPS_APART
        tally = Tally(self.shape.ranks, last, on_change)
        for host in self.hosts:
            host.tally = tally
        self.victim = (repeat * 37 + 5) % self.shape.ranks
        self.scene = self.hosts[self.victim // self.shape.per_host]
        return tally


# ----------------------------------------------------------------------------------------------- layers, no sockets


def make_engine(shape: Shape) -> Engine:
    return Engine(shape.deadlines, shape.ranks, strategies=frozenset(STRATEGIES))


def make_config(shape: Shape, incidents: Path) -> ControlConfig:
    return ControlConfig(
        shape.deadlines, shape.ranks, shape.per_host, 0, shape.hosts, "host0", str(incidents), "benchmark", port=0,
        strategies=STRATEGIES, shutdown=1.0,
    )  # fmt: skip


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


# ----------------------------------------------------------------------------------------------- the real controller


class NotCarried(Exception):
    """The controller did not lead a job of this size through its faults; the text says why."""


class Process:
    """The controller process of a job."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self._folder, self._incidents = folder, folder / "incidents"
        self._seen, self._said = 0, Counter[str]()
        arguments = ["--config", "-", "--socket", str(folder / "ctl.sock"), "--starting"]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            launch.command("controller_main", arguments), env=launch.environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdin as stdin:
            stdin.write(make_config(shape, self._incidents).to_json().encode())
        if not select.select([self._process.stdout], [], [], LIMIT)[0] or not self._process.stdout.readline():
            self.fail("it did not start")
        self.address: str = json.loads((folder / "controller-0.json").read_text())["address"]

    def cpu(self) -> float:
        """Processor seconds that it has spent: the kernel's clock of another process, clock_getcpuclockid(3)."""
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def memory(self) -> int:
        """Bytes that are in memory."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def count(self, text: str) -> int:
        """How many lines with this text its log of events has."""
        with contextlib.suppress(FileNotFoundError), (self._incidents / EVENTS_FILE).open() as file:
            file.seek(self._seen)
            new = file.read()
            whole = new[: new.rfind("\n") + 1]
            self._seen += len(whole)
            for known in ("protected from now on", '"what": "Recovered"', '"what": "Closed"'):
                self._said[known] += whole.count(known)
        return self._said[text]

    def written(self) -> list[Path]:
        """Its incidents that are on disk."""
        return sorted(self._incidents.glob("incident-*.json"))

    def outcomes(self) -> list[str]:
        """Of its incidents, in their order."""
        found = [json.loads(path.read_text()) for path in self.written()]
        return [incident["outcome"] for incident in sorted(found, key=lambda incident: float(incident["opened"]))]

    def fail(self, why: str) -> NoReturn:
        """Ends the process.

        Raises:
            NotCarried: always.
        """
        self._process.kill()
        self._process.wait()
        self._log.close()
        raise NotCarried(f"{why}; the controller's last words:\n{(self._folder / 'log').read_text()[-1000:]}")

    def check(self) -> None:
        """Fails if it has ended."""
        if self._process.poll() is not None:
            self.fail(f"it ended with {self._process.returncode}")

    def wait(self) -> None:
        """Until it has ended by itself."""
        try:
            code = self._process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.fail("it does not end")
        if code != 0:
            self.fail(f"it ended with {code}")
        self._log.close()


class Relay:
    """The stream of one host: the real one, for simulated ranks."""

    def __init__(self, host: Host, config: ControlConfig, folder: Path, on_up: Callable[[], None]) -> None:
        self.host, self.lost = host, ""
        self._on_up, self._leaving = on_up, False
        uplink = Uplink(host.greeting(), config.deadlines, Candidates(config, folder))
        self._keeper = UplinkKeeper(uplink, self._up, self._lost, lambda _: None, self._hear)
        self._task = asyncio.create_task(self._keeper.run())

    def put(self, message: wire.HostSays) -> None:
        self._keeper.put(message)

    def _up(self, _: wire.Welcome) -> None:
        self.put(self.host.hellos())
        self._on_up()

    def _lost(self, why: str) -> None:
        self.lost = why
        if self._leaving:
            self._task.cancel()  # as asked; it would look for another controller

    def _hear(self, message: wire.HostOrders) -> None:
        for answer in self.host.hear(message):
            self.put(answer)

    async def leave(self) -> None:
        """All ranks have ended: the last word, which ends the stream."""
        self._leaving = True
        self.put(wire.HostSays(bye=True))
        await asyncio.wait([self._task], timeout=LIMIT)
        await tasks.end([self._task])


@dataclass(frozen=True)
class Repair:
    """Seconds, and processor seconds of the controller, of one reboot."""

    stop: float
    first_order: float
    repair: float
    cpu_stop: float
    cpu_first_order: float
    cpu: float
    settled: float  # from the fault until training is protected again
    orders: int


@dataclass(frozen=True)
class Carried:
    """What the real controller needed for one size. Seconds."""

    repairs: list[Repair]
    dump: float
    cpu_dump: float
    healthy: float  # share of one processor that heartbeats cost
    memory: int  # bytes of the controller with all ranks registered


@dataclass(frozen=True)
class Found:
    """One size."""

    ranks: int
    hosts: int
    layers: Mapping[str, Sequence[float]]
    carried: Carried | None  # None: not led to the end


class Bench:
    """A job with a real controller, in one event loop."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self._job, self._process = Job(shape), Process(shape, folder)
        self._folder = folder
        self._relays: list[Relay] = []
        self._events: dict[str, asyncio.Event] = {}
        self._beating: list[asyncio.Task[None]] = []
        self._training = True

    async def run(self, repeats: int, seconds: float) -> Carried:
        """So many repairs and a dump, after so many seconds of healthy training.

        Raises:
            NotCarried: it came to something else.
        """
        await self._connect()
        gc.freeze()  # the collector of this process has nothing to find in all this
        self._beating = [asyncio.create_task(self._beat(relay)) for relay in self._relays]
        await asyncio.sleep(self._job.shape.heartbeat)
        healthy = await self._healthy(seconds)
        memory = self._process.memory()
        repairs = [await self._repair(repeat) for repeat in range(repeats)]
        dump, cpu = await self._dump(repeats)
        await self._leave()
        expected = ["rebooted"] * repeats + ["dumped"]
        if self._process.outcomes() != expected:
            raise NotCarried(f"its incidents ended as {self._process.outcomes()}, expected {expected}")
        return Carried(repairs, dump, cpu, healthy, memory)

    async def _connect(self) -> None:
        welcomes = 0
        all_in = asyncio.Event()

        def on_up() -> None:
            nonlocal welcomes
            welcomes += 1
            if welcomes == len(self._job.hosts):
                all_in.set()

        shape, port = self._job.shape, int(self._process.address.rpartition(":")[2])
        for host in self._job.hosts:
            # The first host is that of the controller, and finds its socket there.
            folder = self._folder / f"host{host.number}" if host.number else self._folder
            folder.mkdir(exist_ok=True)
            config = replace(make_config(shape, folder), node_rank=host.number, host=f"host{host.number}", port=port)
            host.tally = Tally(shape.ranks, t.OrderKind.RESUME)
            self._relays.append(Relay(host, config, folder, on_up))
        await self._until(all_in, "welcome of all hosts")
        await self._logged("protected from now on", 1)

    async def _beat(self, relay: Relay) -> None:
        deadlines = self._job.shape.deadlines
        period = deadlines.heartbeat
        await asyncio.sleep(period * relay.host.number / len(self._relays))  # hosts do not beat all at once
        while True:
            if self._training:
                relay.put(relay.host.beats(self._job.step))
                await asyncio.sleep(period)
            else:
                relay.put(wire.HostSays())  # it is there
                await asyncio.sleep(deadlines.heartbeat_lost / 4)

    async def _healthy(self, seconds: float) -> float:
        begin, cpu = time.perf_counter(), self._process.cpu()
        while (spent := time.perf_counter() - begin) < seconds:
            await asyncio.sleep(min(self._job.shape.heartbeat, seconds - spent))
            self._job.step += 1
        return (self._process.cpu() - cpu) / spent

    async def _repair(self, repeat: int) -> Repair:
        job, process = self._job, self._process
        tally = self._watch(job.next_fault(repeat, t.OrderKind.RESUME, self._set))
        await self._pause()
        messages = job.scene.loses(job.victim)
        begin, cpu = time.perf_counter(), process.cpu()
        self._put(job.scene, messages)
        await self._until(self._events["stop"], f"stop ({tally})")
        cpu_stop, heard = process.cpu(), time.perf_counter()
        said = [(host, message) for host in job.hosts for message in host.reports(job.step)]
        reported = time.perf_counter()
        for host, message in said:
            self._put(host, [message])
        await self._until(self._events["first order"], f"first order ({tally})")
        cpu_first = process.cpu()
        await self._until(self._events["last order"], f"last order ({tally})")
        await self._logged('"what": "Recovered"', repeat + 1)
        settled = time.perf_counter() - begin - (reported - heard)
        await self._written(repeat + 1)
        self._training = True
        return Repair(
            stop=tally.at["stop"] - begin,
            first_order=tally.at["first order"] - reported,
            repair=tally.at["last order"] - begin - (reported - heard),  # without our own work on the reports
            cpu_stop=cpu_stop - cpu,
            cpu_first_order=cpu_first - cpu_stop,
            cpu=process.cpu() - cpu,
            settled=settled,
            orders=sum(tally.orders.values()),
        )

    async def _pause(self) -> None:
        """All are heard at the new step. Then heartbeats pause, so that what is measured is the recovery alone."""
        await asyncio.sleep(self._job.shape.heartbeat)
        self._training = False
        await asyncio.sleep(self._job.shape.heartbeat)

    async def _dump(self, repeat: int) -> tuple[float, float]:
        job, process = self._job, self._process
        tally = self._watch(job.next_fault(repeat, t.OrderKind.EXIT, self._set))
        await self._pause()
        messages = job.scene.must_end(job.victim)
        begin, cpu = time.perf_counter(), process.cpu()
        self._put(job.scene, messages)
        await self._until(self._events["stop"], f"stop ({tally})")
        for host in job.hosts:
            self._put(host, host.reports(job.step))
        await self._until(self._events["last order"], f"order to leave ({tally})")
        await self._logged('"what": "Closed"', 1)
        await self._written(repeat + 1)
        return tally.at["last order"] - begin, process.cpu() - cpu

    async def _leave(self) -> None:
        for task in self._beating:
            task.cancel()
        await asyncio.gather(*(relay.leave() for relay in self._relays))
        await asyncio.get_running_loop().run_in_executor(None, self._process.wait)

    def _watch(self, tally: Tally) -> Tally:
        self._events = {what: asyncio.Event() for what in ("stop", "first order", "last order")}
        return tally

    def _set(self, what: str) -> None:
        self._events[what].set()

    def _put(self, host: Host, messages: Sequence[wire.HostSays]) -> None:
        for message in messages:
            self._relays[host.number].put(message)

    async def _until(self, event: asyncio.Event, what: str) -> None:
        end = time.perf_counter() + LIMIT
        while not event.is_set() and time.perf_counter() < end:
            self._process.check()
            self._check_streams()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(event.wait(), 1.0)
        if not event.is_set():
            self._process.fail(f"no {what} within {LIMIT:.0f} s")

    def _check_streams(self) -> None:
        for relay in self._relays:
            if relay.lost:
                self._process.fail(f"host {relay.host.number} lost {relay.lost}")

    async def _logged(self, text: str, times: int) -> None:
        """Until the controller has written it so often."""
        await self._poll(lambda: self._process.count(text) >= times, f"line with {text}")

    async def _written(self, number: int) -> None:
        """Until so many incidents are on disk."""
        await self._poll(lambda: len(self._process.written()) >= number, f"{number}. incident on disk")

    async def _poll(self, condition: Callable[[], bool], what: str) -> None:
        end = time.perf_counter() + LIMIT
        while not condition():
            self._process.check()
            if time.perf_counter() > end:
                self._process.fail(f"no {what} within {LIMIT:.0f} s")
            await asyncio.sleep(0.01)


# ----------------------------------------------------------------------------------------------- the report


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    if len(values) == 1:
        return f"{values[0]:.3g}"
    return f"{statistics.median(values):.3g} [{min(values):.3g}, {max(values):.3g}]"


def growth(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds that one rank more costs: the slope of the line of least squares; for one size, the mean."""
    if len(sizes) == 1:
        return seconds[0] / sizes[0]
    return statistics.linear_regression(sizes, seconds).slope


def of(found: Found, name: str) -> list[float]:
    return [float(getattr(repair, name)) for repair in found.carried.repairs] if found.carried is not None else []


def shares(found: Found) -> dict[str, float]:
    """Processor seconds of a repair in each layer; medians."""
    sums = {name: statistics.median(values) for name, values in found.layers.items()}
    if found.carried is not None:
        sums["wire"] = statistics.median(of(found, "cpu"))
    names = list(sums)
    return {name: sums[name] - (sums[names[i - 1]] if i else 0.0) for i, name in enumerate(names)}


def table(title: str, columns: Sequence[str], found: Sequence[Found], cells: Callable[[Found], list[str]]) -> Table:
    made = Table(title=title, title_justify="left")
    for column in ("ranks", "hosts", *columns):
        made.add_column(column, justify="right")
    for one in found:
        made.add_row(str(one.ranks), str(one.hosts), *cells(one))
    return made


def each(found: Found, name: str) -> str:
    """Milliseconds a rank."""
    return f"{statistics.median(of(found, name)) / found.ranks * 1000:.3f}"


def print_tables(found: Sequence[Found], heartbeat: float, console: Console) -> None:
    def wall(one: Found) -> list[str]:
        assert one.carried is not None
        times = [spread(of(one, name)) for name in ("stop", "first_order", "repair")]
        return [*times, each(one, "repair"), spread(of(one, "settled")), f"{one.carried.dump:.3g}"]

    def cpu(one: Found) -> list[str]:
        assert one.carried is not None
        times = [spread(of(one, name)) for name in ("cpu_stop", "cpu_first_order", "cpu")]
        return [*times, each(one, "cpu"), f"{one.carried.cpu_dump:.3g}"]

    def layers(one: Found) -> list[str]:
        seconds = shares(one)
        return [f"{seconds[name]:.3g}" if name in seconds else "not carried" for name in LAYERS]

    def healthy(one: Found) -> list[str]:
        assert one.carried is not None
        return [f"{one.carried.healthy:.1%}", f"{one.carried.memory / 2**20:.0f}"]

    carried = [one for one in found if one.carried is not None]
    if carried:
        names = ["its stop", "first order*", "all orders", "ms a rank", "protected again", "dump"]
        console.print(table("Seconds until the last rank has ..., on the wall", names, carried, wall))
        console.print("* from the first of all reports", highlight=False)
        names = ["stop", "first order", "whole repair", "ms a rank", "dump"]
        console.print(table("Processor seconds of the controller", names, carried, cpu))
    title = "Processor seconds of a whole repair, by layer"
    console.print(table(title, list(LAYERS.values()), found, layers))
    if carried:
        title = f"Healthy training, a heartbeat each {heartbeat:g} s"
        console.print(table(title, ["of one processor", "memory, MiB"], carried, healthy))
        for name, text in {"repair": "on the wall", "cpu": "processor"}.items():
            slope = growth([one.ranks for one in carried], [statistics.median(of(one, name)) for one in carried])
            console.print(f"one rank more: {slope * 1000:.3f} ms {text} for a whole repair", highlight=False)


async def measure(shape: Shape, repeats: int, seconds: float, console: Console) -> Found:
    layers = measure_layers(shape, repeats)
    carried = None
    try:
        with tempfile.TemporaryDirectory(prefix="tft-bench-") as folder:
            carried = await Bench(shape, Path(folder)).run(repeats, seconds)
    except NotCarried as error:
        console.print(f"{shape.ranks} ranks: not carried: {error}", highlight=False, markup=False)
    return Found(shape.ranks, shape.hosts, layers, carried)


def write_json(file: Path, found: Sequence[Found]) -> None:
    machine = {"processors": os.cpu_count(), "python": platform.python_version(), "grpc": grpc.__version__}
    content = {"sizes": [asdict(one) for one in found], "shares": [shares(one) for one in found], "machine": machine}
    file.write_text(json.dumps(content, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default=",".join(map(str, SIZES)), help="sizes of the job, with commas between them")
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--healthy", type=float, default=10.0, help="seconds of healthy training that are measured")
    parser.add_argument("--heartbeat", type=float, default=SETTINGS.deadlines().heartbeat, help="seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK[0]} ranks, one repeat: does all work?")
    given = parser.parse_args()
    given.sizes = list(QUICK) if given.quick else [int(word) for word in given.ranks.split(",")]
    if given.quick:
        given.repeats, given.healthy, given.heartbeat = 1, 0.5, 0.1
    for size in given.sizes:
        if size < 16 or size % (8 * given.per_host) or (size >= 8 * PARTS and size % (2 * PARTS)):
            parser.error(f"--ranks {size}: expected a multiple of {8 * given.per_host}, and of {2 * PARTS} from "
                         f"{8 * PARTS} ranks on, so that hosts and parts of the model are of equal size")  # fmt: skip
    if given.repeats < 1:
        parser.error(f"--repeats {given.repeats}: expected at least 1")
    return given


def main() -> None:
    given = arguments()
    OPTIONS.append(("grpc.use_local_subchannel_pool", 1))  # else all relays of this process share one connection
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each host
    console, found = Console(), list[Found]()
    if not console.is_terminal:
        console.width = WIDTH

    async def all_sizes() -> None:  # in one event loop: gRPC goes on speaking to the first one that it saw
        for size in given.sizes:
            shape = Shape(size, given.per_host, given.heartbeat)
            found.append(await measure(shape, given.repeats, given.healthy, console))
            console.print(f"{size} ranks: done", highlight=False)

    asyncio.run(all_sizes())
    print_tables(found, given.heartbeat, console)
    if given.json is not None:
        write_json(given.json, found)
    if any(one.carried is None for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
