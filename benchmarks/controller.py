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
import json
import os
import platform
import resource
import select
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

import grpc
import psutil
from controller_job import PARTS, SETTINGS, Host, Job, Shape, Tally, make_config
from controller_layers import measure_layers
from rich.console import Console
from rich.table import Table

from mindspeed_tft.control import launch, tasks
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.candidates import Candidates
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.control.uplink import OPTIONS, Uplink, UplinkKeeper
from mindspeed_tft.engine import types as t
from mindspeed_tft.observe.incident import EVENTS_FILE

SIZES, QUICK = (256, 1024, 4096, 16384), (256,)
WIDTH = 120  # of a report that goes into a file
LIMIT = 300.0  # seconds for any one thing to happen; a controller that needs longer is broken
LAYERS = {
    "engine": "engine",
    "codec": "seats, codec, protobuf",
    "recorder": "recorder",
    "wire": "gRPC, event loop, collector",
}


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
