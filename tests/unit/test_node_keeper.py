"""The copies of launchers, against a real store that is killed; and the small decisions about places."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agent_support import HERE, until
from agent_support import PATIENCE as LONG
from torch.distributed import TCPStore

from mindspeed_tft.agent import keeper as module
from mindspeed_tft.agent import places
from mindspeed_tft.agent.keeper import Keeper, Place
from mindspeed_tft.agent.places import JobStore, Keys, Owner, Watch, claim, newest_generation, vacant
from mindspeed_tft.patches import torch_store

KEYS = Keys("run")
PERIOD, PATIENCE = 0.05, 2.0  # of a keeper


class Server:
    """A store in a process of its own, which may be killed and made anew at the same port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(HERE / "programs" / "store_server.py"), str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None and self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def connect(self, seconds: float = PATIENCE) -> Any:
        return torch_store.connect("127.0.0.1", self.port, seconds, patience=PATIENCE)


class LastingServer:
    """A store in this process, for tests in which it does not die."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    def connect(self, seconds: float = PATIENCE) -> Any:
        return torch_store.connect("127.0.0.1", self.port, seconds, patience=PATIENCE)


class Launcher:
    """A launcher's keeper, and what it told its rendezvous."""

    def __init__(
        self, server: Server | LastingServer, node: int, *, replaced: bool = False, pid: int = 0, token: str = "t"
    ) -> None:
        self.server, self.adopted = server, list[bool]()
        self.away = threading.Event()  # the store cannot be reached from here
        self.complete = threading.Event()
        place = Place(KEYS, node, 2, 0, token, replaced, 0, [f"copied/{node}"], [f"journal/{node}"])
        owner = Owner("here", pid or 1000 + node, 0)
        times = {"period": PERIOD, "patience": PATIENCE, "forgotten": PATIENCE}
        self.keeper = Keeper(place, owner, self, **times, complete=self.done)
        self.keeper.start()

    def connect(self, seconds: float) -> Any:
        if self.away.is_set():
            raise OSError("away")
        return self.server.connect(seconds)

    def adopt(self, empty: bool) -> None:
        self.adopted.append(empty)

    def done(self, entries: int) -> None:
        self.entries = entries
        self.complete.set()


@pytest.fixture
def server(free_ports: Callable[[int], list[int]]) -> Iterator[Server]:
    made = Server(free_ports(1)[0])
    yield made
    made.kill()


@pytest.fixture
def store(free_ports: Callable[[int], list[int]]) -> LastingServer:
    return LastingServer(free_ports(1)[0])


def written(server: Server | LastingServer, key: str, value: str, node: int) -> Launcher:
    """A launcher that has copied a journal."""
    connection = server.connect()
    connection.set(KEYS.started(0), "t")
    connection.set(f"copied/{node}", "rank")
    connection.set(key, value)
    launcher = Launcher(server, node)
    launcher.keeper.training_begins()
    assert launcher.complete.wait(LONG)
    return launcher


