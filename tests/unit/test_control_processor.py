"""The rank's end against a relay that the test plays itself: a plain socket, no other process."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from control_support import until

from mindspeed_tft.control import codec, framing
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.processor import Processor
from mindspeed_tft.control.pulse import pulse
from mindspeed_tft.control.relay import keep, keep_told
from mindspeed_tft.engine import types as t

DEADLINES = t.Deadlines(heartbeat=0.05, heartbeat_lost=5.0, stop=1.0, order=1.0, dump=2.0, exit=1.0)
INFO = t.RankInfo(3, "here", os.getpid(), "tp0-pp0", 1, ("tp0-pp0/dense/0",))


class FakeRelay:
    """Listens, takes one connection at a time, reads and writes messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen(8)
        self.listener.settimeout(5)
        self.sock: socket.socket | None = None
        self.frames = framing.FrameReader()
        self.pending: list[wire.RankSays] = []

    def accept(self, protected: bool = True) -> wire.Hello:
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(5)
        self.frames, self.pending = framing.FrameReader(), []
        hello = self.read("hello").hello
        self.send(welcome=wire.Welcome(protected=protected))
        return hello

    def read(self, kind: str, seconds: float = 5.0) -> wire.RankSays:
        """The next message of this kind; those of other kinds before it are passed over."""
        assert self.sock is not None
        end = time.monotonic() + seconds
        while True:
            while self.pending:
                message = self.pending.pop(0)
                if message.WhichOneof("body") == kind:
                    return message
            assert time.monotonic() < end, f"no {kind} within {seconds} s"
            data = self.sock.recv(65536)
            assert data, "closed"
            self.pending += [codec.parse(wire.RankSays, frame) for frame in self.frames.feed(data)]

    def kinds(self, last: str) -> list[str]:
        """The kinds of all messages up to the next one of kind `last`."""
        assert self.sock is not None
        found: list[str] = []
        while last not in found:
            while not self.pending:
                self.pending += [codec.parse(wire.RankSays, frame) for frame in self.frames.feed(self.sock.recv(65536))]
            found.append(str(self.pending.pop(0).WhichOneof("body")))
        return found

    def send(self, **body: object) -> None:
        assert self.sock is not None
        self.sock.sendall(framing.pack(wire.HostOrders(**body)))  # type: ignore[arg-type]

    def stop(self, epoch: int, reason: str = "rank 1 is gone") -> None:
        self.send(stop=codec.stop_to_wire(t.Stop(epoch, (3,), reason)))

    def order(self, number: int, kind: t.OrderKind = t.OrderKind.FINISH_UPDATE) -> None:
        self.send(order=codec.order_to_wire(t.Order(number, 3, kind, {"step": 7})))

    def drop(self) -> None:
        assert self.sock is not None
        self.sock.close()

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
        self.listener.close()


@pytest.fixture
def relay() -> Iterator[FakeRelay]:
    with tempfile.TemporaryDirectory(prefix="tft") as directory:
        fake = FakeRelay(Path(directory) / "relay.sock")
        yield fake
        fake.close()


class Stops:
    """A stop handler that remembers its calls, and can hang in the first one."""

    def __init__(self, hang: bool = False) -> None:
        self.calls: list[tuple[int, str]] = []
        self.threads: list[str] = []
        self.go_on = threading.Event()
        if not hang:
            self.go_on.set()

    def __call__(self, epoch: int, reason: str) -> None:
        self.calls.append((epoch, reason))
        self.threads.append(threading.current_thread().name)
        self.go_on.wait(10)


@contextlib.contextmanager
def started(
    relay: FakeRelay,
    on_stop: Stops | None = None,
    deadlines: t.Deadlines = DEADLINES,
    waits: Callable[[], bool] = lambda: False,
) -> Iterator[Processor]:
    processor = Processor(relay.path, deadlines, on_stop or Stops(), waits=waits)
    hello = threading.Thread(target=relay.accept)
    hello.start()
    try:
        assert processor.start(INFO, 5.0)
        hello.join(5)
        yield processor
    finally:
        processor.close()


def test_it_registers_and_beats_with_the_latest_stamps(relay: FakeRelay) -> None:
    with started(relay) as processor:
        assert processor.connected
        processor.step, processor.phase = 12, "backward"
        until(lambda: relay.read("heartbeat").heartbeat.step == 12, 2)
        beat = relay.read("heartbeat").heartbeat
        assert beat.pulse
        beat.pulse = 0
        assert beat == wire.Heartbeat(rank=3, step=12, phase="backward")


def test_heartbeats_tell_whether_the_rank_waits_and_whether_its_main_thread_gets_on(relay: FakeRelay) -> None:
    waits = [False]
    with started(relay, waits=lambda: waits[0]):
        assert not relay.read("heartbeat").heartbeat.waiting
        waits[0] = True
        until(lambda: relay.read("heartbeat").heartbeat.waiting, 2)


