"""Where each rank was, and when, and what it did: a lane of segments for each rank. Pure: from an incident's content.

Works on files of every schema: what an older one does not tell is left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_tft.observe.blame import lost, own_faults, own_words

Content = Mapping[str, Any]

STOP, GONE, JOIN = "stop", "gone", "join"  # segments that are no orders
_CAME = re.compile(r"rank (\d+) registered after the stop \(newcomer\)")
_STAGES = {"finish_update": "finish", "stage_shards": "stage", "write_part": "write"}  # of an order, if not its name


@dataclass(frozen=True)
class Segment:
    """From `begin` to `end`, in seconds since the first sign of the fault."""

    stage: str
    begin: float
    end: float
    ok: bool = True
    text: str = ""


@dataclass
class Lane:
    """One rank."""

    rank: int
    host: str = ""
    segments: list[Segment] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)  # of its own

    def as_dict(self) -> dict[str, Any]:
        """Segments as [stage, begin, end, 1 or 0, text], because there may be a hundred thousand."""
        return {
            "rank": self.rank,
            "host": self.host,
            "faults": [list(fault) for fault in self.faults],
            "segments": [[s.stage, round(s.begin, 6), round(s.end, 6), int(s.ok), s.text] for s in self.segments],
        }


def stage_of(kind: str) -> str:
    """The stage that an order belongs to."""
    return _STAGES.get(kind, kind)


def total(content: Content) -> float:
    """Seconds from the first sign of the fault to the end of the incident."""
    return float(content["closed"]) - float(content["opened"])


def stages(content: Content) -> list[dict[str, Any]]:
    """The stages of the job in order, each from its first note to the first note of the next: {stage, t, seconds}."""
    found: list[dict[str, Any]] = []
    for note in content["timeline"]:
        if not found or found[-1]["stage"] != note["stage"]:
            found.append({"stage": note["stage"], "t": note["t"] if found else 0.0})
    ends = [stage["t"] for stage in found[1:]] + [total(content)]
    return [{**stage, "seconds": round(max(0.0, end - stage["t"]), 6)} for stage, end in zip(found, ends, strict=True)]


def lanes(content: Content) -> list[Lane]:
    """One lane for each rank that registered, by rank."""
    found = {info["rank"]: Lane(info["rank"], info["host"]) for info in content["ranks"]}
    for other in (item["rank"] for key in ("faults", "orders") for item in content[key]):
        if other >= 0:
            found.setdefault(other, Lane(other))
    end = total(content)
    arrivals, reports = _arrivals(content), _by_rank(content["reports"])
    stops: dict[int, float] = {}  # by epoch: told again to who registers, a stop began with the first
    for stop in content["stops"]:
        stops.setdefault(stop["epoch"], float(stop["t"]))
    _add_stops(found, content, stops, reports, end)
    _add_losses(found, content, arrivals, reports, end)
    _add_orders(found, content, list(stops.values()), end)
    for lane in found.values():
        lane.segments.sort(key=lambda segment: (segment.begin, segment.end))
    return [found[rank] for rank in sorted(found)]


def orders(content: Content) -> list[dict[str, Any]]:
    """Each order once: older files have those that were told again as often as they were."""
    return list({order["id"]: order for order in reversed(content["orders"])}.values())[::-1]


def _by_rank(items: list[dict[str, Any]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for item in items:
        found[item["rank"]].append(float(item["t"]))
    return found


def _first(times: list[float], after: float, default: float) -> float:
    return min((when for when in times if when >= after), default=default)


def _arrivals(content: Content) -> dict[int, list[float]]:
    """When processes came for ranks; an older file tells it in words."""
    if "arrivals" in content:
        return _by_rank(content["arrivals"])
    told = ((note["t"], _CAME.search(note["text"])) for note in content["timeline"])
    return _by_rank([{"rank": int(match[1]), "t": when} for when, match in told if match])


def _add_stops(
    found: dict[int, Lane], content: Content, stops: dict[int, float], reports: dict[int, list[float]], end: float
) -> None:
    seen: set[tuple[int, int]] = set()
    for stop in content["stops"]:
        epoch, when = stop["epoch"], float(stop["t"])
        next_stop = min((at for other, at in stops.items() if other > epoch), default=end)
        for rank in stop["ranks"]:
            if rank not in found or (epoch, rank) in seen:
                continue
            seen.add((epoch, rank))
            until = _first(reports.get(rank, []), when, next_stop + 1)
            answered = until <= next_stop
            text = "stopped and reported" if answered else "did not report"
            found[rank].segments.append(Segment(STOP, when, until if answered else next_stop, answered, text))


def _add_losses(
    found: dict[int, Lane],
    content: Content,
    arrivals: dict[int, list[float]],
    reports: dict[int, list[float]],
    end: float,
) -> None:
    for fault in own_words(content):
        lane, when = found.get(fault["rank"]), float(fault["t"])
        if lane is None:
            continue
        lane.faults.append((when, f"{fault.get('kind', 'lost')}: {fault['message']}"))
        if lost(fault):
            came = _first(arrivals.get(lane.rank, []), when, end)
            ready = _first(reports.get(lane.rank, []), came, end) if came < end else end
            before = [_cut(segment, when) for segment in lane.segments if segment.begin < when]
            lane.segments = before + [segment for segment in lane.segments if segment.begin >= ready]
            lane.segments.append(Segment(GONE, when, came, False, fault["message"]))
            if came < end:
                lane.segments.append(Segment(JOIN, came, ready, True, "a newcomer starts up and reports"))


def _cut(segment: Segment, at: float) -> Segment:
    if segment.end <= at:
        return segment
    return Segment(segment.stage, segment.begin, at, False, f"{segment.text} (its process was lost)")


def _add_orders(found: dict[int, Lane], content: Content, stops: list[float], end: float) -> None:
    for order in orders(content):
        begin = float(order["t"])
        lane = found[order["rank"]]
        stage = stage_of(order["kind"])
        if "seconds" in order:
            ok, text = bool(order["ok"]), order["message"] if not order["ok"] else ""
            lane.segments.append(Segment(stage, begin, begin + float(order["seconds"]), ok, text))
        else:
            until = min((when for when in stops if when > begin), default=end)
            lane.segments.append(Segment(stage, begin, until, False, "not answered"))


# -------------------------------------------------------------------------------------------------- in words


def did(content: Content) -> list[dict[str, Any]]:
    """What each rank did, in words: {ranks, text}, ranks with the same words together, those with a fault first."""
    words: dict[int, list[str]] = defaultdict(list)
    causes = own_faults(content)
    broken = {fault["rank"] for fault in causes}
    for fault in causes:
        if fault["kind"] == "hang":  # known from its looks: the rank itself says nothing
            words[fault["rank"]].append(f"hang: {_short(fault['message'])}")
    told = own_words(content)
    for fault in told:
        words[fault["rank"]].append(f"{fault.get('kind', 'lost')}: {_short(fault['message'])}")
    for report in content["reports"]:
        words[report["rank"]].append(where(report))
    for rank in sorted({fault["rank"] for fault in told if lost(fault)} & _arrivals(content).keys()):
        words[rank].append("another process took its place")
    for order in orders(content):
        words[order["rank"]].extend(_deeds(order))
    everybody = {info["rank"] for info in content["ranks"]} | words.keys()
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(everybody):
        text = "; ".join(dict.fromkeys(words.get(rank, ["nothing is known of it in this incident"])))
        groups[text].append(rank)
    rows = [{"ranks": members, "text": text} for text, members in groups.items()]
    return sorted(rows, key=lambda row: (broken.isdisjoint(row["ranks"]), len(row["ranks"]), row["ranks"][0]))


def where(report: Mapping[str, Any]) -> str:
    """Where a rank stood when it was stopped, in words."""
    step, commit, update = report["step"], report["commit"], report["update"]
    if step <= 0 and not report.get("trusted", True):
        return "has no state of its own yet"
    if update == "done":
        text = f"had finished the update of step {step}"
    elif update == "dirty":
        text = f"was in the middle of the update of step {step}"
    else:
        told = {
            "none": "had not reached the commit",
            "entered": "stood in the commit",
            "passed": "had passed the commit",
        }
        text = f"{told[commit]} of step {step}"
    return text + ("" if report.get("trusted", True) else ", its memory is not trusted")


def _deeds(order: Mapping[str, Any]) -> list[str]:
    kind, payload, rank = order["kind"], order["payload"], order["rank"]
    if not order.get("ok"):
        told = f": {_short(order['message'])}" if order.get("message") else " (no answer)"
        return [f"could not {kind.replace('_', ' ')}{told}"]
    if kind == "repair":
        return [deed for text in payload["transfers"] if (deed := _moved(text, rank))]
    simple = {
        "finish_update": f"finished its update of step {payload.get('step')}",
        "stage_shards": "laid its shards down for a writer",
        "write_part": f"wrote part {payload.get('part')}",
        "publish": "published the checkpoint",
        "regroup": "built its process groups anew",
        "rollback": f"rolled back to the end of step {payload.get('step')}",
        "load": f"loaded the checkpoint of step {payload.get('step')}",
        "resume": "trains on",
        "exit": f"left with exit code {payload.get('code')}",
    }
    return [simple.get(kind, f"carried out {kind.replace('_', ' ')}")]


def _moved(transfer: str, rank: int) -> str:
    shard, source, target = transfer.split("|")
    if int(source) == rank:
        return f"gave {shard} to rank {target}"
    return f"took {shard} from rank {source}" if int(target) == rank else ""


def _short(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
