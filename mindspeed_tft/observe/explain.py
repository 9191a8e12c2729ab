"""What an incident means: what broke, what was decided and why, what was lost, what to do now. Pure: from the content
of an incident file, of every schema.

The page and `tftctl explain` say what is worked out here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed_tft.engine.words import count, ranks, some
from mindspeed_tft.observe import lanes, moved, reproduce
from mindspeed_tft.observe.blame import flipped, own_faults
from mindspeed_tft.observe.report import SCHEMA

Content = Mapping[str, Any]

RUNNING = ("retried", "rebooted", "rewound")  # outcomes after which training goes on
SAVED = ("dumped", "exists")
_LONGEST = 180  # characters of a headline
_MOST = 50  # faults with their words

_STILL = re.compile(r"no (?:progress|sign of life) for ([\d.]+) s")
_END = re.compile(r"; \d+ completed steps? lost\.")  # of a summary, before the command to go on with
_BROKE = {
    "lost": "is gone",
    "hang": "hung",
    "memory": "lost device memory",
    "corrupted": "lost device memory, perhaps before its last update",
    "precision": "computed wrong numbers",
    "link": "lost its connection",
    "device": "lost its device",
    "exception": "failed with an exception",
    "stopped": "failed with an exception",
    "terminated": "was asked to end by a signal",
}


_PROGRAM = "Read the traceback of {ranks}: an error of the program or its data comes again."
_ADVICE = {
    "memory": "Watch the device of {ranks} on {hosts}: if its memory fails again, take the device out.",
    "corrupted": "Take the device of {ranks} on {hosts} out and test its memory: it failed before an update.",
    "precision": "Test the device of {ranks} on {hosts}: wrong numbers began there. If they return, look at the data.",
    "hang": "Read the stacks of {ranks} below: they say where it hung.",
    "device": "Look at the device of {ranks} on {hosts}: its process could not use it any more.",
    "exception": _PROGRAM,
    "stopped": _PROGRAM,
    "link": "Look at the network of {hosts} ({ranks}): cable, switch port, errors of the interface.",
    "terminated": "{ranks} on {hosts} got a signal to end: was it the scheduler, or a person?",
}


class NotAnIncident(ValueError):
    """The file is none of ours; the message says why."""


@dataclass(frozen=True)
class Answers:
    """The questions of whoever is woken by it."""

    running: bool  # training goes on
    state: str  # "running", "saved" or "stopped"
    verdict: str  # the state in a few words
    what: str  # broke, in one line
    broken: tuple[int, ...]  # ranks with a fault of their own, but for signals that followed one
    details: tuple[str, ...]  # every fault of a rank's own, in order, with its words
    decided: str
    why: tuple[str, ...]
    lost_steps: int | None  # completed steps that are computed again; None: not known
    lost: str  # the same in words
    seconds: float  # from the first sign of the fault to the end of the incident
    detect: float | None  # seconds before that, at most, in which nobody knew
    now: tuple[str, ...] = ()  # what to do
    resume: str = ""  # the command that goes on, where the job ended


def upgrade(content: Content) -> dict[str, Any]:
    """The content with everything that follows from it, whatever its schema was. Does not change its argument.

    Raises:
        NotAnIncident: what every schema has is missing.
    """
    check(content)
    found = {key: value for key, value in content.items() if key != "engine"}
    found["schema"] = max(SCHEMA, int(content["schema"]))
    found["answers"] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in asdict(answers(content)).items()
    }
    found["stages"] = lanes.stages(content)
    found["did"] = lanes.did(content)
    found["transfers"] = moved.transfers(content)
    found["writes"] = moved.writes(content)
    found["hashes"] = moved.hashes(content)
    found["reproduce"] = reproduce.reproduce(content)
    found["lanes"] = [lane.as_dict() for lane in lanes.lanes(content)]
    return {**found, "engine": content.get("engine", {})}


_EVERY = (
    "schema",
    "opened",
    "closed",
    "outcome",
    "step",
    "summary",
    "timeline",
    "faults",
    "stops",
    "reports",
    "orders",
)


def check(content: object) -> None:
    """
    Raises:
        NotAnIncident: this is not the content of an incident file.
    """
    if not isinstance(content, Mapping):
        raise NotAnIncident("it holds no JSON object")
    if missing := [key for key in (*_EVERY, "ranks") if key not in content]:
        raise NotAnIncident(f"it has no {missing[0]!r}, which each incident file has")


# ------------------------------------------------------------------------------------------------ the answers


def answers(content: Content) -> Answers:
    """All that the first screen says."""
    outcome, step = content["outcome"], int(content["step"])
    own = own_faults(content)
    steps = _lost_steps(content)
    state = "running" if outcome in RUNNING else "saved" if outcome in SAVED else "stopped"
    verdict = {
        "running": f"Training goes on after step {step}",
        "saved": f"The job ended; step {step} is saved",
        "stopped": "The job ended, and nothing new was saved",
    }[state]
    detect = _detect(content, own)
    return Answers(
        running=state == "running",
        state=state,
        verdict=verdict,
        what=_what(content, own),
        broken=tuple(sorted({fault["rank"] for fault in own if fault["rank"] >= 0})),
        details=tuple(_details(content, own)),
        decided=_decided(content),
        why=tuple(_why(content)),
        lost_steps=steps,
        lost=_lost(content, steps),
        seconds=round(lanes.total(content), 6),
        detect=detect,
        now=tuple(_now(content, own)),
        resume=_resume(content["summary"]) if state == "saved" else "",
    )


def _resume(summary: str) -> str:
    """What follows the last words of the engine's own: the words of ranks before them may look the same."""
    ends = [match.end() for match in _END.finditer(summary)]
    before, _, command = summary[ends[-1] if ends else 0 :].partition("Go on with:\n")
    return command if before == " " else ""


