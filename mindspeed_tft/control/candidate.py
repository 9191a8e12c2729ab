"""A controller process: serves relays and other candidates, stands for election, and leads while it may.

The rules of who leads are in `leadership`, what a leader does is in `controller`; this module connects both with the
network, the lease in shared storage and the files of this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from cryptography import x509

from mindspeed_tft.control import candidates, codec, listener, operator, peers, pids, tasks, tls
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.candidates import Candidates, RelayIs, RoleFile
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.control.controller import Controller, EngineLike
from mindspeed_tft.control.gate import Gate
from mindspeed_tft.control.leadership import Leadership, Role, Verdict, generation
from mindspeed_tft.control.lease import Lease, Seen, Storage, fresh_name, is_name
from mindspeed_tft.control.seats import HostLink, SeatState, gather
from mindspeed_tft.control.watchers import Watchers
from mindspeed_tft.kept import keep
from mindspeed_tft.observe import logs
from mindspeed_tft.observe.incident import Recorder

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[wire.HostSays, wire.HostOrders]

log = logging.getLogger(__name__)

TICK = 0.2
EPOCHS = 1000  # kept for the stops of each later leader: no two leaders ever give the same one

MakeEngine = Callable[[int, int], EngineLike]  # of the last epoch and the last order id that were used before


@dataclass(eq=False)
class _Visit:
    """A relay's stream, and whether it was told that we lead."""

    link: HostLink
    task: asyncio.Task[None]
    came: float
    votes: bool  # of two relays with the same node rank, only one
    certificate: x509.Certificate | None  # that it showed
    welcomed: bool = False
    dismissed: bool = False


@dataclass
class _Inheritance:
    """What the leaders before us have told."""

    epoch: int = 0
    seats: dict[int, SeatState] = field(default_factory=dict)
    term: int = 0  # of the leader that told the last of it
    version: int = 0


def _of(hello: wire.HostHello, one: wire.Candidate, nnodes: int) -> bool:
    """A host may name candidates of its own only."""
    return one.host == hello.host and (nnodes == 1 or one.index == hello.node_rank)


