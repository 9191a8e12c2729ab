"""The words the engine speaks: what it is told (events) and what it answers (actions).

Pure data, no behaviour: everything here is frozen, comparable and printable, so that a whole incident can be
logged, replayed and simulated. Times are seconds on a monotonic clock that the caller owns; steps are the numbers
Megatron prints (the first step is 1); a rank is a global rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Commit(str, Enum):
    """Where a rank stands at the commit point of the step it was computing."""

    NONE = "none"  # gradients of this step are not final on this rank
    ENTERED = "entered"  # gradients final, the commit collective did not complete here
    PASSED = "passed"  # the commit collective completed: every rank had final gradients


class Update(str, Enum):
    """State of this rank's optimizer shard with respect to the step it was computing."""

    UNTOUCHED = "untouched"  # still the shard of the previous step
    DIRTY = "dirty"  # the local update began and did not end
    DONE = "done"  # the shard of this step


@dataclass(frozen=True)
class RankInfo:
    """What a rank says about itself when it registers."""

    rank: int
    host: str
    pid: int
    part: str  # model part, e.g. "tp0-pp1": its ranks hold the same parameters and write one checkpoint file
    dp_rank: int  # position in the part's data-parallel list
    holds: tuple[str, ...]  # ids of the optimizer shards in this rank's memory, e.g. ("tp0-pp1/dense/0",)
    # Ids of all shards that the part's checkpoint file is made of. (): those that ranks of the part hold. Where experts
    # are divided, ranks of other parts hold some of them.
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankReport:
    """What a stopped rank says about its state. It stays as reported until an order changes it."""

    rank: int
    step: int  # the step being computed; after its end and before the next begins, still that step
    commit: Commit
    update: Update
    fault: str = ""  # why this rank itself stopped ("" when it was only told to, or lost a peer)
    trusted: bool = True  # False: its tensors may be damaged (memory fault); never a source
    rng_start: str = ""  # sha256 of the RNG snapshot at the start of `step`
    rng_end: str = ""  # sha256 of the RNG state at the end of `step` ("" before its update began)
    epoch: int = 0  # the stop that this report answers; 0: told before any stop was heard
    # Steps whose checkpoint this rank could load online, ascending: saved to the end, or loaded, by this very run.
    checkpoints: tuple[int, ...] = ()
    # Hashes of the shards that it holds, by their ids: as they are now; as they were after their last change, where it
    # was taken then; and as they were when one of `checkpoints` was saved, by "step|shard id".
    digests: dict[str, str] = field(default_factory=dict)
    stamps: dict[str, str] = field(default_factory=dict)
    saved: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wish:
    """What operators want of all ranks at the end of a step. A later one replaces an earlier one as a whole.

    Each hold and each save has an id of its own, from the same row of numbers as `id`: a rank that is held under one
    goes on as soon as it hears a later wish without that very hold.
    """

    id: int = 0
    hold: int = 0  # 0: nobody is to be held
    hold_from: int = 0  # at the end of this step or of a later one
    limit: float = 0.0  # seconds after which a rank that is held goes on by itself
    save: int = 0  # 0: no checkpoint is wanted
    save_from: int = 0
    working: bool = False  # the hold is for what is done meanwhile, and ends with it: nobody wants a pause
    pending: bool = False  # a pause that has not come true: if nobody waits for it any more, nobody wants it


@dataclass(frozen=True)
class LinkState:
    """The network link of all collectives, as it was last kept: tested by all ranks."""

    name: str = ""  # an interface, or several with commas between; "": the one that the backend chose at the start
    before: str = ""  # the one before it
    since: str = ""  # UTC, by the clock of a rank
    epoch: int = 0  # of the groups that were built on it then; 0: never moved
    unsettled: int = 0  # epoch of a move that this rank has begun since, and of which it knows no end


# ------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Event:
    """Something that happened, with the time at which the controller saw it."""

    at: float


