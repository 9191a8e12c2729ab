"""Collectives move to another link while ranks, controllers and links fail at every point, in an order that a seed
decides. What is really built on each rank is kept beside what the engine believes."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from mindspeed_tft.engine.machine import Engine, State
from mindspeed_tft.engine.types import (
    Action,
    Answer,
    Asked,
    Commit,
    Deadlines,
    Event,
    FaultSeen,
    Held,
    LinkState,
    Order,
    OrderDone,
    OrderKind,
    RankInfo,
    RankLost,
    RankReport,
    Registered,
    Released,
    Reported,
    Stop,
    Tell,
    Tick,
    Update,
    Wish,
)

WORLD = 4
DEADLINES = Deadlines(heartbeat=1, heartbeat_lost=4, stop=8, order=16, dump=80, exit=4)
LINKS = ("", "eth1", "eth2")
MISFORTUNES = ("lose", "leader", "fault", "drop")
LONGEST = 140.0  # seconds of a run: three requests at most, and time for the last one to end


@dataclass
class Rank:
    number: int
    link: LinkState = field(default_factory=LinkState)  # what it remembers
    built: tuple[str, int] | None = ("", 0)  # link and epoch of its groups; None: none that work
    wish: Wish = field(default_factory=Wish)
    held: int = 0
    stop: int = 0  # epoch of the last one that it heard
    stopped: bool = False
    known: set[int] = field(default_factory=set)  # orders that it has begun
    said: list[Event] = field(default_factory=list)  # to be said again to another controller
    alive: bool = True

    @property
    def trains(self) -> bool:
        return self.alive and not self.stopped and not self.held

    def info(self) -> RankInfo:
        return RankInfo(self.number, f"node{self.number // 2}", 100 + self.number, "tp0-pp0", self.number, ("s/0",))


class Run:
    """One job. A request every now and then, and misfortune as the seed wants it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.term = 0.0, 0
        self.ranks = [Rank(number) for number in range(WORLD)]
        self.engine = self.new_engine()
        self.queue: list[tuple[float, int, Event | Action, int]] = []  # when, order, what, of which leader
        self.count = 0
        self.moves: dict[int, set[int]] = {}  # epoch -> ranks that came to build
        self.broken = {link: bool(link) and self.random.random() < 0.3 for link in LINKS}
        self.old_breaks = self.random.random() < 0.15
        self.misfortune = self.random.choice(["", "", *MISFORTUNES])
        self.answers: list[Answer] = []
        self.seen: Counter[str] = Counter()

    def new_engine(self) -> Engine:
        """One that knows the last epoch, or a first one, after all that knew it have died."""
        before, strategies = 1000 * self.term, frozenset({"retry", "dump"})
        epoch = self.random.choice([before, 0])
        return Engine(DEADLINES, WORLD, epoch=epoch, issued=before << 16, strategies=strategies)

    # ------------------------------------------------------------------------------------------------ the network

    def later(self, what: Event | Action, most: float = 0.5) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now + self.random.random() * most, self.count, what, self.term))

    def say(self, rank: Rank, event: Event) -> None:
        rank.said.append(event)
        if self.misfortune == "drop" and self.random.random() < 0.05:
            self.seen["drop"] += 1
            self.later(self.hello(rank), 3.0)  # it reconnects, and all is said again, both ways
            for again in rank.said:
                self.later(again, 4.0)
        else:
            self.later(event)

    def hello(self, rank: Rank) -> Registered:
        return Registered(
            self.now, rank.info(), rank.stop, began=True, wish=rank.wish, held=rank.held, held_at=7, link=rank.link
        )

    def feed(self, event: Event) -> None:
        for action in self.engine.handle(replace(event, at=self.now)):
            if isinstance(action, Answer):
                self.answers.append(action)
            elif isinstance(action, (Order, Stop, Tell)):
                self.later(action)

    def change_leader(self) -> None:
        self.seen["leader"] += 1
        self.term += 1
        self.engine = self.new_engine()
        for rank in self.ranks:
            if rank.alive:
                self.later(self.hello(rank))
                for event in rank.said:
                    self.later(event, 1.0)

    # ------------------------------------------------------------------------------------------------ ranks

    def take(self, action: Action) -> None:
        if isinstance(action, Tell):
            for number in action.ranks:
                self.on_wish(self.ranks[number], action.wish)
        elif isinstance(action, Stop):
            for number in action.ranks:
                self.on_stop(self.ranks[number], action.epoch)
        elif isinstance(action, Order):
            rank = self.ranks[action.rank]
            if rank.alive and action.id not in rank.known:
                rank.known.add(action.id)
                self.on_order(rank, action)

    def on_wish(self, rank: Rank, wish: Wish) -> None:
        if not rank.alive or wish.id <= rank.wish.id:
            return
        rank.wish = wish
        if rank.stopped:
            return
        if rank.held and wish.hold != rank.held:
            self.train(rank)
        if wish.hold and not rank.held:
            rank.held = wish.hold
            self.say(rank, Held(0.0, rank.number, wish.hold, 7))

    def train(self, rank: Rank) -> None:
        """Out of a hold. Who has no groups notices it at once."""
        self.say(rank, Released(0.0, rank.number, rank.held))
        rank.held = 0
        if rank.built is None:
            self.say(rank, FaultSeen(0.0, rank.number, "peer", "no backend", own=False))

    def on_stop(self, rank: Rank, epoch: int) -> None:
        if not rank.alive or epoch <= rank.stop:
            return
        rank.stop, rank.stopped, rank.held = epoch, True, 0
        if rank.built is not None and rank.built[1] >= epoch:
            self.fail(f"rank {rank.number} takes stop {epoch} for answered: its groups are of {rank.built}")
        self.say(rank, Reported(0.0, RankReport(rank.number, 8, Commit.NONE, Update.UNTOUCHED, epoch=epoch)))

    def on_order(self, rank: Rank, order: Order) -> None:
        payload, kind = order.payload, order.kind
        done = OrderDone(0.0, rank.number, order.id, True)
        if kind is OrderKind.EXIT:
            rank.alive = False
            self.later(RankLost(0.0, rank.number, "left", 100 + rank.number))
            return
        if kind is OrderKind.LINK and not rank.stopped:
            done = self.on_link(rank, order, done)
        elif kind is OrderKind.LINK or int(str(payload.get("epoch", rank.stop))) < rank.stop:
            done = replace(done, ok=False, message="superseded")
        elif kind is OrderKind.REGROUP:
            told = payload.get("link", {})
            assert isinstance(told, dict)
            rank.link = self.state(told)
            rank.built = (rank.link.name, int(str(payload["epoch"])))
        elif kind is OrderKind.RESUME:
            rank.stopped, rank.said = False, []
            if rank.wish.hold:
                rank.held = rank.wish.hold
                self.say(rank, Held(0.0, rank.number, rank.held, 7))
        self.say(rank, done)

    def on_link(self, rank: Rank, order: Order, done: OrderDone) -> OrderDone:
        payload, act = order.payload, str(order.payload["act"])
        self.seen[act] += 1
        if act == "check":
            return replace(done, result={"addresses": f"10.1.1.{rank.number}"})
        if act == "move":
            link, epoch = str(payload["link"]), int(str(payload["epoch"]))
            back = link == rank.link.name
            bad = self.old_breaks if back else self.broken[link] and self.random.random() < 0.5
            rank.built = None if bad else (link, epoch)
            rank.link = replace(rank.link, unsettled=epoch)
            return replace(done, ok=not bad, message="Connect timeout" if bad else "")
        if act == "test":
            assert rank.built is not None, "a test of groups that were not built"
            bad = rank.built[0] != rank.link.name and self.broken[rank.built[0]]
            if not bad and rank.built[0] == rank.link.name:
                rank.link = replace(rank.link, unsettled=0)
            return replace(done, ok=not bad, message="no sum" if bad else "", result={"groups": "6", "at": "today"})
        told = payload["link"]
        assert isinstance(told, dict)
        rank.link = self.state(told)
        return done

    @staticmethod
    def state(told: dict[str, str]) -> LinkState:
        return LinkState(told["name"], told["before"], told["since"], int(told["epoch"])) if told else LinkState()

    # ------------------------------------------------------------------------------------------------ the run

    def fail(self, why: str) -> None:
        raise AssertionError(f"{why}; at {self.now:.1f} s, engine {self.engine.state}, {self.ranks}")

    def strike(self) -> None:
        kind, self.misfortune = self.misfortune, ""
        victim = self.random.choice(self.ranks)
        if kind == "lose" and victim.alive:
            self.seen["lose"] += 1
            victim.alive = False
            self.later(RankLost(0.0, victim.number, "killed", 100 + victim.number))
        elif kind == "leader":
            self.change_leader()
        elif kind == "fault" and victim.alive and not victim.stopped:
            self.seen["fault"] += 1
            self.say(victim, FaultSeen(0.0, victim.number, "memory", "ECC", own=True))
        else:
            self.misfortune = kind

    def run(self) -> Run:
        for rank in self.ranks:
            self.later(self.hello(rank))
        asks = iter(range(1, 4))
        tick = 0.0
        due = 5.0
        strikes_at = self.random.choice(["check", "move", "test", "keep", "Held", "Tell"])
        while self.now < LONGEST and self.engine.state is not State.CLOSED:
            if self.queue and self.queue[0][0] <= tick:
                self.now, _, what, term = heapq.heappop(self.queue)
                name = str(what.payload.get("act", "")) if isinstance(what, Order) else type(what).__name__
                if name == strikes_at and self.random.random() < 0.3:
                    self.strike()
                if term == self.term or not isinstance(what, Action):
                    if isinstance(what, Action):
                        self.take(what)
                    elif term == self.term:
                        self.feed(what)
                continue
            self.now = tick
            self.feed(Tick(0.0))
            tick += 1.0
            if self.now >= due and self.now < LONGEST - 80 and self.quiet and (number := next(asks, 0)):
                due = self.now + 20.0
                kind = self.random.choice(["switch-link", "switch-link", "switch-back"])
                self.feed(Asked(0.0, f"{self.term}.{number}", kind, {"link": self.random.choice(LINKS[1:])}, 300.0))
        self.judge()
        return self

    @property
    def quiet(self) -> bool:
        return self.engine.state is State.TRAINING and not self.engine.status()["pause"]["requests"]  # type: ignore[index]

    def judge(self) -> None:
        """At the end: everybody trains over the same groups, or the job has ended."""
        if self.engine.state is State.CLOSED:
            return
        if self.engine.state is not State.TRAINING or not all(rank.trains for rank in self.ranks):
            self.fail("not everybody trains")
        built = {rank.built for rank in self.ranks}
        if len(built) != 1 or None in built:
            self.fail(f"groups differ: {built}")
        (groups,) = built
        link = self.engine.status()["link"]
        assert groups is not None and isinstance(link, dict)
        if (groups[0] or "default") != link["name"]:
            self.fail(f"the engine believes in {link}, groups are on {groups}")


