"""The documentation site: it builds without a warning, loads nothing from elsewhere, and what it quotes exists."""

from __future__ import annotations

import ast
import html.parser
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mindspeed_tft.observe import catalogue

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TRANSLATED = ("index", "quick-start", "flags", "presets", "operations")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link, an anchor or a page of the navigation that is missing fails."""
    target = tmp_path_factory.mktemp("site")
    done = _build(ROOT / "mkdocs.yml", target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def _build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Not with --quiet: warnings that are not shown do not count."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", target]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("text", "warning"),
    [("[there](missing.md)", "'missing.md'"), ("[there](#missing)", "'#missing'"), ("![](img/none.svg)", "none.svg")],
)
def test_control_a_broken_link_fails_the_build(tmp_path: Path, text: str, warning: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Here\n\n{text}\n")
    config = f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nnav: [index.md]\ntheme: {{name: mkdocs}}\nplugins: []\n"
    (tmp_path / "mkdocs.yml").write_text(f"{config}hooks: []\nextra_css: []\n")
    done = _build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and warning in done.stderr, done.stderr


class _Loads(html.parser.HTMLParser):
    """Addresses that a browser fetches when it shows a page; links that somebody may click are none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in ("canonical", "alternate", "next", "prev"):
            return
        names = ("src", "srcset", "data", "poster") if tag != "link" else ("href",)
        self.found.extend(value for name in names if (value := values.get(name)))


def _loads(text: str) -> list[str]:
    parser = _Loads()
    parser.feed(text)
    return [address for address in parser.found if re.match(r"(https?:)?//", address)]


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    assert {page.name: found for page in pages if (found := _loads(page.read_text(encoding="utf-8")))} == {}
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet
    assert _loads('<script src="https://example.com/a.js"></script><link rel="stylesheet" href="//x/y.css">') == [
        "https://example.com/a.js",
        "//x/y.css",
    ]


