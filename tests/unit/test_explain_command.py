"""`tftctl explain`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from incident_support import FILES, HERE
from typer.testing import CliRunner, Result

from mindspeed_tft.cli.main import app


def explain(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, words)])


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """A `--save` directory with three incidents, of which the hang is the newest."""
    folder = tmp_path / "tft_incidents"
    folder.mkdir()
    for age, name in enumerate(("hang", "recover", "old-link")):
        file = folder / f"incident-20260101-00000{age}-1.json"
        shutil.copyfile(HERE / f"{name}.json", file)
        os.utime(file, (1_800_000_000 - age, 1_800_000_000 - age))
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_it_tells_the_story(name: str) -> None:
    result = explain(HERE / f"{name}.json")
    assert result.exit_code == 0, result.output
    for word in ("decided", "lost", "took", "do now", "Stages", "What each rank did", "rehearse it:", "tftctl drill "):
        assert word in result.output


def test_sources_hashes_and_stacks() -> None:
    recover, hang = explain(HERE / "recover.json").output, explain(HERE / "hang.json").output
    assert "tp1-pp0/dense/0" in recover and "rank 3 (node0)" in recover and "kB" in recover and "equal" in recover
    assert "stacks of rank 2, pid" in hang and "most recent call first" in hang


@pytest.mark.parametrize("words", [["."], ["--save", "."], ["--incident-dir", "tft_incidents"], []])
def test_the_newest_of_a_directory(save: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(save)
    assert "Rank 2 on host node0 hung." in explain(*words).output


def test_json_has_what_follows_also_of_an_old_file() -> None:
    found = json.loads(explain(HERE / "old-dumped.json", "--json").output)
    assert found["answers"]["state"] == "saved" and found["writes"] and found["lanes"] and found["reproduce"]["command"]


def test_a_list(save: Path) -> None:
    (save / "tft_incidents" / "incident-20250101-000000-1.json").write_text("{}")
    rows = json.loads(explain(save, "--list", "--json").output)
    assert [row.get("outcome", "no") for row in rows] == ["rebooted", "rebooted", "retried", "no"]
    assert "it has no 'schema'" in rows[3]["error"]
    text = explain(save, "--list").output
    assert text.index("hung") < text.index("is gone") and "no incident: " in text


def test_a_file_that_has_the_bare_facts_only(save: Path) -> None:
    """As it is left where what follows from them could not be worked out."""
    content = json.loads((HERE / "hang.json").read_text())
    for fault in content["faults"]:
        del fault["rank"]
    file = save / "tft_incidents" / "incident-20250101-000000-1.json"
    file.write_text(json.dumps(content))
    result = explain(file)
    assert result.exit_code == 2 and "cannot be worked out (KeyError: 'rank')" in " ".join(result.output.split())
    assert isinstance(result.exception, SystemExit)
    rows = json.loads(explain(save, "--list", "--json").output)
    assert len(rows) == 4 and ["error" in row for row in rows].count(True) == 1


def test_the_page_again(save: Path) -> None:
    out = save / "page.html"
    result = explain(save, "--html", out)
    assert (result.exit_code, result.output.strip()) == (0, str(out))
    text = out.read_text()
    assert "Rank 2 on host node0 hung" in text and 'href="tft_incidents/incident-' in text


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["EMPTY"], 1, "no incident below"),
        (["EMPTY/none"], 2, "does not exist"),
        (["EMPTY", "--save", "EMPTY"], 2, "give one of INCIDENT, --incident-dir and --save"),
        (["BAD"], 2, "is no incident file: it is not JSON"),
        (["HANG", "--html", "EMPTY/no/such/file"], 2, "cannot be written (No such file"),
    ],
)
def test_what_cannot_be_explained(tmp_path: Path, words: list[str], status: int, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("no")
    places = {"EMPTY": tmp_path / "empty", "BAD": tmp_path / "bad.json", "HANG": HERE / "hang.json"}
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    result = explain(*words)
    assert result.exit_code == status and said in " ".join(result.output.split())