def test_an_empty_store_is_filled_again(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    launchers = [written(server, f"journal/{node}", f"text {node}", node) for node in (0, 1)]
    assert [each.entries for each in launchers] == [4, 4], "started, begun, copied, journal"
    server.kill()
    until(lambda: capsys.readouterr().err.count("the job's store is gone") > 0, "it is said")
    server.start()
    until(lambda: [each.adopted for each in launchers] == [[True], [True]], "both have come back")
    store = server.connect()
    assert [store.get(f"journal/{node}") for node in (0, 1)] == [b"text 0", b"text 1"]
    assert store.check([KEYS.begun(0), KEYS.started(0), "copied/0", "copied/1"])
    until(lambda: store.check([KEYS.node(0), KEYS.node(1)]), "both hold their places")
    for each in launchers:
        each.keeper.close()


def test_what_is_there_is_not_written_over(server: Server) -> None:
    launcher = written(server, "journal/0", "old", 0)
    launcher.away.set()
    server.kill()
    server.start()
    server.connect().set("journal/0", "new")
    launcher.away.clear()
    until(lambda: launcher.adopted == [True], "it has come back")
    assert server.connect().get("journal/0") == b"new"
    launcher.keeper.close()


def test_control_after_stop_nothing_is_filled(server: Server) -> None:
    launcher = written(server, "journal/0", "text", 0)
    server.kill()
    launcher.keeper.close()
    server.start()
    assert not server.connect().check(["journal/0"]) and launcher.adopted == []


def test_a_place_is_taken_when_its_owner_is_silent(store: LastingServer, capsys: pytest.CaptureFixture[str]) -> None:
    owner = Launcher(store, 0, pid=1)
    until(lambda: store.connect().check([KEYS.node(0)]), "the owner holds it")
    other = Launcher(store, 0, replaced=True, pid=2)
    heard = [""]

    def hears() -> bool:
        heard[0] += capsys.readouterr().err
        return "the place of node 0 is held by here (launcher 1), which lives" in heard[0]

    until(hears, "it has seen that the owner lives")
    assert owner.keeper.holds and not other.keeper.holds
    owner.keeper.close()
    until(lambda: other.keeper.holds, "it holds the place")
    found = places.owner_of(store.connect(), KEYS, 0)
    assert found is not None and found.pid == 2
    assert (heard[0] + capsys.readouterr().err).count("which lives") == 1
    other.keeper.close()


def test_of_those_who_claim_a_place_at_once_one_gets_it(store: LastingServer) -> None:
    connection, rivals = store.connect(), [Owner("here", pid, 0) for pid in (1, 2)]
    assert [claim(connection, KEYS, 0, None, each) for each in rivals] == [True, False]
    assert places.owner_of(connection, KEYS, 0) == rivals[0]
    beat = Owner("here", 1, 0, beat=1)
    assert claim(connection, KEYS, 0, rivals[0], beat)
    assert not claim(connection, KEYS, 0, rivals[0], rivals[1]), "it has shown that it lives, meanwhile"
    assert claim(connection, KEYS, 0, beat, rivals[1])


def test_many_launchers_for_one_place(store: LastingServer) -> None:
    connection = store.connect()
    launchers = [Launcher(store, 0, pid=pid, replaced=True) for pid in range(1, 6)]
    until(lambda: connection.add(KEYS.guests(0), 0) == 4, "all others know that they are guests")
    found = places.owner_of(connection, KEYS, 0)
    (holder,) = [each for each in launchers if each.keeper.holds]
    assert found is not None and launchers[found.pid - 1] is holder
    holder.keeper.farewell()
    assert connection.add(KEYS.guests(0), 0) == 0
    for each in launchers:
        assert each.keeper.over != (each is holder), "who has not finished learns that the job has"
        each.keeper.close()


def test_who_holds_no_place_ends_some_time_after_the_store(server: Server) -> None:
    owner = Launcher(server, 0, pid=1)
    until(lambda: server.connect().check([KEYS.node(0)]), "the owner holds it")
    other = Launcher(server, 0, replaced=True, pid=2)
    until(lambda: server.connect().add(KEYS.guests(0), 0) == 1, "it is a guest")
    server.kill()
    until(lambda: other.keeper.over, "for it the job is over")
    assert not owner.keeper.over
    for each in (owner, other):
        each.keeper.close()


def test_those_who_train_come_back_to_a_store_in_which_others_have_begun(server: Server) -> None:
    survivor = written(server, "journal/0", "text", 0)
    survivor.away.set()
    server.kill()
    server.start()
    server.connect().set(KEYS.started(0), "u")
    stranger = Launcher(server, 0, token="u", pid=1)
    until(lambda: server.connect().check([KEYS.node(0)]), "it has begun")
    assert not stranger.keeper.overtaken and stranger.keeper.holds
    survivor.away.clear()
    until(lambda: survivor.adopted == [True], "it has come back")
    until(lambda: stranger.keeper.overtaken, "who has begun without it knows it")
    until(lambda: not stranger.keeper.holds, "and that the place is not its own")
    assert not survivor.keeper.overtaken and survivor.keeper.holds
    for each in (survivor, stranger):
        each.keeper.close()


def test_a_large_journal_is_not_kept(
    store: LastingServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 10)
    launcher = written(store, "journal/0", "x" * 11, 0)
    assert launcher.entries == 3 and "journal/0 is not kept" in capsys.readouterr().err
    launcher.keeper.close()


def test_nobody_serves_the_store(free_ports: Callable[[int], list[int]]) -> None:
    (port,) = free_ports(1)
    with pytest.raises(torch_store.StoreUnreachable, match=f"nobody serves the job's store at 127.0.0.1:{port}"):
        torch_store.connect("127.0.0.1", port, 0.5, patience=1.0)


def test_generations(store: LastingServer) -> None:
    connection = store.connect()
    assert newest_generation(connection, KEYS, 3) is None
    for number in (0, 2):
        connection.set(KEYS.started(number), "")
    assert newest_generation(connection, KEYS, 3) == 2 and newest_generation(connection, KEYS, 1) == 0
    assert newest_generation(connection, Keys("another run"), 3) is None


def test_vacant() -> None:
    assert [vacant([0, 1], 2), vacant([1], 2), vacant([0, 2], 3), vacant([], 1)] == [None, 0, 1, 0]


def test_a_record_that_was_left_behind_is_no_life() -> None:
    now = 0.0
    watch = Watch(10.0, lambda: now)
    owner = Owner("a", 1, 0, beat=5)
    assert not watch.gone(owner) and not watch.moved
    now = 9.0
    assert not watch.gone(owner) and not watch.moved
    now = 11.0
    assert watch.gone(owner)
    assert not watch.gone(Owner("a", 1, 0, beat=6)) and watch.moved


def test_the_job_s_store_is_told_by_the_environment() -> None:
    store = JobStore("::1", 29500, "tft/none/workers/0", 10.0)
    assert JobStore.from_env({places.ENV_STORE: store.to_json()}) == store
    assert JobStore.from_env({}) is None


def test_places_and_keeper_need_no_torch() -> None:
    code = "import mindspeed_tft.agent.keeper, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, env={**os.environ}).returncode == 0
