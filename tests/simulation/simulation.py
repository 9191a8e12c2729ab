"""One simulated incident: ranks, network and disk around a real engine, on a virtual clock, decided by one seed."""

from __future__ import annotations

import contextlib
import gc
import heapq
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from mindspeed_tft.engine.incident import EXIT_REBORN
from mindspeed_tft.engine.machine import Engine, State
from mindspeed_tft.engine.types import (
    Action,
    Answer,
    Asked,
    Closed,
    Event,
    Examine,
    Examined,
    FaultSeen,
    Heartbeat,
    Kill,
    Order,
    OrderKind,
    RankFinished,
    RankLost,
    RankQuiet,
    Recovered,
    Registered,
    Reported,
    Stop,
    Tell,
    Tick,
    Update,
    Withdrawn,
)

from .disk import Disk
from .job import SimRank
from .layout import (
    CLOCK_FAULTS,
    DEADLINES,
    HANGS,
    JUMP,
    SPOILING_FAULTS,
    SUSPENDED,
    TICK,
    Fault,
    Request,
    Scenario,
    Weather,
)
from .world import Collective, Meeting

DIRTY = Update.DIRTY
AWAY = 60.0  # seconds without the control plane, of a rank that is well
LEAVING_ALL_HOLDERS = ("flip", "link", "flap", "cut", "fail", "slow", "terminate")  # faults after which all can speak


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing of a run is garbage before its end, and to find that out again and again takes as long as the run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Simulation:
    """`run` plays the scenario to its end; what is seen on the way is kept for the oracle."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self.disk = Disk()
        self.deadlines = replace(DEADLINES, hang=5.0 if scenario.watch else 0.0)
        self.engine = Engine(self.deadlines, scenario.layout.world_size, strategies=scenario.strategies)
        self.takeovers = 0
        self.befallen = 0  # messages for which the weather was bad
        self.skew = 0.0  # of the engine's clock
        self.suspensions = self.jumps = 0
        self._waiting: list[Event] | None = None  # for an engine whose process is stopped
        self._leaderless = False
        self._ends: dict[SimRank, Event] = {}  # of processes, as their relays tell them again
        self.killed: list[SimRank] = []  # because they hang
        self.asked: list[str] = []  # requests of operators that an engine heard
        self.answers: dict[str, Answer] = {}
        self.notices: set[int] = set()
        self._held_at: dict[tuple[int, int], int] = {}  # hold and epoch of the groups -> the step
        self.furthest = 0  # the last step whose gradients were final everywhere, since the last rewind
        self.spoils: dict[str, int] = {}  # what was spoiled, and since which step
        self._told: dict[str, int] = {}  # of these, what the engine knew after which stop
        self._agreed = 0  # the highest S of this incident
        self._behind = 0  # the furthest step when ranks were last told to go back
        self.ranks = [SimRank(self, info) for info in scenario.layout.infos()]
        self.now = 0.0
        self.violations: list[str] = []
        self.closed: list[tuple[float, Closed]] = []
        self.stopped_at: float | None = None
        self.decided_on: set[int] = set()  # ranks alive whose reports had arrived when S was fixed
        self.harmed: set[int] = set()
        self.flips_aged = False
        self._uncompared: set[str] = set()  # shards with an old flip, of which nobody had another copy of that step
        self.struck: list[tuple[float, Fault]] = []  # faults that really happened, and when
        self.decided_at = float("inf")
        self.timeline: list[tuple[float, str]] = []
        # when, a number that keeps the order, whose and in which of its lives, what: flat, because there are millions
        self._queue: list[tuple[float, int, SimRank | None, int, Callable[[], None]]] = []
        self._count = 0
        self._armed: dict[str, list[Fault]] = {}
        for fault in scenario.faults:
            self._armed.setdefault(fault.point, []).append(fault)
        self.watched = {point.split("@")[0] for point in self._armed}
        self._reached: dict[str, int] = {}
        self._collectives: dict[tuple[str, int, str, int], Collective] = {}
        self._heard: set[int] = set()
        self._epoch = 0  # of the last stop
        self._meetings: dict[tuple[OrderKind, int], Meeting] = {}
        self.incidents: list[list[float]] = []  # begin and end of each
        self.recovered: list[tuple[float, Recovered]] = []
        self.reborn: list[SimRank] = []  # processes that were started again
        self._seats: dict[int, SimRank] = {}  # the process for which each rank registered last
        self._replaced: set[SimRank] = set()
        self._known_damaged: set[SimRank] = set()  # a memory fault on its way is not known yet
        self._parting: set[SimRank] = set()  # told to come back as another process
        self._last_beat: dict[SimRank, float] = {}
        self._resumed: dict[int, int] = {}  # epoch -> the step from which ranks went on

    # ------------------------------------------------------------------------------------------------ running

    def run(self) -> Simulation:
        for rank in self.ranks:
            self.after(self.jitter(0.2), lambda rank=rank: self._start(rank))
        self.after(TICK, self._tick)
        for number, request in enumerate(self.scenario.requests):
            self.after(request.at, lambda number=number, request=request: self._ask(number, request))
        limit = 300.0 if self.scenario.agent is None and not self.scenario.uneven else 3000.0
        queue, pop = self._queue, heapq.heappop
        with _no_collection():
            while queue:
                self.now, _, rank, life, action = pop(queue)
                if self.now > limit or (self.closed and self.now > self.closed[0][0] + 1.0):
                    break
                if rank is None or (rank.life == life and rank.alive and not rank.frozen):
                    action()
        return self

    def _start(self, rank: SimRank) -> None:
        self.say(rank, Registered(0.0, rank.info))
        self._beat(rank)
        self.after(0.3, rank.begin)

    def _start_again(self, old: SimRank) -> None:
        """The agent starts the process of a rank again; it may die once more while it starts."""
        assert self.scenario.agent is not None
        rank = SimRank(self, replace(old.info, pid=old.info.pid + 5000), newcomer=True)
        self.ranks[rank.number] = rank
        self.reborn.append(rank)
        self.say(rank, self._hello(rank))
        self._beat(rank)
        if self.coin(self.scenario.agent.dies):
            self.after(self.jitter(4.0), lambda: rank.kill("died while it started"))
        self.after(self.jitter(4.0), rank.started)

    def _beat(self, rank: SimRank) -> None:
        unheard = (
            self.scenario.layout.world_size > 64 and not self.scenario.watch
        )  # spares the simulator, not the engine
        if not rank.alive or unheard or (rank.hung and not self.scenario.watch):
            return
        if not rank.hung or rank.frozen == "stick":
            waiting = rank.inside is not None or rank.in_hold[0] > 0
            last = max(rank.checkpoints, default=0), self.scenario.one_way
            self.say(rank, Heartbeat(0.0, rank.number, rank.step, rank.phase, waiting, hash(waiting), *last))
            self._last_beat[rank] = self.now
        elif (quiet := self.now - self._last_beat.get(rank, self.now)) >= DEADLINES.heartbeat_lost:
            self.say(rank, RankQuiet(0.0, rank.number, quiet, "T" if rank.frozen == "freeze" else "S"))
        self.after(DEADLINES.heartbeat, lambda: self._beat(rank))

    def _tick(self) -> None:
        self._feed(Tick(0.0))
        self.after(TICK, self._tick)

    def _lose_leader(self, all_of_them: bool) -> None:
        """The leading controller dies, in the middle of whatever it did. Another one leads after a while: one that
        knows nothing, if they all died."""
        if self._leaderless or self.closed or self.engine.state in (State.STARTING, State.EXITING, State.CLOSED):
            return
        self._leaderless = True
        self.takeovers += 1
        self.after(0.2 + self.jitter(2.0), lambda: self._take_over(not all_of_them))

    def _take_over(self, informed: bool) -> None:
        """The next leader knows at most who takes part. All else it is told again."""
        self._leaderless, self._waiting = False, None
        if self.incidents and len(self.incidents[-1]) == 1:
            self.incidents.pop()
        self._heard.clear()
        self.decided_on, self.decided_at = set(), float("inf")
        self._agreed = 0
        world, before = self.scenario.layout.world_size, 100_000 * self.takeovers
        tag, strategies = f"leader{self.takeovers}", self.scenario.strategies
        self.engine = Engine(self.deadlines, world, epoch=before, issued=before, tag=tag, strategies=strategies)
        self._epoch = before
        # What only the dead knew is known no more, nor what is lost on its way again.
        said = {event.message for rank in self._living() for event in rank.link.said if isinstance(event, FaultSeen)}
        doubts = " ".join(rank.doubt for rank in self._living())
        self._told = {text: epoch for text, epoch in self._told.items() if text in said or text in doubts}
        if self.scenario.weather.loss:
            self._told.clear()
        for rank in self._seats.values():
            if informed or rank in self._ends:  # of the others, their relays tell
                self._feed(replace(self._hello(rank), epoch=0))
        for rank in self._seats.values():
            if rank in self._ends:
                self._hear(rank, self._ends[rank])
            elif rank.link.up:
                self._resync(rank)

    def _suspend(self) -> None:
        """The controller is stopped (a debugger, a host that sleeps) while all others go on."""
        if self._waiting is None and not self._leaderless:
            self._waiting = []
            self.suspensions += 1
            self.after(SUSPENDED, self._wake)

    def _wake(self) -> None:
        """What was said meanwhile comes all at once, before or after the first look at the clock."""
        waiting, self._waiting = self._waiting or [], None
        if self.coin(0.5):
            self._feed(Tick(0.0))
        for event in waiting:
            self._feed(event)

    @property
    def unnoticed(self) -> bool:
        """A bit that flipped before the last update may go unnoticed: other holders of the shard may be gone."""
        leave = any(fault.what not in LEAVING_ALL_HOLDERS for _, fault in self.struck)
        leave = leave or any(rank.finished for rank in self.ranks)  # with its shards
        return leave or self.scenario.layout.n == 1 or bool(self.scenario.weather.loss)

    @property
    def trained(self) -> bool:
        """The engine knew all ranks at some time."""
        return any(state == State.TRAINING.value for _, state in self.timeline)

    def _living(self) -> list[SimRank]:
        return [rank for rank in self._seats.values() if rank.alive]

    def _resync(self, rank: SimRank) -> None:
        self.say(rank, self._hello(rank))
        said, rank.link.said = rank.link.said, []
        for event in said:
            self.say(rank, event)

    def _hello(self, rank: SimRank) -> Registered:
        told = (rank.stop_epoch, rank.bare, rank.doubt, rank.began, rank.wish, *rank.in_hold)
        return Registered(0.0, rank.info, *told)

    def _feed(self, event: Event) -> None:
        if self._leaderless:
            return
        if self._waiting is not None:
            if not isinstance(event, Tick):
                self._waiting.append(event)
            return
        if isinstance(event, Reported) and event.report.epoch in (self._epoch, 0 if self._epoch == 1 else -1):
            self._heard.add(event.report.rank)
        if isinstance(event, FaultSeen) and event.kind in SPOILING_FAULTS:
            self._told.setdefault(event.message, self._epoch)
        if isinstance(event, FaultSeen) and event.kind in ("memory", "corrupted") and event.rank in self._seats:
            self._known_damaged.add(self._seats[event.rank])
        if isinstance(event, Reported) and event.report.rank in self._seats:  # the last word counts
            change = self._known_damaged.discard if event.report.trusted else self._known_damaged.add
            change(self._seats[event.report.rank])
        before, decided = self.engine.state, self.engine.step >= 0
        actions = self.engine.handle(replace(event, at=self.now + self.skew))
        if self.decided_at > self.now and self.engine.step > 0:
            self.decided_at = self.now
            self.decided_on = {rank for rank in self._heard if self.ranks[rank].alive}
        if self.scenario.online and not decided and self.engine.step >= 0:
            self._judge_decision(self.engine.step)
        if self.engine.state is not before:
            self.timeline.append((self.now, self.engine.state.value))
        for action in actions:
            self._do(action)

    def _judge_decision(self, step: int) -> None:
        """S against the true state, at every decision: a repair changes that state."""
        heard = [self.ranks[number] for number in self._heard if self.ranks[number].alive]
        best = max((rank.completed for rank in heard if rank.trusted), default=0)
        committed = max(self.furthest, max(rank.gradients for rank in self.ranks))
        self._agreed = max(self._agreed, step)
        if not best <= step <= committed:
            self.violation(f"S = {step}, but a live rank had completed {best}, and {committed} was committed")
        for shard in {shard for rank in self.ranks for shard in rank.old_flips}:
            if sum(rank.can_show(shard, step) for rank in heard) < 2:
                self._uncompared.add(shard)

    def _judge_parting(self, leaver: SimRank) -> None:
        """Nobody is sent away with the last good copy of a shard, unless another shard has none anyway."""
        self._parting.add(leaver)
        believed = self.engine._roster.alive  # a death may be known a moment later
        here = [rank for rank in self._seats.values() if rank.alive or rank.number in believed]
        spoiled = {rank for rank in here if rank.damaged and (rank.bare or rank in self._known_damaged)}
        whole = [rank for rank in here if rank not in spoiled and not rank.flips and rank.update is not DIRTY]
        left = [rank for rank in whole if rank not in self._parting]
        for of_shard in (whole, left):
            missing = self.scenario.layout.holders().keys() - {shard for rank in of_shard for shard in rank.versions}
            missing -= {shard for rank in here for shard in rank.old_flips}  # nothing may show which copy is good
            if missing and of_shard is left and not self.spoils:
                self.violation(f"rank {leaver.number} is sent away, and nobody is left with {sorted(missing)}")
            elif missing:
                return

    def resumed(self, rank: SimRank, step: int) -> None:
        """A rank leaves the repair: clean, at S, and everybody at the same S."""
        if rank.damaged or not rank.trusted or rank.step != step or set(rank.versions.values()) != {step}:
            self.violation(f"rank {rank.number} resumes after {step} with {rank.versions} at {rank.step}")
        self._known_damaged.discard(rank)
        if self._resumed.setdefault(rank.group_epoch, step) != step:
            self.violation(f"rank {rank.number} resumes after {step}, others after {self._resumed[rank.group_epoch]}")

        hidden = rank.old_flips if self.unnoticed else rank.old_flips & self._uncompared
        if unseen := rank.flips.keys() - hidden:
            self.violation(f"rank {rank.number} resumes after {step} with flipped bits in {sorted(unseen)}")
        if not rank.small:
            self.violation(f"rank {rank.number} resumes without random states and counters")
        if not rank.unowned and not self.scenario.weather.loss:  # else nobody may have heard that its memory failed
            self.violation(f"rank {rank.number} resumes with damaged tensors that no optimizer owns")
        if wrong := [text for text in rank.taints if self._told.get(text, rank.group_epoch) < rank.group_epoch]:
            self.violation(f"rank {rank.number} resumes after {step} with numbers that are known to be wrong: {wrong}")

    def holds(self, rank: SimRank) -> None:
        """Whoever is held under one hold is held after one step, unless a recovery came in between."""
        hold, step = rank.in_hold
        if self._held_at.setdefault((hold, rank.group_epoch), step) != step:
            self.violation(f"rank {rank.number} is held after step {step}, others under hold {hold} after another one")

    def _judge_answer(self, answer: Answer) -> None:
        """It comes once, and is true. Who is in a fault at this moment has not told it yet. Words of a hold that come
        after the fault that ended it are believed: no connection reorders them, but for some weathers here."""
        if answer.id in self.answers:
            self.violation(f"{answer.id} is answered twice")
        self.answers[answer.id] = answer
        orderly = self._living() if not self.scenario.weather.reorder else []
        well = [rank for rank in orderly if not rank.held and not rank.hung and not rank.stopping]
        if answer.ok and answer.id.startswith("pause") and any(rank.in_hold[0] == 0 for rank in well):
            free = [rank.number for rank in well if rank.in_hold[0] == 0]
            self.violation(f"{answer.id}: {answer.text}, but ranks {free} are not held")

    def _ask(self, number: int, request: Request) -> None:
        if request.kind == "withdraw":
            self._feed(Withdrawn(0.0, self.asked[-1] if self.asked else ""))
        elif not self._leaderless:
            self.asked.append(f"{request.kind}{number}")
            self._feed(Asked(0.0, self.asked[-1], request.kind, dict(request.args), 20.0, "operator"))

    def committed(self, step: int) -> None:
        self.furthest = max(self.furthest, step)

    def spoiled(self, fault: str, since: int) -> None:
        """Wrong numbers since the update of this step: in every rank, and in every checkpoint from that step on."""
        self.spoils[fault] = since
        for rank in self.ranks:
            rank.taints.add(fault)
        for step, written in self.disk.periodic.items():
            for saved in written.values() if step >= since else ():
                saved.taints.add(fault)

    def _judge_recovery(self, done: Recovered) -> None:
        """The steps lost are stated, and a rewind is one to a checkpoint."""
        found = re.search(r"(\d+) completed steps? lost", done.summary)
        least, most = max(0, self._agreed - done.step), max(0, self._behind - done.step)
        weather = self.scenario.weather
        if weather.reorder or (weather.duplicate and weather.only == "Heartbeat"):
            # late heartbeats tell of steps before an earlier rewind
            most = 1_000_000
        if found is None or not least <= int(found[1]) <= most:
            self.violation(f"not {least} to {most} steps lost: {done.summary}")
        if "Rewound" in done.summary:
            self.furthest = max(rank.gradients for rank in self.ranks)  # some may have trained on for a while
            if done.step not in self.disk.periodic or f"checkpoint of step {done.step}" not in done.summary:
                self.violation(f"rewound to {done.step}: {done.summary}")
        self._agreed = 0

    def meeting(self, rank: SimRank, order: Order) -> Meeting:
        epoch = int(str(order.payload.get("epoch", rank.group_epoch)))
        members = self.scenario.layout.world_size
        if order.kind is OrderKind.REPAIR:
            members = len({end for transfer in list(order.payload["transfers"]) for end in transfer.split("|")[1:]})  # type: ignore[arg-type]
        return self._meetings.setdefault((order.kind, epoch), Meeting(self, members))

    def _do(self, action: Action) -> None:
        if self.closed and not isinstance(action, (Stop, Order, Closed, Answer)):
            return
        if isinstance(action, (Examine, Kill)):
            self._look_at(self._seats.get(action.rank, self.ranks[action.rank]), action)
        if isinstance(action, Stop):
            self.stopped_at = self.now if self.stopped_at is None else self.stopped_at
            if action.epoch > self._epoch:
                self._new_stop(action.epoch)
            for number in action.ranks:
                told = self._seats.get(number, self.ranks[number])
                self._tell(told, "Stop", lambda told=told: told.stop(action.epoch, action.doubt))  # type: ignore[misc]
        elif isinstance(action, Order):
            if action.kind in (OrderKind.ROLLBACK, OrderKind.LOAD):
                self._behind = self.furthest
            rank = self._seats.get(action.rank, self.ranks[action.rank])
            if action.kind is OrderKind.EXIT and action.payload["code"] == EXIT_REBORN:
                self._judge_parting(rank)
            self._tell(rank, action.kind.value, lambda: rank.order(action))
        elif isinstance(action, Tell):
            for number in action.ranks:
                told = self._seats.get(number, self.ranks[number])
                self._tell(told, "Tell", lambda told=told: told.hear_wish(action.wish))  # type: ignore[misc]
        elif isinstance(action, Answer):
            self._judge_answer(action)
        elif isinstance(action, Closed):
            self.closed.append((self.now, action))
            self._incident_ends()
        elif isinstance(action, Recovered):
            self.recovered.append((self.now, action))
            self._judge_recovery(action)
            self._incident_ends()

    def _look_at(self, rank: SimRank, action: Examine | Kill) -> None:
        """What a relay does: it is well, whatever its rank does."""
        if isinstance(action, Examine):
            seen = Examined(0.0, rank.number, rank.info.pid, "", "stacks.txt")
            self.after(self.jitter(0.5), lambda: self.say(rank, seen) if rank.alive else None)
        elif action.pid == rank.info.pid:
            self._tell(rank, "Kill", lambda: self._end_process(rank))

    def _end_process(self, rank: SimRank) -> None:
        if rank.alive:
            self.killed.append(rank)
            if not rank.hung and not self.scenario.weather.loss:  # else it may not have heard the stop
                self.violation(f"rank {rank.number} is killed although it does not hang")
            rank.kill("killed because it does not move")

    def _new_stop(self, epoch: int) -> None:
        if epoch > 1:  # those who reported of their own accord before the first stop are heard
            self._heard.clear()
        self._epoch = epoch
        if not self.closed and (not self.incidents or len(self.incidents[-1]) == 2):
            self.incidents.append([self.now])

    def _incident_ends(self) -> None:
        if self.incidents and len(self.incidents[-1]) == 1:
            self.incidents[-1].append(self.now)

    # ------------------------------------------------------------------------------------------------ the job's world

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, None, 0, action))

    def then(self, rank: SimRank, seconds: float, action: Callable[[], None]) -> None:
        """Unless what goes on in this rank is over by then."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, rank, rank.life, action))

    def jitter(self, most: float) -> float:
        return self.random.random() * most

    def coin(self, chance: float) -> bool:
        return self.random.random() < chance

    def violation(self, text: str) -> None:
        self.violations.append(text)

    def collective(self, rank: SimRank, name: str) -> Collective:
        group = "world" if name in ("clip", "commit", "save", "hold") else str(self.scenario.layout.column(rank.number))
        key = (name, rank.step, group, rank.group_epoch)
        if key not in self._collectives:
            layout = self.scenario.layout
            self._collectives[key] = Collective(self, name, layout.world_size if group == "world" else layout.d)
        return self._collectives[key]

    def died(self, rank: SimRank, message: str) -> None:
        lost = RankLost(0.0, rank.number, message, rank.info.pid)
        weather = self.scenario.weather
        for copy in range(self._copies("RankLost") if weather.only == "RankLost" else 1):
            told = max(0.0, rank.link.clear_up - self.now) + self.jitter(0.3)
            if copy or (weather.only == "RankLost" and weather.reorder):
                told = self.jitter(weather.delay)  # before the last words of the process, or long after them
            self.after(told, lambda: self._hear(rank, lost))
        agent = self.scenario.agent
        if agent is not None and rank.exit_codes in ([], [EXIT_REBORN]) and not self.coin(agent.never):
            late = self.coin(agent.late)
            self.after(30.0 if late else self.jitter(3.0), lambda: self._start_again(rank))
        if self.scenario.reborn and not rank.exit_codes:
            newcomer = replace(rank.info, pid=rank.info.pid + 5000)
            self.after(self.jitter(2.0), lambda: self._feed(Registered(0.0, newcomer)))

    # ------------------------------------------------------------------------------------------------ faults

    def reach(self, rank: SimRank, point: str) -> None:
        """A rank comes to a point where a fault may be waiting for it."""
        armed = self._armed.get(point)
        if not armed:
            return
        self._reached[point] = self._reached.get(point, 0) + 1
        for fault in armed:
            if fault.count == self._reached[point]:
                if fault.delay:
                    self.after(fault.delay, lambda fault=fault: self._strike(rank, fault))
                else:
                    self._strike(rank, fault)

    def _strike(self, rank: SimRank, fault: Fault) -> None:
        if fault.what in ("takeover", "amnesia"):
            self._lose_leader(fault.what == "amnesia")
            return
        if fault.what in CLOCK_FAULTS:
            self.jumps += 1
            if fault.what == "suspend":
                self._suspend()
            else:
                self.skew += JUMP if fault.what == "ahead" else -JUMP
            return
        if not rank.alive or (fault.what == "flap" and rank.inside is None):
            return
        self.struck.append((self.now, fault))
        self.harmed.add(rank.number)
        if fault.what == "kill":
            rank.kill()
        elif fault.what == "kill_host":
            for other in self.ranks:
                if other.info.host == rank.info.host:
                    self.harmed.add(other.number)
                    self.after(self.jitter(0.05), lambda other=other: other.kill("host lost power"))
        elif fault.what == "raise":
            rank.crash("exception", "RuntimeError: something broke")
        elif fault.what == "terminate":
            rank.terminate()
        elif fault.what == "memory":
            rank.damage()
        elif fault.what == "flip":
            rank.flip(len(self.struck))
        elif fault.what in SPOILING_FAULTS:
            rank.spoil(fault.what, len(self.struck))
        elif fault.what == "link":
            rank.break_link()
        elif fault.what == "flap" and rank.inside is not None:
            rank.peer_lost(rank.inside)
        elif fault.what == "hang":
            rank.hung = True
        elif fault.what in HANGS:
            rank.hung, rank.frozen = True, self._visible(rank, fault.what)
        elif fault.what in ("fail", "slow"):
            rank.spell = fault.what
        elif fault.what == "cut":
            self._cut(rank)
        elif fault.what == "away":
            self._cut(rank, AWAY)
        else:
            raise ValueError(fault.what)

    def _visible(self, rank: SimRank, hang: str) -> str:
        """The hang itself, or a like one that can be told from work: a rank that beats may do anything between steps,
        and in the first steps whoever is not stopped."""
        if not rank.held and (self.engine.state is not State.TRAINING or self.engine._watch.limit is None):
            return "freeze"
        return "hold" if rank.resting and hang == "stick" else hang

    # ------------------------------------------------------------------------------------------------ the network

    def say(self, rank: SimRank, event: Event) -> None:
        """Rank to engine."""
        link = rank.link
        if not isinstance(event, (Heartbeat, RankQuiet, Registered, Examined)):
            link.said.append(event)
        if not link.up:
            if not isinstance(event, (Heartbeat, RankQuiet)):
                link.unsaid.append(event)
            return
        number, kind = link.number, type(event).__name__
        for copy in range(self._copies(kind)):
            at, in_order = self._arrival(link.clear_up, kind, copy)
            link.clear_up = max(link.clear_up, at) if in_order else link.clear_up
            self.after(at - self.now, lambda: self._arrived(rank, event, number))

    def _arrived(self, rank: SimRank, event: Event, number: int) -> None:
        link = rank.link
        if number == link.number:
            self._hear(rank, event)
        elif not isinstance(event, (Heartbeat, RankQuiet)):
            self._say_again(rank, event)  # it was in flight when the connection broke

    def _hear(self, rank: SimRank, event: Event) -> None:
        """What a process says counts from its registration until another one registers for its rank."""
        seated = self._seats.get(rank.number)
        if rank in self._replaced:
            return
        if isinstance(event, (RankLost, RankFinished)):
            self._ends[rank] = event
        if isinstance(event, Registered):
            if seated is not None and seated is not rank:
                self._replaced.add(seated)
            self._seats[rank.number] = rank
            rank.known_at = min(rank.known_at, self.now)
        elif seated is not rank and rank.newcomer:  # overtook its registration
            if not self.scenario.weather.loss:
                self.after(0.05, lambda: self._hear(rank, event))
            return
        self._feed(event)

    def _say_again(self, rank: SimRank, event: Event) -> None:
        if rank.link.up:
            self.say(rank, event)
        else:
            rank.link.unsaid.append(event)

    def _tell(self, rank: SimRank, kind: str, action: Callable[[], None]) -> None:
        """Engine to rank."""
        link = rank.link
        number = link.number
        if not link.up:
            return
        for copy in range(self._copies(kind)):
            at, in_order = self._arrival(link.clear_down, kind, copy)
            link.clear_down = max(link.clear_down, at) if in_order else link.clear_down
            self.after(at - self.now, lambda: action() if link.number == number else None)

    def _copies(self, kind: str) -> int:
        weather = self.scenario.weather
        if weather.only not in ("", kind):
            return 1
        self.befallen += 1
        if weather.loss and self.coin(weather.loss):
            return 0
        return 2 if weather.duplicate and self.coin(weather.duplicate) else 1

    def _arrival(self, not_before: float, kind: str, copy: int) -> tuple[float, bool]:
        """When a message arrives, and whether later ones have to wait for it. Where only one kind suffers, its first
        copies come in order unless `reorder`, and second ones long after."""
        weather = self.scenario.weather
        if weather.only and (weather.only != kind or not (copy or weather.reorder)):
            return max(self.now + self.jitter(Weather.delay), not_before), True
        at = self.now + self.jitter(weather.delay)
        return (at, not weather.only) if weather.reorder else (max(at, not_before), not weather.only)

    def _cut(self, rank: SimRank, seconds: float = 0.0) -> None:
        """The connection breaks and comes back, at once or much later."""
        link = rank.link
        if not link.up:
            return
        link.up, link.number = False, link.number + 1
        self.after(seconds or self.jitter(1.0), lambda: self._reconnect(rank))

    def _reconnect(self, rank: SimRank) -> None:
        link = rank.link
        if not rank.alive and not rank.finished:
            return
        link.up = True
        self.say(rank, self._hello(rank))
        unsaid, link.unsaid = link.unsaid, []
        for event in unsaid:
            self.say(rank, event)
