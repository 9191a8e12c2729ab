"""For the tests of the control plane: an engine that needs no brain, and a rank that needs no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_tft.control.config import ControlConfig, meeting_dir
from mindspeed_tft.engine import types as t

HERE = Path(__file__).parent
DEADLINES = t.Deadlines(heartbeat=0.1, heartbeat_lost=2.0, stop=3.0, order=5.0, dump=8.0, exit=3.0)


class FakeEngine:
    """On the first fault: stop all, collect reports, one FINISH_UPDATE and one EXIT for each rank, closed."""

    def __init__(
        self, deadlines: t.Deadlines, world_size: int, epoch: int, issued: int, tag: str, strategies: frozenset[str]
    ) -> None:
        self.deadlines, self.world_size = deadlines, world_size
        self.live: set[int] = set()
        self.finished: set[int] = set()
        self.reports: dict[int, t.RankReport] = {}
        self.epoch = epoch
        self.orders: dict[int, t.Order] = {}
        self.next_id = issued + 1
        self.stage = "run"

    def handle(self, event: t.Event) -> list[t.Action]:
        out: list[t.Action] = []
        if isinstance(event, t.Registered):
            self.live.add(event.info.rank)
        elif isinstance(event, t.RankFinished):
            self.live.discard(event.rank)
            self.finished.add(event.rank)
            if len(self.finished) == self.world_size and self.stage == "run":
                self.stage = "closed"
                out.append(t.Closed("finished", -1, "the end"))
        elif isinstance(event, t.RankLost):
            self.live.discard(event.rank)
            out += self._stop(event.message)
        elif isinstance(event, t.FaultSeen):
            out += self._stop(event.message)
        elif isinstance(event, t.Reported):
            self.reports[event.report.rank] = event.report
        elif isinstance(event, t.OrderDone):
            self.orders.pop(event.order, None)
        return out + self._go_on()

    def incident(self) -> dict[str, object]:
        return {"state": self.stage}

    def status(self) -> dict[str, object]:
        return {"state": self.stage}

    def _stop(self, reason: str) -> list[t.Action]:
        if self.stage != "run":
            return []
        self.stage, self.epoch = "stop", self.epoch + 1
        return [t.Note("stop", reason), t.Stop(self.epoch, tuple(sorted(self.live)), reason)]

    def _order(self, kind: t.OrderKind, payload: dict[str, str | int | list[str] | dict[str, str]]) -> list[t.Action]:
        out: list[t.Action] = []
        for rank in sorted(self.live):
            order = t.Order(self.next_id, rank, kind, payload)
            self.next_id += 1
            self.orders[order.id] = order
            out.append(order)
        return out

    def _go_on(self) -> list[t.Action]:
        if self.stage == "stop" and self.live <= set(self.reports):
            self.stage = "finish"
            return [t.Note("decide", "dump step 7"), *self._order(t.OrderKind.FINISH_UPDATE, {"step": 7})]
        if self.stage == "finish" and not [o for o in self.orders.values() if o.rank in self.live]:
            self.stage = "exit"
            return [t.Note("exit", "all done"), *self._order(t.OrderKind.EXIT, {"code": 1, "summary": "saved step 7"})]
        if self.stage == "exit" and not self.live:
            self.stage = "closed"
            return [t.Closed("dumped", 7, "step 7 is saved, nothing is lost")]
        return []


class BrokenEngine(FakeEngine):
    """Fails at the tenth event."""

    heard = 0

    def handle(self, event: t.Event) -> list[t.Action]:
        self.heard += 1
        if self.heard > 10:
            raise KeyError("a mistake of the engine")
        return super().handle(event)


def config(tmp: Path, world: int = 2, **values: object) -> ControlConfig:
    settings: dict[str, object] = {
        "deadlines": DEADLINES,
        "world_size": world,
        "local_world_size": world,
        "node_rank": 0,
        "nnodes": 1,
        "host": "here",
        "incident_dir": str(tmp / "incidents"),
        "run_name": "test",
        "run_id": str(tmp),
        "start": 15.0,
        "shutdown": 3.0,
        "engine": "control_support:FakeEngine",
    }
    return ControlConfig(**{**settings, **values})  # type: ignore[arg-type]


def until(condition: Callable[[], object], seconds: float = 10.0, what: str = "condition") -> float:
    """Seconds that it took; an assertion when it did not come true in time."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"{what} not within {seconds} s"
        time.sleep(0.002)
    return time.monotonic() - begin


