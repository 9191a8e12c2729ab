"""The scenarios that this field tests, by number: docs/simulation.md says which test plays which. Here is checked that
these tests exist, and here are those that had no other place, on the usual stage: one controller, four ranks, two
replicas.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_tft.engine.machine import Engine, State
from mindspeed_tft.engine.types import (
    Action,
    Closed,
    Commit,
    Deadlines,
    Event,
    FaultSeen,
    Order,
    OrderDone,
    OrderKind,
    RankInfo,
    RankLost,
    RankReport,
    Recovered,
    Registered,
    Reported,
    Stop,
    Tick,
    Update,
)

PAGE = "docs/simulation.md"
BASE = [f"B{number}" for number in range(1, 25)]
RETRY = [f"U{number}" for number in range(1, 11)]
RECOVER = [f"A{number}" for number in range(1, 11)]
MINDSPORE = [f"M{number}" for number in range(1, 7)]
OTHER = ["processor", "actions", "states", "platform", "transport", "files", "waits", "C API", "fuzz", "system"]
BEYOND = [f"N{number}" for number in range(1, 17)]
ABSENT = "does not exist here, because "

# ------------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Row:
    scenario: str
    what: str
    answer: str

    @property
    def tests(self) -> list[str]:
        return re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", self.answer)


def rows_of(text: str) -> list[Row]:
    """Lines `| id | what | answer |` of all tables whose first column is named `id`."""
    found, inside = [], False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == "id":
            inside = True
        elif inside and not set(line) <= set("|-: "):
            assert len(cells) == 3, line
            found.append(Row(*cells))
    return found


def wrong_rows(rows: list[Row], root: Path) -> list[str]:
    """What is wrong with the table: scenarios left out, rows without an answer, tests that do not exist."""
    known = [*BASE, *RETRY, *RECOVER, *MINDSPORE, *OTHER, *BEYOND]
    listed = [row.scenario for row in rows]
    found = [f"{one} is listed {listed.count(one)} times" for one in known if listed.count(one) != 1]
    found += [f"{one} is no scenario" for one in listed if one not in known]
    for row in rows:
        absent = row.answer.startswith(ABSENT) and len(row.answer) > len(ABSENT) + 10
        if not row.tests and not absent:
            found.append(f"{row.scenario} has neither a test nor a reason")
        for test in row.tests:
            path, _, name = test.partition("::")
            file = root / path
            if not file.is_file() or not re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE):
                found.append(f"{row.scenario}: {test} does not exist")
    return found


def test_every_scenario_has_a_test_that_exists_or_a_reason(root: Path) -> None:
    assert wrong_rows(rows_of((root / PAGE).read_text()), root) == []


def test_control_a_gap_in_the_table_is_seen(root: Path) -> None:
    text = (root / PAGE).read_text()
    rows = rows_of(text)
    some = next(row for row in rows if row.tests)
    broken = {
        "does not exist": text.replace(some.tests[0], some.tests[0] + "_of_somebody_else"),
        "is listed 0 times": "\n".join(line for line in text.splitlines() if not line.startswith("| U6 ")),
        "neither a test nor a reason": re.sub(r"\| U6 \|(.*?)\|.*", r"| U6 |\1| to be done |", text),
        "is no scenario": text.replace("| U6 |", "| U66 |"),
    }
    for what, page in broken.items():
        assert any(what in line for line in wrong_rows(rows_of(page), root)), what


# ------------------------------------------------------------------------------------------------ the usual stage

DEADLINES = Deadlines(heartbeat=1, heartbeat_lost=5, stop=10, order=8, dump=30, exit=4, reboot=20)
K = OrderKind
ONLINE = frozenset({"dump", "retry", "recover"})


@dataclass
class Stage:
    """Four ranks of one part, two shards of two holders: rank r holds shard r % 2. All carry out what they are told."""

    strategies: frozenset[str] = ONLINE
    n: int = 2
    saved: tuple[int, ...] = ()
    now: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    orders: list[Order] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    ends: list[Recovered | Closed] = field(default_factory=list)
    failing: set[tuple[int, str]] = field(default_factory=set)
    untrusted: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.engine = Engine(DEADLINES, 4, strategies=self.strategies)
        for rank in range(4):
            self.tell(Registered(0, self.info(rank)))

    def info(self, rank: int, pid: int = 0) -> RankInfo:
        return RankInfo(rank, f"h{rank}", pid or 100 + rank, "p0", rank, (f"p0/dense/{rank % (4 // self.n)}",))

    def tell(self, event: Event) -> None:
        """And all that follows from it at once."""
        waiting = self.engine.handle(replace(event, at=self.now))
        while waiting:
            action = waiting.pop(0)
            self.note(action)
            if isinstance(action, Order):
                ok = (action.rank, action.kind.value) not in self.failing
                self.failing.discard((action.rank, action.kind.value))
                answer = OrderDone(self.now, action.rank, action.id, ok, "" if ok else "refused")
                waiting += self.engine.handle(answer)

    def note(self, action: Action) -> None:
        if isinstance(action, Order):
            self.orders.append(action)
            self.done[action.kind.value] += 1
        elif isinstance(action, Stop):
            self.stops.append(action)
            self.done["stop"] += len(action.ranks)
        elif isinstance(action, (Recovered, Closed)):
            self.ends.append(action)

    def report(self, step: int, *ranks: int, trusted: bool = True) -> None:
        """Stopped in the forward pass of `step`."""
        for rank in ranks:
            trusts = trusted and rank not in self.untrusted
            word = RankReport(
                rank, step, Commit.NONE, Update.UNTOUCHED, "", trusts, epoch=self.epoch, checkpoints=self.saved
            )
            self.tell(Reported(0, word))

    @property
    def epoch(self) -> int:
        return self.stops[-1].epoch if self.stops else 0

    def hurt(self, *ranks: int, kind: str = "memory", step: int = 11) -> None:
        """A fault of these ranks' own, and what all report of it."""
        self.untrusted = {*ranks} if kind == "memory" else set()
        for rank in ranks:
            self.tell(FaultSeen(0, rank, kind, f"{kind} error in step {step}", own=True))
        self.report(step, *range(4))

    def tick(self, seconds: float) -> None:
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.tell(Tick(0))

    def transfers(self) -> list[str]:
        return [str(text) for order in self.orders if order.kind is K.REPAIR for text in order.payload["transfers"]]