@dataclass(frozen=True)
class Registered(Event):
    info: RankInfo
    epoch: int = 0  # of the last stop that this process heard, perhaps from an engine before this one
    bare: bool = False  # it was started in the place of another process, and has none of its state yet
    doubt: str = ""  # why the numbers of all ranks may be wrong, as a `Stop` told this process
    began: bool = False  # it has begun a step: if this engine knows nothing of that, another one did
    wish: Wish = field(default_factory=Wish)  # the last one that it heard, perhaps from an engine before this one
    held: int = 0  # id of the hold that it is in; 0: none
    held_at: int = 0  # the step after which
    link: LinkState = field(default_factory=LinkState)
    held_for: float = 0.0  # seconds so far


@dataclass(frozen=True)
class Heartbeat(Event):
    rank: int
    step: int
    phase: str
    waiting: bool = False  # some thread of the rank waits for an operation that needs its peers
    pulse: int = 0  # changes when the main thread's Python stack does; 0: unknown
    checkpoint: int = 0  # the last step whose checkpoint this run has completed or loaded; 0: none
    one_way: bool = False  # this rank's data cannot be put back to an earlier step: no checkpoint can be loaded online


@dataclass(frozen=True)
class RankQuiet(Event):
    """A relay that is well has heard nothing of a rank whose process lives and is connected. Said again and again."""

    rank: int
    seconds: float  # by the relay's own looks, so that a relay which was stopped itself does not count that time
    state: str = ""  # of the main thread, as in /proc: "T" stopped, "D" in the kernel, ...


@dataclass(frozen=True)
class Examined(Event):
    """A relay has looked at a process as it was asked to."""

    rank: int
    pid: int
    spare: str = ""  # why this process must not be killed
    stacks: str = ""  # file with the stacks of all its threads
    message: str = ""  # why there is no such file


@dataclass(frozen=True)
class FaultSeen(Event):
    """A rank that is alive says that it, or one of its peers, is broken."""

    rank: int
    kind: str  # "exception", "terminated", "peer", "memory", "communication", ...
    message: str
    own: bool  # True: the fault is this rank's own; False: it only noticed a lost peer


@dataclass(frozen=True)
class RankLost(Event):
    """The process of a rank is gone (connection closed without goodbye, or its agent said so)."""

    rank: int
    message: str
    pid: int = 0  # of the process that is gone; 0: unknown. A late word about an older process is told by it


@dataclass(frozen=True)
class RankFinished(Event):
    """A rank ended training in the ordinary way and said goodbye."""

    rank: int


@dataclass(frozen=True)
class Reported(Event):
    report: RankReport


@dataclass(frozen=True)
class OrderDone(Event):
    """A rank carried out an order, or could not."""

    rank: int
    order: int
    ok: bool
    message: str = ""
    result: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Held(Event):
    """A rank waits between two steps, because operators want it."""

    rank: int
    hold: int
    step: int  # the last one that it has completed


@dataclass(frozen=True)
class Released(Event):
    """A rank trains on after a hold."""

    rank: int
    hold: int


@dataclass(frozen=True)
class SavedStep(Event):
    """The framework's own checkpoint of a step is complete, as operators wanted it, or was given up on all ranks."""

    rank: int
    save: int
    step: int
    path: str
    why: str = ""  # it was given up


@dataclass(frozen=True)
class Asked(Event):
    """An operator asks for something. Answered by `Answer` with the same id, perhaps after some `Progress`."""

    id: str
    kind: str  # "pause", "resume", "dump", ...
    args: dict[str, str] = field(default_factory=dict)
    patience: float = 600.0  # seconds after which the operator wants an answer in any case
    who: str = ""  # for the log


@dataclass(frozen=True)
class Withdrawn(Event):
    """The operator does not wait for the answer any more: what was not done yet is not to be done."""

    id: str


