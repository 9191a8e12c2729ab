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


@dataclass(frozen=True)
class Heartbeat(Event):
    rank: int
    step: int
    phase: str
    waiting: bool = False  # some thread of the rank waits for an operation that needs its peers
    pulse: int = 0  # changes when the main thread's Python stack does; 0: unknown


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
    REGROUP = "regroup"  # payload: step, epoch. Build all process groups anew under this epoch, with all ranks
    # payload: step, digests, transfers ["shard|source rank|target rank", ...] in one order for everybody. Before a LOAD
    # the shard is "<part>/unowned": the tensors of the part that no optimizer owns and no checkpoint holds. For a
    # newcomer also "<part>/small": the small state of S (random states, counters, scheduler, scalers)
    REPAIR = "repair"
    # payload: step, newcomers [ranks as text]. Leave the broken step behind, gather parameters from the shards of S.
    # With newcomers, everybody forgets what it cached in its first step
    ROLLBACK = "rollback"
    # payload: step, newcomers as above. Load the checkpoint of `step`, on all ranks together, and put every state of
    # the steps after it back to it (instead of a rollback). Later checkpoints are not used any more: their steps are
    # computed again, and saved again
    LOAD = "load"
    RESUME = "resume"  # payload: step. Train on with S + 1
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
    hang: float = 0.0  # without progress, at least, until a rank that others wait for is taken to hang; 0: no watch
    hang_fixed: bool = False  # `hang` is the limit, however long steps take; False: longer steps make it longer