def test_u5_a_broken_link_is_four_rollbacks_and_no_repair() -> None:
    stage = Stage()
    stage.hurt(2, kind="link")
    assert (stage.done["stop"], stage.done["repair"], stage.done["rollback"]) == (4, 0, 4)
    (end,) = stage.ends
    assert isinstance(end, Recovered) and (end.outcome, end.step) == ("retried", 10)


def test_u6_two_damaged_ranks_get_their_shards_from_the_other_holders() -> None:
    stage = Stage()
    stage.hurt(0, 3)
    assert sorted(set(stage.transfers())) == ["p0/dense/0|2|0", "p0/dense/1|1|3"]
    assert stage.done["rollback"] == 4
    assert stage.engine.state is State.TRAINING


@pytest.mark.parametrize("saved", [(10,), ()])
def test_u3_without_replicas_all_four_load_the_checkpoint_or_nobody_goes_on(saved: tuple[int, ...]) -> None:
    stage = Stage(n=1, saved=saved)
    stage.hurt(1)
    assert (stage.done["load"], stage.done["rollback"]) == ((4, 0) if saved else (0, 0))
    end = stage.ends[-1]
    assert end.outcome == ("rewound" if saved else "failed")
    assert "p0/dense/1" in end.summary, "the shard that nobody has is named"