def _detect(content: Content, own: list[dict[str, Any]]) -> float | None:
    """Seconds in which something was wrong and nobody knew, at most: since the rank was heard, or has moved, last."""
    if own and own[0]["kind"] == "hang" and (match := _STILL.search(own[0]["message"])):
        return float(match[1])
    told = content.get("engine", {}).get("timings", {}).get("detect")
    return round(float(told), 6) if told else None


def _host(content: Content) -> dict[int, str]:
    return {info["rank"]: info["host"] for info in content["ranks"]}


def _what(content: Content, own: list[dict[str, Any]]) -> str:
    if not own:
        noticed = content["faults"][0] if content["faults"] else None
        if noticed is None:
            return _first_sentence(content["summary"])
        return f"A connection between ranks broke; rank {noticed['rank']} was the first to notice"
    host = _host(content)
    first = own[0]
    same = sorted({fault["rank"] for fault in own if fault["kind"] == first["kind"]})
    if first["rank"] < 0:
        return _clip(f"All ranks: {first['message']}")
    where = sorted({host.get(rank, "") for rank in same} - {""})
    whole = _whole(host, same) if first["kind"] == "lost" else []
    if whole and len(set(host.values())) > 1:
        one = len(whole) == 1
        text = f"{'Host' if one else 'Hosts'} {some(whole)} {'is' if one else 'are'} gone, with {ranks(same)}"
    else:
        who = ranks(same, 4)
        broke = _BROKE.get(first["kind"], f"had a fault of kind {first['kind']}")
        broke = "found a bit of its shard flipped" if flipped(first) else broke
        broke = "are gone" if broke == "is gone" and len(same) > 1 else broke
        at = f" on {'host' if len(where) == 1 else 'hosts'} {some(where)}" if where else ""
        text = f"{who[0].upper()}{who[1:]}{at} {broke}"
    more = len({(fault["rank"], fault["kind"]) for fault in own} - {(rank, first["kind"]) for rank in same})
    return _clip(text + (f", and {count(more, 'more fault')} followed" if more else ""))