@dataclass(frozen=True)
class Steered(Event):
    """A cluster manager decides from now on how faults are answered; or it does no more, for the reason in `why`."""

    on: bool
    who: str = ""  # for the log
    why: str = ""


@dataclass(frozen=True)
class Told(Event):
    """The cluster manager names faults, and wants the job to be stopped because of them. Answered by a `Consult`."""

    faults: tuple[tuple[int, str], ...] = ()  # (rank, "memory" | "link" | "process"); (): it gives none
    who: str = ""


@dataclass(frozen=True)
class Advised(Event):
    """What the cluster manager decides for. Said while nothing was asked, it says nothing."""

    strategy: str  # "retry", "recover", "dump", "exit"
    leaving: tuple[int, ...] = ()  # ranks whose node goes: their launcher is not to start them again


@dataclass(frozen=True)
class Tick(Event):
    """Time passed; deadlines are judged on ticks only."""


# ------------------------------------------------------------------------------------------------ actions


class OrderKind(str, Enum):
    # Orders of a repair also name their epoch: a rank that has heard of a later stop refuses them.
    # Orders that give shards away name their hashes at S, as far as they are known: digests (shard id -> hash).
    # payload: step. Complete the local update of S, no collective. Result: rng_end, "digest:<shard id>" of each shard
    FINISH_UPDATE = "finish_update"
    STAGE_SHARDS = "stage_shards"  # payload: step, directory, shards, digests. Write own shards for a writer to read
    WRITE_PART = "write_part"  # payload: step, directory, part, sources (shard id -> "self" or "rank:<r>"), digests
    PUBLISH = "publish"  # payload: step, directory, parts. Manifest, rename, tracker. Result: path, resume, exists
    DISCARD = "discard"  # payload: directory. Remove what a failed attempt left behind
    # payload: step, epoch, newcomers [ranks as text] where there are some, and link (name, before, since, epoch) where
    # the job was moved to another one. Build all process groups anew under this epoch, with all ranks. Result of a rank
    # that now knows that none of its tensors was hit: intact
    REGROUP = "regroup"
    # payload: step, digests, transfers ["shard|source rank|target rank", ...] in one order for everybody. Before a LOAD
    # the shard is "<part>/unowned": the tensors of the part that no optimizer owns and no checkpoint holds. For a
    # newcomer also "<part>/small": the small state of S (random states, counters, scheduler, scalers)
    REPAIR = "repair"
    # payload: step, newcomers [ranks as text]. Leave the broken step behind, gather parameters from the shards of S.
    # With newcomers, everybody forgets what it cached in its first step
    ROLLBACK = "rollback"
    # payload: step, newcomers as above. Load the checkpoint of `step`, on all ranks together, and put every state of
    # the steps after it back to it (instead of a rollback). Later checkpoints are not used any more: their steps are
    # computed again, and saved again. Step 0: the newest one. Result then: loaded, its step
    LOAD = "load"
    RESUME = "resume"  # payload: step. Train on with S + 1
    # Orders to ranks that are held, and to all of them together
    SAVE = "save"  # payload: step, after which they are held. The framework's own checkpoint of it. Result: path
    # payload: act, and what it needs. "check": link. "move": link, epoch, seconds for one group. "test": seconds for
    # all groups. "keep": link, as in REGROUP. A rank that cannot says so, and stays held
    LINK = "link"
    EXIT = "exit"  # payload: code, summary. 75 saved, 76 unsaved; 78: only this rank, which is to be started again


@dataclass(frozen=True)
class Action:
    """Something the caller has to do for the engine."""


@dataclass(frozen=True)
class Stop(Action):
    """Tell these ranks to leave their collectives and report. `epoch` grows with every stop.

    A rank that registers after a stop is told the same epoch again: who has heard it does nothing.
    """

    epoch: int
    ranks: tuple[int, ...]
    reason: str
    doubt: str = ""  # why the numbers of all ranks may be wrong: kept by all of them until they train on