def test_u10_wrong_numbers_make_all_four_load_an_older_checkpoint() -> None:
    for kind in ("corrupted", "precision"):
        stage = Stage(saved=(7, 8, 9, 10))
        stage.hurt(2, kind=kind)
        assert stage.done["load"] == 4
        assert {order.payload["step"] for order in stage.orders if order.kind is K.LOAD} == {9}
        assert isinstance(stage.ends[-1], Recovered)


def test_a1_a_killed_rank_registers_again_and_gets_its_shard_from_its_replica() -> None:
    stage = Stage()
    stage.tell(RankLost(0, 3, "killed by signal 9"))
    stage.report(11, 0, 1, 2)
    assert stage.engine.state is State.WAITING
    stage.tell(Registered(0, stage.info(3, pid=999), bare=True))
    word = RankReport(3, 0, Commit.NONE, Update.UNTOUCHED, trusted=False, epoch=stage.epoch)
    stage.tell(Reported(0, word))
    assert sorted(set(stage.transfers()))[0] == "p0/dense/1|1|3"
    assert (stage.done["regroup"], stage.done["rollback"], stage.done["resume"]) == (4, 4, 4)
    (end,) = stage.ends
    assert isinstance(end, Recovered) and end.outcome == "rebooted"


@pytest.mark.parametrize("strategies", [frozenset({"dump"}), ONLINE])
def test_a3_two_ranks_give_their_shards_and_one_publishes(strategies: frozenset[str]) -> None:
    """Also where a reboot would have been possible, and nobody came."""
    stage = Stage(strategies)
    stage.tell(RankLost(0, 3, "killed by signal 9"))
    stage.report(11, 0, 1, 2)
    stage.tick(25)
    sources = {rank for order in stage.orders if order.kind in (K.WRITE_PART, K.STAGE_SHARDS) for rank in [order.rank]}
    assert sources == {0, 1}
    assert (stage.done["write_part"], stage.done["publish"], stage.done["exit"]) == (1, 1, 3)
    assert isinstance(stage.ends[-1], Closed) and (stage.ends[-1].outcome, stage.ends[-1].step) == ("dumped", 10)


@pytest.mark.parametrize("kind", ["regroup", "repair", "rollback", "resume"])
def test_u2_a_handler_that_fails_once_costs_one_try(kind: str) -> None:
    stage = Stage()
    stage.failing = {(2, kind)}
    stage.hurt(0)
    assert stage.done["stop"] == 8, "everybody is stopped once more"
    stage.report(11, *range(4))
    (end,) = stage.ends
    assert isinstance(end, Recovered) and end.tries == 2


def test_n12_twenty_thousand_actions_leave_nothing_behind() -> None:
    """One job, one repair after the other: books stay as small as they were, epochs and order ids never come again."""
    stage = Stage(frozenset({"dump", "retry"}))
    sizes = set()
    step = 10
    while sum(stage.done.values()) < 20_000:
        step += 3
        stage.hurt(step % 4, kind=("link", "memory")[step % 2], step=step)
        desk, engine = stage.engine._desk, stage.engine
        sizes.add((len(desk._orders), len(desk._answered), len(engine._reports), len(engine.timeline) < 100))
        stage.now += 1
    assert len(stage.ends) > 800 and all(isinstance(end, Recovered) for end in stage.ends)
    assert len(sizes) == 1, sizes
    ids = [order.id for order in stage.orders]
    assert ids == sorted(set(ids))
    epochs = [stop.epoch for stop in stage.stops]
    assert epochs == sorted(epochs)
    assert len(stage.engine._repairs._count) < 5  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------------ controls


def test_control_a_source_that_is_damaged_itself_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_tft.engine import planning

    share = planning._share

    def anybody(infos: Any, wanted: Any, *more: Any) -> Any:
        return tuple(replace(transfer, source=3 - transfer.source) for transfer in share(infos, wanted, *more))

    monkeypatch.setattr(planning, "_share", anybody)
    with pytest.raises(AssertionError):
        test_u6_two_damaged_ranks_get_their_shards_from_the_other_holders()
