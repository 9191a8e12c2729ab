"""An engine with a clock and ranks by hand: what the tests of stops, dumps, repairs and reboots share."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_tft.engine.machine import Engine
from mindspeed_tft.engine.types import (
    Action,
    Commit,
    Deadlines,
    Event,
    Note,
    Order,
    OrderDone,
    OrderKind,
    RankInfo,
    Registered,
    Stop,
    Tick,
    Update,
)

DEADLINES = Deadlines(heartbeat=1, heartbeat_lost=5, stop=10, order=8, dump=30, exit=4, register=60)
N, E, P = Commit.NONE, Commit.ENTERED, Commit.PASSED
U, X, D = Update.UNTOUCHED, Update.DIRTY, Update.DONE


class EngineJob:
    """An engine, and four ranks by default: one part, two shards, rank r holds shard r % 2."""

    def __init__(self, engine: Engine, world: int = 4, register: bool = True) -> None:
        self.engine, self.world, self.now = engine, world, 100.0
        self.actions: list[Action] = []
        self.answered: set[int] = set()  # ids of orders
        if register:
            self.feed(*(Registered(0, self.info(rank)) for rank in range(world)))

    def info(self, rank: int, pid: int = 0) -> RankInfo:
        return RankInfo(rank, f"h{rank}", pid or 1000 + rank, "p0", rank, (f"p0/{rank % 2}",))

    def feed(self, *events: Event) -> list[Action]:
        """The actions of these events; `actions` keeps all of them."""
        found: list[Action] = []
        for event in events:
            found += self.engine.handle(replace(event, at=self.now))
        self.actions += found
        return found

    def wait(self, seconds: float) -> list[Action]:
        """Ticks of half a second."""
        found: list[Action] = []
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            found += self.feed(Tick(0))
        return found

    def answer(self, *which: Order, ok: bool = True, message: str = "", **result: str) -> list[Action]:
        self.answered |= {order.id for order in which}
        return self.feed(*(OrderDone(0, order.rank, order.id, ok, message, result) for order in which))

    def open(self) -> list[Order]:
        """Orders that are not answered."""
        raise NotImplementedError

    def until(self, kind: OrderKind) -> list[Order]:
        """Answer all open orders until some of this kind come; returns these."""
        for _ in range(10):
            found = self.open()
            if kind in {order.kind for order in found}:
                return [order for order in found if order.kind is kind]
            self.answer(*found)
        raise AssertionError(f"no {kind} came")


def orders(actions: list[Action], kind: OrderKind | None = None) -> list[Order]:
    return [action for action in actions if isinstance(action, Order) and kind in (None, action.kind)]


def stops(actions: list[Action]) -> list[Stop]:
    return [action for action in actions if isinstance(action, Stop)]


def notes(actions: list[Action], warn: bool = False) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, Note) and (action.warn or not warn))
