"""The command that rehearses what happened in an incident, as near as it is known. Pure.

A drill is a small job on one machine, so of a large one the kind of parallelism is kept and not its size. What cannot
be expressed is said, with the reason.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_tft.faults import spec
from mindspeed_tft.faults.spec import FaultSpec, Layout, SpecError
from mindspeed_tft.observe.blame import flipped, own_faults

Content = Mapping[str, Any]

MOST_RANKS = 16  # processes that a drill may have on one machine
_PART = re.compile(r"tp(\d+)-pp(\d+)(?:-ep(\d+))?")
_KINDS = {"memory": "uce", "corrupted": "uce", "link": "link", "precision": "nan", "hang": "hang"}
_MARGIN = 5  # steps after the fault


def reproduce(content: Content) -> dict[str, Any]:
    """{command, exact, why}: `exact` is False where the drill is another job or moment than this one; `why` says in
    which way, and why there is no command ("") where there is none."""
    notes: list[str] = []
    try:
        layout, factor = _layout(content, notes)
        faults = tuple(_faults(content, layout, factor, notes))
        command = _command(content, layout, faults, notes)
    except SpecError as error:
        return {"command": "", "exact": False, "why": f"no drill can express it: {error}"}
    return {"command": command, "exact": not notes, "why": "; ".join(dict.fromkeys(notes))}


# ------------------------------------------------------------------------------------------------ the job


def _layout(content: Content, notes: list[str]) -> tuple[Layout, int]:
    """The layout of the drill, and how many ranks of the incident stand for one of its."""
    told = content.get("job", {}).get("layout")
    layout = spec.parse_layout(told) if told else _from_parts(content)
    if layout.world_size <= MOST_RANKS and layout.cp == 1:
        return layout, 1
    small = Layout(
        dp=min(layout.dp, 4) if layout.ep == 1 else 4, tp=min(layout.tp, 2), pp=min(layout.pp, 2), ep=min(layout.ep, 2)
    )
    if small.world_size > MOST_RANKS:
        small = replace(small, tp=1)
    notes.append(f"the job was {layout}, of {layout.world_size} ranks: {small} stands for it on one machine")
    return small, max(1, layout.world_size // small.world_size)


def _from_parts(content: Content) -> Layout:
    """From the names of model parts. Context-parallel ranks cannot be told from data-parallel ones by them."""
    found = [match for info in content["ranks"] if (match := _PART.fullmatch(info["part"]))]
    world = int(content.get("engine", {}).get("world_size") or len(content["ranks"]))
    if not found:
        raise SpecError("the names of the model parts are not known, so neither is the layout")
    tp, pp, ep = (1 + max(int(match[axis] or 0) for match in found) for axis in (1, 2, 3))
    if world % (tp * pp):
        raise SpecError(f"{world} ranks are no multiple of tp{tp}pp{pp}")
    return Layout(dp=world // (tp * pp), tp=tp, pp=pp, ep=ep)


def _preset(content: Content, faults: Sequence[FaultSpec]) -> str:
    told = content.get("job", {}).get("strategies", "").split()
    for name in ("recover", "retry"):
        if name in told or (not told and content["outcome"] == {"recover": "rebooted", "retry": "retried"}[name]):
            return name
    if content["outcome"] == "rewound" and not told:
        return "retry"
    return "dump" if all(fault.kind in spec.AVAILABLE_KINDS["dump"] for fault in faults) else "retry"


def _command(content: Content, layout: Layout, faults: tuple[FaultSpec, ...], notes: list[str]) -> str:
    job = content.get("job", {})
    preset = _preset(content, faults)
    dtype = job.get("dtype", "fp32")
    if "dtype" not in job:
        notes.append("the number format is not known: fp32 is taken")
    sharded = job.get("sharded", "yes") == "yes"
    replicas = _replicas(content, layout) if sharded else max(1, layout.dp // layout.ep)
    steps = max([fault.step for fault in faults], default=7) + _MARGIN
    if steps > spec.MAX_STEPS:
        first = min(fault.step for fault in faults)
        faults = tuple(replace(fault, step=7 + min(2, fault.step - first)) for fault in faults)
        steps = 7 + 2 + _MARGIN
        notes.append(
            f"the fault fell into step {first}: a drill has {spec.MAX_STEPS} steps at most, and step 7 stands for it"
        )
    if any(fault.step < 2 for fault in faults):
        raise SpecError("the fault fell before step 2: nothing is completed yet that could be saved")
    nodes = spec.default_nodes(faults)
    kinds = {fault.kind for fault in faults}
    if misfits := sorted(kinds - set(spec.AVAILABLE_KINDS[preset])):
        raise SpecError(f"kind {misfits[0]} is not rehearsed with preset {preset}")
    spec.check_drill(preset, layout, faults, steps, replicas, dtype, None, nodes)
    words = ["tftctl drill", f"--preset {preset}", f"--layout {layout}", f"--dtype {dtype}"]
    if not sharded:
        words.append("--no-distributed-optimizer")
    elif replicas != 2:
        words.append(f"--replicas {replicas}")
    words += [f"--nodes {nodes}"] if nodes > 1 else []
    words += [f"--fault {fault}" for fault in faults]
    return " ".join([*words, f"--steps {steps}"])


def _replicas(content: Content, layout: Layout) -> int:
    """As the job said; of one that did not: how many ranks held the same shard."""
    told = content.get("job", {}).get("replicas")
    holders = Counter(shard for info in content["ranks"] for shard in info["holds"])
    wanted = int(told) if told else max(holders.values(), default=2)
    return wanted if layout.dp // layout.ep % wanted == 0 else 2


# --------------------------------------------------------------------------------------------- the faults


def _faults(content: Content, layout: Layout, factor: int, notes: list[str]) -> Iterator[FaultSpec]:
    """The faults of ranks themselves; what followed from the first ones (signals of a launcher) is left out."""
    seen: set[tuple[str, int]] = set()
    own = [fault for fault in own_faults(content) if fault["rank"] >= 0]
    if not own and content["faults"]:
        first = content["faults"][0]
        notes.append("no rank is known to be broken itself: a broken connection is taken")
        own = [{**first, "kind": "link"}]
    if not own:
        raise SpecError("no fault was told of")
    step, _ = _stood(content, int(own[0]["rank"]))
    if (nodes := _whole_host(content, own)) is not None:
        notes.append("the ranks of a host are taken to be those of a node")
        yield FaultSpec("node", _small(nodes, layout, factor), step, "backward")
        return
    for fault in own:
        kind, rank = _kind(fault), _small(int(fault["rank"]), layout, factor)
        if (kind, rank) in seen:
            continue
        seen.add((kind, rank))
        _, phase = _stood(content, int(fault["rank"]))
        if kind in ("kill", "segv", "stop") and all(r["rank"] != fault["rank"] for r in _reports(content)):
            notes.append("where a lost process stood is known from its last sign of life and from the others only")
        phase = _in_repair(content, fault) or phase
        if kind in ("nan", "flip"):
            phase = {"nan": spec.NAN_PHASE, "flip": spec.FLIP_PHASE}[kind]
        elif phase == "backward":
            notes.append("forward and backward are told as one phase: backward is taken")
        if kind == "flip" and step > 2:
            step -= 1  # it flips after the update of the step before
        yield FaultSpec(kind, rank, step, phase)


def _kind(fault: Mapping[str, Any]) -> str:
    kind, text = fault.get("kind", "lost"), fault["message"]
    if flipped(fault):
        return "flip"
    if kind in _KINDS:
        return "stop" if kind == "hang" and "stopped" in text else _KINDS[kind]
    if kind == "terminated":
        return "term"
    if kind in ("lost", "stopped"):
        return "segv" if "SIGSEGV" in text else "kill"
    if kind in ("exception", "device"):
        return "oom" if "out of memory" in text.lower() else "exc"
    raise SpecError(f"a fault of kind {kind!r} has no counterpart in a drill")


def _small(rank: int, layout: Layout, factor: int) -> int:
    return rank if factor == 1 else rank % layout.world_size


def _whole_host(content: Content, own: Sequence[Mapping[str, Any]]) -> int | None:
    """The first rank of a host of which all ranks were lost, where it is one of several."""
    members: dict[str, set[int]] = defaultdict(set)
    for info in content["ranks"]:
        members[info["host"]].add(info["rank"])
    lost = {fault["rank"] for fault in own if fault.get("kind", "lost") == "lost"}
    whole = [min(every) for every in members.values() if len(every) > 1 and every <= lost]
    return min(whole) if whole and len(members) > 1 else None


def _reports(content: Content) -> list[dict[str, Any]]:
    """Where ranks stood at the first stop: what they say at a later one is what orders have made of them."""
    first = min((stop["epoch"] for stop in content["stops"]), default=0)
    later = min((float(stop["t"]) for stop in content["stops"] if stop["epoch"] > first), default=float("inf"))
    return [report for report in content["reports"] if report["step"] > 0 and float(report["t"]) < later]


def _stood(content: Content, rank: int) -> tuple[int, str]:
    """Step and phase (in the words of a drill) that a rank was in: by its report, else by its last sign of life, else
    by what the others were in."""
    reports = _reports(content)
    report = next((r for r in reports if r["rank"] == rank), None)
    beats = {beat["rank"]: beat for beat in content.get("before", {}).get("last_heard", [])}
    most = max((r["step"] for r in reports), default=int(content.get("engine", {}).get("furthest_step") or 0) + 1)
    if report is None and rank in beats and beats[rank]["step"] == most:
        told = {"commit": "commit", "update": "update", "param-gather": "param-gather"}
        return most, told.get(beats[rank]["phase"], "backward")
    if report is None:  # nobody passes a commit that it had not entered
        commits = {r["commit"] for r in reports if r["step"] == most}
        return most, "update" if "passed" in commits else "commit" if "entered" in commits else "backward"
    if report["update"] == "dirty":
        return report["step"], "update"
    if report["update"] == "done":
        return report["step"], "param-gather"
    return report["step"], {"none": "backward", "entered": "commit", "passed": "update"}[report["commit"]]


def _in_repair(content: Content, fault: Mapping[str, Any]) -> str:
    """The phase of a repair that a fault fell into; "" for one that fell into training."""
    told = [f for f in content["faults"] if f["rank"] == fault["rank"] and f["message"] == fault["message"]]
    when = float(told[0]["t"]) if told else 0.0
    late = 0.01  # seconds that an answer may have been on its way
    mine = [order for order in content["orders"] if order["rank"] == fault["rank"] and 0 < order["t"] <= when]
    last = max(mine, key=lambda order: float(order["t"]), default=None)
    if last is None or last["kind"] not in spec.REPAIR_PHASES:
        return ""
    return str(last["kind"]) if when <= last["t"] + last.get("seconds", float("inf")) + late else ""
