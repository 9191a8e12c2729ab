"""Whose word counts, when another process stands for a rank: the controller's books, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_support import config

from mindspeed_tft.control import codec
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.controller import Controller, HostLink
from mindspeed_tft.engine import types as t
from mindspeed_tft.observe.incident import Recorder


class Listener:
    """An engine that writes down what it hears, and stops all ranks with every loss."""

    def __init__(self) -> None:
        self.heard: list[t.Event] = []

    def handle(self, event: t.Event) -> list[t.Action]:
        self.heard.append(event)
        return [t.Stop(len(self.heard), (0, 1), "lost")] if isinstance(event, t.RankLost) else []

    def incident(self) -> dict[str, object]:
        return {}


class Hosts:
    """A controller, and hosts that speak to it."""

    def __init__(self, tmp: Path) -> None:
        self.engine = Listener()
        self.controller = Controller(config(tmp, nnodes=2), self.engine, Recorder(tmp, "test"))
        self.info: dict[str, t.RankInfo] = {}

    def host(self, node: int) -> HostLink:
        link = HostLink(wire.HostHello(host=f"host{node}", node_rank=node))
        self.controller._hosts[node] = link
        return link

    def hello(self, link: HostLink, session: str, pid: int, rank: int = 1) -> None:
        self.info[session] = t.RankInfo(rank, link.hello.host, pid, "p0", rank, ())
        says = codec.hello(session, self.info[session])
        self.say(link, wire.FromRank(rank=rank, session=session, says=says))

    def report(self, link: HostLink, session: str, seq: int = 1) -> None:
        report = t.RankReport(1, 7, t.Commit.NONE, t.Update.UNTOUCHED)
        self.say(link, wire.FromRank(rank=1, session=session, says=codec.says(t.Reported(0.0, report), seq)))

    def lost(self, link: HostLink, session: str) -> None:
        info = self.info[session]
        event = t.RankLost(0.0, info.rank, "ended", info.pid)
        self.say(link, codec.lost_to_wire(event, session, codec.info_to_wire(info)))

    def say(self, link: HostLink, word: wire.FromRank) -> None:
        self.controller._hear(link, wire.HostSays(ranks=[word]))

    def heard(self) -> list[str]:
        return [type(event).__name__ for event in self.engine.heard]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


def test_a_newcomer_is_heard_and_numbers_its_words_from_one(hosts: Hosts) -> None:
    link = hosts.host(0)
    hosts.hello(link, "old", 10)
    hosts.report(link, "old", seq=5)
    hosts.lost(link, "old")
    hosts.hello(link, "new", 20)
    hosts.report(link, "new", seq=1)
    assert hosts.heard() == ["Registered", "Reported", "RankLost", "Registered", "Reported"]


def test_a_late_word_of_the_loss_does_not_count_against_the_newcomer(hosts: Hosts) -> None:
    here, there = hosts.host(0), hosts.host(1)
    hosts.hello(here, "old", 10)
    hosts.hello(there, "new", 10)  # the same pid, of another host
    hosts.lost(here, "old")
    hosts.report(here, "old")
    assert hosts.heard() == ["Registered", "Registered"]


def test_who_was_out_of_reach_and_replaced_does_not_come_back(hosts: Hosts) -> None:
    here, there = hosts.host(0), hosts.host(1)
    hosts.hello(here, "old", 10)
    hosts.hello(there, "new", 20)
    hosts.hello(here, "old", 10)
    hosts.report(here, "old")
    hosts.report(there, "new")
    assert hosts.heard() == ["Registered", "Registered", "Reported"]


def test_stops_reach_ranks_of_a_relay_that_was_started_again(hosts: Hosts) -> None:
    """The stream of the relay before it has not ended yet."""
    before = hosts.host(0)
    hosts.hello(before, "zero", 10, rank=0)
    hosts.hello(before, "one", 11)
    after = hosts.host(0)
    hosts.hello(after, "new", 21)
    hosts.lost(after, "new")
    assert [list(link.out.get_nowait().stop.ranks) for link in (before, after)] == [[0], [1]]
    hosts.controller._hosts.pop(0)
    hosts.controller._feed(t.RankLost(0.0, 0, "ended"))
    assert not before.out.empty()