class Rank:
    """A process that stands for a training rank. It writes what happens to it as JSON lines."""

    def __init__(
        self,
        tmp: Path,
        cfg: ControlConfig,
        rank: int,
        local_rank: int | None = None,
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        **options: object,
    ) -> None:
        """`popen` starts it, perhaps on another host."""
        self.rank = rank
        self.log = tmp / f"rank{rank}-{time.monotonic_ns()}.jsonl"
        self.err = self.log.with_suffix(".err")
        local = rank if local_rank is None else local_rank
        program = options.pop("program", "control_rank.py")
        words = {"config": cfg.to_json(), "rank": rank, "local_rank": local, "log": str(self.log), **options}
        env = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent.parent}"}
        with open(self.err, "wb") as err:
            self.process = popen(
                [sys.executable, str(HERE / str(program)), json.dumps(words)],
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                env=env,
                start_new_session=True,
            )

    def lines(self, what: str | None = None) -> list[dict[str, object]]:
        if not self.log.exists():
            return []
        text = self.log.read_text()
        found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [line for line in found if what in (None, line["what"])]

    def wait(self, what: str, seconds: float = 10.0, count: int = 1) -> dict[str, object]:
        try:
            until(lambda: len(self.lines(what)) >= count, seconds, f"{what} of rank {self.rank}")
        except AssertionError as error:
            raise AssertionError(f"{error}; log {self.lines()}, stderr {self.err.read_text()}") from None
        return self.lines(what)[count - 1]

    def kill(self, signum: int = signal.SIGKILL) -> float:
        self.process.send_signal(signum)
        return time.monotonic()

    def text(self) -> str:
        return self.err.read_text()


def processes(directory: Path, module: str = "") -> list[int]:
    """Control processes that meet in this directory; `module` is "host_main" or "controller_main"."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            here = any(word.startswith(f"{directory}/") for word in words)
            if here and any(word.endswith(f"control.{module}" if module else "_main") for word in words):
                found.append(int(entry.name))
    return sorted(found)


class Job:
    """Ranks of one job on one or more pretended hosts. Leaves nothing behind, and sees to it that nobody does."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.ranks: dict[int, Rank] = {}
        self.configs: list[ControlConfig] = []
        self.crashed: set[int] = set()  # nodes whose relay was killed for good: it could not clean up

    def start(self, cfg: ControlConfig, first: int = 0, **options: Any) -> list[Rank]:
        """All ranks of one host, the first of them with local rank 0."""
        self.configs.append(cfg)
        started = [Rank(self.tmp, cfg, first + local, local, **options) for local in range(cfg.local_world_size)]
        self.ranks.update((rank.rank, rank) for rank in started)
        return started

    def directories(self) -> list[Path]:
        return [meeting_dir(cfg) for cfg in self.configs]

    def leader(self, node: int = 0) -> int:
        """Process id of the controller that leads, by the files of one host: one that was killed leaves its file."""
        found = [role for role in self.roles(node) if role["leader"]]
        assert found, self.roles(node)
        return int(str(max(found, key=lambda role: int(str(role["term"])))["pid"]))

    def roles(self, node: int = 0) -> list[dict[str, object]]:
        """What the controllers of a host say of themselves."""
        paths = sorted(self.directories()[node].glob("controller-*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def only(self, module: str, node: int = 0) -> int:
        found: list[int] = []

        def alone() -> bool:  # a process that starts another one is seen twice, for a moment
            found[:] = processes(self.directories()[node], module)
            return len(found) == 1

        until(alone, what=f"one {module}")
        return found[0]

    def events(self) -> list[dict[str, object]]:
        path = self.tmp / "incidents" / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def registered(self) -> int:
        """Number of ranks of which the engine has heard."""
        found = [event["info"] for event in self.events() if event["what"] == "Registered"]
        return len({info["rank"] for info in found})  # type: ignore[index]

    def incidents(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in sorted((self.tmp / "incidents").glob("incident-*.json"))]

    def text(self) -> str:
        return "".join(rank.text() for rank in self.ranks.values())

    def end(self, seconds: float = 15.0) -> None:
        """Everything ends by itself, once the ranks are gone."""
        for rank in self.ranks.values():
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait(10)
        left: list[int] = []
        try:
            until(lambda: not [pid for d in self.directories() for pid in processes(d)], seconds, "end of the job")
        except AssertionError as error:
            left = [pid for d in self.directories() for pid in processes(d)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"orphans {left}: {error}; {self.text()}") from None
        for node, directory in enumerate(self.directories()):
            assert node in self.crashed or not directory.exists(), list(directory.iterdir())
