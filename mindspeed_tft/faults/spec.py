"""What a drill breaks, and in which job: the words of a fault and of a parallel layout, read and refused.

Pure: it starts nothing and imports nothing outside the standard library, because a training process reads its
own faults with it too. Every refusal names what was given and what would be right.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

KINDS: dict[str, str] = {
    "kill": "SIGKILL",
    "term": "SIGTERM",
    "segv": "SIGSEGV, a real access to address 0",
    "stop": "SIGSTOP",
    "exc": "a Python exception in user code",
    "oom": "an out-of-memory error",
    "uce": "an uncorrectable device-memory error that destroys parameters and optimizer state",
    "uce-low": "an uncorrectable device-memory error that hits no live tensor",
    "link": "a retryable communication error",
    "hang": "a native call that never returns",
    "nan": "a corrupted gradient, of which no device says a word",
    "flip": "one bit of its optimizer shard flipped, of which no device says a word",
    "controller": "the controller process killed",
    "agent": "the launcher of the rank's node killed",
    "node": "all processes of the rank's node killed",
}

# After these a rank goes on in what it was doing; the others end it.
GOES_ON: frozenset[str] = frozenset({"term", "link", "nan", "flip", "controller", "agent"})
# After these the process cannot train on: it dies of them, or has to make room for another one.
ENDS_PROCESS: frozenset[str] = frozenset({"kill", "segv", "exc", "oom", "stop", "hang", "node"})
OF_NODE: frozenset[str] = frozenset({"agent", "node"})  # they hit more than a rank, and leave the job another node
HANGS: frozenset[str] = frozenset({"stop", "hang"})  # the watch ends the process
_SIGNALS: frozenset[str] = frozenset({"kill", "segv", "node"})  # no handler of ours runs
# Training goes on as if nothing had happened: what is rehearsed is the fault that comes after it.
UNNOTICED: frozenset[str] = frozenset({"controller", "agent", "flip"})

# The moments of a step in the order in which a rank passes them; `save` and `eval` lie between steps.
STEP_PHASES: tuple[str, ...] = (
    "data",
    "forward",
    "backward",
    "grad-reduce",
    "clip",
    "commit",
    "update",
    "param-gather",
)
# The moments of an online repair: the fault falls when its rank begins to carry out that order. The step of such a
# fault is the step of the fault that is being repaired.
REPAIR_PHASES: tuple[str, ...] = ("regroup", "repair", "rollback")
PHASES: tuple[str, ...] = (*STEP_PHASES, "save", "eval", *REPAIR_PHASES)

PRESETS: tuple[str, ...] = ("dump", "retry", "recover", "elastic")
DTYPES: tuple[str, ...] = ("fp32", "bf16", "fp16")

# What can be rehearsed today; a later feature adds its line here.
# With `retry` the kinds of `dump` show what happens to a fault that cannot be repaired online.
AVAILABLE_KINDS: dict[str, tuple[str, ...]] = {
    "dump": ("kill", "term", "segv", "exc", "oom", "stop", "hang", "uce", "flip", "controller", "node"),
    "retry": ("uce", "uce-low", "link", "nan", "flip", "kill", "term", "segv", "exc", "oom", "controller"),
    "recover": (
        *("kill", "segv", "exc", "oom", "stop", "hang", "uce", "uce-low", "link"),
        *("flip", "controller", "agent", "node"),
    ),
}
REPAIRED_ONLINE: frozenset[str] = frozenset({"uce", "uce-low", "link"})
KINDS_IN_REPAIR: tuple[str, ...] = ("uce", "uce-low", "link", "kill", "exc", "segv")
NAN_PHASE = "backward"  # a gradient is corrupted where it flows
FLIP_PHASE = "param-gather"  # a bit flips once the hash of the step's update is taken
AVAILABLE_PHASES: dict[str, tuple[str, ...]] = {"dump": STEP_PHASES, "retry": PHASES, "recover": PHASES}
DEFAULT_FAULT: dict[str, str] = {
    "dump": "kill@1:7:backward",
    "retry": "uce@1:7:backward",
    "recover": "kill@1:7:backward",
}
MIN_REWIND_STEP = 4  # a checkpoint, a whole step after it that is lost with it, the step before the fault, the fault
MIN_STEPS = 3  # one before the fault, its own, one after it
MAX_STEPS = 100  # the unbroken run keeps a checkpoint of every step
AVAILABLE_AXES: tuple[str, ...] = ("dp", "tp", "pp", "ep")

_FAULT = re.compile(r"(?P<kind>[^@:]+)@(?P<rank>\d+):(?P<step>\d+)(?::(?P<phase>[^:]+))?")
_AXIS = re.compile(r"([a-z]+)(\d+)")


class SpecError(ValueError):
    """A fault or layout that cannot be drilled; the message says what would be right."""


@dataclass(frozen=True)
class FaultSpec:
    """One fault: `kind` hits `rank` while it computes `step`, when it reaches `phase` (None: any moment)."""

    kind: str
    rank: int
    step: int
    phase: str | None = None

    def __str__(self) -> str:
        tail = f":{self.phase}" if self.phase else ""
        return f"{self.kind}@{self.rank}:{self.step}{tail}"

    @property
    def ends_process(self) -> bool:
        """Its rank goes on as another process, if at all. An exception that an order of a repair meets fails that order
        alone, and the repair is tried again."""
        return self.kind in (_SIGNALS if self.phase in REPAIR_PHASES else ENDS_PROCESS)

    def victims(self, per_node: int) -> tuple[int, ...]:
        """The ranks whose process it ends, where a node has `per_node` ranks."""
        if self.kind == "node":
            first = self.rank // per_node * per_node
            return tuple(range(first, first + per_node))
        return (self.rank,) if self.ends_process else ()

    def settled(self, seed: int) -> FaultSpec:
        """This fault with its phase chosen: the same seed always chooses the same one."""
        if self.phase is not None:
            return self
        if self.kind == "nan":
            return replace(self, phase=NAN_PHASE)
        if self.kind == "flip":
            return replace(self, phase=FLIP_PHASE)
        # A generator of its own: the training process's global one is part of the state that is compared.
        chosen = random.Random(f"{seed}/{self}").choice(STEP_PHASES)
        return replace(self, phase=chosen)


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes. As in Megatron, experts are divided over data-parallel ranks: ep of dp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def shard_of(self, rank: int, replicas: int) -> tuple[int, ...]:
        """Which shard of the optimizer `rank` holds: ranks with the same answer are each other's replicas.

        Megatron's order of ranks, the fastest first: tensor, context, expert, data, pipeline. The data-parallel list of
        a model part is that of context and data together. Ranks with the same shard of it have the same experts, and of
        these the same shard, where the replicas divide dp / ep.
        """
        tensor, rest = rank % self.tp, rank // self.tp
        position, pipeline = rest % (self.cp * self.dp), rest // (self.cp * self.dp)
        return tensor, pipeline, position % (self.cp * self.dp // replicas)

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in ("tp", "pp", "cp", "ep", "dp")}
        return "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "dp1"


def parse_fault(text: str) -> FaultSpec:
    """Read `KIND@RANK:STEP[:PHASE]`."""
    found = _FAULT.fullmatch(text.strip())
    if found is None:
        raise SpecError(f"--fault {text!r}: expected KIND@RANK:STEP[:PHASE], for example kill@1:7:backward")
    kind, phase = found["kind"], found["phase"]
    if kind not in KINDS:
        usable = "; ".join(f"with preset {preset}: {' '.join(kinds)}" for preset, kinds in AVAILABLE_KINDS.items())
        raise SpecError(f"--fault {text!r}: unknown kind {kind!r}; {usable}")
    if phase is not None and phase not in PHASES:
        usable = "; ".join(f"with preset {preset}: {' '.join(names)}" for preset, names in AVAILABLE_PHASES.items())
        raise SpecError(f"--fault {text!r}: unknown phase {phase!r}; {usable}")
    step = int(found["step"])
    if step < 1:
        raise SpecError(f"--fault {text!r}: step {step} does not exist; the first step is 1")
    return FaultSpec(kind, int(found["rank"]), step, phase)


def parse_faults(text: str) -> tuple[FaultSpec, ...]:
    """Read a comma list of faults, as it travels in the environment of a training process."""
    return tuple(parse_fault(part) for part in text.split(",") if part.strip())


def format_faults(faults: Iterable[FaultSpec]) -> str:
    """The inverse of `parse_faults`."""
    return ",".join(str(fault) for fault in faults)


def parse_layout(text: str) -> Layout:
    """Read axes with sizes, such as `dp4` or `tp2pp2dp2`."""
    wrong = f"--layout {text!r}"
    if not re.fullmatch(rf"(?:{_AXIS.pattern})+", text):
        raise SpecError(f"{wrong}: expected axes with sizes, for example dp4, tp2dp2, pp2dp2 or tp2pp2dp2")
    sizes: dict[str, int] = {}
    for axis, size in _AXIS.findall(text):
        if axis not in ("dp", "tp", "pp", "ep", "cp"):
            raise SpecError(f"{wrong}: unknown axis {axis!r}; known axes: dp tp pp ep cp")
        if axis in sizes:
            raise SpecError(f"{wrong}: axis {axis!r} is given twice; give each axis once")
        if int(size) < 1:
            raise SpecError(f"{wrong}: {axis}{size} is no size; sizes start at 1")
        sizes[axis] = int(size)
    return Layout(**sizes)


def check_replicas(layout: Layout, replicas: int) -> None:
    """Refuse a number of optimizer replicas that the data-parallel size cannot be divided into."""
    if replicas < 1:
        raise SpecError(f"--replicas {replicas}: expected at least 1")
    if layout.ep > 1 and (layout.dp % layout.ep or layout.dp // layout.ep % replicas):
        raise SpecError(
            f"--layout {layout}: ep must divide dp, and --replicas {replicas} what is left; for example ep2dp4 with "
            "2 replicas"
        )
    if layout.dp % replicas:
        fitting = " ".join(str(n) for n in range(2, layout.dp + 1) if layout.dp % n == 0)
        raise SpecError(
            f"--replicas {replicas}: the data-parallel size {layout.dp} of layout {layout} must be divisible by it; "
            f"fitting: {fitting}"
        )


def first_rewind(faults: Iterable[FaultSpec], replicas: int) -> FaultSpec | None:
    """The first fault after which nothing but a periodic checkpoint may hold the state; None: there is no such one."""
    return min((f for f in faults if replicas == 1 or f.kind == "nan"), key=lambda fault: fault.step, default=None)


def interval_before(step: int) -> int:
    """How often to save so that a fault of `step` finds a checkpoint, but not one of the step before: then completed
    steps have to be computed again, which is what a rehearsal of it is for. For step 7 it is 4."""
    return (step - 1) // 2 + 1


def check_drill(
    preset: str,
    layout: Layout,
    faults: Sequence[FaultSpec],
    steps: int,
    replicas: int,
    dtype: str = "fp32",
    save_interval: int | None = None,
    nodes: int = 1,
) -> None:
    """Refuse what this preset cannot rehearse (yet), before anything is started."""
    if not MIN_STEPS <= steps <= MAX_STEPS:
        raise SpecError(f"--steps {steps}: expected {MIN_STEPS} to {MAX_STEPS}")
    check_job(preset, layout, replicas, dtype)
    if not faults:
        raise SpecError("--fault: give at least one, for example kill@1:7:backward")
    for fault in faults:
        _check_fault(preset, layout, fault, steps)
        _check_nan(fault, dtype)
        _check_hang(fault)
        _check_flip(fault)
        _check_in_repair(preset, fault, faults)
        _check_node(layout, fault, replicas, nodes)
    if preset == "dump" and all(fault.kind in UNNOTICED for fault in faults):
        raise SpecError(f"--fault {faults[0]}: training goes on after it; add a fault that ends it, such as kill@1:8")
    _check_nodes(layout, nodes)
    _check_checkpoints(faults, replicas, save_interval)


def default_nodes(faults: Sequence[FaultSpec]) -> int:
    """How many nodes the job has, where nobody says it: two, if one of them is to be hit."""
    return 2 if any(fault.kind in OF_NODE for fault in faults) else 1


def _check_nodes(layout: Layout, nodes: int) -> None:
    if nodes < 1 or layout.world_size % nodes:
        fitting = " ".join(str(n) for n in range(1, layout.world_size + 1) if layout.world_size % n == 0)
        raise SpecError(
            f"--nodes {nodes}: the {layout.world_size} ranks of layout {layout} are spread evenly; fitting: {fitting}"
        )


def _check_node(layout: Layout, fault: FaultSpec, replicas: int, nodes: int) -> None:
    if fault.kind not in OF_NODE:
        return
    if nodes < 2:
        raise SpecError(f"--nodes {nodes}: --fault {fault} hits one node of several; use --nodes 2")
    if fault.kind != "node" or layout.world_size % nodes:
        return
    gone = fault.victims(layout.world_size // nodes)
    left = {layout.shard_of(rank, replicas) for rank in range(layout.world_size) if rank not in gone}
    if lost := [rank for rank in gone if layout.shard_of(rank, replicas) not in left]:
        raise SpecError(
            f"--fault {fault}: with layout {layout} on {nodes} nodes, all {replicas} holders of the shard of rank "
            f"{lost[0]} are on that node, so its state would be gone; use another --layout, such as dp4, or "
            f"more than {nodes} --nodes"
        )


def check_job(preset: str, layout: Layout, replicas: int, dtype: str) -> None:
    """Refuse a job that cannot be drilled, whatever breaks in it."""
    if preset not in PRESETS:
        raise SpecError(f"--preset {preset!r}: unknown; known presets: {' '.join(PRESETS)}")
    if preset not in AVAILABLE_KINDS:
        raise SpecError(f"--preset {preset}: not available yet; available: {' '.join(AVAILABLE_KINDS)}")
    if dtype not in DTYPES:
        raise SpecError(f"--dtype {dtype!r}: unknown; known: {' '.join(DTYPES)}")
    _check_axes(layout)
    check_replicas(layout, replicas)
    if replicas < 2 and preset == "dump":
        raise SpecError(
            "--replicas 1: with preset dump the survivors save what they hold, and without a second copy the state of "
            "a lost rank is held by nobody; use --replicas 2, or --preset retry, which goes on from a checkpoint"
        )


def _check_axes(layout: Layout) -> None:
    if layout.cp > 1:
        raise SpecError(f"--layout {layout}: axis cp cannot be drilled yet; available axes: {' '.join(AVAILABLE_AXES)}")


def _elsewhere(kind: str) -> str:
    fitting = [preset for preset, kinds in AVAILABLE_KINDS.items() if kind in kinds]
    return f"; use --preset {fitting[0]}" if fitting else ""


def _check_fault(preset: str, layout: Layout, fault: FaultSpec, steps: int) -> None:
    kinds, phases = AVAILABLE_KINDS[preset], AVAILABLE_PHASES[preset]
    if fault.kind not in kinds:
        raise SpecError(
            f"--fault {fault}: kind {fault.kind!r} is not available with preset {preset}, where there are "
            f"{' '.join(kinds)}{_elsewhere(fault.kind)}"
        )
    if fault.phase is not None and fault.phase not in phases:
        raise SpecError(
            f"--fault {fault}: phase {fault.phase!r} is not available with preset {preset} yet; "
            f"available: {' '.join(phases)}"
        )
    if fault.rank >= layout.world_size:
        raise SpecError(
            f"--fault {fault}: rank {fault.rank} does not exist; layout {layout} has ranks 0 to {layout.world_size - 1}"
        )
    if not 2 <= fault.step < steps:
        # Before step 2 nothing is completed that could be saved; after the last step nothing would go on.
        raise SpecError(f"--fault {fault}: with --steps {steps} the step must be one of 2 to {steps - 1}")


def _check_hang(fault: FaultSpec) -> None:
    if fault.kind == "hang" and fault.phase in ("save", "eval"):
        raise SpecError(
            f"--fault {fault}: between steps work may take any time, so nobody takes it for a hang; use a phase of the "
            f"step ({' '.join(STEP_PHASES)}), or kind stop"
        )


def _check_flip(fault: FaultSpec) -> None:
    if fault.kind == "flip" and fault.phase == "update":
        raise SpecError(
            f"--fault {fault}: in the middle of an update half of the shard is still to be written; use phase "
            f"{FLIP_PHASE!r}, or one before the update"
        )


def _check_nan(fault: FaultSpec, dtype: str) -> None:
    if fault.kind != "nan":
        return
    if fault.phase not in (None, NAN_PHASE):
        raise SpecError(f"--fault {fault}: a gradient is corrupted in phase {NAN_PHASE!r}; no other is available")
    if dtype == "fp16":
        raise SpecError(
            f"--fault {fault}: with --dtype fp16 the loss scaler takes it for an overflow and skips the step, so there "
            f"is nothing to recover from; use --dtype fp32 or bf16"
        )


def repaired(preset: str) -> frozenset[str]:
    """The kinds after which training goes on in the same job."""
    return {"retry": REPAIRED_ONLINE, "recover": REPAIRED_ONLINE | ENDS_PROCESS}.get(preset, frozenset())


def _check_in_repair(preset: str, fault: FaultSpec, faults: Sequence[FaultSpec]) -> None:
    """A fault that falls into a repair needs another one, of the same step, that is repaired."""
    if fault.phase not in REPAIR_PHASES:
        return
    if fault.kind not in KINDS_IN_REPAIR:
        raise SpecError(
            f"--fault {fault}: kind {fault.kind!r} is not available in phase {fault.phase!r}, where there are "
            f"{' '.join(KINDS_IN_REPAIR)}"
        )
    causes = [
        other
        for other in faults
        if other.phase not in REPAIR_PHASES and other.kind in repaired(preset) and other.step == fault.step
    ]
    if not causes:
        raise SpecError(
            f"--fault {fault}: phase {fault.phase!r} belongs to the repair of another fault of step {fault.step}, and "
            f"none that is repaired online is given; add for example --fault uce@{fault.rank}:{fault.step}:backward"
        )
    destroys = sorted(repaired(preset) & {"uce", *ENDS_PROCESS})
    if fault.phase == "repair" and all(cause.kind not in destroys for cause in causes):
        raise SpecError(
            f"--fault {fault}: nobody has a shard to move in that repair, so no rank gets to phase 'repair'; only kind "
            f"{' or '.join(map(repr, destroys))} of step {fault.step} destroys one"
        )


def _check_checkpoints(faults: Sequence[FaultSpec], replicas: int, save_interval: int | None) -> None:
    """Refuse faults without the periodic checkpoints that they need."""
    saves = [fault for fault in faults if fault.phase == "save"]
    if save_interval is not None:
        _check_interval(saves, save_interval)
    first = first_rewind(faults, replicas)
    if first is None:
        return
    why = "--replicas 1" if replicas == 1 else "kind 'nan'"
    if first.step < MIN_REWIND_STEP:
        raise SpecError(
            f"--fault {first}: with {why} training goes on from a checkpoint, and one that is older than the step "
            f"before needs step {MIN_REWIND_STEP} or later"
        )
    if save_interval is None and saves:
        raise SpecError(
            f"--fault {saves[0]}: with {why} the job saves periodically for the way back; say with --save-interval how "
            f"often, so that step {saves[0].step} is saved and one before step {first.step} as well"
        )
    if save_interval is not None and save_interval >= first.step:
        raise SpecError(
            f"--save-interval {save_interval}: with {why} a checkpoint is needed before step {first.step}; give "
            f"{interval_before(first.step)} or less"
        )


def _check_interval(saves: Sequence[FaultSpec], save_interval: int) -> None:
    if save_interval < 1:
        raise SpecError(f"--save-interval {save_interval}: expected at least 1")
    for fault in saves:
        if fault.step % save_interval:
            raise SpecError(
                f"--save-interval {save_interval}: step {fault.step} is not saved then, and --fault {fault} does not "
                f"fire; give a divisor of {fault.step}"
            )


def without(faults: Iterable[FaultSpec], fired: Iterable[FaultSpec]) -> tuple[FaultSpec, ...]:
    """`faults` without those of `fired`, each counted as often as it was given, in their order."""
    gone, left = Counter(fired), []
    for fault in faults:
        if gone[fault]:
            gone[fault] -= 1
        else:
            left.append(fault)
    return tuple(left)