def play(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            run = Run(seed).run()
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc
        seen.update(run.seen)
        seen.update("ok" if answer.ok else "failed" for answer in run.answers)
    # Each of these happened, or nothing was tried.
    assert all(seen[what] > 1 for what in (*MISFORTUNES, "check", "move", "test", "keep", "ok", "failed")), seen


def test_whatever_happens_all_train_on_one_link_or_the_job_ends() -> None:
    play(range(80))


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 5000, 500))
def test_whatever_happens_in_many_runs(first: int) -> None:
    play(range(first, first + 500))


CONTROLS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a regroup that names no link": ("engine.desk.Desk.link_payload", lambda _self: {}),
    "a leader that does not hear of the link": ("engine.link.Heard.take", lambda _self, _told: None),
    "a leader that trusts a move without an end": ("engine.link.Heard.doubt", lambda _self, ours: ""),
    "a leader that keeps what is held for nobody": ("engine.hold.Holds._orphaned", property(lambda _self: False)),
    "a stop below the epoch of a move": ("engine.machine.Engine._catch_up", lambda _self, _rank, _epoch: None),
}


@pytest.mark.parametrize("what", CONTROLS)
def test_control(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with a fault is found."""
    name, broken = CONTROLS[what]
    monkeypatch.setattr(f"mindspeed_tft.{name}", broken)
    with pytest.raises((AssertionError, KeyError)):
        play(range(1000))