def test_the_pulse_is_that_of_the_main_thread() -> None:
    first = pulse()
    assert first != pulse(), "the main thread has got on"
    done = threading.Event()

    def stands() -> None:
        until(lambda: pulse() == pulse(), 5, "a pulse that stays")
        done.set()

    threading.Thread(target=stands).start()
    assert done.wait(6)  # in which the main thread does not get on


def test_a_stop_runs_the_handler_in_the_worker_thread(relay: FakeRelay) -> None:
    stops = Stops()
    with started(relay, stops) as processor:
        assert not processor.stopping
        relay.stop(1)
        assert processor.wait_stop(2.0)
        assert (processor.stopping, processor.stop_epoch) == (True, 1)
        until(lambda: stops.calls, 2)
        relay.stop(1)  # said again after a reconnect somewhere: no second abort
        relay.stop(2, "rank 0 is gone too")
        until(lambda: len(stops.calls) == 2, 2)
        assert stops.calls == [(1, "rank 1 is gone"), (2, "rank 0 is gone too")]
        assert set(stops.threads) == {"tft-processor-worker"}


def test_a_hanging_handler_holds_neither_heartbeats_nor_orders_nor_the_exit(relay: FakeRelay) -> None:
    stops = Stops(hang=True)
    with started(relay, stops) as processor:
        relay.stop(1)
        until(lambda: stops.calls, 2)
        relay.read("heartbeat")
        relay.read("heartbeat")
        relay.order(5)
        order = processor.next_order(2.0)
        assert order is not None and order.id == 5
        begin = time.monotonic()
        processor.close()
        assert time.monotonic() - begin < 1.5
        stops.go_on.set()


def test_a_handler_that_fails_is_told(relay: FakeRelay, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Stops):
        def __call__(self, epoch: int, reason: str) -> None:
            raise RuntimeError("no such communicator")

    with started(relay, Failing()):
        relay.stop(1)
        fault = relay.read("fault").fault
        assert (fault.kind, fault.own, fault.rank) == ("handler", False, 3)
        assert "no such communicator" in fault.message
        assert "no such communicator" in caplog.text


def test_orders_come_once_and_answers_go_up(relay: FakeRelay) -> None:
    with started(relay) as processor:
        relay.order(7)
        relay.order(7)
        relay.order(8, t.OrderKind.EXIT)
        first, second = processor.next_order(2.0), processor.next_order(2.0)
        assert first == t.Order(7, 3, t.OrderKind.FINISH_UPDATE, {"step": 7})
        assert second is not None and (second.id, second.kind) == (8, t.OrderKind.EXIT)
        assert processor.next_order(0.05) is None
        processor.order_done(7, False, "no shard", {"why": "dirty"})
        done = relay.read("done").done
        assert (done.rank, done.order, done.ok, done.message) == (3, 7, False, "no shard")
        assert dict(done.result) == {"why": "dirty"}


def test_a_new_stop_voids_orders_that_nobody_began(relay: FakeRelay) -> None:
    with started(relay) as processor:
        relay.stop(1)
        relay.order(1)
        relay.order(2, t.OrderKind.EXIT)
        relay.stop(2)
        done = relay.read("done").done
        assert (done.order, done.ok) == (1, False)
        assert "superseded" in done.message
        order = processor.next_order(1.0)
        assert order is not None and order.kind is t.OrderKind.EXIT


def test_a_parked_process_waits_and_says_everything_again_when_it_is_admitted(
    relay: FakeRelay, caplog: pytest.LogCaptureFixture
) -> None:
    with started(relay) as processor:
        processor.report(t.RankReport(3, 0, t.Commit.NONE, t.Update.UNTOUCHED))
        relay.read("report")
        for _ in range(2):
            relay.send(parked=wire.Parked(rank=3, session="s", reason="process 7 on host b has its place and lives"))
        until(lambda: processor.parked, 2)
        assert processor.connected and not processor.stopping
        relay.drop()
        assert relay.accept().parked
        relay.read("report")
        relay.send(admitted=wire.Admitted(rank=3, session="s"))
        relay.read("report")
        assert not processor.parked
        assert caplog.text.count("waits as a spare: process 7 on host b has its place and lives") == 1
        assert caplog.text.count("takes its place now") == 1
        relay.drop()
        assert not relay.accept().parked


@pytest.mark.parametrize("what", ["stop", "order"])
def test_who_is_told_to_do_something_is_not_parked_any_more(relay: FakeRelay, what: str) -> None:
    """Another controller does not know that it was."""
    with started(relay) as processor:
        relay.send(parked=wire.Parked(rank=3, session="s", reason="taken"))
        until(lambda: processor.parked, 2)
        relay.stop(1) if what == "stop" else relay.order(1)
        until(lambda: not processor.parked, 2)


