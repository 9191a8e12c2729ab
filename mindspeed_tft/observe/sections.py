"""The parts of an incident's page below its first screen, as HTML. Everything from the incident is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from mindspeed_tft.observe import explain
from mindspeed_tft.observe.rows import MOST_RANKS
from mindspeed_tft.observe.words import seconds, size, spans

Content = Mapping[str, Any]

LONGEST_RAW = 600_000  # characters of the file that are repeated in the page
_MOST_ROWS = 150  # of a table
_MOST_NOTES = 400

COLOURS = {
    "stop": "#c87619", "gone": "#c23030", "join": "#7157d9", "reboot": "#7157d9", "decide": "#a854a8",
    "consult": "#c22762",
    "finish": "#96622d", "regroup": "#2d72d2", "repair": "#238551", "rollback": "#5f8a1d", "load": "#00857a",
    "resume": "#3fa45b", "stage": "#4c90f0", "write": "#215db0", "publish": "#184a90", "exit": "#738091",
    "closed": "#5f6b7c", "train": "#8f99a8", "discard": "#8f99a8", "save": "#215db0", "link": "#2d72d2",
}  # fmt: skip
WORDS = {
    "stop": "leaves its collective and reports", "gone": "no process", "join": "a newcomer starts up",
    "finish": "finishes its update", "regroup": "builds process groups anew", "repair": "moves shards",
    "rollback": "rolls back to the end of the last complete step", "load": "loads the checkpoint",
    "resume": "trains on", "stage": "lays shards down for a writer", "write": "writes a part of the checkpoint",
    "publish": "publishes the checkpoint", "exit": "leaves", "save": "saves the framework's own checkpoint",
    "link": "moves its groups to another link",
}  # fmt: skip
_TOOLS = """<div class="tools"><button data-do="in">Zoom in</button><button data-do="out">out</button>
<button data-do="left">←</button><button data-do="right">→</button><button data-do="all">All</button>
<button data-do="stretch" title="The order of time is kept, lengths are not">Stretch short stages</button>"""
_NO_SCRIPT = "<noscript><p class=small>The timeline needs JavaScript; all else on this page does not.</p></noscript>"
_SPEED = ("bytes n", "seconds n", "GB/s n", "")


def all_parts(content: Content, name: str, raw: str) -> Iterable[str]:
    """Each part in order; "" for one that this incident does not have."""
    yield _timeline(content)
    yield _decision(content)
    yield _stages(content)
    yield _did(content)
    yield _transfers(content)
    yield _writes(content)
    yield _hashes(content)
    yield _stacks(content)
    yield _reproduce(content)
    yield _versions(content)
    yield _raw(content, name, raw)


def _timeline(content: Content) -> str:
    aggregated = len(content["lanes"]) > MOST_RANKS
    note = "Ranks of note first, then hosts, each from its first rank to its last. " if aggregated else ""
    used = dict.fromkeys(segment[0] for lane in content["lanes"] for segment in lane["segments"])
    legend = "".join(f"<span>{dot(stage)}{escape(WORDS.get(stage, stage))}</span>" for stage in used)
    return f"""<section class="card" id="timeline"><h2>Timeline</h2>{_TOOLS}
