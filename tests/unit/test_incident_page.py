"""The page of an incident: complete without scripts, closed against what it shows, small with thousands of ranks."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from incident_support import FILES, content, thousands

from mindspeed_tft.observe import explain, page, sections

VOID = {"meta", "br", "link", "input"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&@@title@@"


class Seen(HTMLParser):
    """What a browser would make of it: elements, attributes, texts outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data = self.data or data
        elif not self.open or self.open[-1] != "style":
            self.text += data


def parse(html: str) -> Seen:
    seen = Seen()
    seen.feed(html)
    assert not seen.open, f"left open: {seen.open}"
    return seen


@pytest.mark.parametrize("name", FILES)
def test_the_first_screen_answers_and_the_rest_is_there(name: str) -> None:
    found = explain.upgrade(content(name))
    seen = parse(page.render(found, f"{name}.json", json.dumps(found)))
    answers = found["answers"]
    for text in (answers["what"], answers["verdict"], answers["decided"], answers["lost"], *answers["now"]):
        assert text in seen.text
    assert seen.text.index(answers["verdict"]) < seen.text.index("Timeline")
    for note in found["timeline"]:
        assert note["text"] in seen.text
    for row in found["did"]:
        assert row["text"] in seen.text
    assert found["reproduce"]["command"] in seen.text
    for stack in found.get("stacks", []):
        assert stack["text"] in seen.text
    data = json.loads(seen.data)
    assert [row["short"] for row in data["rows"]] == [f"rank {rank}" for rank in range(4)]
    assert sum(len(row["segments"]) for row in data["rows"]) == sum(len(lane["segments"]) for lane in found["lanes"])
    assert {segment[0] for row in data["rows"] for segment in row["segments"]} <= sections.COLOURS.keys()


def test_it_loads_nothing_and_runs_nothing_else() -> None:
    html = page.render(explain.upgrade(content("hang")), "hang.json", "{}")
    seen = parse(html)
    assert not {"link", "img", "iframe", "object", "base", "form"} & {*seen.tags}
    assert not [value for name, value in seen.attributes if name in ("src", "action", "srcset")]
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/2000/svg)", html)
    (policy,) = [value for name, value in seen.attributes if name == "content" and "default-src" in value]
    assert policy.startswith("default-src 'none'; ") and "script-src 'sha256-" in policy


def hostile(value: Any) -> Any:
    """The same with a hostile end to every text that a rank, a host or an error may bring."""
    if isinstance(value, dict):
        return {key: hostile(item) if key not in _WORDS else item for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return value + HOSTILE if isinstance(value, str) else value


# Not free texts: the page, or what works it out, goes by them.
_WORDS = {"outcome", "commit", "update", "kind", "what", "transfers", "result", "part", "dtype", "layout", "strategies"}


@pytest.mark.parametrize("name", FILES)
def test_nothing_in_it_becomes_markup(name: str) -> None:
    plain = parse(page.render(explain.upgrade(content(name)), "a.json", "{}"))
    bad = explain.upgrade(hostile(content(name)))
    seen = parse(page.render(bad, HOSTILE, json.dumps(bad)))
    assert {*seen.tags} == {*plain.tags} and seen.tags.count("script") == 2
    assert not [item for item in seen.attributes if item[0].startswith("on")]
    assert HOSTILE in seen.text, "control: it is there, as text"
    assert HOSTILE in json.loads(seen.data)["rows"][0]["label"]


@pytest.mark.parametrize("number", [4096, pytest.param(16_384, marks=pytest.mark.full)])
def test_thousands_of_ranks_are_hosts_and_those_that_matter(number: int) -> None:
    together = number // 256  # ranks of a row
    found = explain.upgrade(thousands(number, per_host=8, lost=[5]))
    html = page.render(found, "many.json", "x" * 20_000_000)
    assert len(html) < 5_000_000
    rows = json.loads(parse(html).data)["rows"]
    assert rows[0]["label"] == "rank 5 · host0" and rows[0]["bad"]
    assert rows[1]["label"] == f"host0 … host{together // 8 - 1} · {together} ranks" and rows[1]["bad"]
    assert len(rows) == 1 + 256 and not any(row["bad"] for row in rows[2:])
    regroup = next(segment for segment in rows[2]["segments"] if segment[0] == "regroup")
    last = 2 * together - 1
    assert regroup[1:4] == [3.0, pytest.approx(3.5 + last * 1e-6), 1]
    assert regroup[5] == f"{together} ranks; slowest rank {last}: 0.500 s"


@pytest.mark.parametrize(("number", "rows"), [(64, 64), (65, 1 + 9)])
def test_few_ranks_have_a_row_each(number: int, rows: int) -> None:
    found = explain.upgrade(thousands(number, per_host=8, lost=[5]))
    assert len(json.loads(parse(page.render(found, "a.json")).data)["rows"]) == rows
