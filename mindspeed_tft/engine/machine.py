"""The engine: the life of one job as a state machine. Events with timestamps go in, actions come out; nothing else.

    STARTING -> TRAINING -> STOPPING -> ... -> TRAINING, or EXITING -> CLOSED

Here it is decided who takes part (registrations, newcomers, goodbyes), what is known of them (heartbeats, losses), and
what an engine before this one left behind. What a fault leads to is `stops`' affair. See README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mindspeed_tft.engine.link import Heard, named
from mindspeed_tft.engine.overview import overview
from mindspeed_tft.engine.repair import Stage as RepairStage
from mindspeed_tft.engine.roster import Arrival
from mindspeed_tft.engine.states import State
from mindspeed_tft.engine.steering import Steering
from mindspeed_tft.engine.types import (
    Action,
    Advised,
    Asked,
    Deadlines,
    Event,
    Examined,
    FaultSeen,
    Heartbeat,
    Held,
    OrderDone,
    RankFinished,
    RankInfo,
    RankLost,
    RankQuiet,
    Registered,
    Released,
    Reported,
    SavedStep,
    Steered,
    Tick,
    Told,
    Withdrawn,
)
from mindspeed_tft.engine.words import count, ranks

__all__ = ["Engine", "State"]

_OF_TRAINING = (FaultSeen, RankLost, RankFinished, Reported)


class Engine(Steering):
    """Decides for one job of `world_size` ranks. Not thread-safe; never blocks; reads no clock."""

    def __init__(
        self,
        deadlines: Deadlines,
        world_size: int,
        *,
        epoch: int = 0,
        issued: int = 0,
        tag: str = "",
        strategies: frozenset[str] = frozenset({"dump"}),
    ) -> None:
        """
        Args:
            epoch: no smaller than any epoch that was used before this engine; its stops count on from there.
            issued: no smaller than any order id that was used before it; a rank carries out an id once.
            tag: makes the names of this job's dump directories different from those of another job.
            strategies: "retry" lets faults be repaired online where that is possible; "recover" does, too, and waits
                for processes that are started again. A dump is the last resort of all.
        """
        super().__init__(deadlines, world_size, epoch, issued, tag, strategies)
        self._first_registration: float | None = None
        self._warned_of_missing = False
        self._bare: dict[int, RankInfo] = {}  # STARTING: processes that were started in the place of others
        self._began = False  # STARTING: the job trained when other engines led, of which none has left a word
        self._later: list[Event] = []  # of such a job, until all ranks are known
        self._later_since = 0.0
        self._strategies = strategies
        self._beats: dict[int, Heartbeat] = {}  # the last one of each rank
        self._links = Heard(self._desk)
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Registered: self._on_registered,
            Heartbeat: self._on_heartbeat,
            FaultSeen: self._on_fault,
            RankLost: self._on_lost,
            RankFinished: self._on_finished,
            Reported: self._on_reported,
            OrderDone: self._on_order_done,
            RankQuiet: self._on_quiet,
            Examined: self._on_examined,
            Asked: self._on_asked,
            Withdrawn: self._holds.withdrawn,
            Held: self._on_held,
            Released: self._holds.released,
            SavedStep: self._holds.saved,
            Steered: self._on_steered,
            Told: self._on_told,
            Advised: self._on_advised,
            Tick: self._on_tick,
        }

    # ------------------------------------------------------------------------------------------------ events

    def handle(self, event: Event) -> list[Action]:
        """What has to be done because of this event."""
        self._pass_time(event.at)
        if self._began and self._state is State.STARTING and isinstance(event, _OF_TRAINING):
            self._later_since = self._later_since if self._later else self._desk.now
            self._later.append(event)
        else:
            self._handlers[type(event)](event)
        if self._state is State.TRAINING and (
            broken := self._holds.broken or self._links.doubt(ours=self._holds.working)
        ):
            self._stop_for_link(broken)
        if self._repair is not None and self._repair.failure:
            self._stop_again(self._repair.failure)
        elif self._repair is not None and self._repair.stage is RepairStage.DONE:
            self._train_on(self._repair)
            self._links.settled()
        if self._dump is not None and self._dump.ending is not self._ending:
            self._leave(self._dump.ending)
        return self._desk.drain()

    def _pass_time(self, at: float) -> None:
        """A clock that jumps, or a controller that was stopped for a while, is no fault of anybody in the job."""
        lost = self._desk.advance(at)
        if lost < 0:
            self._desk.note(f"the clock went back by {-lost:.1f} s: waiting goes on from there", warn=True)
        elif lost >= self._deadlines.heartbeat_lost:
            self._desk.note(f"no event for {lost:.1f} s more than usual: that time counts against nobody", warn=True)

    def _on_tick(self, event: Tick) -> None:
        flow = self._flow
        if self._state is State.STOPPING and flow is not None:
            flow.tick()
        elif (waiting := self._waiting) is not None:
            self._tick_waiting(waiting)
        elif self._state is State.STOPPING:
            self._tick_stopping()
        elif self._state is State.TRAINING:
            self._tick_training()
        elif self._state is State.STARTING:
            self._tick_starting()
        elif self._state is State.EXITING and self._desk.now >= self._deadline:
            self._desk.note(f"{self._absent()} did not leave within {self._deadlines.exit:g} s", warn=True)
            self._close()
        self._holds.tick(self._furthest + 1)
        if self._state not in (State.EXITING, State.CLOSED):
            self._warn_of_silence()

    def _on_held(self, event: Held) -> None:
        if self._state is State.TRAINING:
            self._furthest = max(self._furthest, event.step)
        if self._may_be_held:
            self._holds.held(event)

    @property
    def _may_be_held(self) -> bool:
        """Otherwise everybody is stopped, and what a rank says of a hold was said before it heard of that. While ranks
        are told to train on, some may come to a hold before the last answer of another one is here."""
        return self._state in (State.STARTING, State.TRAINING) or self.state is State.RESUMING

    def _on_asked(self, event: Asked) -> None:
        self._holds.asked(event, self.state, self._furthest + 1)

    def status(self) -> dict[str, object]:
        """All that an operator may want to know now: plain values. Costs as much as there are ranks."""
        last = self._past[1] if self._past is not None else {}
        return {
            "state": self.state.value,
            "step": self._furthest,
            "epoch": self._desk.epoch,
            "strategies": sorted(self._strategies),
            "seconds_per_step": self._watch.step_seconds,
            "incidents": self._number - 1 + (self._state is not State.TRAINING and bool(self._desk.incident.faults)),
            "last_incident": {key: last[key] for key in ("outcome", "summary", "step") if key in last},
            "reason": self._reason if self._state not in (State.STARTING, State.TRAINING) else "",
            "pause": self._holds.as_dict(),
            "link": {"name": named(self._desk.link.name), **self._links.as_dict()},
            **overview(
                *(self.state, self._furthest, self._strategies, self._roster),
                *(self._beats, self._holds.held_after, self._desk.now),
            ),
        }

    # ------------------------------------------------------------------------------------------------ registration

    def _on_registered(self, event: Registered) -> None:
        info, rank = event.info, event.info.rank
        arrival = self._roster.classify(info)
        if arrival is Arrival.OUTSIDE:
            self._desk.note(f"rank {rank} registered, but the job has {self._roster.world_size} ranks", warn=True)
            return
        if arrival is Arrival.AGAIN and rank in self._roster.finished:
            return  # it has left training and may be saving or evaluating: nothing is asked of it
        if arrival is Arrival.NEWCOMER:
            if self._reboots is not None and self._reboots.sent_again(info):
                return
            self._supersede(info)
        self._roster.enter(info, arrival, self._desk.now)
        if event.bare and arrival is Arrival.FIRST:
            self._bare[rank] = info
        self._began = self._began or event.began or event.bare
        self._links.take(event.link)
        self._holds.registered(event if self._may_be_held else replace(event, held=0))
        self._catch_up(rank, max(event.epoch, event.link.epoch, event.link.unsettled))
        if event.doubt and not self._desk.doubt:
            self._take_doubt(event.doubt)
        if arrival is Arrival.NEWCOMER and (welcoming := self._welcoming) is not None:
            welcoming.came(info)
        if self._state is State.STARTING:
            self._count_registrations()
        elif self._state is State.TRAINING:
            self._desk.note(f"rank {rank} reconnected")
        elif self._ending is None or self._ending.outcome != "finished":
            self._greet(rank, arrival)

    def _supersede(self, newcomer: RankInfo) -> None:
        """There is another process for this rank, so the one before it is gone."""
        rank, why = newcomer.rank, f"another process (pid {newcomer.pid} on {newcomer.host}) registered in its place"
        if rank in self._roster.newcomers:
            self._lose_newcomer(rank, why)
        elif rank in self._roster.alive:
            self._lose(rank, why)

    def _count_registrations(self) -> None:
        if self._first_registration is None:
            self._first_registration = self._desk.now
            self._desk.note(f"waiting for {count(self._roster.world_size, 'rank')} to register")
        if self._roster.complete:
            self._state = State.TRAINING
            self._desk.note(f"all {self._roster.world_size} ranks registered: protected from now on")
            self._desk.enter("train")
            self._watch.begin()
            self._seat_newcomers()
            later, self._later = self._later, []
            for event in later:
                self._handlers[type(event)](event)

    def _greet(self, rank: int, arrival: Arrival) -> None:
        """A rank registered after the stop: it must not stay behind in a collective, nor wait for a lost order."""
        self._desk.note(f"rank {rank} registered after the stop ({arrival.value})")
        if self._repair is not None and self._repair.failure:
            return  # its coming ended the repair: it is stopped with everybody
        self._desk.stop((rank,), self._reason)
        flow = self._flow
        if self._state is State.STOPPING and flow is not None:
            flow.repeat(rank)
        elif self._ending is not None:
            old = self._exits.get(rank)
            if old is not None and arrival is Arrival.AGAIN:
                self._desk.put(old)
                return
            self._order_exit(rank)
            if self._state is State.EXITING:
                self._awaited.add(rank)

    def _warn_of_silence(self) -> None:
        limit = self._deadlines.heartbeat_lost
        if quiet := self._roster.newly_quiet(self._desk.now - limit):
            self._desk.note(f"no heartbeat for {limit:g} s from {ranks(quiet)}", warn=True)
        begun, patience = self._first_registration, self._deadlines.register
        waiting = self._state is State.STARTING and begun is not None and not self._warned_of_missing
        if waiting and begun is not None and self._desk.now - begun >= patience:
            self._warned_of_missing = True
            missing = ranks(self._roster.missing())
            self._desk.note(f"not protected: {missing} did not register within {patience:g} s", warn=True)

    # ------------------------------------------------------------------------------------------- after another engine

    def _catch_up(self, rank: int, epoch: int) -> None:
        """A rank has heard of a later stop than ours: of an engine whose place this one took. Ranks obey later epochs
        only, so ours go on from there; a stop that it would not obey is given again."""
        if epoch <= self._desk.epoch:
            return
        before, self._desk.epoch = self._desk.epoch, epoch
        why = f"rank {rank} has heard of epoch {epoch} already, where this stop was epoch {before}"
        if self._state in (State.STARTING, State.TRAINING):
            self._first = False
        elif self._repair is not None:
            self._repair.fail(why)
        elif self._state is State.STOPPING and self._dump is None:
            self._desk.note(f"everybody is stopped anew: {why}")
            self._stop_anew(self._reason)

    def _seat_newcomers(self) -> None:
        """Processes that came for lost ranks when another engine was here. Of those before them only the place is
        known."""
        bare, self._bare = self._bare, {}
        for rank, info in bare.items():
            self._lose(rank, f"process {info.pid} on {info.host} was started in its place")
            self._roster.enter(info, Arrival.NEWCOMER, self._desk.now)
            if (welcoming := self._welcoming) is not None:
                welcoming.came(info)
            self._greet(rank, Arrival.NEWCOMER)

    def _tick_starting(self) -> None:
        """Of a job that trained before: who does not come to this controller is not known, nor what it holds."""
        if self._later and self._desk.now - self._later_since >= self._deadlines.stop:
            missing = ranks(self._roster.missing())
            why = "no controller is left that knew who holds what"
            self._abandon_start(f"{missing} did not come to this controller, which knows nothing of them", why)

    # ------------------------------------------------------------------------------------------------ signs of life

    def _on_heartbeat(self, event: Heartbeat) -> None:
        if event.rank not in self._roster.alive:
            return
        self._beats[event.rank] = event
        if self._roster.hear(event.rank, self._desk.now):
            self._desk.note(f"rank {event.rank} is heard again")
        if self.state is not State.RESUMING:  # who trains on already tells of steps that this incident does not lose
            self._furthest = max(self._furthest, event.step - 1)
        if self._state is State.TRAINING:
            self._watch.heard(event)
        if self._repairs is not None:
            self._repairs.heard(event.step)

    def _on_quiet(self, event: RankQuiet) -> None:
        if self._state is State.TRAINING:
            self._watch.quiet(event)

    def _on_examined(self, event: Examined) -> None:
        if self._state is State.TRAINING:
            self._watch.examined(event)
        elif self._inquest is not None:
            self._inquest.answer(event)

    def _on_finished(self, event: RankFinished) -> None:
        rank, roster = event.rank, self._roster
        if rank in roster.newcomers:
            self._lose_newcomer(rank, "left before it trained")
            return
        if rank not in roster or rank in roster.finished or rank in roster.lost:
            self._left(rank)
            return
        roster.finish(rank)
        self._holds.gone(rank)
        if not self._close_when_finished():
            self._gone(rank, "finished training")

    def _on_lost(self, event: RankLost) -> None:
        rank, roster = event.rank, self._roster
        process = roster.process_of(rank)
        if rank not in roster or self._state is State.CLOSED:
            return
        if event.pid and process is not None and event.pid != process.pid:
            return  # the end of a process whose successor is here already
        if self._reboots is not None:
            self._reboots.ended(rank)
        if rank in roster.newcomers:
            self._lose_newcomer(rank, event.message)
        elif rank not in roster.lost and rank not in roster.finished:
            self._lose(rank, event.message)