<span>{note}Point at a bar for its times; drag to look closer, double click for all.</span></div>
<div class="lanes" id="lanes">{_NO_SCRIPT}</div>
<div class="legend" style="margin-top:8px">{legend}<span><b class="bad">◆</b> a fault of the rank itself</span>
<span>◆ a signal that followed</span>
<span>no bar: waits for the others</span></div></section>"""


def _decision(content: Content) -> str:
    before = [(note, "before") for note in content.get("before", {}).get("timeline", []) if note["warn"]][-12:]
    notes = [*before, *((note, "") for note in content["timeline"])]
    more = f"<p class=dim>and {len(notes) - _MOST_NOTES} more, in the file</p>" if len(notes) > _MOST_NOTES else ""
    items = "".join(_note(note, kind) for note, kind in notes[:_MOST_NOTES])
    return section("decision", "Decision chain", f'<ol class="chain">{items}</ol>{more}')


def _note(note: Mapping[str, Any], kind: str) -> str:
    tag = f'<span class="tag">{dot(note["stage"])}{escape(note["stage"])}</span>'
    words = f'<span class="x{" warn" if note["warn"] else ""}">{escape(clip(note["text"], 4000))}</span>'
    return f'<li class="{kind}"><span class="t">{seconds(note["t"])}</span><span>{tag}</span>{words}</li>'


def _stages(content: Content) -> str:
    spent = explain.spent(content)
    lines = []
    for row in explain.slowest(content):
        worst = ", ".join(f"rank {rank} {seconds(took)}" for rank, took in row["slowest"])
        name, words = f"{dot(row['stage'])}{escape(row['stage'])}", escape(WORDS.get(row["stage"], ""))
        times = [seconds(row[key]) for key in ("first", "median", "last")]
        lines.append([name, words, seconds(spent.get(row["stage"])), row["ranks"], *times, escape(worst)])
    head = ["stage", "each rank", "job n", "ranks n", "fastest n", "median n", "slowest n", "who took longest"]
    return section("stages", "Stages", table(head, lines))


def _did(content: Content) -> str:
    hosts = {info["rank"]: info["host"] for info in content["ranks"]}
    heard = {beat["rank"]: beat for beat in content.get("before", {}).get("last_heard", [])}
    lines = []
    for group in content["did"]:
        members = group["ranks"]
        where = sorted({hosts.get(rank, "") for rank in members} - {""})
        told = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        last = sorted({f"{heard[rank]['phase']} of step {heard[rank]['step']}" for rank in members if rank in heard})
        lines.append(
            [spans(members), len(members), escape(told), escape(", ".join(last[:2])), escape(group["text"])]
        )  # fmt: skip
    head = ["ranks", "number n", "hosts", "heard last in", "did x"]
    return section("ranks", "What each rank did", table(head, lines))


def _transfers(content: Content) -> str:
    moved = content["transfers"]
    if not moved:
        return ""
    lines = [
        [escape(one["shard"]), f"rank {one['source']}", escape(one["source_host"]), f"rank {one['target']}",
         escape(one["target_host"]), *_speed(one)]
        for one in moved
    ]  # fmt: skip
    known = [one["bytes"] for one in moved if one["bytes"] is not None]
    text = f"{len(moved)} transfer{'s' * (len(moved) != 1)}, {size(sum(known))}. " if known else "Bytes are not known. "
    if known:
        text += (
            "Seconds are those of the target, from the moment at which it turned to this shard until it was in place"
            " and its hash checked; of small shards most of that is waiting."
        )
    head = ["shard", "from", "host", "to", "host", *_SPEED]
    return section("transfers", "Transfers between ranks", _says(text) + table(head, lines))


def _writes(content: Content) -> str:
    parts = content["writes"]
    if not parts:
        return ""
    lines = []
    for one in parts:
        sources = (
            f"{shard} from {'itself' if source == 'self' else source.replace('rank:', 'rank ')}"
            for shard, source in one["sources"].items()
        )
        who = [escape(one["part"]), f"rank {one['writer']}", escape(one["host"])]
        lines.append([*who, escape(", ".join(sources)), *_speed(one)])
    return section("writes", "Checkpoint", table(["part", "writer", "host", "shards x", *_SPEED], lines))


def _speed(one: Mapping[str, Any]) -> list[str]:
    rate = "" if one["gb_per_s"] is None else f"{one['gb_per_s']:.3g}"
    failed = "" if one["ok"] else '<span class="bad">failed</span>'
    return [size(one["bytes"]), seconds(one["seconds"]), rate, failed]


def _hashes(content: Content) -> str:
    compared = content["hashes"]
    if not compared:
        return ""
    apart = [row for row in compared if not row["agree"]]
    lines = []
    for row in compared:
        told = ", ".join(_hash(*holder) for holder in row["holders"][:8])
        more = f" and {len(row['holders']) - 8} more" if len(row["holders"]) > 8 else ""
        cell = f'<span class="mono">{escape(told + more)}</span>'
        lines.append([escape(row["shard"]), row["step"], _judged(row), cell])
    number = sum(len(row["holders"]) for row in compared)
    text = f"{len(compared)} shards, {number} hashes: "
    text += f"{len(apart)} shards differ." if apart else "none differs."
    head = ["shard", "step n", "holders", "hashes x"]
    return section("hashes", "Hashes compared", _says(text) + table(head, lines))


def _hash(rank: int, now: str, then: str) -> str:
    """With the hash after the last update where that is another one; what is behind the colon counts updates."""
    changed = then and then.partition(":")[0] != now.partition(":")[0]
    return f"rank {rank} {now[:12]}" + (f" (after its update {then[:12]})" if changed else "")


def _judged(row: Mapping[str, Any]) -> str:
    if not row["compared"]:
        return '<span class="dim">told once</span>'
    return "equal" if row["agree"] else '<span class="bad">differ</span>'


def _stacks(content: Content) -> str:
    told = []
    for stack in content.get("stacks", []):
        when = f"{seconds(abs(stack['t']))} {'before' if stack['t'] <= 0 else 'after'} the first sign of the fault"
        title = escape(f"rank {stack['rank']}, pid {stack['pid']}, {when}")
        if stack["text"]:
            told.append(f"<details open><summary>{title}</summary><pre>{escape(stack['text'])}</pre></details>")
        else:
            why = stack["why_none"] or f"they are in {stack['file']}, on the host of that rank"
            told.append(f"<p>{title}: <span class=dim>no stacks here: {escape(why)}</span></p>")
    return section("stacks", "Stacks of ranks that did not move", "".join(told)) if told else ""


def _reproduce(content: Content) -> str:
    told = content["reproduce"]
    text = told["why"] or "The same layout, kind, rank, step and phase, in a small model on this machine."
    return section("reproduce", "Rehearse it", (command(told["command"]) if told["command"] else "") + _says(text))


def _versions(content: Content) -> str:
    packages = [[escape(name), escape(str(version))] for name, version in content.get("versions", {}).items()]
    job = [[escape(key), escape(str(value))] for key, value in content.get("job", {}).items() if value]
    inner = table(["package", "version"], packages) + (table(["job", ""], job) if job else "")
    return f'<details class="card" id="versions"><summary>Versions and job</summary>{inner}</details>'


def _raw(content: Content, name: str, raw: str) -> str:
    link = f'<a href="{escape(name)}">{escape(name)}</a>, schema {content["schema"]}'
    if not raw or len(raw) > LONGEST_RAW:
        return section("raw", "Raw JSON", f"<p>{link}, {size(len(raw))}, beside this page</p>")
    inner = f"<summary>Raw JSON</summary><p>{link}</p><pre>{escape(raw)}</pre>"
    return f'<details class="card" id="raw">{inner}</details>'


# ------------------------------------------------------------------------------------------------ small parts


def section(anchor: str, title: str, inner: str) -> str:
    return f'<section class="card" id="{anchor}"><h2>{escape(title)}</h2>{inner}</section>'


def table(head: list[str], lines: list[list[Any]]) -> str:
    """Cells are HTML. A head that ends in " n" is of numbers, in " x" of long texts."""
    kinds = [{" n": "n", " x": "wide"}.get(title[-2:], "w") for title in head]
    names = [title if kind == "w" else title[:-2] for title, kind in zip(head, kinds, strict=True)]
    top = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in zip(names, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for cell, kind in zip(line, kinds, strict=True)) + "</tr>"
        for line in lines[:_MOST_ROWS]
    )
    more = _says(f"and {len(lines) - _MOST_ROWS} more, in the file") if len(lines) > _MOST_ROWS else ""
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>{more}'


def command(text: str) -> str:
    """A command with a button that copies it."""
    return f'<div class="copy"><pre class="command">{escape(text)}</pre><button>copy</button></div>'


def items(texts: Iterable[str], limit: int) -> str:
    """The first of many as items of a list."""
    every = list(texts)
    shown = "".join(f"<li>{escape(clip(text, 420))}</li>" for text in every[:limit])
    return shown + (f"<li>and {len(every) - limit} more</li>" if len(every) > limit else "")


def dot(stage: str) -> str:
    """A square in the colour of a stage."""
    return f'<i class="dot" style="background:{colour(stage)}"></i>'


def colour(stage: str) -> str:
    return COLOURS.get(stage, "#738694")


def clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _says(text: str) -> str:
    return f'<p class="dim small">{escape(text)}</p>'
