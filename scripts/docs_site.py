"""What mkdocs does for the documentation site beside its plugins (`hooks` in mkdocs.yml).

- A fenced block `sequence` becomes a picture of who does what in which order. In the source it stays readable text.
- SVG files of `docs/img/` are put into the page itself, so that they follow the page's colours, light and dark.
- A link that leaves `docs/` leads nowhere on the site: its text stays, the link goes. In the repository it works.

Nothing is loaded from a network, neither when the site is built nor when it is read.
"""

from __future__ import annotations

import html
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PICTURE = re.compile(r'<p><img alt="([^"]*)" src="[^"]*?img/([\w-]+\.svg)"\s*/?></p>')
WORD = re.compile(r"(<td[^>]*>)<code>([^\s<]{1,44})</code>(?=</td>)")
LOG = re.compile(r'<div class="(language-text highlight)">(?=(?:(?!</div>).)*\[mindspeed_tft)', re.DOTALL)

LANE, GAP, MARGIN, STAGE = 156, 10, 4, 72  # widths in units of the drawing, about pixels
LINE, PAD = 16, 7  # height of a line of text, room around it
CHARACTER = 6.5  # width of a character of 12 units, on average


# -------------------------------------------------------------------------------------------- what mkdocs calls


def on_config(config: Any) -> Any:
    """Tell the Markdown extension of fenced blocks about `sequence`."""
    fences = config["mdx_configs"].setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "sequence", "class": "sequence", "format": _fence})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Drop links that climb out of `docs/`."""
    out = "../" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\[([^\]]+)\]\({re.escape(out)}[^)]*\)", r"\1", markdown)


def on_page_content(content: str, config: Any, **_: Any) -> str:
    """Put our SVG pictures into the page; mark names in tables, which are not to be folded, and lines of a log, which
    are."""
    folder = Path(config["docs_dir"]) / "img"

    def inline(found: re.Match[str]) -> str:
        svg = (folder / found[2]).read_text(encoding="utf-8").strip()
        return f'<figure class="picture" role="img" aria-label="{found[1]}">{svg}</figure>'

    content = WORD.sub(r'\1<code class="word">\2</code>', PICTURE.sub(inline, content))
    return LOG.sub(r'<div class="\1 log">', content)


def _fence(source: str, *_: Any, **__: Any) -> str:
    return f'<figure class="sequence">{draw(source)}</figure>'


# -------------------------------------------------------------------------------------------------- sequences


@dataclass
class Drawing:
    """A sequence while it is drawn, from the top."""

    lanes: dict[str, str]  # short name -> title
    y: float = 0
    free: float = 0  # below the name of the last stage
    begun: dict[str, float] = field(default_factory=dict)  # where the line of a lane that lives began
    lines: list[str] = field(default_factory=list)  # lanes, which lie below all else
    shapes: list[str] = field(default_factory=list)

    def x(self, lane: str) -> float:
        """The middle of a lane.

        Raises:
            ValueError: there is no such lane.
        """
        if lane not in self.lanes:
            raise ValueError(f"sequence: no lane {lane!r} (there are {', '.join(self.lanes)})")
        return STAGE + list(self.lanes).index(lane) * (LANE + GAP) + LANE / 2

    @property
    def width(self) -> float:
        return STAGE + len(self.lanes) * (LANE + GAP) - GAP + MARGIN

    def end_lane(self, lane: str) -> None:
        """Draw a lane's line down to here."""
        x, top = self.x(lane), self.begun.pop(lane)
        self.lines.append(f'<line class="lane" x1="{x}" y1="{top}" x2="{x}" y2="{self.y}"/>')

    def text(self, x: float, lines: list[str], style: str) -> None:
        """Centred lines of text, from here on."""
        for number, line in enumerate(lines):
            y = self.y + PAD + LINE * number + 12
            self.shapes.append(f'<text class="{style}" x="{x}" y="{y}">{html.escape(line)}</text>')

    def box(self, first: str, last: str, text: str, style: str = "box") -> None:
        """A box over one lane, or from one to another."""
        left, right = sorted((self.x(first), self.x(last)))
        left, right = left - LANE / 2, right + LANE / 2
        lines = _fold(text, right - left - 2 * PAD)
        height = LINE * len(lines) + 2 * PAD
        self.shapes.append(
            f'<rect class="{style}" x="{left}" y="{self.y}" width="{right - left}" height="{height}" rx="5"/>'
        )
        self.text((left + right) / 2, lines, "words")
        self.y += height + 9

    def arrow(self, source: str, target: str, text: str) -> None:
        """A message from a lane to another one."""
        start, end = self.x(source), self.x(target)
        lines = _fold(text, max(abs(end - start), LANE) - 10)
        self.text((start + end) / 2, lines, "message")
        self.y += LINE * len(lines) + PAD + 5
        way = 1 if end > start else -1
        tip, y = end - way * 2, self.y
        head = f"{tip},{y} {tip - way * 8},{y - 4.5} {tip - way * 8},{y + 4.5}"
        self.shapes.append(f'<line class="arrow" x1="{start}" y1="{y}" x2="{tip - way * 6}" y2="{y}"/>')
        self.shapes.append(f'<polygon class="head" points="{head}"/>')
        self.y += 9

    def stage(self, name: str) -> None:
        """A line over everything, with the name of what begins."""
        self.y = max(self.y, self.free) + 5
        self.shapes.append(f'<line class="rule" x1="0" y1="{self.y}" x2="{self.width}" y2="{self.y}"/>')
        lines = _fold(name, STAGE - 6)
        for number, line in enumerate(lines):
            y = self.y + 17 + 14 * number
            self.shapes.append(f'<text class="stage" x="{MARGIN / 2}" y="{y}">{html.escape(line)}</text>')
        self.free = self.y + 14 * len(lines) + 6
        self.y += 9