def _details(content: Content, own: list[dict[str, Any]]) -> list[str]:
    """The faults with their words, the first of many."""
    host, told = _host(content), own or content["faults"]
    more = [f"and {len(told) - _MOST} more"] if len(told) > _MOST else []
    return [_line(fault, host) for fault in told[:_MOST]] + more


def _whole(host: Mapping[int, str], lost: Iterable[int]) -> list[str]:
    """Hosts of which all ranks were lost, and more than one."""
    everybody, gone = Counter(host.values()), Counter(host[rank] for rank in lost if rank in host)
    return sorted(name for name, number in gone.items() if number == everybody[name] > 1)


def _line(fault: Mapping[str, Any], host: Mapping[int, str]) -> str:
    rank = int(fault["rank"])
    name = host.get(rank)
    who = f"rank {rank}" + (f" ({name})" if name else "") if rank >= 0 else "all ranks"
    when = float(fault["t"]) if "t" in fault else None
    return f"{who}: {fault.get('kind', 'lost')}: {fault['message']}" + (f" (at {when:.2f} s)" if when else "")


def _decided(content: Content) -> str:
    engine, step = content.get("engine", {}), content["step"]
    tries = len(engine.get("repairs", []))
    again = f", at the {tries}. try" if tries > 1 and content["outcome"] in RUNNING else ""
    replaced = sorted(int(rank) for rank in engine.get("replaced", {}))
    rewound = any(repair.get("rewind") for repair in engine.get("repairs", [])[-1:])
    outcome = content["outcome"]
    if outcome == "retried":
        return f"Online repair{again}: no process was started again, all ranks computed step {step + 1} once more"
    if outcome == "rebooted":
        how = f"from the checkpoint of step {step}" if rewound else "with state from other holders"
        return f"Worker reboot{again}: only {ranks(replaced)} started again, {how}; nobody else restarted"
    if outcome == "rewound":
        return f"Rewind{again}: no process was started again, all ranks loaded the checkpoint of step {step}"
    if outcome == "dumped":
        return f"Dying-gasp checkpoint: the survivors wrote a complete checkpoint of step {step}, then the job ended"
    if outcome == "exists":
        return f"The job ended: the checkpoint of step {step} was on disk already"
    return "No repair and no checkpoint was possible: the job ended"


def _why(content: Content) -> list[str]:
    """The reasons, each once, in the order in which they arose."""
    engine = content.get("engine", {})
    found = []
    for note in content["timeline"]:
        text = note["text"]
        if text.startswith("no repair, a dump instead: "):
            found.append("It was not repaired online: " + text.removeprefix("no repair, a dump instead: "))
        elif _is_reason(note["stage"], text):
            found.append(text)
    if not found and engine.get("agreement"):
        found.append(f"S = {engine['step']}: {engine['agreement']}")
    return [_clip(text, 700) for text in dict.fromkeys(found)]


def _is_reason(stage: str, text: str) -> bool:
    """A line of the timeline that says why something was decided."""
    if text.startswith(("this try to repair failed", "wrong shards", "no checkpoint:", "S = ")):
        return True
    chosen = stage == "decide" and ("try " in text or "attempt " in text)
    chosen = chosen or (stage == "consult" and " decides for " in text)
    return chosen or (stage == "reboot" and text.startswith("waiting for newcomers"))


def _lost_steps(content: Content) -> int | None:
    furthest, step = content.get("engine", {}).get("furthest_step"), int(content["step"])
    if furthest is None or step < 0:
        return None
    return max(0, int(furthest) - step)