def test_every_page_is_in_the_site_and_pictures_are_in_their_pages(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        place = site / "zh" if name.endswith(".zh") else site
        assert (place / f"{name.removesuffix('.zh')}.html").is_file(), page
    text = (site / "architecture.html").read_text(encoding="utf-8")
    assert text.count("<svg") >= 5 and 'class="picture"' in text and "<img alt" not in text
    for fault in (DOCS / "faults").glob("[!i]*.md"):
        built = (site / "faults" / f"{fault.stem}.html").read_text(encoding="utf-8")
        assert 'class="sequence"' in built, fault


def test_chinese_pages_are_chinese(site: Path) -> None:
    for name in TRANSLATED:
        text = (site / "zh" / f"{name}.html").read_text(encoding="utf-8")
        assert len(re.findall("[\u4e00-\u9fff]", text)) > 500, name


def _links(path: Path) -> Iterator[str]:
    """The relative links of a page, without those in code."""
    text = re.sub(r"^(```|~~~).*?^\1$|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:", target):
            yield target


def test_links_between_the_files_of_the_repository_lead_somewhere(tmp_path: Path) -> None:
    """mkdocs looks at those inside docs/; here are all, also those of README and CONTRIBUTING."""
    found = 0
    for folder in (ROOT, DOCS, DOCS / "faults", ROOT / "benchmarks", *(ROOT / "mindspeed_tft").iterdir()):
        for page in sorted(folder.glob("*.md")):
            for target in _links(page):
                place, _, anchor = target.partition("#")
                goal = page.parent / place if place else page
                assert goal.exists(), f"{page}: {target}"
                assert not anchor or anchor in _anchors(goal), f"{page}: {target}"
                found += 1
    assert found > 100
    page = tmp_path / "page.md"
    page.write_text(
        "# A b, `c`\n[x](y.md#z) `[n](o.md)`\n```\n[n](o.md)\n```\n[p](q.md) <https://e.org> [w](https://e.org)\n"
    )
    assert (list(_links(page)), _anchors(page)) == (["y.md#z", "q.md"], {"a-b-c"})


def _anchors(page: Path) -> set[str]:
    """As Markdown makes them of titles in ASCII, or as they are given."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = [re.sub(r"\{#.*", "", title) for title in re.findall(r"^#+ (.+)$", text, re.M)]
    named = re.findall(r"\{#([\w-]+)\}", text)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles} | set(named)


# ------------------------------------------------------------------------------------------------------- flags


def _rows(page: str) -> dict[str, tuple[str, ...]]:
    """The first cell of each row of a page's tables that names something in code -> the next two cells."""
    rows = re.findall(r"^\| (`[^|]+`|\w+) \|([^|\n]*)\|([^|\n]*)\|", (DOCS / page).read_text(encoding="utf-8"), re.M)
    return {name.strip("`"): (first.strip(), second.strip()) for name, first, second in rows}


def test_the_chinese_page_has_every_flag_with_its_default() -> None:
    english, chinese = _rows("flags.md"), _rows("flags.zh.md")
    assert len(english) > 30 and "--tft-deadline" in english
    assert english.keys() - {"setting", "timeout"} == chinese.keys() - {"设置", "超时"}
    for name, cells in english.items():
        if name.startswith(("--", "TTP")) and name in chinese:
            assert cells == chinese[name], name


# --------------------------------------------------------------------------------------------- what is quoted


@cache
def _texts() -> str:
    """All texts of the sources, one after the other with \\1 between; each `{...}` of an f-string as one \\0."""
    found: list[str] = []
    for folder in (ROOT / "mindspeed_tft", ROOT / "patches"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(_part(value) for value in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%(\.\d+)?[sdrfg]", "\0", node.value))
    return "\1".join(found)


def _part(value: ast.expr) -> str:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else "\0"


def _exists(quote: str) -> bool:
    """Whether a text of the sources reads like this; `…` stands for one or more values."""
    pattern = r"[^\1]+".join(re.escape(part) for part in quote.strip("…").split("…"))
    return re.search(pattern, _texts()) is not None


def _quotes() -> Iterator[str]:
    for line in (DOCS / "faq.md").read_text(encoding="utf-8").splitlines():
        if found := re.fullmatch(r"### `+ ?(.+?) ?`+", line):
            yield found[1]


def test_every_text_of_the_faq_is_one_of_the_sources() -> None:
    quotes = list(_quotes())
    assert len(quotes) > 45
    assert [quote for quote in quotes if not _exists(quote)] == []
    assert not _exists("this text is … in no module")


@pytest.mark.parametrize("page", ["operations.md", "operations.zh.md"])
def test_metrics_and_rules_to_alert_on_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    known = {metric.name for metric in catalogue.METRICS}
    named = set(re.findall(r"`(tft_[a-z_]+)", text)) - {"tft_incidents"}
    assert len(named) >= 6 and named <= known, named - known
    rules = re.findall(r"- alert: (\w+)", (ROOT / "examples" / "prometheus-rules.yml").read_text(encoding="utf-8"))
    assert len(rules) >= 8 and set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+)`", text)) == set(rules)


# --------------------------------------------------------------------------------------------------- sequences


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tft_site_hooks", ROOT / "scripts" / "docs_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_sequence_is_drawn(hooks: Any) -> None:
    svg = hooks.draw("dead = rank 1 | others\n== stop\ndead x <killed>\nothers -> dead : who?\ndead + again")
    assert svg.startswith("<svg") and "&lt;killed&gt;" in svg and svg.count('class="lane"') == 3
    assert svg.count('class="head"') == 1 and ">stop</text>" in svg


@pytest.mark.parametrize(("line", "why"), [("others ~ dead", "is no stage"), ("nobody : waits", "no lane 'nobody'")])
def test_a_sequence_that_means_nothing_is_refused(hooks: Any, line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        hooks.draw(f"dead | others\n{line}")