def test_a_dismissed_process_comes_out_and_is_ordered_to_leave_once(relay: FakeRelay) -> None:
    """Also in the middle of training: it was out of reach while another one took its place."""
    stops = Stops()
    with started(relay, stops) as processor:
        relay.stop(1)
        relay.order(1)
        for _ in range(2):
            relay.send(dismissed=wire.Dismissed(rank=3, session="s", code=78, reason="it counts as lost"))
        assert processor.wait_stop(2.0, after=1)
        order = processor.next_order(2.0)
        assert order is not None
        assert (order.kind, order.payload["code"]) == (t.OrderKind.EXIT, 78)
        assert order.payload["words"] == "rank 3 leaves: it counts as lost"
        assert processor.next_order(0.1) is None
        until(lambda: len(stops.calls) == 2, 2)
        assert stops.calls[1] == (2, "it counts as lost")


def test_who_it_is_tells_what_it_has_and_what_it_heard(relay: FakeRelay) -> None:
    processor = Processor(relay.path, DEADLINES, Stops())
    hello: list[wire.Hello] = []
    thread = threading.Thread(target=lambda: hello.append(relay.accept()))
    thread.start()
    try:
        assert processor.start(INFO, 5.0, bare=True)
        thread.join(5)
        assert (hello[0].bare, hello[0].epoch) == (True, 0)
        relay.stop(4)
        assert processor.wait_stop(2.0)
        relay.drop()
        again = relay.accept()
        assert (again.bare, again.epoch, again.session) == (True, 4, hello[0].session)
        processor.resumed()
        after = relay.read("hello").hello  # a controller that comes later must not take it for an empty process
        assert (after.bare, after.epoch, after.session) == (False, 4, hello[0].session)
        processor.resumed()
        relay.drop()
        assert not relay.accept().bare
    finally:
        processor.close()


def test_after_a_reconnect_everything_that_counts_is_said_again(
    relay: FakeRelay, caplog: pytest.LogCaptureFixture
) -> None:
    with started(relay) as processor:
        processor.fault("exception", "boom", own=True)
        processor.report(t.RankReport(3, 7, t.Commit.NONE, t.Update.UNTOUCHED))
        relay.read("report")
        relay.drop()
        until(lambda: not processor.connected, 2)
        processor.order_done(4, True)  # said while nobody listens
        relay.accept()
        kinds = [relay.read(kind).seq for kind in ("fault", "report", "done")]
        assert kinds == [1, 2, 3]
        until(lambda: processor.connected, 2)
        assert caplog.text.count("FAULT TOLERANCE IS OFF on rank 3") == 1
        relay.send(resync=wire.Resync())
        assert [relay.read(kind).seq for kind in ("fault", "report", "done")] == [1, 2, 3]


