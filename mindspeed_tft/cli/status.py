"""The page of `tftctl status`: what an on-call engineer wants to see first comes first."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

FEW = 64  # ranks, or shards, up to which each is shown
LATE = 5.0  # seconds without a heartbeat that are worth a colour

_COLOURS = {"full": "green", "degraded": "yellow", "none": "red", "busy": "yellow"}
_RESULTS = {"training goes on": "green", "a dump": "yellow", "no newer checkpoint": "red"}


def line(told: dict[str, Any]) -> str:
    """The same in one line, for a log."""
    alive = sum(rank["state"] == "alive" for rank in told["ranks"])
    return (
        f"{told['run']}: {told['state']}, step {told['step']}, {alive} of {told['world_size']} ranks, protection "
        f"{told['protection']['level']}, {_pause(told['pause'])}"
    )


def page(told: dict[str, Any], everything: bool = False) -> RenderableType:
    """`told`: what the controller answered. `everything`: each rank and shard, however many there are."""
    parts: list[RenderableType] = [_head(told), _outlook(told["outlook"])]
    parts += _ranks(told["ranks"], everything)
    parts += _shards(told["shards"], everything)
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _head(told: dict[str, Any]) -> Table:
    table = Table(title=Text(f"Job {told['run']}"), show_header=False, title_justify="left")
    table.add_column("what", style="bold")
    table.add_column("value", overflow="fold")
    leader, level = told["controller"], told["protection"]["level"]
    standbys = ", ".join(f"{one['index']} on {one['host']}" for one in told["standbys"])
    seconds = told["seconds_per_step"]
    rows = {
        "state": told["state"] + (f": {told['reason']}" if told["reason"] else ""),
        "protection": f"{level}: {told['protection']['text']}",
        "step": f"{told['step']} complete" + (f", {seconds:.2f} s each" if seconds else ""),
        "checkpoint": f"step {told['checkpoint']}, of this run" if told["checkpoint"] else "none of this run yet",
        "pause": _pause(told["pause"]),
        "hosts": ", ".join(f"{one['host']} ({_few(one['ranks'])})" for one in told["hosts"]),
        "leader": f"controller {leader['index']} on {leader['host']}, pid {leader['pid']}, term {told['term']}",
        "standbys": standbys or "none",
        "incidents": f"{told['incidents']}, in {told['incident_dir']}",
        "epoch": str(told["epoch"]),
        "transport": told["transport"],
    }
    if told["last_incident"]:
        rows["last incident"] = f"{told['last_incident'].get('outcome')}: {told['last_incident'].get('summary')}"
    if told["parked"] or told["newcomers"]:
        rows["spares"] = ", ".join(
            f"process {one['pid']} on {one['host']} for rank {one['rank']}"
            for one in [*told["parked"], *told["newcomers"]]
        )
    if told.get("manager"):
        manager = told["manager"]
        rows["decisions"] = f"{manager['name']} decides for job {manager['job']}: {manager['place']}"
    if told.get("link"):
        rows["link"] = _link(told["link"])
    for name, value in rows.items():
        table.add_row(name, Text(value, _COLOURS[level] if name == "protection" else ""))
    return table


def _link(told: dict[str, str]) -> str:
    moved = f", since {told['since']}, and {told['before']} before" if "before" in told else ", as at the start"
    return told["name"] + moved


def _pause(told: dict[str, Any]) -> str:
    if told["paused"]:
        return f"paused after step {told['step']}, for {told['seconds']:.0f} s, goes on in {told['seconds_left']:.0f} s"
    if told["wished"]:
        return f"wanted, from step {told['from_step'] or 'now'} on; {told['held']} ranks are held"
    return "not paused"


def _outlook(told: list[dict[str, Any]]) -> Table:
    table = _table("What a fault would lead to now", "fault of a", "leads to", "steps lost", "how", "because")
    for one in told:
        result = Text(one["result"], _RESULTS.get(one["result"], ""))
        table.add_row(one["fault"], result, str(one["steps_lost"]), Text(one["text"]), Text(one["reason"]))
    return table


def _ranks(told: list[dict[str, Any]], everything: bool) -> list[RenderableType]:
    shown = told
    parts: list[RenderableType] = []
    if len(told) > FEW and not everything:
        usual = Counter((rank["state"], rank["phase"]) for rank in told).most_common(1)[0][0]
        shown = [rank for rank in told if (rank["state"], rank["phase"]) != usual or _is_late(rank)][:FEW]
        counts = Counter(f"{rank['state']}, {rank['phase'] or 'not heard'}" for rank in told)
        summary = _table("Ranks by state and phase (--ranks shows each)", "state, phase", "ranks")
        for what, number in counts.most_common():
            summary.add_row(what, str(number))
        parts.append(summary)
    table = _table("Ranks", "rank", "state", "step", "phase", "heard", "pid", "host", "part", "holds")
    for rank in shown:
        heard = rank["heard_seconds_ago"]
        age = Text("" if heard is None else f"{heard:.1f} s ago", "red" if _is_late(rank) else "")
        state = Text(rank["state"] + (f": {rank['why']}" if rank["why"] else ""))
        state.stylize("" if rank["state"] == "alive" else "red")
        row = (
            rank["step"],
            rank["phase"],
            age,
            rank["pid"] or "",
            rank["host"],
            rank["part"],
            ", ".join(rank["holds"]),
        )
        table.add_row(str(rank["rank"]), state, *(one if isinstance(one, Text) else Text(str(one)) for one in row))
    return [*parts, table] if shown else parts


def _is_late(rank: dict[str, Any]) -> bool:
    return rank["heard_seconds_ago"] is not None and rank["heard_seconds_ago"] > LATE


def _shards(told: dict[str, dict[str, Any]], everything: bool) -> list[RenderableType]:
    weakest = sorted(told.items(), key=lambda item: (len(item[1]["hosts"]), len(item[1]["ranks"])))
    shown = weakest if everything or len(told) <= FEW else weakest[:FEW]
    title = "Shards of the optimizer" + (
        f" (the weakest {len(shown)} of {len(told)})" if len(shown) < len(told) else ""
    )
    table = _table(title, "shard", "held by ranks", "on hosts")
    for name, one in sorted(shown) if len(shown) == len(told) else shown:
        held = Text(_few(one["ranks"]), "red" if len(one["ranks"]) == 1 else "")
        table.add_row(Text(name), held, Text(", ".join(one["hosts"])))
    return [table]


def _few(numbers: list[int], limit: int = 16) -> str:
    """`0-3, 8 and 12 more`."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:limit])
    return text + (f" and {len(runs) - limit} more" if len(runs) > limit else "")
