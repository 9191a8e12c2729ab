"""The rank's end of the control plane: one per training process. No gRPC here, because loader workers fork from it.

Two threads: one owns the socket to the host's relay (reads, writes, heartbeats, reconnects) and never runs a handler;
the other runs the stop handler. The step path only sets `step` and `phase`. If the relay is lost the rank says so
once, trains on unprotected and keeps trying to come back.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mindspeed_tft.control import codec
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.framing import FrameError, FrameReader, pack
from mindspeed_tft.control.pulse import pulse
from mindspeed_tft.engine import types as t

log = logging.getLogger(__name__)

UNPROTECTED = (
    "*** FAULT TOLERANCE IS OFF on rank %d: %s. Training goes on, but a fault now would end the job without a dump; "
    "reconnecting in the background ***"
)
_MAX_REMEMBERED = 1000
_LATEST = ("held", "released", "saved")  # of these, the last one says all
_HANDLER_GRACE = 0.2  # an abort that hangs must not delay the exit of the rank
_MAX_REVIVALS = 5
_BACK_OFF = (0.05, 5.0)
_PEER = struct.Struct("3i")

_living: weakref.WeakSet[Processor] = weakref.WeakSet()


class Processor:
    """Connects a rank to its relay. All methods are for the main thread; none of them blocks without a deadline."""

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        deadlines: t.Deadlines,
        on_stop: Callable[[int, str], None],
        on_lost: Callable[[str], None] | None = None,
        revive: Callable[[], None] | None = None,
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        """`on_stop(epoch, reason)` runs in a thread of ours; `on_lost(reason)` too, each time protection is lost.

        `revive` starts a relay again that has died (`launch.reviver`); one rank of a host has it. `waits` says whether
        this rank waits for its peers; it is called by a thread of ours, once a heartbeat.
        """
        self.step = 0
        self.phase = "start"
        self.checkpoint = 0  # the last step whose checkpoint this run has completed or loaded
        self.one_way = False  # none of them can be loaded online
        self._path = Path(socket_path)
        self._deadlines = deadlines
        self._on_stop = on_stop
        self._on_lost = on_lost
        self._revive = revive
        self._revivals = 0
        self._waits = waits
        self._session = secrets.token_hex(8)
        self._info: t.RankInfo | None = None
        self._lock = threading.Condition()
        self._sock: socket.socket | None = None
        self._frames = FrameReader()
        self._out = bytearray()
        self._outbox: collections.deque[wire.RankSays] = collections.deque()
        self._remembered: list[wire.RankSays] = []  # by the I/O thread alone; said again after a reconnect
        self._forget = False
        self._seq = 0
        self._welcomed = False
        self._protected = False
        self._ever = False
        self._was_protected = False
        self._warned = False
        self._refused = ""
        self._parked = ""
        self._bare = False
        self._doubt = ""  # why the numbers of all ranks may be wrong, until training goes on
        self._dismissed = False
        self._wish = t.Wish()
        self._held = (0, 0, 0.0)  # the hold that this rank is in, after which step, and since when
        self._said_unsettled = 0  # of the link, by the last hello
        self._link = t.LinkState()
        self._goodbye_seen = False
        self._stop_epoch = 0
        self._orders: queue.SimpleQueue[t.Order | None] = queue.SimpleQueue()
        self._known_orders: set[int] = set()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        self._forked = False
        self._heard = 0.0
        self._threads: list[threading.Thread] = []
        self._wake_out, self._wake_in = -1, -1
        _living.add(self)

    # ---------------------------------------------------------------------------------- what the main thread calls

    def start(self, info: t.RankInfo, timeout: float, bare: bool = False) -> bool:
        """Registers the rank; True when the relay and the controller both hear us within `timeout` seconds.

        `bare`: this process was started in the place of another one, and has none of its state until `resumed`.
        """
        if self._threads:
            raise RuntimeError("the processor was started before")
        self._info, self._bare = info, bare
        self._wake_out, self._wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for target, name in ((self._io_main, "tft-processor-io"), (self._worker_main, "tft-processor-worker")):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        with self._lock:
            self._lock.wait_for(lambda: self.connected or self._refused or self._closing, timeout)
        if not self.connected:
            self._lost(self._refused or f"no relay and controller within {timeout:.1f} s at {self._path}")
        return self.connected

    def fault(self, kind: str, message: str, own: bool) -> None:
        """Says that this rank (own) or one of its peers is broken."""
        self._say(t.FaultSeen(0.0, self._rank, kind, message, own))

    def report(self, report: t.RankReport) -> None:
        """Says where this rank stands, after it stopped."""
        self._say(t.Reported(0.0, report))

    def next_order(self, timeout: float) -> t.Order | None:
        """The next order, in the order in which they were given; None when none came in time."""
        end = time.monotonic() + timeout
        while True:
            try:
                order = self._orders.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            if order is not None:
                return order

    def order_done(self, order_id: int, ok: bool, message: str = "", result: dict[str, str] | None = None) -> None:
        """Says that an order was carried out, or could not be."""
        self._say(t.OrderDone(0.0, self._rank, order_id, ok, message, dict(result or {})))

    def held(self, hold: int, step: int) -> None:
        """Says that this rank waits after `step`, as operators want it."""
        self._held = (hold, step, time.monotonic())
        self._say(t.Held(0.0, self._rank, hold, step))

    def released(self, hold: int) -> None:
        """Says that this rank trains on after a hold, which is over for it even if nobody said so."""
        self._held = (0, 0, 0.0)
        self._say(t.Released(0.0, self._rank, hold))
        with self._lock:
            if self._wish.hold == hold:
                self._wish = replace(self._wish, hold=0)

    def left_hold(self) -> None:
        """A fault took this rank out of a hold: it is still wished."""
        self._held = (0, 0, 0.0)
        self._outbox.append(wire.RankSays())  # no word: what was said of it before is not to be said again

    def saved(self, save: int, step: int, path: str, why: str = "") -> None:
        """Says that the framework's checkpoint of `step` is complete, as operators wanted it; `why`: it is not, and all
        ranks train on."""
        self._say(t.SavedStep(0.0, self._rank, save, step, path, why))

    def put_back(self, order: t.Order) -> None:
        """This order is for whoever asks next."""
        self._orders.put(order)

    def tell_link(self, state: t.LinkState) -> None:
        """From now on a controller to which this rank registers is told this of the link of collectives."""
        self._link = state
        self._wake()

    def resumed(self) -> None:
        """Training goes on: what was said of the fault is over, and not to be said again after a reconnect."""
        self._forget = True
        self._wake()

    def goodbye(self, timeout: float = 2.0) -> bool:
        """Says that this rank ends in the ordinary way; True when the relay heard it in time."""
        if self._closing or self._forked:
            return False
        self._say(t.RankFinished(0.0, self._rank))
        with self._lock:
            self._lock.wait_for(lambda: self._goodbye_seen or not self._welcomed, timeout)
        return self._goodbye_seen

    def close(self, timeout: float = 5.0) -> None:
        """Ends the threads and the connection. A close without a goodbye counts as the end of the rank's protection."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._work.put(None)
        self._orders.put(None)
        self._wake()
        end = time.monotonic() + timeout
        for thread, share in zip(self._threads, (timeout, _HANDLER_GRACE), strict=False):
            if thread is not threading.current_thread():
                thread.join(max(0.0, min(share, end - time.monotonic())))
            if thread.is_alive():  # a daemon: it does not hold the process
                log.warning("thread %s of the control plane did not end in time", thread.name)
        _living.discard(self)
        if not any(thread.is_alive() for thread in self._threads):
            for fd in (self._wake_out, self._wake_in):
                if fd >= 0:
                    os.close(fd)
            self._wake_out = self._wake_in = -1

    @property
    def stopping(self) -> bool:
        """True from the first stop on."""
        return self._stop_epoch > 0

    @property
    def stop_epoch(self) -> int:
        """Epoch of the latest stop, 0 when there was none."""
        return self._stop_epoch

    @property
    def connected(self) -> bool:
        """True while the relay hears this rank and a controller hears the relay."""
        return self._welcomed and self._protected

    @property
    def wish(self) -> t.Wish:
        """What operators want, as this rank heard it last."""
        return self._wish

    @property
    def parked(self) -> str:
        """Why this process has to wait for the place of its rank; "" when nobody else has it, as far as is known."""
        return self._parked

    def wait_connected(self, timeout: float) -> bool:
        """Waits until relay and controller hear this rank again; False when they do not in time, or never did."""
        with self._lock:
            if self._was_protected and not self.connected:
                log.warning("rank %d: no controller; waiting for one, at most %.0f s", self._rank, timeout)
                self._lock.wait_for(lambda: self.connected or self._closing, timeout)
        return self.connected

    def wait_stop(self, timeout: float, after: int = 0) -> bool:
        """Waits until a stop with an epoch above `after` came; False when none came in time."""
        with self._lock:
            return self._lock.wait_for(lambda: self._stop_epoch > after, timeout)

    # ---------------------------------------------------------------------------------- the I/O thread

    @property
    def _rank(self) -> int:
        if self._info is None:
            raise RuntimeError("the processor was not started")
        return self._info.rank

    def _say(self, event: t.Event) -> None:
        """Hands a word to the I/O thread. Takes no lock: a signal handler may call it in the middle of itself."""
        self._outbox.append(codec.says(event))
        self._wake()

    def _take_outbox(self) -> None:
        """Numbers what the main thread said, so that the controller can tell what it heard before, and sends it."""
        if self._forget:
            self._forget = False
            self._remembered.clear()
            if self._bare or self._doubt:
                self._bare, self._doubt = False, ""
                self._out += pack(self._hello())
        if self._said_unsettled and not self._link.unsettled:  # relays keep a hello, to say it again
            self._out += pack(self._hello())
        while self._outbox:
            message = self._outbox.popleft()
            if message.WhichOneof("body") is None:
                self._remembered = [old for old in self._remembered if old.WhichOneof("body") != "held"]
                continue
            self._seq += 1
            message.seq = self._seq
            if (kind := message.WhichOneof("body")) in _LATEST:  # a job may be paused more often than it may fail
                self._remembered = [old for old in self._remembered if old.WhichOneof("body") != kind]
            if len(self._remembered) < _MAX_REMEMBERED:
                self._remembered.append(message)
            self._out += pack(message)

    def _say_again(self) -> None:
        for message in self._remembered:
            self._out += pack(message)

    def _wake(self) -> None:
        if self._wake_in >= 0:
            with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups: it will wake up
                os.write(self._wake_in, b"x")

    def _io_main(self) -> None:
        pause = _BACK_OFF[0]
        while not self._closing:
            try:
                self._connect()
                pause = _BACK_OFF[0]
                self._serve()
            except (OSError, FrameError, codec.WireError) as error:
                reason = self._refused or f"the relay at {self._path} cannot be used ({error})"
            except Exception as error:
                log.exception("the control thread of rank %d failed; it starts again", self._rank)
                reason = f"{type(error).__name__}: {error}"
            else:
                reason = "closed"
            was_up = self._drop()
            if self._closing:
                return
            if was_up:
                self._lost(reason)
            self._try_revive()
            with self._lock:
                self._lock.wait_for(lambda: self._closing, pause)
            # Within `heartbeat_lost` we must be back: who is not counts as lost once anything else speaks for it.
            pause = min(2 * pause, _BACK_OFF[1], self._deadlines.heartbeat_lost / 4)

    def _try_revive(self) -> None:
        """Starts a dead relay again, after one that took us in before. A host that kills relays is not fought with."""
        if self._revive is None or not self._ever or self._revivals >= _MAX_REVIVALS or not self._is_dead():
            return
        self._revivals += 1
        try:
            self._revive()
        except Exception as error:
            log.warning("the relay could not be started again: %s", error)

    def _is_dead(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
            probe.settimeout(self._deadlines.heartbeat)
            try:
                probe.connect(str(self._path))
            except (ConnectionRefusedError, FileNotFoundError):
                return True
            except OSError:
                return False  # it is there, and slow
        return False

    def _connect(self) -> None:
        assert self._info is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sock = sock  # at once, so that a fork in this moment finds it
        sock.settimeout(self._deadlines.heartbeat_lost)
        sock.connect(str(self._path))
        _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid not in (os.getuid(), os.geteuid()):
            raise PermissionError(f"the process listening there belongs to user {uid}")
        sock.setblocking(False)
        self._frames = FrameReader()
        self._out = bytearray(pack(self._hello()))
        self._heard = time.monotonic()

    def _hello(self) -> wire.RankSays:
        assert self._info is not None
        parked, began, (hold, step, since), link = bool(self._parked), self.step > 0, self._held, self._link
        self._said_unsettled = link.unsettled
        held = (hold, step, time.monotonic() - since if hold else 0.0)
        told = (self._stop_epoch, parked, self._bare, self._doubt, began, self._wish, held, link)
        return codec.hello(self._session, self._info, *told)

    def _serve(self) -> None:
        """Reads, writes and beats until the connection or the processor ends."""
        sock = self._sock
        assert sock is not None
        beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_out, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                if self._welcomed and now >= beat:
                    waits = self._waits() or self._held[0] > 0  # for the others, until they are held as well
                    last = self.checkpoint, self.one_way
                    word = t.Heartbeat(0.0, self._rank, self.step, self.phase, waits, pulse(), *last)
                    self._out += pack(codec.says(word))
                    beat = now + self._deadlines.heartbeat
                if self._welcomed:
                    self._take_outbox()
                self._flush(sock)
                if self._closing and not self._out and not (self._welcomed and self._outbox):
                    return
                selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0))
                wait = min(beat - now, self._deadlines.heartbeat) if self._welcomed else self._deadlines.heartbeat
                events = selector.select(max(0.0, wait))
                for key, _ in events:
                    if key.fd == self._wake_out:
                        os.read(self._wake_out, 4096)
                self._receive(sock)
                # After reading: if this process itself was stopped for a while, the relay's beats are waiting there.
                silence = time.monotonic() - self._heard
                if silence > self._deadlines.heartbeat_lost:
                    raise TimeoutError(f"the relay has been silent for {silence:.1f} s")

    def _flush(self, sock: socket.socket) -> None:
        while self._out:
            try:
                sent = sock.send(self._out)
            except BlockingIOError:
                return
            del self._out[:sent]

    def _receive(self, sock: socket.socket) -> None:
        while True:
            try:
                data = sock.recv(65536)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionError("the relay closed the connection")
            self._heard = time.monotonic()
            for frame in self._frames.feed(data):
                self._take(codec.parse(wire.HostOrders, frame))

    def _take(self, message: wire.HostOrders) -> None:
        kind = message.WhichOneof("body")
        if kind == "beat":
            self._set_protected(message.beat.protected)
        elif kind == "welcome":
            with self._lock:
                self._welcomed = self._ever = True
                self._refused = ""
            self._say_again()
            self._set_protected(message.welcome.protected)
        elif kind == "refused":
            self._refused = message.refused.reason
            raise ConnectionError(f"refused: {message.refused.reason}")
        elif kind == "parked":
            self._park(message.parked.reason)
        elif kind == "admitted":
            self._admit()
            self._say_again()
        elif kind == "dismissed":
            self._dismiss(message.dismissed)
        elif kind == "stop":
            self._admit()
            self._take_stop(codec.stop_from_wire(message.stop))
        elif kind == "order":
            self._admit()
            order = codec.order_from_wire(message.order)
            if order.id not in self._known_orders:  # an order is said again after a reconnect
                self._known_orders.add(order.id)
                self._orders.put(order)
        elif kind == "wish":
            self._take_wish(codec.wish_from_wire(message.wish))
        elif kind == "resync":
            self._out += pack(self._hello())  # another controller may lead, which has to know the last epoch
            self._say_again()
        elif kind == "goodbye_seen":
            with self._lock:
                self._goodbye_seen = True
                self._lock.notify_all()
        else:
            raise codec.WireError("the relay said nothing that we know")

    def _take_stop(self, stop: t.Stop) -> None:
        if stop.epoch >= self._stop_epoch:
            self._doubt = stop.doubt or self._doubt
        if stop.epoch <= self._stop_epoch:
            return
        self._supersede(stop.epoch)
        with self._lock:
            self._stop_epoch = stop.epoch
            self._lock.notify_all()
        self._work.put(lambda: self._on_stop(stop.epoch, stop.reason))

    def _take_wish(self, wish: t.Wish) -> None:
        with self._lock:
            if wish.id > self._wish.id:
                self._wish = wish

    def _park(self, reason: str) -> None:
        if not self._parked:
            log.warning("rank %d: this process waits as a spare: %s", self._rank, reason)
        self._parked = reason

    def _admit(self) -> None:
        """Whoever is told to do something has the place of its rank."""
        if self._parked:
            self._parked = ""
            log.warning("rank %d: this process takes its place now", self._rank)

    def _dismiss(self, message: wire.Dismissed) -> None:
        """There is no place for this process: a stop that nobody else hears, and an order to leave."""
        if self._dismissed:  # said again after a reconnect
            return
        self._dismissed = True
        self._take_stop(t.Stop(self._stop_epoch + 1, (self._rank,), message.reason))
        payload: codec.Payload = {"code": message.code, "words": f"rank {self._rank} leaves: {message.reason}"}
        self._orders.put(t.Order(-1, self._rank, t.OrderKind.EXIT, payload))

    def _supersede(self, epoch: int) -> None:
        """Orders that nobody began were given before this stop: their plan is void. Only an exit stays."""
        kept: list[t.Order] = []
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                break
            if order is not None and order.kind is t.OrderKind.EXIT:
                kept.append(order)
            elif order is not None:
                self.order_done(order.id, False, f"superseded by stop epoch {epoch}")
        for order in kept:
            self._orders.put(order)

    def _set_protected(self, protected: bool) -> None:
        with self._lock:
            was, self._protected = self._protected, protected
            self._was_protected = self._was_protected or protected
            self._lock.notify_all()
        if was and not protected:
            self._lost("its relay has no controller")
        elif protected and self._warned and not was:
            self._warned = False
            log.warning("fault tolerance is on again on rank %d", self._rank)

    def _drop(self) -> bool:
        """Forgets the connection; True when it was in use."""
        with self._lock:
            was_up = self._welcomed and self._protected
            self._welcomed = self._protected = False
            self._lock.notify_all()
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        return was_up

    def _lost(self, reason: str) -> None:
        if not self._warned and not self._closing:
            self._warned = True
            log.warning(UNPROTECTED, self._rank, reason)
            if self._on_lost is not None:
                on_lost = self._on_lost
                self._work.put(lambda: on_lost(reason))

    # ---------------------------------------------------------------------------------- the worker thread

    def _worker_main(self) -> None:
        while not self._closing:
            try:
                job = self._work.get(timeout=self._deadlines.heartbeat_lost)
            except queue.Empty:
                continue
            if job is None or self._closing:
                return
            try:
                job()
            except Exception as error:
                log.exception("a handler of the control plane failed on rank %d", self._rank)
                self.fault("handler", f"{type(error).__name__}: {error}", own=False)

    def _forget_after_fork(self) -> None:
        """In a forked child: let go of the parent's connection. Only closes: locks may be held by lost threads."""
        self._forked = True
        self._closing = True
        self._welcomed = self._protected = False
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        for fd in (self._wake_out, self._wake_in):
            if fd >= 0:
                os.close(fd)
        self._wake_out = self._wake_in = -1
        self._threads = []
        self._lock = threading.Condition()


def of_this_process() -> Processor | None:
    """The processor that was started in this process, if there is one."""
    return next((one for one in list(_living) if one._threads and not one._closing), None)


def _after_fork() -> None:
    for processor in list(_living):
        processor._forget_after_fork()
    _living.clear()


os.register_at_fork(after_in_child=_after_fork)
