"""For the tests of metrics and traces: a job of four ranks on two hosts, led by the real engine and watched by what is
tested."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.machine import Engine
from mindspeed_tft.observe.metrics import Metrics
from mindspeed_tft.observe.recoveries import Recovery

DEADLINES = t.Deadlines(heartbeat=1, heartbeat_lost=5, stop=10, order=8, dump=30, exit=4, reboot=20)
DONE: dict[str, Any] = {"commit": t.Commit.PASSED, "update": t.Update.DONE}
BROKEN: dict[str, Any] = {"commit": t.Commit.NONE, "update": t.Update.UNTOUCHED}


class Watched:
    """The engine by hand, with a clock. `told` has the recoveries, `stream` all that passed the controller."""

    def __init__(self, *strategies: str, ranks: int = 4, hosts: int = 2) -> None:
        self.engine = Engine(DEADLINES, ranks, strategies=frozenset({*strategies, "dump"}))
        self.told: list[Recovery] = []
        self.metrics = Metrics(ranks, DEADLINES.heartbeat_lost, self.told.append)
        self.now, self.ranks, self.hosts = 100.0, ranks, hosts
        self.stream: list[t.Event | tuple[float, t.Action]] = []
        self.open: list[t.Order] = []
        self.feed(*(t.Registered(0, self.info(rank)) for rank in range(ranks)))

    def info(self, rank: int, pid: int = 0) -> t.RankInfo:
        return t.RankInfo(
            rank, f"h{rank * self.hosts // self.ranks}", pid or 1000 + rank, "p0", rank, (f"p0/{rank % 2}",)
        )

    def feed(self, *events: t.Event) -> list[t.Action]:
        found: list[t.Action] = []
        for event in events:
            event = replace(event, at=self.now)
            self.stream.append(event)
            self.metrics.event(event)
            for action in self.engine.handle(event):
                self.stream.append((self.now, action))
                self.metrics.action(action, self.now)
                found.append(action)
        self.open += [action for action in found if isinstance(action, t.Order)]
        return found

    def train(self, first: int, last: int, seconds: float = 2.0) -> None:
        """All ranks compute these steps, and say so at the begin of each and at the end of the last."""
        for step in range(first, last + 1):
            self.beat(step)
            self.now += seconds
        self.beat(last + 1)

    def beat(self, step: int) -> None:
        self.feed(*(t.Heartbeat(0, rank, step, "forward-backward") for rank in range(self.ranks)))

    def report(self, step: int, where: dict[str, Any], *but: int) -> None:
        epoch = self.engine.incident()["epoch"]
        assert isinstance(epoch, int)
        self.feed(
            *(
                t.Reported(0, t.RankReport(rank, step, epoch=epoch, **where))
                for rank in range(self.ranks)
                if rank not in but
            )
        )

    def obey(self, seconds: float = 0.5, **results: dict[str, str]) -> None:
        """All orders are carried out, a round takes so long. `results`: by kind."""
        while self.open:
            orders, self.open = self.open, []
            self.now += seconds
            for order in orders:
                self.feed(t.OrderDone(0, order.rank, order.id, True, "", results.get(order.kind.value, {})))


def recorded(path: Path) -> Iterator[t.Event | tuple[float, t.Action]]:
    """What a log of events says that passed a controller."""
    for line in path.read_text().splitlines():
        found = json.loads(line)
        item = _made(getattr(t, found["what"]), found)
        yield item if isinstance(item, t.Event) else (found["at"], item)


def _made(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        names = [one.name for one in dataclasses.fields(kind) if one.name in value]
        return kind(**{name: _made(hints[name], value[name]) for name in names})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if get_origin(kind) is tuple:
        return tuple(_made(get_args(kind)[0], one) for one in value)
    return value
