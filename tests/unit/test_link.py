"""Moving all collectives to another link: what the engine orders, and what follows a failure at each point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from mindspeed_tft.engine.link import Stage
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
    Progress,
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
)
from mindspeed_tft.settings import Settings

WORLD = 4
DEADLINES = Deadlines(heartbeat=1, heartbeat_lost=4, stop=8, order=16, dump=40, exit=4)
RETRY = frozenset({"retry", "dump"})
Reply = Callable[[Order], "OrderDone | None"]


def info(rank: int) -> RankInfo:
    return RankInfo(rank, f"node{rank // 2}", 100 + rank, "tp0-pp0", rank, (f"tp0-pp0/dense/{rank % 2}",))


@dataclass
class Job:
    """An engine, and ranks that do what they are told: they are held when it is wished, and obey orders."""

    strategies: frozenset[str] = RETRY
    reply: dict[str, Reply] = field(default_factory=dict)  # by the act of a LINK order: another answer, or none
    links: dict[int, LinkState] = field(default_factory=dict)
    epoch: int = 0
    deadlines: Deadlines = DEADLINES

    def __post_init__(self) -> None:
        self.engine = Engine(self.deadlines, WORLD, strategies=self.strategies, epoch=self.epoch)
        self.now = 0.0
        self.acts: list[tuple[str, int]] = []  # of LINK orders, once for all ranks
        self.payloads: list[Order] = []
        self.answers: list[Answer] = []
        self.progress: list[Progress] = []
        self.stops: list[Stop] = []
        self.regroups: list[Order] = []
        self.asked = 0
        for rank in range(WORLD):
            self.feed(Registered(self.now, info(rank), link=self.links.get(rank, LinkState())))

    def feed(self, *events: Event) -> None:
        """These events, and whatever they lead to."""
        todo = [*events]
        while todo:
            for action in self.engine.handle(todo.pop(0)):
                todo += self.on(action)

    def on(self, action: Action) -> list[Event]:
        if isinstance(action, Answer):
            self.answers.append(action)
        elif isinstance(action, Progress):
            self.progress.append(action)
        elif isinstance(action, Tell):
            return self.on_wish(action)
        elif isinstance(action, Stop):
            self.stops.append(action)
            return [Reported(self.now, report(rank, action.epoch)) for rank in action.ranks]
        elif isinstance(action, Order) and action.kind is OrderKind.LINK:
            act = str(action.payload["act"])
            if not self.acts or self.acts[-1][0] != act or self.acts[-1][1] == WORLD:
                self.acts.append((act, 0))
            self.acts[-1] = (act, self.acts[-1][1] + 1)
            self.payloads.append(action)
            found = self.reply.get(act, self.obey)(action)
            return [found] if found is not None else []
        elif isinstance(action, Order) and action.kind is not OrderKind.EXIT:
            self.regroups += [action] * (action.kind is OrderKind.REGROUP)
            return [OrderDone(self.now, action.rank, action.id, True)]
        return []

    def on_wish(self, action: Tell) -> list[Event]:
        if action.wish.hold:
            return [Held(self.now, rank, action.wish.hold, 7) for rank in action.ranks]
        return [Released(self.now, rank, action.wish.id) for rank in action.ranks]

    def obey(self, order: Order) -> OrderDone:
        results = {
            "check": {"addresses": f"10.78.0.{order.rank + 1}"},
            "test": {"groups": "6", "bytes": "3145728", "seconds": "0.02", "at": f"2026-12-0{order.rank + 1}T00:00:00"},
        }
        return OrderDone(self.now, order.rank, order.id, True, "", results.get(str(order.payload["act"]), {}))

    def fails(self, rank: int, why: str) -> Reply:
        return lambda order: OrderDone(self.now, rank, order.id, False, why) if order.rank == rank else self.obey(order)

    def mute(self, rank: int) -> Reply:
        return lambda order: None if order.rank == rank else self.obey(order)

    def once(self, first: Reply) -> Reply:
        """`first` for the first stage of that act, and afterwards as told."""
        seen: set[int] = set()

        def reply(order: Order) -> OrderDone | None:
            fresh = order.rank not in seen
            seen.add(order.rank)
            return first(order) if fresh else self.obey(order)

        return reply

    def ask(self, kind: str, **args: str) -> Answer:
        self.asked += 1
        self.feed(Asked(self.now, str(self.asked), kind, args))
        return self.answers[-1]

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1
            self.feed(Tick(self.now))


def report(rank: int, epoch: int) -> RankReport:
    return RankReport(rank, 8, Commit.NONE, Update.UNTOUCHED, epoch=epoch)


ALL = [(act, WORLD) for act in ("check", "move", "test", "keep")]
BACK = [("move", WORLD), ("test", WORLD)]


def test_every_rank_takes_every_stage_and_trains_on() -> None:
    job = Job()
    found = job.ask("switch-link", link="eth1")
    assert found.ok, found.text
    assert found.text == (
        "collectives of 4 ranks use link eth1 now, and not default: 6 groups of the first rank tested"
    )
    assert found.data["link"] == "eth1" and found.data["before"] == "default" and found.data["bytes"] == 3145728
    assert found.data["since"] == "2026-12-01T00:00:00"  # of one rank, whose word all of them keep
    assert job.acts == ALL and not job.stops
    assert {order.payload["link"] for order in job.payloads if order.payload["act"] == "move"} == {"eth1"}
    assert job.engine.status()["link"] == {"name": "eth1", "before": "default", "since": found.data["since"]}
    pause = job.engine.status()["pause"]
    assert isinstance(pause, dict) and not pause["wished"] and job.engine.state is State.TRAINING


@pytest.mark.parametrize("deadlines", [DEADLINES, *(Settings(tft_deadline=total).deadlines() for total in (40, 180))])
def test_a_rank_that_is_busy_with_a_group_hears_a_stop_in_time(deadlines: Deadlines) -> None:
    """It may be busy for five times the limit of a group, and others for once more until they miss it."""
    job = Job(deadlines=deadlines)
    assert job.ask("switch-link", link="eth1").ok
    (seconds,) = {float(str(order.payload["seconds"])) for order in job.payloads if order.payload["act"] == "move"}
    assert 0 < 6 * seconds <= min(deadlines.stop, deadlines.order)


def test_back_and_forth() -> None:
    job = Job()
    assert "never moved" in job.ask("switch-back").text
    assert job.ask("switch-link", link="eth1").ok
    assert job.ask("switch-link", link="eth1").text == "collectives use link eth1 already"
    assert job.ask("switch-back").ok
    link = job.engine.status()["link"]
    assert isinstance(link, dict) and (link["name"], link["before"]) == ("default", "eth1")
    assert job.ask("switch-back").ok
    assert job.ask("switch-link", link="default").ok
    epochs = [order.payload["epoch"] for order in job.payloads if order.payload["act"] == "move" and order.rank == 0]
    assert epochs == [1, 2, 3, 4]
    assert "no link is named" in job.ask("switch-link").text
    assert job.ask("switch-link", link="eth1,eth/2").text == "'eth/2' cannot be the name of a network interface"


def test_a_paused_job_stays_paused() -> None:
    job = Job()
    assert job.ask("pause").ok
    assert job.ask("switch-link", link="eth1").ok
    pause = job.engine.status()["pause"]
    assert isinstance(pause, dict) and pause["paused"]
    assert job.ask("resume").ok


def test_a_link_that_one_rank_cannot_use_changes_nothing() -> None:
    job = Job()
    job.reply["check"] = job.fails(2, "interface eth1 of host node1 is down")
    found = job.ask("switch-link", link="eth1")
    assert (found.ok, found.text) == (False, "nothing was changed: rank 2: interface eth1 of host node1 is down")
    assert job.acts == ALL[:1] and not job.stops and job.engine.state is State.TRAINING


def test_a_link_with_the_same_address_on_two_hosts_joins_nobody() -> None:
    job = Job()
    job.reply["check"] = lambda order: OrderDone(0.0, order.rank, order.id, True, "", {"addresses": "127.0.0.1,::1"})
    found = job.ask("switch-link", link="lo")
    assert not found.ok and "the hosts node0, node1 have the same address on it, 127.0.0.1" in found.text
    assert job.acts == ALL[:1]


@pytest.mark.parametrize("act", ["move", "test"])
def test_a_link_that_does_not_work_is_left_again(act: str) -> None:
    job = Job()
    job.reply[act] = job.once(job.fails(1, "Connect timeout"))
    found = job.ask("switch-link", link="eth1")
    doing = "build" if act == "move" else "test"
    assert found.text == (
        f"could not {doing} the groups on link eth1: rank 1: Connect timeout. Link default is put back, and tested"
    )
    assert not found.ok and found.data == {"link": "default", "wanted": "eth1", "step": 7}
    assert job.acts == [*ALL[: 2 if act == "move" else 3], *BACK] and not job.stops
    moves = [order.payload for order in job.payloads if order.payload["act"] == "move" and order.rank == 0]
    assert [(each["link"], each["epoch"]) for each in moves] == [("eth1", 1), ("", 2)]
    assert job.engine.state is State.TRAINING
    assert job.ask("switch-link", link="eth1").ok  # it was repaired


@pytest.mark.parametrize("act", ["move", "test"])
def test_a_rank_that_does_not_answer_is_not_waited_for_longer_than_an_order_may_take(act: str) -> None:
    job = Job()
    job.reply[act] = job.once(job.mute(1))
    job.feed(Asked(0.0, "1", "switch-link", {"link": "eth1"}))
    job.wait(DEADLINES.order - 1)
    assert not job.answers
    job.wait(2)
    assert not job.answers[-1].ok and "rank 1: no answer within 16 s" in job.answers[-1].text
    assert job.engine.state is State.TRAINING and not job.stops


def test_the_operator_is_told_what_is_done_meanwhile() -> None:
    job = Job()
    job.reply["move"] = job.once(job.mute(1))
    job.feed(Asked(0.0, "1", "switch-link", {"link": "eth1"}))
    job.wait(1)
    job.reply["move"] = job.mute(1)
    job.wait(DEADLINES.order)
    assert [progress.text for progress in job.progress] == ["move link eth1", "move back link default"]


@pytest.mark.parametrize("act", ["move", "test"])
@pytest.mark.parametrize("strategies", [RETRY, frozenset({"dump"})])
def test_if_the_old_link_is_gone_too_everybody_is_stopped(act: str, strategies: frozenset[str]) -> None:
    job = Job(strategies)
    job.reply["move"] = job.once(job.fails(1, "Connect timeout"))
    if act == "test":
        job.reply["test"] = job.fails(3, "wrong sums")
    else:
        job.reply["move"] = job.fails(1, "Connect timeout")
    found = job.ask("switch-link", link="eth1")
    assert not found.ok
    assert found.text.startswith("no link works: could not build the groups on link eth1: rank 1: Connect timeout")
    assert "then link default could not be put back" in found.text
    (stop,) = job.stops
    assert stop.epoch == 3 and "no link works" in stop.reason  # above both moves
    if strategies == RETRY:
        assert job.engine.state is State.TRAINING and len(job.regroups) == WORLD
        assert all("link" not in order.payload for order in job.regroups)  # on the one from the start
        assert job.engine.incident()["outcome"] == "retried"
    else:
        assert job.engine.state is not State.TRAINING and not job.regroups


@pytest.mark.parametrize("stage", list(Stage))
def test_a_rank_is_lost_at_each_point(stage: Stage) -> None:
    """Then it is an ordinary fault, and what was kept last is what the others are built on."""
    job = Job()
    if stage in (Stage.MOVE_BACK, Stage.TEST_BACK):
        job.reply["move"] = job.once(job.fails(1, "Connect timeout"))
        act = "move" if stage is Stage.MOVE_BACK else "test"
        if act == "move":
            job.reply["move"] = _second(job, job.fails(1, "Connect timeout"), job.mute(2))
        else:
            job.reply["test"] = job.mute(2)
    else:
        job.reply[stage.value] = job.mute(2)
    job.feed(Asked(0.0, "1", "switch-link", {"link": "eth1"}))
    assert not job.answers
    job.feed(RankLost(1.0, 2, "killed", 102))
    assert not job.answers[-1].ok and "a fault came in between" in job.answers[-1].text
    (stop,) = job.stops
    moves = [order.payload["epoch"] for order in job.payloads if order.payload["act"] == "move"]
    assert all(stop.epoch > int(str(epoch)) for epoch in moves)
    assert job.engine.state is not State.TRAINING
    link = job.engine.status()["link"]
    assert isinstance(link, dict) and link["name"] == ("eth1" if stage is Stage.KEEP else "default")


def _second(job: Job, first: Reply, second: Reply) -> Reply:
    seen: set[int] = set()

    def reply(order: Order) -> OrderDone | None:
        fresh = order.rank not in seen
        seen.add(order.rank)
        return (first if fresh else second)(order)

    return reply


def test_a_fault_afterwards_is_repaired_on_the_new_link() -> None:
    job = Job()
    assert job.ask("switch-link", link="eth1").ok
    job.feed(FaultSeen(1.0, 1, "memory", "ECC", own=True))
    assert job.engine.state is State.TRAINING and len(job.regroups) == WORLD
    told = {"name": "eth1", "before": "", "since": "2026-12-01T00:00:00", "epoch": "1"}
    assert [order.payload["link"] for order in job.regroups] == [told] * WORLD
    assert job.regroups[0].payload["epoch"] == 2


def test_who_was_out_of_reach_is_asked_again() -> None:
    job = Job()
    job.reply["move"] = job.once(job.mute(1))
    job.feed(Asked(0.0, "1", "switch-link", {"link": "eth1"}))
    before = len(job.payloads)
    job.feed(Registered(1.0, info(1), link=LinkState(unsettled=1)))
    again = job.payloads[before]
    assert (again.rank, again.payload["act"]) == (1, "move") and again in job.payloads[:before]
    assert job.answers[-1].ok and not job.stops


# ------------------------------------------------------------------------------------------------ another engine


def test_another_engine_learns_the_link_from_ranks() -> None:
    """Two had not heard that it was kept: all groups were tested on it nevertheless."""
    new = LinkState("eth1", "eth0", "2026-12-01T00:00:00", 5, 0)
    old = LinkState("eth0", "", "2026-11-01T00:00:00", 3, 5)
    job = Job(links={0: old, 1: new, 2: old, 3: new}, epoch=1000)
    assert not job.stops and job.engine.state is State.TRAINING
    assert job.engine.status()["link"] == {"name": "eth1", "before": "eth0", "since": "2026-12-01T00:00:00"}
    assert job.ask("switch-back").ok
    assert job.payloads[-1].payload["link"] == {
        "name": "eth0", "before": "eth1", "since": "2026-12-01T00:00:00", "epoch": "1001",
    }  # fmt: skip


def test_an_operator_who_asks_another_engine_again_gets_an_answer() -> None:
    """Its answer was lost with the engine before. What would not be the same twice is not done twice."""
    job = Job(links=dict.fromkeys(range(WORLD), LinkState("eth1", "eth0", "2026-12-01T00:00:00", 5)), epoch=1000)
    job.feed(Asked(0.0, "again", "switch-link", {"link": "eth1", "again": "1"}))
    job.wait(1)
    again = job.answers[-1]
    assert again.ok and again.data["link"] == "eth1" and not job.acts
    back = job.ask("switch-back", again="1")
    assert not back.ok and "use link eth1, and used eth0 before; ask again" in back.text and not job.acts
    assert job.ask("switch-back").ok


@pytest.mark.parametrize("unsure", [{2}, {0, 1, 2, 3}])
def test_another_engine_builds_the_groups_anew_where_a_move_had_no_end(unsure: set[int]) -> None:
    old = LinkState("eth0", "", "2026-11-01T00:00:00", 3, 0)
    links = {rank: replace(old, unsettled=5 if rank in unsure else 0) for rank in range(WORLD)}
    job = Job(links=links, epoch=1000)
    (stop,) = job.stops
    assert "the controller was lost while collectives moved" in stop.reason and stop.epoch == 1001
    assert job.engine.state is State.TRAINING
    assert [order.payload["link"]["name"] for order in job.regroups] == ["eth0"] * WORLD  # type: ignore[index,call-overload]


def test_an_engine_that_forgot_all_uses_no_epoch_again() -> None:
    """Its stops have to be above the epoch of the groups, or ranks would take them for answered."""
    job = Job(links=dict.fromkeys(range(WORLD), LinkState("eth1", "", "", 7, 0)))
    job.feed(FaultSeen(1.0, 1, "memory", "ECC", own=True))
    assert job.stops[-1].epoch == 8