def test_a_lost_controller_is_said_once_and_its_return_too(relay: FakeRelay, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with started(relay) as processor:
        for _ in range(3):
            relay.send(beat=wire.Beat(protected=False))
        until(lambda: not processor.connected, 2)
        relay.send(beat=wire.Beat(protected=True))
        until(lambda: processor.connected, 2)
        assert caplog.text.count("FAULT TOLERANCE IS OFF") == 1
        assert "has no controller" in caplog.text
        assert "on again" in caplog.text


def test_a_hold_that_a_fault_ended_is_not_said_again(relay: FakeRelay) -> None:
    with started(relay) as processor:
        processor.held(5, 8)
        assert relay.read("held").held == wire.Held(rank=3, hold=5, step=8)
        relay.drop()
        hello = relay.accept()
        assert (hello.held, hello.held_at) == (5, 8)
        assert 0.0 < hello.held_for < 5.0
        first = relay.read("held")
        processor.left_hold()
        processor.fault("exception", "why", own=True)
        relay.read("fault")
        relay.drop()
        hello = relay.accept()
        assert (hello.held, hello.held_for) == (0, 0.0)
        assert "held" not in relay.kinds("fault")
        processor.held(5, 9)
        assert relay.read("held").seq > first.seq


def test_a_hello_that_a_relay_keeps_does_not_outlive_a_move_to_another_link(relay: FakeRelay) -> None:
    """The connection was made anew in the middle of the move."""
    with started(relay) as processor:
        processor.tell_link(t.LinkState(unsettled=7))
        relay.drop()
        assert relay.accept().link.unsettled == 7
        processor.tell_link(t.LinkState("eth1", "", "now", 7))
        processor.order_done(4, True)
        hello = relay.read("hello").hello
        assert (hello.link.name, hello.link.epoch, hello.link.unsettled) == ("eth1", 7, 0)
        assert relay.read("done").done.order == 4
        processor.tell_link(t.LinkState("eth2", "eth1", "now", 9))
        processor.order_done(5, True)
        assert "hello" not in relay.kinds("done"), "nothing is told that is not wrong otherwise"


def test_what_a_relay_keeps_of_a_rank_is_what_is_true_of_it() -> None:
    hello = codec.hello("s", INFO, epoch=2, held=(3, 5, 70.0)).hello
    keep(hello, codec.says(t.Held(0.0, 3, 5, 8)))
    keep(hello, codec.says(t.Heartbeat(0.0, 3, 9, "held")))
    assert (hello.held, hello.held_at, hello.held_for, hello.began) == (5, 8, 0.0, True)
    keep_told(hello, wire.HostOrders(stop=codec.stop_to_wire(t.Stop(2, (3,), "again"))))
    assert hello.held == 5, "it had heard this stop before it was held"
    keep_told(hello, wire.HostOrders(stop=codec.stop_to_wire(t.Stop(3, (3,), "why", "wrong"))))
    assert (hello.held, hello.held_at, hello.epoch, hello.doubt) == (0, 0, 3, "wrong")
    keep(hello, codec.says(t.Held(0.0, 3, 5, 9)))
    keep(hello, codec.says(t.Released(0.0, 3, 5)))
    assert (hello.held, hello.held_at) == (0, 0)
    wish = t.Wish(7, 6, 0, 60.0)
    keep_told(hello, wire.HostOrders(wish=codec.wish_to_wire(wish, [3, 4])))
    keep_told(hello, wire.HostOrders(wish=codec.wish_to_wire(t.Wish(6), [3, 4])))
    assert codec.wish_from_wire(hello.wish) == wish and not hello.wish.ranks


def test_a_silent_relay_is_left(relay: FakeRelay, caplog: pytest.LogCaptureFixture) -> None:
    deadlines = replace(DEADLINES, heartbeat_lost=0.4)
    with started(relay, deadlines=deadlines) as processor:
        until(lambda: not processor.connected, 2)
        until(lambda: "silent for" in caplog.text, 2)


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"\x00\x00\x00\x04abcd", b"\x00\x00\x00\x00"])
def test_garbage_from_the_relay_is_survived(relay: FakeRelay, garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with started(relay) as processor:
        assert relay.sock is not None
        relay.sock.sendall(garbage)
        until(lambda: "FAULT TOLERANCE IS OFF" in caplog.text, 2)
        relay.drop()
        relay.accept()
        until(lambda: processor.connected, 2)


def test_a_refusal_has_its_reason(relay: FakeRelay, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        for _ in range(2):
            sock, _ = relay.listener.accept()
            with sock:
                sock.settimeout(5)
                sock.recv(65536)  # a socket that is closed with the hello unread takes the refusal back
                sock.sendall(framing.pack(wire.HostOrders(refused=wire.Refused(reason="rank 3 is taken"))))

    thread = threading.Thread(target=refuse)
    thread.start()
    processor = Processor(relay.path, DEADLINES, Stops())
    try:
        assert not processor.start(INFO, 3.0)
        assert "rank 3 is taken" in caplog.text
    finally:
        thread.join(5)
        processor.close()


def test_no_relay_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    processor = Processor(tmp_path / "nobody.sock", DEADLINES, Stops())
    try:
        begin = time.monotonic()
        assert not processor.start(INFO, 0.3)
        assert time.monotonic() - begin < 1
        assert caplog.text.count("FAULT TOLERANCE IS OFF") == 1
        assert not processor.goodbye(0.2)
    finally:
        processor.close()


def test_goodbye_waits_until_it_was_heard(relay: FakeRelay) -> None:
    with started(relay) as processor:
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(processor.goodbye(3.0)))
        thread.start()
        assert relay.read("goodbye").goodbye.rank == 3
        relay.send(goodbye_seen=wire.GoodbyeSeen())
        thread.join(5)
        assert answers == [True]


def test_close_sends_what_is_left(relay: FakeRelay) -> None:
    with started(relay) as processor:
        processor.order_done(9, True, "x" * 50_000)
        processor.close()
        assert relay.read("done").done.order == 9


def test_a_forked_child_lets_go_of_the_connection(relay: FakeRelay) -> None:
    """Else the end of the rank would not close it while a loader worker lives."""
    with started(relay) as processor:
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
            mine = processor._sock is None and not processor.connected and not processor.goodbye(0.1)
            processor.close()
            os.write(into, repr((mine, sum("socket:" in link for link in links))).encode())
            os._exit(0)
        os.close(into)
        assert select.select([out], [], [], 5)[0]
        mine, sockets = eval(os.read(out, 100))
        os.close(out)
        assert os.waitpid(child, 0)[1] == 0
        here = sum(
            "socket:" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)
        )
        assert mine
        assert sockets == here - 1  # all but the processor's
        relay.read("heartbeat")  # the parent's is alive


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
