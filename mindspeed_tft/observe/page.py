"""An incident as one HTML page that needs nothing else: no network, no program beside a browser.

Everything that comes from the incident is escaped; scripts other than the page's own are forbidden to the browser. With
thousands of ranks it shows hosts, and stays below five megabytes.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from typing import Any

from mindspeed_tft.observe import explain, sections
from mindspeed_tft.observe.rows import rows
from mindspeed_tft.observe.words import clock, seconds, size

Content = Mapping[str, Any]

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def render(content: Content, name: str, raw: str = "") -> str:
    """The page.

    Args:
        content: of an incident file, as `explain.upgrade` makes it.
        name: of that file, which lies beside the page.
        raw: the text of that file, folded into the page unless it is too long.
    """
    template = (importlib.resources.files("mindspeed_tft.observe") / "page.html").read_text(encoding="utf-8")
    script = _SCRIPT.search(template)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    answers = content["answers"]
    data = {
        "total": answers["seconds"],
        "stages": [[stage["stage"], stage["t"], stage["seconds"]] for stage in content["stages"]],
        "colours": sections.COLOURS,
        "words": sections.WORDS,
        "rows": [asdict(row) for row in rows(content)],
    }
    first = (_top(content, name), _hero(content), _facts(content), _nav(content))
    # One pass, so that nothing in the content can be taken for a place to fill in.
    filled = {
        "script-hash": f"sha256-{digest}",
        "title": escape(f"{answers['what']} · {answers['verdict']}"),
        "body": "\n".join([*first, *sections.all_parts(content, name, raw)]),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"@@([a-z-]+)@@", lambda match: filled[match[1]], template)


# ------------------------------------------------------------------------------------------ the first screen


def _top(content: Content, name: str) -> str:
    hosts = {info["host"] for info in content["ranks"]}
    number = content["engine"].get("number")
    job = content.get("job", {})
    facts = {
        "incident": f"{number} of this run" if number else name,
        "run": content["run"],
        "began": clock(content["opened"]),
        "job": f"{len(content['ranks'])} ranks on {len(hosts)} host{'s' * (len(hosts) != 1)}"
        + (f", {job['layout']} {job.get('dtype', '')}" if job.get("layout") else ""),
        "strategies": job.get("strategies", ""),
        "file": name,
    }
    return '<div class="top">' + "".join(
        f"<span>{escape(key)} <b>{escape(str(value))}</b></span>" for key, value in facts.items() if value
    ) + "</div>"  # fmt: skip


def _hero(content: Content) -> str:
    answers = content["answers"]
    details = sections.items(answers["details"], 4)
    return (
        f'<section class="card hero {escape(answers["state"])}"><div class="verdict">{escape(answers["verdict"])}</div>'
        f'<h1>{escape(answers["what"])}</h1><ul class="details">{details}</ul></section>'
    )


def _facts(content: Content) -> str:
    answers = content["answers"]
    reasons = answers["why"]
    earlier = f"<li>{len(reasons) - 4} earlier ones: see the decision chain</li>" if len(reasons) > 4 else ""
    why = earlier + sections.items(reasons[-4:], 4)
    detect = f"noticed within {seconds(answers['detect'])}" if answers["detect"] else ""
    running = {"running": ("Yes", "good"), "saved": ("No, start it again", "warn"), "stopped": ("No", "bad")}
    word, kind = running[answers["state"]]
    command = sections.command(answers["resume"]) if answers["resume"] else ""
    lost = answers["lost"] + ("" if answers["lost_steps"] else ".")
    moved = sum(transfer["bytes"] or 0 for transfer in content["transfers"])
    written = sum(part["bytes"] or 0 for part in content["writes"])
    furthest = content["engine"].get("furthest_step")
    work = [f"step {furthest} was the last complete one"] if furthest and answers["lost_steps"] is not None else []
    work += [f"{size(moved)} moved between ranks"] if moved else []
    work += [f"{size(written)} written"] if written else []
    return f"""<div class="facts">
<section class="card w8"><h3>What was decided, and why</h3><div class="big">{escape(answers["decided"])}</div>
<ul class="small dim">{why}</ul></section>
<section class="card w4"><h3>What to do now</h3><ul class="first">{sections.items(answers["now"], 6)}</ul></section>
<section class="card w4"><h3>What was lost</h3><div class="big">{escape(lost)}</div>
<div class="small dim">{escape("; ".join(work))}</div></section>
<section class="card w5"><h3>How long it took</h3><div class="big">{seconds(answers["seconds"])}</div>
<div class="small dim">{escape(detect)}</div>{_stage_bar(content)}</section>
<section class="card w3"><h3>Is the job running again?</h3><div class="big {kind}">{word}</div>
<div class="small dim">{escape(_since(content))}</div></section>
{f'<section class="card w12"><h3>Go on with</h3>{command}</section>' if command else ""}
</div>"""


def _since(content: Content) -> str:
    if content["answers"]["running"]:
        return f"since {clock(content['closed'])}, from step {content['step'] + 1}"
    return f"ended {clock(content['closed'])}"


def _stage_bar(content: Content) -> str:
    found = explain.spent(content)
    total = sum(found.values()) or 1.0
    parts = {stage: spent for stage, spent in found.items() if spent / total > 0.002}
    bar = "".join(
        f'<i style="width:{100 * spent / total:.2f}%;background:{sections.colour(stage)}"></i>'
        for stage, spent in parts.items()
    )
    legend = "".join(
        f"<span>{sections.dot(stage)}{escape(stage)} {seconds(spent)}</span>" for stage, spent in parts.items()
    )
    return f'<div class="bar">{bar}</div><div class="legend">{legend}</div>'


def _nav(content: Content) -> str:
    links = {"timeline": "Timeline", "decision": "Decision chain", "stages": "Stages", "ranks": "What each rank did"}
    links |= {"transfers": "Transfers"} if content["transfers"] else {}
    links |= {"writes": "Checkpoint"} if content["writes"] else {}
    links |= {"hashes": "Hashes"} if content["hashes"] else {}
    links |= {"stacks": "Stacks"} if content.get("stacks") else {}
    links |= {"reproduce": "Rehearse it", "versions": "Versions", "raw": "Raw"}
    return "<nav>" + "".join(f'<a href="#{anchor}">{escape(text)}</a>' for anchor, text in links.items()) + "</nav>"