class Candidate:
    """One controller process of a job."""

    def __init__(
        self,
        config: ControlConfig,
        index: int,
        directory: Path,
        make_engine: MakeEngine,
        starting: bool,
    ) -> None:
        """`starting`: the relay of this host is being started at the same time; else it is there."""
        self._config, self._index, self._directory = config, index, directory
        self._transport = tls.transport(config, first=index == 0)
        self._deadlines = config.deadlines
        self._make_engine = make_engine
        self._known = Candidates(config, directory)
        self._leadership = Leadership(index, config.nnodes, config.deadlines.heartbeat_lost, term=self._known.term)
        self._me = wire.Candidate()
        self._role: RoleFile | None = None
        self._unix = self._address = ""
        self._visits: set[_Visit] = set()
        self._inherited = _Inheritance()
        self._controller: Controller | None = None
        self._peers: peers.Peers | None = None
        self._lease: Lease | None = None
        self._counter = 0
        self._storage = Storage()
        self._over = False
        self._gate = Gate(config.nnodes)
        self._service = operator.Service(
            config, self._transport, time.monotonic, lambda: self._controller, self._other_leader, self._about,
            self._gate.admit,
        )  # fmt: skip
        self._starting = starting  # until anybody was heard
        self._heard = time.monotonic()  # a relay or a leader
        self._changed = asyncio.Event()

    # ---------------------------------------------------------------------------------- life

    async def run(self, unix_path: str, ready: Callable[[], None]) -> None:
        """Serves until the job is over. The leader says the last words when its launcher is gone."""
        if not self._starting and candidates.relay_of(self._directory) is RelayIs.ENDED:
            return  # the job has ended while this process was started
        keep(self._directory)
        launcher = self._watch_launcher()
        self._unix = unix_path
        server = listener.make_server(self._stream, self._told, self._service.handler())
        finished: Controller | None = None
        try:
            self._address = listener.bind(server, unix_path, self._config, self._index, self._transport)
            address = self._address if self._config.nnodes > 1 else f"unix:{unix_path}"
            self._me = wire.Candidate(index=self._index, host=self._config.host, address=address)
            await server.start()
            self._gate.start(self._address)
            self._say_role()
            ready()
            finished = await self._live()
        finally:
            # First of all the port: a restart of the job by its launcher wants it at once.
            await server.stop(grace=0.2)
            self._gate.end()
            if self._role is not None:  # else that file is still of one before us, which was killed
                candidates.forget(self._directory, self._index)
            Path(unix_path).unlink(missing_ok=True)
            candidates.leave(self._directory)
        if finished is not None:
            await finished.finish(launcher)
        elif launcher >= 0:
            os.close(launcher)

    def _watch_launcher(self) -> int:
        if self._config.launcher_pid <= 0:
            return -1
        try:
            return pids.open_pidfd(self._config.launcher_pid)
        except ProcessLookupError:
            return -1

    async def _live(self) -> Controller | None:
        """Until the job is over; the controller, if it was ours."""
        beat = 0.0
        while not self._over:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TICK)
            now = time.monotonic()
            verdict = self._leadership.judge(now)
            if verdict is not Verdict.WAIT and (term := await self._stand(verdict)):
                finished = await self._reign(term)
                if finished is not None:
                    return finished
                continue
            self._send_on(now)
            if now >= beat:
                beat = now + self._deadlines.heartbeat
                self._look_at_lease(now)
                for visit in self._visits:
                    visit.link.out.put_nowait(wire.HostOrders(beat=wire.Beat(protected=False)))
            if self._is_alone(now):
                return None
        return None

    def _is_alone(self, now: float) -> bool:
        """Nobody was heard for so long that nobody is to be expected."""
        if self._visits:
            self._heard = now
        alone, lost = now - self._heard, self._deadlines.heartbeat_lost
        if self._starting:
            if alone > self._config.start + lost:
                log.warning("no host came within %.0f s, the controller ends", alone)
                return True
            return False
        if alone <= 2 * self._deadlines.heartbeat:
            return False
        if (relay := candidates.relay_of(self._directory)) is RelayIs.ALIVE:
            self._heard = now
        return relay is RelayIs.ENDED or alone > 3 * lost

    def _say_role(self) -> None:
        term, leads = self._leadership.term, self._leadership.role is Role.LEADER
        ready = leads or self._inherited.term == term > 0
        places = self._unix, self._address, self._config.run_name, self._config.master, self._config.restart
        role = RoleFile(os.getpid(), self._index, term, leads, ready, *places)
        if role != self._role:
            self._role = role
            role.write(self._directory)

    # ---------------------------------------------------------------------------------- election

    async def _stand(self, verdict: Verdict) -> int:
        """The term that we lead from now on; 0: somebody else does, or may."""
        now = time.monotonic()
        leadership = self._leadership
        term = leadership.upcoming()
        if self._config.nnodes == 1:
            leadership.lead(term, now)
            return term
        claimed = await self._claim(term)
        if not claimed:
            if claimed is not None:  # another one has; we stand again for the generation after it
                leadership.passed(term)
                return 0
            if verdict is Verdict.CLAIM or not leadership.majority(time.monotonic()):  # it took its time
                return 0
        if leadership.term >= term:
            return 0
        leadership.lead(term, time.monotonic())
        return term

    async def _claim(self, term: int) -> bool | None:
        """Makes our leadership visible in shared storage; None where that does not work."""
        lease = self._lease or Lease(Path(self._config.incident_dir), fresh_name())
        found = self._lease is None
        try:
            claimed = await self._storage.run(lambda: lease.claim(term, found), self._deadlines.heartbeat_lost)
        except (OSError, asyncio.TimeoutError) as error:
            log.info("term %d has no lease: %r", term, error)
            return None
        if claimed and found:
            self._use_lease(lease)
        return claimed

    def _use_lease(self, lease: Lease) -> None:
        self._lease = lease
        self._leadership.new_lease()

    def _look_at_lease(self, now: float) -> None:
        """Once a heartbeat, without waiting for the storage: a sign of life if we lead, and a look in any case."""
        self._look_at_certificates()
        if self._lease is None or self._storage.busy:
            return
        lease, leads, term = self._lease, self._leadership.role is Role.LEADER, self._leadership.term
        self._counter += leads
        counter = self._counter

        def look() -> Seen | None:
            if leads:
                with contextlib.suppress(OSError):  # what counts is what can be read
                    lease.renew(term, counter)
            return lease.look()

        def seen(future: asyncio.Future[Seen | None]) -> None:
            if future.cancelled() or future.exception() is not None:
                return  # no news; how old the last are is for the rules to judge
            found = future.result()
            if found is not None:
                self._leadership.saw_lease(found.term, found.counter, now)
                self._changed.set()

        self._storage.submit(look).add_done_callback(seen)

    # ---------------------------------------------------------------------------------- leading

    async def _reign(self, term: int) -> Controller | None:
        """Leads a term. None: another one leads now, or nobody."""
        config, first = self._config, generation(term) == 0
        epoch = 0 if first else max(self._inherited.epoch, EPOCHS * term)
        engine = self._make_engine(epoch, term << 32)
        recorder = Recorder(config.incident_dir, config.run_name, config.job)
        watchers = Watchers(config, term, self._index, self._transport)
        controller = Controller(config, engine, recorder, lambda: self._leadership.may_act(time.monotonic()), watchers)
        self._controller = controller
        logs.bind(epoch=lambda: controller.epoch, step=lambda: recorder.step, incident=lambda: recorder.incident)
        self._known.learn([self._me])
        self._peers = peers.Peers(self._deadlines, self._transport, self._lead_message, self._peer_answered)
        try:
            controller.inherit(self._inherited.seats.values(), epoch)
            self._say_role()
            self._share_table()
            for visit in list(self._visits):
                self._welcome(visit)
            why = await self._lead_on(controller)
            if why and controller.broken is None:  # before all else: those ranks are protected where they go now
                self._say_role()
                log.warning("controller %d leads no more (term %d): %s", self._index, term, why)
                logs.bind(epoch=0, step=0, incident=0)
                self._dismiss()
        finally:
            self._controller = None
            controller.operators.end("this controller leads no more")
            last, self._peers = self._peers, None
            await last.end()
            await watchers.end()
            self._say_role()
        if controller.broken is not None:
            raise controller.broken
        return None if why else controller

    def _dismiss(self) -> None:
        for visit in self._visits:
            if visit.welcomed:
                visit.dismissed = True
                visit.task.cancel()

    async def _lead_on(self, controller: Controller) -> str:
        """Until the job is over, or why we do not lead any more."""
        running = asyncio.ensure_future(controller.run())
        beat, told = 0.0, (0, 0)
        try:
            while not running.done():
                self._changed.clear()
                waiting = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait([running, waiting], timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                now = time.monotonic()
                if now >= beat:
                    beat = now + self._deadlines.heartbeat
                    self._look_at_lease(now)
                if why := self._leadership.must_step_down(now):
                    self._leadership.step_down()
                    return why
                if self._leadership.role is not Role.LEADER:
                    return f"another one has term {self._leadership.term}"
                if told != (controller.version, controller.epoch) and self._peers is not None:
                    told = (controller.version, controller.epoch)
                    self._peers.tell()
            running.result()
        finally:
            self._inherited.epoch = max(self._inherited.epoch, controller.epoch)
            self._inherited.seats.update((state.rank, state) for state in controller.snapshot(0))
            await tasks.end([running])
        if controller.broken is None and self._peers is not None:
            await self._peers.say_last(self._lead_message(controller.version, over=True))
            if self._lease is not None:
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    lease = self._lease
                    await self._storage.run(lease.remove, self._deadlines.heartbeat_lost)
        return ""

    def _lead_message(self, after: int, over: bool = False) -> wire.Lead:
        controller = self._controller
        assert controller is not None
        states = controller.snapshot(after)[: peers.SEATS_AT_ONCE]
        return wire.Lead(
            protocol=codec.PROTOCOL,
            run=self._config.run_name,
            term=self._leadership.term,
            leader=self._me,
            table=self._known.table(),
            lease=self._lease.name if self._lease is not None else "",
            epoch=controller.epoch,
            seats=[peers.seat_to_wire(state) for state in states],
            over=over,
            shared=self._leadership.shared,
        )

    def _peer_answered(self, index: int, answer: wire.LeadHeard) -> None:
        if answer.refused:
            log.warning("controller %d refuses this one: %s", index, answer.refused)
        elif answer.term > self._leadership.term:
            self._leadership.overruled(answer.term)
            self._changed.set()
        elif answer.sees_lease:
            self._leadership.confirmed(index)

    def _share_table(self) -> None:
        """Everybody has to know where to look for the next leader."""
        if self._peers is None:
            return
        table = self._known.table()
        self._peers.know([Candidates.route(one) for one in table.candidates if one.index != self._index])
        self._peers.tell()
        for visit in self._visits:
            if visit.welcomed:
                visit.link.out.put_nowait(wire.HostOrders(table=table))

    # ---------------------------------------------------------------------------------- relays

    async def _stream(self, _: object, context: Context) -> None:
        """One relay, for as long as it is connected."""
        limit = self._deadlines.heartbeat_lost
        first = await asyncio.wait_for(context.read(), limit)
        if not isinstance(first, wire.HostSays):
            return  # it ended before its first word: no peer of another kind, and nobody is there to be told
        refusal = codec.line(self._refusal(first, context), 1000)
        if refusal:
            log.warning("refused a host: %s", refusal)
            await context.write(wire.HostOrders(refused=wire.Refused(reason=refusal)))
            return
        self._gate.admit(context.peer())
        task = asyncio.current_task()
        assert task is not None
        votes, certificate = not self._is_held(first.hello), tls.peer_certificate(context)
        visit = _Visit(HostLink(first.hello), task, time.monotonic(), votes, certificate)
        writer = asyncio.ensure_future(self._write(visit.link, context))
        patience = tasks.Patience(limit)
        try:
            self._enter(visit)
            while not visit.link.bye:
                message = await context.read()
                if not isinstance(message, wire.HostSays):  # the end
                    break
                patience.renew()
                self._hear(visit, message)
        except codec.WireError as error:
            log.warning("host %s does not follow the protocol: %s", visit.link.hello.host, error)
            raise
        except asyncio.CancelledError:
            if patience.ran_out():
                if visit.welcomed:
                    log.warning("host %s has been silent for %.1f s", visit.link.hello.host, limit)
            elif not visit.dismissed:
                raise
        finally:
            patience.end()
            self._left(visit, silent=patience.over)
            await tasks.end([writer])

    def _is_held(self, hello: wire.HostHello) -> bool:
        """The relay of another host has this node rank, and is here: this one is a spare."""
        return any(
            visit.votes and visit.link.hello.node_rank == hello.node_rank and visit.link.hello.host != hello.host
            for visit in self._visits
        )

    def _enter(self, visit: _Visit) -> None:
        hello, now = visit.link.hello, time.monotonic()
        self._starting, self._heard = False, now
        self._visits.add(visit)
        if hello.lease and self._lease is None:
            self._use_lease(Lease(Path(self._config.incident_dir), hello.lease))
        if visit.votes:
            self._vote(hello, now)
        self._changed.set()
        if self._leadership.role is Role.LEADER and self._controller is not None:
            self._welcome(visit)

    def _vote(self, hello: wire.HostHello, now: float) -> None:
        if not self._leadership.came(hello.node_rank, hello.term, now):  # we lead no more, and it may vote anew
            self._leadership.came(hello.node_rank, hello.term, now)

    def _welcome(self, visit: _Visit) -> None:
        assert self._controller is not None
        visit.welcomed = True
        if visit.votes:
            self._leadership.welcomed(visit.link.hello.node_rank)
        lease = self._lease.name if self._lease is not None else ""
        welcome = wire.Welcome(protected=True, term=self._leadership.term, leader=self._me, lease=lease)
        visit.link.out.put_nowait(wire.HostOrders(welcome=welcome))
        visit.link.out.put_nowait(wire.HostOrders(table=self._known.table()))
        self._controller.enter(visit.link)

    def _hear(self, visit: _Visit, message: wire.HostSays) -> None:
        if visit.dismissed:
            return
        if visit.votes:
            self._leadership.heard(visit.link.hello.node_rank, time.monotonic())
        if self._known.learn([one for one in message.candidates if _of(visit.link.hello, one, self._config.nnodes)]):
            self._share_table()
        if visit.welcomed and self._controller is not None:
            self._controller.hear(visit.link, message)

    def _left(self, visit: _Visit, silent: bool) -> None:
        self._visits.discard(visit)
        hello = visit.link.hello
        if visit.votes and not any(v.votes and v.link.hello.node_rank == hello.node_rank for v in self._visits):
            # On a single host nobody can be cut off from another one, and the next relay finds who leads.
            over = visit.link.ended or self._config.nnodes == 1
            self._leadership.left(hello.node_rank, visit.link.bye and over)
            spare = next((v for v in self._visits if v.link.hello.node_rank == hello.node_rank), None)
            if spare is not None:
                spare.votes = True
                self._vote(spare.link.hello, time.monotonic())
                if spare.welcomed:
                    self._leadership.welcomed(hello.node_rank)
        if visit.welcomed and self._controller is not None:
            self._controller.left(visit.link, silent)
        self._changed.set()

    def _look_at_certificates(self) -> None:
        """Once a heartbeat: a host whose certificate was revoked is heard no longer."""
        if self._transport is None:
            return
        self._transport.watch()
        for visit in self._visits:
            why = "" if visit.certificate is None else self._transport.barred_certificate(visit.certificate)
            if why and not visit.dismissed:
                log.warning("host %s is heard no longer: %s", visit.link.hello.host, why)
                visit.link.out.put_nowait(wire.HostOrders(refused=wire.Refused(reason=why)))
                visit.dismissed = True
                asyncio.get_running_loop().call_later(self._deadlines.heartbeat, visit.task.cancel)

    def _send_on(self, now: float) -> None:
        """Relays that came while another one leads: it was heard since, so they are better off there."""
        leadership = self._leadership
        for visit in list(self._visits):
            if not visit.dismissed and leadership.heard_since(visit.came):
                body = wire.Redirect(term=leadership.term, leader=leadership.leader, table=self._known.table())
                visit.link.out.put_nowait(wire.HostOrders(redirect=body))
                visit.dismissed = True  # it leaves by itself

    def _refusal(self, first: object, context: Context) -> str:
        """Why this peer may not come in, or nothing."""
        if not isinstance(first, wire.HostSays) or not first.HasField("hello"):
            return "the first message is no hello"
        hello = first.hello
        if hello.protocol != codec.PROTOCOL:
            return f"it speaks protocol {hello.protocol}, this controller speaks {codec.PROTOCOL}; install one version"
        if hello.run != self._config.run_name:
            return f"it belongs to job {hello.run!r}, this is the controller of {self._config.run_name!r}"
        if not 0 <= hello.node_rank < self._config.nnodes:
            return f"node rank {hello.node_rank} is not one of {self._config.nnodes}"
        if hello.lease and not is_name(hello.lease):
            return f"{codec.clean(hello.lease, 80)!r} is no name of a lease"
        if hello.host != codec.line(hello.host, 255):
            return f"{hello.host[:255]!r} is no name of a host"
        return self._stranger(hello.host, context)

    def _stranger(self, host: str, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """Why the certificate of a peer does not fit the host that it says it is."""
        return self._transport.refusal(context, host) if self._transport is not None else ""

    async def _write(self, link: HostLink, context: Context) -> None:
        patience = tasks.Patience(self._deadlines.heartbeat_lost)
        try:
            while True:
                patience.rest()
                message = await link.out.get()
                if message.HasField("order") and not link.out.empty():  # these come by the thousand
                    message = gather(message, link.out)
                patience.renew()
                await context.write(message)
        finally:
            patience.end()

    # ---------------------------------------------------------------------------------- operators

    def _other_leader(self) -> wire.Candidate | None:
        leader = self._leadership.leader
        return next((one for one in self._known.table().candidates if one.index == leader != self._index), None)

    def _about(self) -> dict[str, object]:
        """What operators may want to know of the controllers, while this one leads."""
        known = self._known.table().candidates
        return {
            "run": self._config.run_name,
            "controller": {"index": self._index, "host": self._config.host, "pid": os.getpid()},
            "term": self._leadership.term,
            "standbys": [{"index": one.index, "host": one.host} for one in known if one.index != self._index],
            "incident_dir": self._config.incident_dir,
            "transport": "tls" if self._transport is not None else "plain" if self._address else "unix",
        }

    # ---------------------------------------------------------------------------------- another leader

    async def _told(
        self, lead: wire.Lead, context: grpc.aio.ServicerContext[wire.Lead, wire.LeadHeard]
    ) -> wire.LeadHeard:
        """Another candidate says that it leads."""
        if lead.protocol != codec.PROTOCOL or lead.run != self._config.run_name:
            return wire.LeadHeard(refused=f"this is a controller of {self._config.run_name!r}, not of {lead.run!r}")
        if stranger := self._stranger(lead.leader.host, context):
            return wire.LeadHeard(refused=stranger)
        if lead.lease and not is_name(lead.lease):
            return wire.LeadHeard(refused=f"{codec.clean(lead.lease, 80)!r} is no name of a lease")
        self._gate.admit(context.peer())
        now = time.monotonic()
        if not self._leadership.told(lead.term, lead.leader.index, now, lead.shared):
            return wire.LeadHeard(term=self._leadership.term)
        self._starting, self._heard = False, now
        self._known.learn([*lead.table.candidates, lead.leader])
        if lead.lease and (self._lease is None or self._lease.name != lead.lease):
            self._use_lease(Lease(Path(self._config.incident_dir), lead.lease))
        self._inherit(lead)
        if lead.over:
            self._over = True
        self._say_role()
        self._changed.set()
        sees = self._leadership.sees_lease
        return wire.LeadHeard(term=lead.term, version=self._inherited.version, sees_lease=sees)

    def _inherit(self, lead: wire.Lead) -> None:
        kept = self._inherited
        if kept.term != lead.term:
            kept.term, kept.version = lead.term, 0
        kept.epoch = max(kept.epoch, lead.epoch)
        for seat in lead.seats:
            state = peers.seat_from_wire(seat)
            kept.seats[state.rank] = state
            kept.version = max(kept.version, state.version)
