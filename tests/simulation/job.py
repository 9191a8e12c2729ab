"""Simulated ranks of a training job: what each computes, holds, reports, and does when ordered.

The true state lives here (`SimRank.versions`); the engine sees reports only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from mindspeed_tft.engine.repair import DIGEST
from mindspeed_tft.engine.types import (
    Commit,
    FaultSeen,
    Held,
    Order,
    OrderDone,
    OrderKind,
    RankFinished,
    RankInfo,
    RankReport,
    Released,
    Reported,
    SavedStep,
    Update,
    Wish,
)
from mindspeed_tft.recovery.hold import Boundary
from mindspeed_tft.recovery.notices import EVERY

from .disk import PartFile, Saved, Version
from .shards import Shards, of
from .world import REPAIRING, TOGETHER, Collective, Job, Link

GRACE = 2.0  # seconds in which the engine ends a hold for all ranks


class SimRank(Shards):
    """One rank: its place in the step, its shards, its orders."""

    def __init__(self, job: Job, info: RankInfo, newcomer: bool = False) -> None:
        start = job.scenario.first_step - 1
        super().__init__(job, info, start)
        self.step, self.commit, self.update = start, Commit.PASSED, Update.DONE
        self.gradients = start  # the step whose final gradients are in memory
        self.completed = start  # the last step whose update ended here
        self.trusted, self.hung, self.finished = True, False, False
        self.unowned = True  # the tensors that no optimizer owns are whole
        self.updated = start  # the step of the last update that began here, also when it was rewound since
        self.taints: set[str] = set()  # faults that may have spread wrong numbers into its shards
        self.checkpoints: set[int] = set()  # those it could load
        if job.scenario.save_every and start:  # loaded by this run
            self._write_periodic()
            self.checkpoints.add(start)
        self.stopping = self.held = False
        self.stop_epoch = 0  # the last stop that it heard
        self.group_epoch = 0  # of its process groups
        self.fault = ""
        self.inside: Collective | None = None
        self.link = Link()
        self.spell = ""  # what the next order suffers: "fail", "slow"
        self.frozen = ""  # how it hangs, if nothing goes on here at all
        self.resting = True  # between two steps
        self._report_due = False
        self._hurt = 0  # memory faults so far
        self._turn = 0  # grows when the running order is over
        self.life = 0  # grows when what was going on here is over
        self._orders: list[Order] = []
        self._busy = False
        self._answers: dict[int, OrderDone | None] = {}
        self._now: Order | None = None
        self.small = True  # its random states and counters go with its step
        self.newcomer, self.starting = newcomer, newcomer
        self.bare = newcomer  # has not trained yet
        self.began = False  # a step, in this process
        self.wish = Wish()  # of operators, as it heard last
        self.agreed = (0, 0, 0)  # in the commit of this step: a hold, a save, and the limit of the hold
        self.in_hold = (0, 0)  # the hold that it is in, and after which step
        self._before_hold = (0, 0)  # the hold that it is about to be in, and its limit
        # Of the real one, what it decides; its loop, in which a rank waits, is played here.
        self.boundary = Boundary(cast(Any, self), lambda: self.stopping, GRACE)
        self.doubt = ""  # why numbers may be wrong, as it was told
        self._said_before = 0  # its running order began
        self.known_at = float("inf")  # when the engine heard of it
        if newcomer:
            self._begin_bare()
        self.exit_codes: list[int] = []
        self.told_to_leave = False

    # ------------------------------------------------------------------------------------------------ training

    def _begin_bare(self) -> None:
        """A process that was started again: it waits for orders as soon as its start-up is over."""
        self.step = self.completed = self.gradients = self.updated = 0
        self.commit, self.update = Commit.NONE, Update.UNTOUCHED
        self.trusted, self.damaged, self.unowned, self.small = False, True, False, False
        self.stopping = self.held = True
        self.checkpoints = set()
        self._set(None)

    def started(self) -> None:
        self.starting = False
        self._work()

    def begin(self) -> None:
        if self.stopping:
            self.hold()
        elif self.alive:
            self.begin_step()

    def begin_step(self) -> None:
        self.step += 1
        self.began = True
        self.resting = False
        self.commit, self.update = Commit.NONE, Update.UNTOUCHED
        self._reach("compute")
        slow = self.job.scenario.uneven and self.job.coin(0.05)
        self._go_on(4.0 if slow else 0.1, lambda: self._enter("reduce"))

    def _enter(self, name: str) -> None:
        if self.stopping:
            self.hold()
            return
        self.inside = self.job.collective(self, name)
        if name == "commit":
            self.inside.offers.append(self._offer())
        elif name == "hold":
            self.inside.votes.append(not self.boundary._is_ended(self._before_hold[0]))
        self._reach(name)
        if self.inside is not None:  # else the fault took it out again
            self.inside.arrive(self)

    def released(self, name: str) -> None:
        if name == "reduce":
            self._go_on(0.01, lambda: self._enter("clip"))
        elif name == "save":
            self.checkpoints.add(self.step)
            self._reach("saved")
            self._go_on(0.02, self._next_step)
        elif name == "clip":
            self.job.committed(self.step)
            self.gradients, self.commit = self.step, Commit.ENTERED
            self._reach("entering")
            self._go_on(0.01, lambda: self._enter("commit"))
        elif name == "commit":
            self.commit = Commit.PASSED
            self._reach("passed")
            self._go_on(0.01, self._begin_update)
        elif name == "hold":
            self._wait_as_agreed()
        else:
            self.resting = True
            self._reach("between")
            evaluates = self.job.scenario.uneven and self.job.coin(0.01)
            most = 6.0 if self.job.scenario.faults else 90.0  # who is told to stop has to hear it
            self._go_on(most if evaluates else 0.02, self._next)

    def _begin_update(self) -> None:
        self.update, self.updated = Update.DIRTY, self.step
        self._set(None)
        self._reach("update")
        self._go_on(0.05, self._end_update)

    def _end_update(self) -> None:
        self.update = Update.DONE
        self._set(self.step)
        self.completed = self.step
        self._reach("updated")
        self._go_on(0.005, lambda: self._enter("gather"))

    def _next(self) -> None:
        """Save where it is time to; else on."""
        every = self.job.scenario.save_every
        if every and self.step % every == 0:
            self.checkpoints.discard(self.step)  # of an earlier life of this step
            if self._changed(self.stamps):
                self.damage()
                return
            self._enter("save")
            if self.inside is not None:
                self._write_periodic()
        else:
            self._next_step()

    def _write_periodic(self) -> None:
        written = self.job.disk.periodic.setdefault(self.step, {})
        written[self.number] = Saved(dict(self.versions), set(self.taints), dict(self.flips))
        self.saved[self.step] = self._digests()
        self._stamp()

    # ------------------------------------------------------------------------------------------------ operators

    def _offer(self) -> tuple[int, int, int]:
        return self.boundary.offer(self.step)

    def hear_wish(self, wish: Wish) -> None:
        if self.alive and not self.hung and wish.id > self.wish.id:
            self.wish = wish
            if self.in_hold[0] and self.boundary._is_ended(self.in_hold[0]):
                self._leave_hold()

    def _next_step(self) -> None:
        (hold, save, limit), self.agreed = self.agreed, (0, 0, 0)
        if save:
            self.boundary._done = save
            self.job.say(self, SavedStep(0.0, self.number, save, self.step, f"/save/{self.step}"))
        if hold and not self.stopping:
            self._before_hold = (hold, limit)
            self._enter("hold")
        else:
            self._go_on_training()

    def _wait_as_agreed(self) -> None:
        hold, limit = self._before_hold
        if not all(self.job.collective(self, "hold").votes):
            self.boundary._over = hold
            self._go_on_training()
            return
        self.in_hold = (hold, self.step)
        self.job.holds(self)
        self.job.say(self, Held(0.0, self.number, hold, self.step))
        self.job.reach(self, "held")
        if not self.alive or self.in_hold[0] != hold:
            return  # of the fault that was waiting here
        if self.boundary._is_ended(hold):
            self._leave_hold()
        else:
            limit = self.wish.limit if self.wish.hold == hold else limit
            self.job.then(self, limit + GRACE, lambda: self._leave_hold() if self.in_hold[0] == hold else None)
            self._look_for_notice(hold)

    def _look_for_notice(self, hold: int) -> None:
        if self.in_hold[0] == hold and hold in self.job.notices:
            self._leave_hold()
        elif self.in_hold[0] == hold:
            self.job.then(self, EVERY, lambda: self._look_for_notice(hold))

    def _leave_hold(self) -> None:
        hold, self.in_hold = self.in_hold[0], (0, 0)
        self.boundary._over = hold
        self.job.notices.add(hold)
        self.job.say(self, Released(0.0, self.number, hold))
        self._go_on_training()

    def _go_on_training(self) -> None:
        if self.step < self.job.scenario.last_step:
            self.begin_step()
        elif not self.stopping:
            self.finished = True
            self.job.say(self, RankFinished(0.0, self.number))
            self.alive = False
        else:
            self.hold()

    def _reach(self, point: str) -> None:
        if point in self.job.watched:
            self.job.reach(self, f"{point}@{self.step - self.job.scenario.first_step + 1}")

    def _go_on(self, most: float, action: Callable[[], None]) -> None:
        """The next part of the step, unless a fault just ended it."""
        if not self.held:
            self._then(most, action)

    def _then(self, most: float, action: Callable[[], None]) -> None:
        self.job.then(self, self.job.jitter(most), action)

    def can_show(self, shard: str, step: int) -> bool:
        """It has this shard as it is after that step, or comes to it, and its own hash does not speak against it."""
        here = None if shard in self.flips.keys() - self.old_flips else self.versions.get(shard)
        comes = here == step - 1 and self.gradients == self.step == step and self.update is Update.UNTOUCHED
        return not self.damaged and (here == step or comes)

    @property
    def phase(self) -> str:
        """As a session stamps it."""
        if self.held:
            return "stopped"
        if self.in_hold[0]:
            return "held"
        if self.resting:
            return "between-steps"
        if self.commit is not Commit.PASSED:
            return "forward-backward" if self.commit is Commit.NONE else "commit"
        return "param-gather" if self.update is Update.DONE else "update"

    # ------------------------------------------------------------------------------------------------ faults

    def kill(self, message: str = "killed by signal 9") -> None:
        if not self.alive:
            return
        self.alive = False
        self._leave_collective()
        self._tear_files()
        self.job.died(self, message)

    def crash(self, kind: str, text: str) -> None:
        """An exception climbs out of the step, wherever it is."""
        if not self.alive or self.held:
            return
        self.life += 1
        self._leave_collective()
        self.fault = text
        self.job.say(self, FaultSeen(0.0, self.number, kind, text, own=True))
        self.hold()

    def damage(self) -> None:
        """A memory fault: what the shards hold now is garbage."""
        if not self.alive:
            return
        self.trusted, self.damaged, self.unowned = False, True, False
        self._hurt += 1
        self._set(None)
        self.crash("memory", "uncorrectable error at 0x7f")
        if self.held:
            self.job.say(self, FaultSeen(0.0, self.number, "memory", "uncorrectable error at 0x7f", own=True))

    def spoil(self, kind: str, number: int) -> None:
        """Wrong numbers are seen: the last update that began here may have spread them to every rank."""
        if not self.alive or self.hung or not self.small or (self.newcomer and not self.began):
            return  # who has computed nothing sees no wrong numbers
        text = f"bad numbers ({number})"
        self.job.spoiled(text, self.updated)
        if kind == "corrupted":
            self.trusted, self.damaged, self.unowned = False, True, False
            self._hurt += 1
            self._set(None)
        if self.held:
            self.fault = text
            self.job.say(self, FaultSeen(0.0, self.number, kind, text, own=True))
            self._abort_order("numbers are wrong")
            self.job.after(0.0, lambda: self.crash(kind, text))  # where it was about to train on
        else:
            self.crash(kind, text)

    def break_link(self) -> None:
        text = "LINK ERROR on eth0"
        if self.alive and self.held:
            self.fault = text
            self.job.say(self, FaultSeen(0.0, self.number, "link", text, own=True))
            self._abort_order("the link is broken")
        else:
            self.crash("link", text)

    def terminate(self) -> None:
        """A signal asks the rank to end. Its state is whole."""
        if self.alive and not self.held:
            self.fault = "received SIGTERM"
            self.job.say(self, FaultSeen(0.0, self.number, "terminated", self.fault, own=True))
            self._stop_now()

    def peer_lost(self, where: Collective) -> None:
        if self.alive and self.inside is where and not self.hung:
            self.life += 1
            self._leave_collective()
            self.job.say(self, FaultSeen(0.0, self.number, "peer", "connection reset by peer", own=False))
            self.stopping = True
            self.hold()

    def stop(self, epoch: int, doubt: str = "") -> None:
        """Told to stop. Who waits for orders already reports once more, and refuses those of an older stop."""
        if self.alive and not self.hung and epoch >= self.stop_epoch:
            self.doubt = doubt or self.doubt
        if not self.alive or self.hung or epoch <= self.stop_epoch:
            return
        self.stop_epoch = epoch
        if not self.held:
            self._stop_now()
            return
        self._report_due = True
        self._abort_order("stopped once more")
        self._then(0.05, self._work)

    def _abort_order(self, why: str) -> None:
        """Comes out of what it does with others, as out of a collective."""
        order = self._now
        if order is not None and order.kind in REPAIRING:
            turn = self._turn = self._turn + 1
            self.job.after(self.job.jitter(0.05), lambda: self._end(turn, order, why, False))

    def _stop_now(self) -> None:
        if not self.alive or self.stopping or self.hung:
            return
        self.stopping = True
        self.job.reach(self, "stopping")
        self._then(0.05, self._abort)

    def _abort(self) -> None:
        if self.inside is not None or self.in_hold[0]:
            self.life += 1
            self._leave_collective()
            self.hold()

    def _leave_collective(self) -> None:
        inside, self.inside = self.inside, None
        if inside is not None:
            inside.tear()

    def hold(self) -> None:
        """The step is over for this rank: it reports and waits for orders."""
        if self.held or self.hung:
            return
        self.held = self.stopping = True
        self.agreed, self.in_hold = (0, 0, 0), (0, 0)
        self.life += 1
        self._then(0.05, self._report)

    def _report(self) -> None:
        self._report_due = False
        early = self.job.scenario.early_rng and self.commit is not Commit.NONE
        known = early or self.update is not Update.UNTOUCHED
        digests, stamps = self._digests(), dict(self.stamps)
        self._stamp()  # what was told binds
        report = RankReport(
            self.number,
            self.step,
            self.commit,
            self.update,
            self.fault,
            self.trusted,
            self._rng(self.step - 1),
            self._rng(self.step) if known else "",
            self.stop_epoch,
            () if self.job.scenario.one_way else tuple(sorted(self.checkpoints)),
            digests,
            {shard: stamp for shard, stamp in stamps.items() if shard in digests},
            {f"{step}|{shard}": d for step in self.checkpoints for shard, d in self.saved.get(step, {}).items()},
        )
        self.job.say(self, Reported(0.0, report))
        self.job.reach(self, "reported")
        self._work()

    def _rng(self, step: int) -> str:
        drift = "-drifted" if self.number == self.job.scenario.drifted else ""
        return f"{self.info.part}@{step}{drift}"

    # ------------------------------------------------------------------------------------------------ orders

    def order(self, order: Order) -> None:
        """An order may come twice: it is carried out once and answered again."""
        if not self.alive or self.hung:
            return
        if order.id in self._answers:
            answer = self._answers[order.id]
            if answer is not None:
                self.job.say(self, answer)
            return
        if order.kind is OrderKind.SAVE:
            if self.in_hold[0]:
                done = OrderDone(0.0, self.number, order.id, True, "", {"path": f"/save/{self.step}"})
                self._answers[order.id] = done
                self.job.say(self, done)
            return
        self._answers[order.id] = None
        self.told_to_leave = self.told_to_leave or order.kind is OrderKind.EXIT
        self._orders.append(order)
        self._work()

    def _work(self) -> None:
        if self._busy or self.hung or not self.alive or self.starting:
            return
        if self._report_due and self.held:
            self._report()
            return
        if not self._orders:
            return
        if not self.held and self._orders[0].kind is not OrderKind.EXIT:
            return
        self._busy = True
        order = self._orders.pop(0)
        self._now = order
        self._said_before = len(self.link.said)
        self.job.reach(self, f"order:{order.kind.value}")
        spell, self.spell = self.spell, ""
        begun = self._begin(order)
        seconds = 12.0 if spell == "slow" else self.job.jitter(0.3)
        turn = self._turn = self._turn + 1
        end = self._ender(turn, order, begun, spell == "fail")
        if order.kind in TOGETHER and spell != "fail" and not begun:
            self.job.after(seconds, lambda: self._meet(turn, order, end))
        else:
            self.job.after(seconds, end)

    def _ender(self, turn: int, order: Order, begun: str, fails: bool) -> Callable[[], None]:
        hurt = self._hurt
        return lambda: self._end(turn, order, begun, fails or (self._hurt > hurt and order.kind in REPAIRING))

    def _meet(self, turn: int, order: Order, end: Callable[[], None]) -> None:
        if turn == self._turn and self.alive and not self.hung:
            self.job.meeting(self, order).arrive(self, end)

    def _begin(self, order: Order) -> str:
        """The first half of an order; returns what is wrong with it."""
        payload: dict[str, Any] = order.payload
        if payload.get("epoch", self.stop_epoch) < self.stop_epoch:
            return "superseded"
        if order.kind is OrderKind.FINISH_UPDATE:
            if self.gradients != payload["step"] or self.step != payload["step"] or self.update is not Update.UNTOUCHED:
                self.job.violation(f"rank {self.number} told to finish {payload['step']} at {self.step}/{self.update}")
            self.commit, self.update, self.updated = Commit.PASSED, Update.DIRTY, self.step
            self._set(None)
        elif order.kind is OrderKind.LOAD:
            self.trusted = False  # until it has ended
            self._set(None)
        elif order.kind is OrderKind.PUBLISH:
            if self.job.disk.exists(payload["step"]):
                return "exists"
            if not self.job.disk.complete(payload["directory"], payload["parts"]):
                return "a part is missing or torn"
        return ""

    def _end(self, turn: int, order: Order, begun: str, fails: bool) -> None:
        if not self.alive or self.hung or turn != self._turn:
            return
        self._turn += 1
        self._now = None
        result: dict[str, str] = {}
        message = "input/output error" if fails else begun if begun != "exists" else ""
        if not message:
            message = self._carry_out(order, begun, result)
        if not self.alive:  # it died between the rename and the tracker
            return
        done = OrderDone(0.0, self.number, order.id, not message, message, result)
        self._answers[order.id] = done
        self._busy = False
        self.job.reach(self, f"done:{order.kind.value}")
        if self.alive and not self.hung:
            self.job.say(self, done)
            if order.kind is OrderKind.EXIT:
                self._exit(order)
            elif order.kind is OrderKind.RESUME and done.ok:
                self._resume()
            self._work()

    def _carry_out(self, order: Order, begun: str, result: dict[str, str]) -> str:
        payload: dict[str, Any] = order.payload
        disk = self.job.disk
        if order.kind is OrderKind.FINISH_UPDATE:
            self.commit, self.update = Commit.PASSED, Update.DONE
            if self.trusted:
                self._set(payload["step"])
                self.completed = payload["step"]
            result["rng_end"] = self._rng(self.step)
            self._stamp()
            result.update({DIGEST + shard: digest for shard, digest in self._digests().items()})
        elif order.kind is OrderKind.STAGE_SHARDS:
            if self.damaged:
                return "uncorrectable error"
            if why := self._changed(of(payload.get("digests", {}), payload["shards"])):
                return why
            for shard in payload["shards"]:
                disk.directory(payload["directory"]).staged[shard, self.number] = self._content(shard)
        elif order.kind is OrderKind.WRITE_PART:
            return self._write(payload)
        elif order.kind is OrderKind.PUBLISH:
            result["path"] = f"/ckpt/iter_{payload['step']:07d}"
            if begun == "exists":
                result["exists"] = "1"
                return ""
            published = disk.rename(payload["directory"], payload["step"])
            self.job.reach(self, "renamed")
            published.tracked = self.alive
        elif order.kind is OrderKind.DISCARD:
            disk.discard(payload["directory"])
        elif order.kind is OrderKind.REGROUP:
            self.group_epoch = payload["epoch"]
        elif order.kind is OrderKind.REPAIR:
            return self._receive(payload["step"], payload["transfers"], payload.get("digests", {}))
        elif order.kind is OrderKind.LOAD:
            self._load(payload["step"])
        elif order.kind is OrderKind.ROLLBACK:
            if self.damaged:
                return "uncorrectable error"
            if why := self._changed(self.stamps):
                return why
            self.step = self.completed = self.gradients = payload["step"]
            self.commit, self.update = Commit.PASSED, Update.DONE
        elif order.kind is OrderKind.RESUME:
            if self.damaged:
                return "uncorrectable error"
            self.job.resumed(self, payload["step"])
        return ""

    def _receive(self, step: int, transfers: list[str], digests: Mapping[str, str]) -> str:
        """Takes whatever its sources have, if it has the right hash: the oracle says whether that was right."""
        mine = [transfer.split("|") for transfer in transfers]
        for shard, source, target in mine:
            giver = self.job.ranks[int(source)]
            if self.number not in (int(source), int(target)):
                continue
            whole = giver.unowned if shard.endswith("/unowned") else not giver.damaged
            if not whole or not giver.alive:
                return f"rank {source} cannot give {shard}"
            if shard in giver.versions and (why := giver._changed(of(digests, [shard]))):
                return why
            if int(target) == self.number and shard.endswith("/small"):
                self.small = self._can_give_small(giver, step)
            elif int(target) == self.number:
                self.unowned = giver.unowned
            if int(target) == self.number and shard in self.versions:
                self.versions[shard] = giver.versions[shard]
                self._clean(shard)
                if shard in giver.flips:
                    self.flips[shard] = giver.flips[shard]
                    self.old_flips |= {shard} & giver.old_flips
                self.taints |= giver.taints
        if {shard for shard, _, target in mine if int(target) == self.number} >= set(self.versions):
            self.trusted, self.damaged = True, False
            self.step = self.completed = self.gradients = self.updated = step
            self.commit, self.update = Commit.PASSED, Update.DONE
            self.stamps = {}
            self._stamp()
        return ""

    def _can_give_small(self, giver: SimRank, step: int) -> bool:
        at_end = giver.step == step and giver.update is Update.DONE
        at_start = giver.step == step + 1 and giver.update is Update.UNTOUCHED
        if giver.small and giver.trusted and (at_end or at_start):
            return True
        self.job.violation(f"rank {giver.number} gives the small state of {step} at {giver.step}/{giver.update}")
        return False

    def _load(self, step: int) -> None:
        """All of the rank from a periodic checkpoint, but for what no checkpoint holds."""
        saved = self.job.disk.periodic.get(step, {}).get(self.number)
        if saved is None or (step not in self.checkpoints and not self.newcomer):
            self.job.violation(f"rank {self.number} told to load {step}, which it does not know")
            return
        self.versions, self.taints = dict(saved.versions), set(saved.taints)
        self.flips, self.old_flips, self.stamps = dict(saved.flips), set(saved.flips), {}
        self.small = True
        self.checkpoints.add(step)
        self.trusted, self.damaged = True, False
        self.saved = {known: digests for known, digests in self.saved.items() if known <= step}
        self._stamp()
        self.step = self.completed = self.gradients = step
        self.commit, self.update = Commit.PASSED, Update.DONE
        self.checkpoints = {known for known in self.checkpoints if known <= step}

    def _resume(self) -> None:
        """On with the next step: nothing of the broken one is left."""
        self.life += 1
        self.stopping = self.held = self.bare = False
        self.stop_epoch = max(self.stop_epoch, self.group_epoch)  # a stop that is answered stops nobody, however late
        self.doubt = ""
        del self.link.said[: self._said_before]
        self.fault = ""
        self.begin_step()

    def _write(self, payload: dict[str, Any]) -> str:
        here = self.job.disk.directory(payload["directory"])
        own = [shard for shard, source in payload["sources"].items() if source == "self"]
        if not self.damaged and (why := self._changed(of(payload.get("digests", {}), own))):
            return why
        found: dict[str, Version] = {}
        for shard, source in payload["sources"].items():
            if source == "self" and self.damaged:
                return "uncorrectable error"
            if source == "self":
                found[shard] = self._content(shard)
            elif (shard, int(source[5:])) not in here.staged:
                return f"{shard} was not staged by {source}"
            else:
                found[shard] = here.staged[shard, int(source[5:])]
        here.parts[payload["part"]] = PartFile(found, self._rng(payload["step"]))
        return ""

    def _tear_files(self) -> None:
        if self._now is not None and self._now.kind is OrderKind.WRITE_PART:
            payload: dict[str, Any] = self._now.payload
            self.job.disk.directory(payload["directory"]).parts[payload["part"]] = None

    def _exit(self, order: Order) -> None:
        self.exit_codes.append(int(str(order.payload["code"])))
        self.alive = False
        self._leave_collective()
        self.job.died(self, "connection closed")