def _lost(content: Content, steps: int | None) -> str:
    if steps is not None:
        return "No completed step" if steps == 0 else f"{count(steps, 'completed step')}, computed again"
    furthest = content.get("engine", {}).get("furthest_step")
    known = sorted({step for report in content["reports"] for step in report.get("checkpoints", ())})
    text = "Everything since the last checkpoint on disk"
    text += f" (this run has one of step {known[-1]})" if known else ""
    return text + (f"; step {furthest} was the last that was complete" if furthest else "")


# ------------------------------------------------------------------------------------------------ what to do


def _now(content: Content, own: list[dict[str, Any]]) -> list[str]:
    host, outcome = _host(content), content["outcome"]
    found = []
    if outcome in RUNNING:
        found.append("Nothing at once: the job is running again.")
    elif outcome in SAVED:
        found.append("Start the job again with the command below; it goes on after that step.")
    else:
        found.append("Start the job again: it begins from the last checkpoint on disk.")
    advice: dict[str, list[int]] = {}
    for fault in own:
        if (text := _advice(fault)) and fault["rank"] >= 0:
            advice.setdefault(text, []).append(fault["rank"])
    for text, who in advice.items():
        where = some(sorted({host.get(rank, "an unknown host") for rank in who}))
        found.append(text.format(ranks=ranks(who, 4), hosts=where))
    if not own and content["faults"]:
        found.append(
            "Look at the network between the ranks that noticed it: cables, switch ports, errors of interfaces."
        )
    engine = content.get("engine", {})
    if int(engine.get("number", 1)) > 1:
        found.append(
            f"It is incident number {engine['number']} of this run: compare with those before (tftctl explain --list)."
        )
    if len(engine.get("repairs", [])) > 1:
        found.append("More than one try was needed: read why the earlier ones failed.")
    if outcome not in RUNNING and content.get("job", {}).get("strategies") == "dump":
        found.append(
            "To survive such a fault without an end of the job: --enable-hbmfault-repair and --enable-worker-reboot."
        )
    return found


def _advice(fault: Mapping[str, Any]) -> str:
    if flipped(fault):
        return "Drain {hosts} at the next chance and test its memory: a bit flipped without any error report ({ranks})."
    kind = fault["kind"]
    if kind == "lost":
        if "heard" in fault["message"] or "relay" in fault["message"]:
            return "Look at {hosts}: it was not heard any more ({ranks}): power, network, kernel log."
        return "Find out why {ranks} died: the end of the log, and the kernel log of {hosts} (dmesg: out of memory)."
    return _ADVICE.get(kind, "")


# ---------------------------------------------------------------------------------------------- for long lists


def spent(content: Content) -> dict[str, float]:
    """Seconds that the job was in each stage; stages that came again add up."""
    found: dict[str, float] = {}
    for stage in content["stages"]:
        found[stage["stage"]] = found.get(stage["stage"], 0.0) + float(stage["seconds"])
    return found


def slowest(content: Content, limit: int = 3) -> list[dict[str, Any]]:
    """For each stage that ranks took part in: {stage, ranks, first, last, median, slowest}, seconds, and who took
    longest."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    for lane in content["lanes"]:
        for stage, begin, end, *_ in lane["segments"]:
            found.setdefault(stage, []).append((end - begin, begin, lane["rank"]))
    rows = []
    for stage, all_of in sorted(found.items(), key=lambda item: min(begin for _, begin, _ in item[1])):
        durations = sorted(seconds for seconds, _, _ in all_of)
        worst = sorted(all_of, reverse=True)[:limit]
        rows.append(
            {
                "stage": stage,
                "ranks": len({rank for _, _, rank in all_of}),
                "first": round(durations[0], 6),
                "median": round(durations[len(durations) // 2], 6),
                "last": round(durations[-1], 6),
                "slowest": [[rank, round(seconds, 6)] for seconds, _, rank in worst],
            }
        )
    return rows


def _first_sentence(text: str) -> str:
    return _clip(text.partition(". ")[0])


def _clip(text: str, limit: int = _LONGEST) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
