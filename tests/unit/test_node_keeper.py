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

from mindspeed_tft.agent import keeper as module
from mindspeed_tft.agent import places
from mindspeed_tft.agent.keeper import Keeper, Place
from mindspeed_tft.agent.places import JobStore, Keys, Owner, Watch, newest_generation, vacant
from mindspeed_tft.patches import torch_store

KEYS = Keys("run")
PERIOD, PATIENCE = 0.05, 2.0


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


class Launcher:
    """A launcher's keeper, and what it told its rendezvous."""

    def __init__(self, server: Server, node: int, *, replaced: bool = False, pid: int = 0) -> None:
        self.connect, self.adopted = server.connect, list[bool]()
        self.complete = threading.Event()
        place = Place(KEYS, node, 2, 0, replaced, 0, [f"copied/{node}"], [f"journal/{node}"])
        self.keeper = Keeper(
            place, Owner("here", pid or 1000 + node, 0), self, period=PERIOD, patience=PATIENCE, complete=self.done
        )
        self.keeper.start()

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


def written(server: Server, key: str, value: str, node: int) -> Launcher:
    """A launcher that has copied a journal."""
    store = server.connect()
    store.set(KEYS.started(0), "")
    store.set(f"copied/{node}", "rank")
    store.set(key, value)
    launcher = Launcher(server, node)
    launcher.keeper.training_begins()
    assert launcher.complete.wait(PATIENCE)
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
    server.kill()
    server.start()
    server.connect().set("journal/0", "new")
    until(lambda: launcher.adopted == [True], "it has come back")
    assert server.connect().get("journal/0") == b"new"
    launcher.keeper.close()


def test_control_after_stop_nothing_is_filled(server: Server) -> None:
    launcher = written(server, "journal/0", "text", 0)
    server.kill()
    launcher.keeper.close()
    server.start()
    assert not server.connect().check(["journal/0"]) and launcher.adopted == []


def test_a_place_is_taken_when_its_owner_is_silent(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    owner, other = Launcher(server, 0, pid=1), Launcher(server, 0, replaced=True, pid=2)
    until(lambda: other.keeper.spare, "it has seen that the owner lives")
    owner.keeper.close()
    until(lambda: not other.keeper.spare, "it holds the place")
    found = places.owner_of(server.connect(), KEYS, 0)
    assert found is not None and found.pid == 2 and not owner.keeper.spare
    assert capsys.readouterr().err.count("the place of node 0 is held by here (launcher 1), which lives") == 1
    other.keeper.close()


def test_a_large_journal_is_not_kept(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 10)
    launcher = written(server, "journal/0", "x" * 11, 0)
    assert launcher.entries == 3 and "journal/0 is not kept" in capsys.readouterr().err
    launcher.keeper.close()


def test_nobody_serves_the_store(free_ports: Callable[[int], list[int]]) -> None:
    (port,) = free_ports(1)
    with pytest.raises(torch_store.StoreUnreachable, match=f"nobody serves the job's store at 127.0.0.1:{port}"):
        torch_store.connect("127.0.0.1", port, 0.5, patience=1.0)


def test_generations(server: Server) -> None:
    store = server.connect()
    assert newest_generation(store, KEYS, 3) is None
    for number in (0, 2):
        store.set(KEYS.started(number), "")
    assert newest_generation(store, KEYS, 3) == 2 and newest_generation(store, KEYS, 1) == 0
    assert newest_generation(store, Keys("another run"), 3) is None


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
