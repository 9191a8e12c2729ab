"""Whose word counts, when another process stands for a rank: the controller's books, without a network."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from control_support import DEADLINES, config

from mindspeed_tft.control import codec
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.controller import Controller
from mindspeed_tft.control.seats import HostLink, Seats
from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.incident import EXIT_REBORN
from mindspeed_tft.engine.machine import Engine, State
from mindspeed_tft.observe.incident import Recorder

PATIENCE = 10.0


class Hosts:
    """Seats, hosts that speak to them, and a clock."""

    def __init__(self, reboot: bool = True) -> None:
        self.now = 0.0
        self.events: list[t.Event] = []
        self.warnings: list[str] = []
        self.seats = Seats(PATIENCE, reboot, self.events.append, self.warnings.append)
        self.info: dict[str, t.RankInfo] = {}

    def host(self, name: str) -> HostLink:
        return HostLink(wire.HostHello(host=name))

    def hello(self, link: HostLink, session: str, pid: int, rank: int = 1, parked: bool = False) -> None:
        self.info[session] = t.RankInfo(rank, link.hello.host, pid, "p0", rank, (f"p0/dense/{rank}",))
        says = codec.hello(session, self.info[session], parked=parked)
        self.seats.hear(link, wire.FromRank(rank=rank, session=session, says=says), self.now)

    def report(self, link: HostLink, session: str, seq: int = 1) -> None:
        report = t.RankReport(self.info[session].rank, 7, t.Commit.NONE, t.Update.UNTOUCHED)
        self.says(link, session, codec.says(t.Reported(0.0, report), seq))

    def goodbye(self, link: HostLink, session: str) -> None:
        self.says(link, session, codec.says(t.RankFinished(0.0, self.info[session].rank)))

    def says(self, link: HostLink, session: str, says: wire.RankSays) -> None:
        word = wire.FromRank(rank=self.info[session].rank, session=session, says=says)
        self.seats.hear(link, word, self.now)

    def lost(self, link: HostLink, session: str) -> None:
        info = self.info[session]
        event = t.RankLost(0.0, info.rank, "ended", info.pid)
        self.seats.hear(link, codec.lost_to_wire(event, session, codec.info_to_wire(info)), self.now)

    def cut(self, link: HostLink) -> None:
        self.seats.left(link, self.now)

    def later(self, seconds: float, incident: bool) -> None:
        self.now += seconds
        self.seats.look(self.now, incident)

    def heard(self) -> list[str]:
        """What the engine heard since the last look: by name, and with the pid of the process."""
        told = [
            f"{type(event).__name__} {event.info.pid if isinstance(event, t.Registered) else getattr(event, 'pid', '')}"
            for event in self.events
        ]
        self.events.clear()
        return [text.strip() for text in told]

    @staticmethod
    def told(link: HostLink) -> list[wire.HostOrders]:
        found: list[wire.HostOrders] = []
        while not link.out.empty():
            found.append(link.out.get_nowait())
        return found


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


# ---------------------------------------------------------------------------------- one after the other


def test_a_newcomer_is_heard_and_numbers_its_words_from_one(hosts: Hosts) -> None:
    link = hosts.host("a")
    hosts.hello(link, "old", 10)
    hosts.report(link, "old", seq=5)
    hosts.lost(link, "old")
    hosts.hello(link, "new", 20)
    hosts.report(link, "new", seq=1)
    assert hosts.heard() == ["Registered 10", "Reported", "RankLost 10", "Registered 20", "Reported"]
    assert not hosts.warnings and not hosts.told(link)


def test_words_that_come_again_after_a_reconnect_are_dropped(hosts: Hosts) -> None:
    link = hosts.host("a")
    hosts.hello(link, "old", 10)
    hosts.report(link, "old", seq=5)
    hosts.hello(link, "old", 10)
    hosts.report(link, "old", seq=5)
    assert hosts.heard() == ["Registered 10", "Reported", "Registered 10"]


# ---------------------------------------------------------------------------------- who knocks


def test_a_process_that_knocks_is_parked_named_once_and_not_heard(hosts: Hosts) -> None:
    here, there = hosts.host("a"), hosts.host("b")
    hosts.hello(here, "old", 10)
    for _ in range(2):  # its relay reconnects
        hosts.hello(there, "new", 10)  # the same pid, of another host
        hosts.report(there, "new")
        hosts.goodbye(there, "new")
    hosts.report(here, "old")
    assert hosts.heard() == ["Registered 10", "Reported"]
    text = "process 10 on host a has its place and lives"
    assert hosts.warnings == [f"rank 1: process 10 on host b is parked: {text}"]
    parked = wire.HostOrders(parked=wire.Parked(rank=1, session="new", reason=text))
    assert hosts.told(there) == [parked, parked]
    assert not hosts.told(here)


def test_the_first_that_still_lives_takes_the_place_of_who_is_lost(hosts: Hosts) -> None:
    here = hosts.host("a")
    spares = [hosts.host(name) for name in "bcde"]
    hosts.hello(here, "old", 10)
    for pid, link in enumerate(spares, 20):
        hosts.hello(link, f"spare {pid}", pid)
        hosts.told(link)
    hosts.lost(spares[0], "spare 20")  # it died
    hosts.cut(spares[1])  # it is out of reach
    hosts.lost(here, "old")
    assert hosts.heard() == ["Registered 10", "RankLost 10", "Registered 22"]
    assert hosts.told(spares[2]) == [wire.HostOrders(admitted=wire.Admitted(rank=1, session="spare 22"))]
    hosts.report(spares[2], "spare 22")
    hosts.report(spares[3], "spare 23")
    assert hosts.heard() == ["Reported"]
    hosts.hello(spares[1], "spare 21", 21)  # back, and still the next one
    hosts.lost(spares[2], "spare 22")
    assert hosts.heard() == ["RankLost 22", "Registered 21"]


def test_who_has_finished_is_not_replaced(hosts: Hosts) -> None:
    here, there = hosts.host("a"), hosts.host("b")
    hosts.hello(here, "old", 10)
    hosts.goodbye(here, "old")
    hosts.hello(there, "new", 20)
    hosts.hello(here, "old", 10)  # its relay was started again
    hosts.lost(here, "old")
    assert hosts.heard() == ["Registered 10", "RankFinished", "Registered 10"]
    assert "has finished training" in hosts.warnings[0]


def test_at_the_end_of_the_job_nobody_waits(hosts: Hosts) -> None:
    here, there = hosts.host("a"), hosts.host("b")
    hosts.hello(here, "old", 10)
    hosts.hello(there, "new", 20)
    hosts.told(there)
    hosts.seats.close("finished")
    hosts.hello(there, "late", 21)
    reason = "it is not needed, the job has ended (finished)"
    assert hosts.told(there) == [
        wire.HostOrders(dismissed=wire.Dismissed(rank=1, session=session, code=0, reason=reason))
        for session in ("new", "late")
    ]
    hosts.hello(here, "old", 10)
    assert hosts.heard() == ["Registered 10", "Registered 10"], "who belongs to the job is still heard"


def test_who_was_parked_stays_so_where_nothing_is_known_of_its_rank(hosts: Hosts) -> None:
    """Every controller was lost, and the relay of the spare is the first that finds the new one."""
    here, there = hosts.host("a"), hosts.host("b")
    hosts.hello(there, "new", 20, parked=True)
    assert hosts.told(there)[0].WhichOneof("body") == "parked"
    hosts.later(PATIENCE - 1, incident=False)
    assert not hosts.heard()
    hosts.hello(here, "old", 10)
    hosts.later(2 * PATIENCE, incident=False)
    assert hosts.heard() == ["Registered 10"]


def test_a_place_that_nobody_claims_is_given_to_who_waits(hosts: Hosts) -> None:
    there = hosts.host("b")
    hosts.hello(there, "new", 20, parked=True)
    hosts.later(PATIENCE, incident=False)
    assert hosts.heard() == ["Registered 20"]
    hosts.told(there)
    hosts.hello(there, "new", 20, parked=True)  # it reconnected before it was told
    assert [message.WhichOneof("body") for message in hosts.told(there)] == ["admitted"]


# ---------------------------------------------------------------------------------- hosts that are lost


def test_a_missing_stream_alone_is_no_loss(hosts: Hosts) -> None:
    here, there = hosts.host("a"), hosts.host("b")
    hosts.hello(here, "zero", 10, rank=0)
    hosts.hello(there, "one", 11)
    hosts.cut(there)
    hosts.later(100 * PATIENCE, incident=False)
    assert hosts.heard() == ["Registered 10", "Registered 11"]


def test_in_an_incident_a_host_that_does_not_come_back_is_lost(hosts: Hosts) -> None:
    here, there = hosts.host("a"), hosts.host("b")
    hosts.hello(here, "zero", 10, rank=0)
    for rank in (1, 2, 3, 4):
        hosts.hello(there, f"rank {rank}", 10 + rank, rank=rank)
    hosts.lost(there, "rank 3")
    hosts.goodbye(there, "rank 4")
    hosts.heard()
    hosts.cut(there)
    hosts.later(PATIENCE - 0.1, incident=True)
    assert not hosts.heard()
    hosts.later(0.1, incident=True)
    hosts.later(PATIENCE, incident=True)
    assert hosts.events[0] == t.RankLost(PATIENCE, 1, "its host b is gone, not heard for 10.0 s", 11)
    assert hosts.heard() == ["RankLost 11", "RankLost 12"]


def test_a_relay_that_is_started_again_in_time_loses_nobody(hosts: Hosts) -> None:
    there, again = hosts.host("b"), hosts.host("b")
    hosts.hello(there, "one", 11, rank=1)
    hosts.hello(there, "two", 12, rank=2)
    hosts.cut(there)
    hosts.later(PATIENCE / 2, incident=True)
    hosts.hello(again, "one", 11, rank=1)
    hosts.heard()
    hosts.later(PATIENCE, incident=True)
    (event,) = hosts.events  # rank 2 died together with the relay: nobody saw it
    assert isinstance(event, t.RankLost)
    assert (event.rank, event.message) == (2, "it did not come back after the relay of its host b ended, 15.0 s ago")


def test_a_process_that_knocks_from_elsewhere_tells_of_a_lost_host(hosts: Hosts) -> None:
    lost, cut, spare = hosts.host("b"), hosts.host("c"), hosts.host("d")
    hosts.hello(lost, "one", 11, rank=1)
    hosts.hello(lost, "two", 12, rank=2)
    hosts.hello(cut, "three", 13, rank=3)
    hosts.heard()
    hosts.cut(lost)
    hosts.cut(cut)
    hosts.later(PATIENCE / 2, incident=False)
    hosts.hello(spare, "new", 21, rank=1)
    hosts.later(PATIENCE / 4, incident=False)
    assert not hosts.heard()
    hosts.later(PATIENCE / 4, incident=False)
    assert hosts.heard() == ["RankLost 11", "Registered 21", "RankLost 12"], "and not of host c"
    hosts.hello(spare, "newer", 22, rank=2)
    assert hosts.heard() == ["Registered 22"]


def test_a_spare_that_was_there_before_tells_nothing(hosts: Hosts) -> None:
    there, spare = hosts.host("b"), hosts.host("d")
    hosts.hello(there, "one", 11)
    hosts.hello(spare, "new", 21)
    hosts.now = 1.0
    hosts.cut(there)
    hosts.hello(spare, "new", 21)  # its relay reconnects
    hosts.later(PATIENCE, incident=False)
    assert hosts.heard() == ["Registered 11"]

    other = Hosts()  # takes over, and hears of the spare first
    other.seats.restore(hosts.seats.snapshot(), 0.0)
    other.hello(spare, "new", 21, parked=True)
    other.later(PATIENCE, incident=False)
    assert other.heard() == ["Registered 11"]

    hosts.hello(spare, "newer", 22)
    hosts.later(0.0, incident=False)
    assert hosts.heard() == ["RankLost 11", "Registered 21"]


def test_silence_counts_from_the_last_word(tmp_path: Path) -> None:
    """A host that lost its power says no goodbye: its stream ends when it has been silent for as long already."""
    heard: list[t.Event] = []

    class Listener:
        def handle(self, event: t.Event) -> list[t.Action]:
            heard.append(event)
            return []

        def incident(self) -> dict[str, object]:
            return {}

    for silent in (False, True):
        heard.clear()
        controller = Controller(config(tmp_path, nnodes=2), Listener(), Recorder(tmp_path, "test"))
        link = HostLink(wire.HostHello(host="b"))
        hello = codec.hello("one", t.RankInfo(1, "b", 11, "p0", 1, ()))
        controller.hear(link, wire.HostSays(ranks=[wire.FromRank(rank=1, session="one", says=hello)]))
        controller._feed(t.FaultSeen(0.0, 0, "peer", "connection closed", False))
        controller.left(link, silent)
        controller._tick(time.monotonic())
        assert any(isinstance(event, t.RankLost) for event in heard) is silent


# ---------------------------------------------------------------------------------- who comes back


def test_who_was_out_of_reach_and_replaced_is_sent_off(hosts: Hosts) -> None:
    here, there = hosts.host("a"), hosts.host("b")
    hosts.hello(here, "old", 10)
    hosts.cut(here)
    hosts.hello(there, "new", 20)
    hosts.later(PATIENCE, incident=False)
    assert hosts.heard() == ["Registered 10", "RankLost 10", "Registered 20"]
    hosts.warnings.clear()
    for _ in range(2):
        hosts.hello(here, "old", 10)
        hosts.report(here, "old")
        hosts.lost(here, "old")
    assert not hosts.heard()
    why = "process 20 on host b took its place while it was out of reach"
    dismissed = wire.HostOrders(dismissed=wire.Dismissed(rank=1, session="old", code=0, reason=why))
    assert hosts.told(here) == [dismissed, dismissed]
    assert hosts.warnings == [f"rank 1: process 10 on host a is sent off: {why}"]
    hosts.report(there, "new")
    assert hosts.heard() == ["Reported"]


@pytest.mark.parametrize("reboot", [True, False])
def test_who_counts_as_lost_comes_back_as_another_process(reboot: bool) -> None:
    hosts = Hosts(reboot)
    here = hosts.host("a")
    hosts.hello(here, "old", 10)
    hosts.cut(here)
    hosts.later(PATIENCE, incident=True)
    hosts.heard()
    hosts.hello(here, "old", 10)
    if not reboot:  # a dump is under way: the engine knows what to do with it
        assert hosts.heard() == ["Registered 10"]
        return
    (message,) = hosts.told(here)
    assert (message.dismissed.code, message.dismissed.session) == (EXIT_REBORN, "old")
    assert not hosts.heard()
    hosts.lost(here, "old")
    hosts.hello(here, "new", 20)
    assert hosts.heard() == ["Registered 20"]


# ---------------------------------------------------------------------------------- another controller


def successor(hosts: Hosts, ranks: int) -> tuple[Engine, Hosts]:
    """A controller that takes over what `hosts` knows, with a real engine."""
    engine = Engine(DEADLINES, ranks, epoch=3, strategies=frozenset({"recover", "dump"}))
    other = Hosts()
    other.now = hosts.now
    other.seats.restore(hosts.seats.snapshot(), hosts.now)
    for event in other.events:
        engine.handle(event)
    return engine, other


def test_another_controller_knows_who_is_there(hosts: Hosts) -> None:
    link = hosts.host("a")
    for rank in range(3):
        hosts.hello(link, f"rank {rank}", 10 + rank, rank=rank)
    hosts.goodbye(link, "rank 2")
    engine, other = successor(hosts, 3)
    assert engine.state is State.TRAINING
    assert other.heard() == ["Registered 10", "Registered 11", "Registered 12", "RankFinished"]
    again = other.host("a")
    other.hello(again, "rank 0", 10, rank=0)
    other.hello(again, "stranger", 99, rank=1)
    assert other.heard() == ["Registered 10"]
    other.later(PATIENCE, incident=True)
    assert other.heard() == ["RankLost 11", "Registered 99"]


def test_another_controller_knows_who_stands_for_whom(hosts: Hosts) -> None:
    """In the middle of an incident: a newcomer has none of the state, and must not be taken for its predecessor."""
    link = hosts.host("a")
    for rank in range(2):
        hosts.hello(link, f"rank {rank}", 10 + rank, rank=rank)
    hosts.lost(link, "rank 1")
    for life in ("first", "second"):
        hosts.hello(link, life, 20, rank=1)
        hosts.lost(link, life)
    hosts.hello(link, "third", 21, rank=1)
    engine, other = successor(hosts, 2)
    assert engine.state is State.STOPPING
    assert other.heard() == ["Registered 10", "Registered 11", "RankLost 11", "Registered 21"]
    other.hello(other.host("a"), "second", 20, rank=1)
    assert not other.heard(), "it had its time"

    hosts.seats.recovered()  # control: after the incident it is like any other
    engine, other = successor(hosts, 2)
    assert engine.state is State.TRAINING
    assert other.heard() == ["Registered 10", "Registered 21"]


def test_only_changes_are_told(hosts: Hosts) -> None:
    link = hosts.host("a")
    for rank in range(3):
        hosts.hello(link, f"rank {rank}", 10 + rank, rank=rank)
    known = hosts.seats.version
    assert len(hosts.seats.snapshot()) == 3
    assert not hosts.seats.snapshot(known)
    hosts.report(link, "rank 2")
    hosts.hello(link, "rank 2", 12, rank=2)
    assert hosts.seats.version == known, "nothing that another controller would not hear by itself"
    hosts.lost(link, "rank 1")
    (state,) = hosts.seats.snapshot(known)
    assert (state.rank, state.lost, state.version) == (1, "ended", hosts.seats.version)


# ---------------------------------------------------------------------------------- what is told


def test_stops_reach_ranks_of_a_relay_that_was_started_again(hosts: Hosts) -> None:
    """The stream of the relay before it has not ended yet."""
    before, after = hosts.host("a"), hosts.host("a")
    hosts.hello(before, "zero", 10, rank=0)
    hosts.hello(before, "one", 11)
    hosts.hello(after, "one", 11)
    assert hosts.seats.by_host((0, 1, 2)) == {before: [0], after: [1]}
    hosts.cut(before)
    assert hosts.seats.by_host((0, 1, 2)) == {after: [1]}
    hosts.seats.tell(1, wire.HostOrders(kill=wire.Kill(rank=1)))
    hosts.seats.tell(0, wire.HostOrders(kill=wire.Kill(rank=0)))
    assert len(hosts.told(after)) == 1 and not hosts.told(before)


def test_a_relay_speaks_for_its_own_host_only() -> None:
    """Whose certificate names host b cannot register, lose, or speak for a process of host a."""
    hosts = Hosts()
    a, b = hosts.host("a"), hosts.host("b")
    hosts.hello(a, "one", 11)
    assert hosts.heard() == ["Registered 11"]
    hosts.report(b, "one", seq=1)
    hosts.goodbye(b, "one")
    hosts.lost(b, "one")
    assert hosts.heard() == []
    assert [text for text in hosts.warnings if "rank 1 is process 11 on host a" in text], hosts.warnings
    hosts.report(a, "one", seq=1)  # and nothing of that was counted as said
    assert hosts.heard() == ["Reported"]


def test_a_process_that_says_it_is_on_another_host_is_refused() -> None:
    hosts = Hosts()
    b = hosts.host("b")
    info = t.RankInfo(1, "a", 66, "p0", 1, ("p0/dense/1",))
    for _ in range(2):
        hosts.seats.hear(b, wire.FromRank(rank=1, session="forged", says=codec.hello("forged", info)), hosts.now)
    event = t.RankLost(0.0, 2, "ended", 67)
    gone = codec.lost_to_wire(event, "forged too", codec.info_to_wire(t.RankInfo(2, "a", 67, "p0", 2, ())))
    hosts.seats.hear(b, gone, hosts.now)
    assert hosts.heard() == []
    assert hosts.seats.snapshot() == []
    assert hosts.told(b) == []
    first, second = hosts.warnings
    assert first == (
        "refused a word of host b: it says that rank 1 runs on host a; the rank and the relay beside it have to call "
        "their host by one name (`uname -n`)"
    )
    assert "rank 2" in second


def test_the_loss_of_a_rank_is_told_under_its_own_name() -> None:
    """Else a host would seat, and lose, whatever rank it likes: also one that the job does not have."""
    hosts = Hosts()
    a, b = hosts.host("a"), hosts.host("b")
    hosts.hello(a, "one", 11, rank=1)
    hosts.heard()
    for claimed in (1, 10**6, -1):
        info = codec.info_to_wire(t.RankInfo(claimed, "b", 66, "p0", 1, ("p0/dense/1",)))
        forged = codec.lost_to_wire(t.RankLost(0.0, 2, "ended", 66), "forged", info)
        with pytest.raises(codec.WireError, match=f"loss of rank {claimed} under the name of rank 2"):
            hosts.seats.hear(b, forged, hosts.now)
    bare = codec.lost_to_wire(t.RankLost(0.0, 2, "ended", 66), "forged")
    with pytest.raises(codec.WireError, match="of which nothing is known"):
        hosts.seats.hear(b, bare, hosts.now)
    nowhere = t.RankInfo(2, "", 66, "p0", 2, ("p0/dense/2",))
    hosts.seats.hear(b, wire.FromRank(rank=2, session="x", says=codec.hello("x", nowhere)), hosts.now)
    assert hosts.heard() == [] and [state.rank for state in hosts.seats.snapshot()] == [1]
    assert "it says that rank 2 runs on host (none)" in hosts.warnings[0]
    hosts.report(a, "one", seq=1)
    hosts.seats.hear(a, codec.lost_to_wire(t.RankLost(0.0, 1, "ended", 11), "one"), hosts.now)  # it is known by then
    assert hosts.heard() == ["Reported", "RankLost 11"]


def test_the_place_of_a_rank_that_lives_is_not_for_another_host() -> None:
    hosts = Hosts()
    a, b = hosts.host("a"), hosts.host("b")
    hosts.hello(a, "one", 11)
    hosts.hello(b, "two", 22)  # it knocks, and waits
    assert hosts.heard() == ["Registered 11"]
    assert [message.WhichOneof("body") for message in hosts.told(b)] == ["parked"]
    hosts.report(b, "two")
    assert hosts.heard() == []
    assert any("process 22 on host b is parked" in text for text in hosts.warnings)


def test_a_parked_process_that_dies_before_anybody_claims_its_place_is_forgotten() -> None:
    hosts = Hosts()
    spare = hosts.host("spare")
    hosts.hello(spare, "s", 7, parked=True)
    hosts.lost(spare, "s")
    hosts.later(2 * PATIENCE, incident=False)
    assert hosts.heard() == []