def draw(source: str) -> str:
    """The SVG of a sequence.

    The first line names the lanes: `dead = rank 1 | others = ranks 0, 2, 3 | controller`. Then, from the top:

        == stop                     a stage begins
        dead x killed               a lane ends, and why
        dead + started again        it begins anew
        dead : text                 what somebody does
        dead & others : text        what several do, over all lanes between the two
        dead -> others : text       a message

    Raises:
        ValueError: a line means nothing.
    """
    first, *rest = [line.strip() for line in source.strip().splitlines() if line.strip()]
    pairs = [[word.strip() for word in lane.partition("=")[::2]] for lane in first.split("|")]
    drawing = Drawing({name: title or name for name, title in pairs})
    drawing.y = 4
    for lane, title in drawing.lanes.items():
        x = drawing.x(lane)
        drawing.shapes.append(f'<rect class="who" x="{x - LANE / 2}" y="4" width="{LANE}" height="28" rx="5"/>')
        drawing.shapes.append(f'<text class="name" x="{x}" y="23">{html.escape(title)}</text>')
    drawing.y = 32
    drawing.begun = dict.fromkeys(drawing.lanes, 32.0)
    drawing.y = 42
    for line in rest:
        _draw_line(drawing, line)
    drawing.y = max(drawing.y, drawing.free)
    for lane in list(drawing.begun):
        drawing.end_lane(lane)
    height = drawing.y + 4
    return (
        f'<svg viewBox="0 0 {drawing.width:g} {height:g}" style="min-width:{drawing.width * 0.86:.0f}px"'
        f' role="img">{"".join(drawing.lines)}{"".join(drawing.shapes)}</svg>'
    )


def _draw_line(drawing: Drawing, line: str) -> None:
    if line.startswith("=="):
        drawing.stage(line.strip("= "))
    elif found := re.fullmatch(r"(\w+) -> (\w+) : (.+)", line):
        drawing.arrow(found[1], found[2], found[3])
    elif found := re.fullmatch(r"(\w+) x (.+)", line):
        drawing.box(found[1], found[1], found[2], "fault")
        drawing.y -= 9
        drawing.end_lane(found[1])
        drawing.y += 9
    elif found := re.fullmatch(r"(\w+) \+ (.+)", line):
        drawing.begun[found[1]] = drawing.y
        drawing.box(found[1], found[1], found[2], "reborn")
    elif found := re.fullmatch(r"(\w+) ! (.+)", line):
        drawing.box(found[1], found[1], found[2], "fault")
    elif found := re.fullmatch(r"(\w+) & (\w+) : (.+)", line):
        drawing.box(found[1], found[2], found[3])
    elif found := re.fullmatch(r"(\w+) : (.+)", line):
        drawing.box(found[1], found[1], found[2])
    else:
        raise ValueError(f"sequence: {line!r} is no stage, message, box, end or beginning")


def _fold(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, max(8, int(width / CHARACTER)), break_long_words=False) or [""]