@dataclass(frozen=True)
class Order(Action):
    """An order to one rank. After a reconnect it may come again with the same id: carried out once, answered again."""

    id: int
    rank: int
    kind: OrderKind
    payload: dict[str, str | int | list[str] | dict[str, str]]


@dataclass(frozen=True)
class Examine(Action):
    """Keep the stacks of this rank's process, and say whether it may be killed: answered by `Examined`."""

    rank: int


@dataclass(frozen=True)
class Kill(Action):
    """End this process of a rank, which does not move any more. Its end is told as that of any other."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Tell(Action):
    """What operators want, for these ranks. Who has heard it, or a later one, does nothing."""

    wish: Wish
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Progress(Action):
    """Something that an operator waits for gets on."""

    id: str
    text: str
    done: int = 0
    of: int = 0  # 0: not countable


@dataclass(frozen=True)
class Answer(Action):
    """What came of an operator's request: `ok`, or refused or failed, for the reason in `text`."""

    id: str
    ok: bool
    text: str
    data: dict[str, str | int | float] = field(default_factory=dict)
    late: bool = False  # not done in time, and withdrawn
    lost: bool = False  # nobody is left here who could answer: ask again


@dataclass(frozen=True)
class Consult(Action):
    """All are stopped, and the cluster manager is to decide: answered by `Advised`. A later one replaces it."""

    strategies: tuple[str, ...]  # that the state of the job allows, the gentlest first; "exit" is always among them
    faults: tuple[tuple[int, str], ...]  # (rank, kind), of all that are known
    failed: str = ""  # the strategy that was decided for before, and did not lead on
    why: str = ""
    step: int = 0  # the last one that is known to be complete somewhere


@dataclass(frozen=True)
class Unadvised(Action):
    """The cluster manager did not decide in time: what follows is the engine's own decision."""

    why: str


@dataclass(frozen=True)
class Note(Action):
    """A line for the incident: every decision comes with its reason. `stage` names the stage that begins or ends."""

    stage: str
    text: str
    warn: bool = False


@dataclass(frozen=True)
class Closed(Action):
    """The incident is over: nothing more will be ordered."""

    outcome: str  # "dumped", "exists", "failed", "finished"
    step: int  # the step S that was saved, -1 if none
    summary: str


@dataclass(frozen=True)
class Recovered(Action):
    """An incident is over and training goes on. `Engine.incident` tells about it until the next one begins."""

    outcome: str  # "retried"; "rebooted": with ranks that were started again; "rewound": from a checkpoint
    step: int  # the step from which all ranks go on: S, or that of the checkpoint
    tries: int  # the last one succeeded
    summary: str
    epoch: int  # of the process groups from now on


MAX_WAITS = 5  # one more than the engine renews its waiting


@dataclass(frozen=True)
class Deadlines:
    """Seconds allowed per stage; derived from one knob by `settings`, asserted to be ordered there."""

    heartbeat: float
    heartbeat_lost: float
    stop: float
    order: float
    dump: float
    exit: float
    register: float = 300.0  # after the first rank registered; a warning only, that the job is not protected
    reboot: float = 60.0  # from the last report until each lost rank has a newcomer that is ready: strategy "recover"
    consult: float = 0.0  # for a decision of the cluster manager, each time that one is asked
    hang: float = 0.0  # without progress, at least, until a rank that others wait for is taken to hang; 0: no watch
    hang_fixed: bool = False  # `hang` is the limit, however long steps take; False: longer steps make it longer

    def patience(self, recovers: bool = False) -> float:
        """Seconds that a stopped rank obeys before it ends by itself. Only a guard against an engine that is there and
        says nothing: the engine's own deadlines end sooner, each of which it renews once less. `recovers`: a repair may
        take what a dump may, and be followed by one, and newcomers are waited for."""
        once = self.stop + self.dump + (self.reboot + 2 * self.consult if recovers else 0.0)
        return MAX_WAITS * once + self.exit
