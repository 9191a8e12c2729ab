"""`tftctl explain`: what an incident was, from the file that it left."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mindspeed_tft.cli import consoles
from mindspeed_tft.observe import explain, page
from mindspeed_tft.observe.explain import NotAnIncident
from mindspeed_tft.observe.words import clock, seconds, size, spans

NOTHING = 1  # exit status: there is no incident
WRONG = 2  # bad arguments, or a file that is no incident
WIDE = 160  # columns where there is no terminal
_PATTERN = "incident-*.json"
# Of `--save`, of a directory that holds several, of a drill's `--keep`.
_BELOW = ("tft_incidents", "*/tft_incidents", "*/*/tft_incidents")
_COLOURS = {"running": "green", "saved": "yellow", "stopped": "red"}
_MOST = 20  # rows of a table


def command(
    incident: Annotated[
        Optional[Path],  # noqa: UP045  typer reads this annotation on Python 3.10 as well
        typer.Argument(help="An incident file, or a directory of them; of a directory the newest is taken."),
    ] = None,
    incident_dir: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="Where incident reports are (--tft-incident-dir of the job)."),
    ] = None,
    save: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="The --save directory of the job: looks into its tft_incidents."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with all that follows from it.")] = False,
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="OUT", help="Make the page again, into this file."),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List all incidents that are found, the newest first.")
    ] = False,
) -> None:
    """Say what broke, what was decided and why, how long each stage took, which holders gave what, and what to do now.

    Without an argument the newest incident below the current directory is taken. Files of older versions are explained
    as far as they go. Exit status: 0; 1 when there is no incident; 2 for bad arguments or a file that is no incident.
    """
    places = [place for place in (incident, incident_dir, save) if place is not None]
    if len(places) > 1:
        _fail("give one of INCIDENT, --incident-dir and --save")
    place = places[0] if places else Path()
    if not place.exists():
        _fail(f"{place} does not exist; give an incident file, or the directory of --tft-incident-dir or --save")
    files = [place] if place.is_file() else find(place)
    if not files:
        print(f"tftctl explain: no incident below {place.resolve()}: no file {_PATTERN} there, nor in tft_incidents",
              file=sys.stderr)  # fmt: skip
        raise typer.Exit(NOTHING)
    console = consoles.for_tables(WIDE)
    if listed:
        show_list(files, as_json, console)
        return
    file = files[0]
    raw, content = _load(file)
    if html is not None:
        _write(html, page.render(content, os.path.relpath(file.resolve(), html.resolve().parent), raw))
    if as_json:
        print(json.dumps(content, indent=1))
    elif html is not None:
        print(html)
    else:
        show(content, file, console)


def find(place: Path) -> list[Path]:
    """All incident files of a directory, or of the directories of incidents below it, the newest first."""
    found = {
        path for pattern in (_PATTERN, *(f"{below}/{_PATTERN}" for below in _BELOW)) for path in place.glob(pattern)
    }
    return sorted(found, key=lambda path: (path.stat().st_mtime, path.name), reverse=True)


def read(file: Path) -> tuple[str, dict[str, Any]]:
    """The text of an incident file, and its content with all that follows from it.

    Raises:
        NotAnIncident: the file cannot be read, or is no incident.
    """
    try:
        raw = file.read_text(encoding="utf-8")
        content = json.loads(raw)
    except OSError as error:
        raise NotAnIncident(f"it cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise NotAnIncident(f"it is not JSON: {error}") from error
    try:
        return raw, explain.upgrade(content)  # also where it is in the file already: by an older version, perhaps
    except NotAnIncident:
        raise
    except Exception as error:  # the controller could not do it either, and left the bare facts; or it was edited
        raise NotAnIncident(f"what it means cannot be worked out ({type(error).__name__}: {error})") from error


def _load(file: Path) -> tuple[str, dict[str, Any]]:
    try:
        return read(file)
    except NotAnIncident as error:
        _fail(f"{file} is no incident file: {error}; give one named {_PATTERN}")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        _fail(f"--html {file}: cannot be written ({error.strerror})")


def _fail(text: str) -> NoReturn:
    print(f"tftctl explain: error: {text}", file=sys.stderr)
    raise typer.Exit(WRONG)


# --------------------------------------------------------------------------------------------------- list


def show_list(files: list[Path], as_json: bool, console: Console) -> None:
    """One line for each incident; of a file that is none, the reason."""
    rows = list(_rows(files))
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = _table("", "began", "what", "outcome", "step", "lost", "seconds", "file")
    for row in rows:
        if "error" in row:
            _row(table, "", Text(f"no incident: {row['error']}", "red"), "", "", "", "", row["file"])
        else:
            lost = "?" if row["lost_steps"] is None else str(row["lost_steps"])
            _row(table, clock(row["opened"]), Text(row["what"]), Text(row["outcome"], _COLOURS[row["state"]]),
                          str(row["step"]), lost, seconds(row["seconds"]), row["file"])  # fmt: skip
    console.print(table)


def _rows(files: list[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        try:
            _, content = read(file)
        except NotAnIncident as error:
            yield {"file": str(file), "error": str(error)}
            continue
        answers = content["answers"]
        told = {key: answers[key] for key in ("state", "what", "lost_steps", "seconds")}
        yield {"file": str(file), **{key: content[key] for key in ("opened", "closed", "outcome", "step")}, **told}


# --------------------------------------------------------------------------------------------------- show


def show(content: Mapping[str, Any], file: Path, console: Console) -> None:
    """All of it, for a terminal."""
    answers = content["answers"]
    console.print(Text(f"{answers['verdict']}.", f"bold {_COLOURS[answers['state']]}"))
    console.print(Text(f"{answers['what']}.", "bold"))
    for line in answers["details"][:6]:
        console.print(Text(f"  {line}", "dim"), soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    _row(table, "decided", Text(answers["decided"]))
    for why in answers["why"]:
        _row(table, "", Text(f"- {why}"))
    _row(table, "lost", Text(answers["lost"]))
    known = f", noticed within {seconds(answers['detect'])}" if answers["detect"] else ""
    _row(table, "took", f"{seconds(answers['seconds'])} ({clock(content['opened'])}{known})")
    for index, text in enumerate(answers["now"]):
        _row(table, "" if index else "do now", Text(f"- {text}"))
    console.print(table)
    if answers["resume"]:
        console.print("\ngo on with:", style="bold")
        console.print(Text(answers["resume"]), soft_wrap=True)
    _show_stages(content, console)
    _show_moved(content, console)
    _show_hashes(content, console)
    _show_did(content, console)
    for stack in content.get("stacks", []):
        console.print(f"\nstacks of rank {stack['rank']}, pid {stack['pid']}:", style="bold", highlight=False)
        console.print(Text(stack["text"] or stack["why_none"] or stack["file"]), soft_wrap=True)
    told = content["reproduce"]
    console.print("\nrehearse it:", style="bold")
    console.print(Text(told["command"] or told["why"]), soft_wrap=True)
    if told["command"] and told["why"]:
        console.print(Text(f"  ({told['why']})", "dim"), soft_wrap=True)
    there = file.with_suffix(".html")
    console.print(Text(f"\nfile: {file}" + (f"  page: {there}" if there.exists() else ""), "dim"), soft_wrap=True)


def _show_stages(content: Mapping[str, Any], console: Console) -> None:
    spent = explain.spent(content)
    table = _table("Stages", "stage", "job", "ranks", "median", "slowest", "who took longest")
    for row in explain.slowest(content):
        worst = ", ".join(f"rank {rank} {seconds(took)}" for rank, took in row["slowest"])
        _row(table, row["stage"], seconds(spent.get(row["stage"])), str(row["ranks"]), seconds(row["median"]),
                      seconds(row["last"]), worst)  # fmt: skip
    console.print(table)


def _show_moved(content: Mapping[str, Any], console: Console) -> None:
    if content["transfers"]:
        table = _table("Sources", "shard", "from", "to", "bytes", "seconds", "GB/s", "")
        for one in content["transfers"][:_MOST]:
            source, target = (f"rank {one[side]} ({one[side + '_host']})" for side in ("source", "target"))
            _row(table, one["shard"], source, target, *_speed(one))
        console.print(table)
        _more(content["transfers"], console)
    if content["writes"]:
        table = _table("Checkpoint", "part", "writer", "shards", "bytes", "seconds", "GB/s", "")
        for one in content["writes"][:_MOST]:
            shards = ", ".join(f"{shard} from {source}" for shard, source in one["sources"].items())
            _row(table, one["part"], f"rank {one['writer']} ({one['host']})", shards, *_speed(one))
        console.print(table)
        _more(content["writes"], console)


def _speed(one: Mapping[str, Any]) -> tuple[str, str, str, str]:
    rate = "" if one["gb_per_s"] is None else f"{one['gb_per_s']:.3g}"
    return size(one["bytes"]), seconds(one["seconds"]), rate, "" if one["ok"] else "failed"


def _show_hashes(content: Mapping[str, Any], console: Console) -> None:
    compared = content["hashes"]
    if not compared:
        return
    table = _table("Hashes", "shard", "step", "holders", "")
    for row in compared[:_MOST]:
        holders = ", ".join(f"rank {rank} {now[:12]}" for rank, now, _ in row["holders"][:6])
        _row(table, row["shard"], str(row["step"]), holders, judged(row))
    console.print(table)
    _more(compared, console)


def judged(row: Mapping[str, Any]) -> Text:
    """Whether the hashes of a shard agree."""
    if not row["compared"]:
        return Text("told once", "dim")
    return Text("equal") if row["agree"] else Text("differ", "red")


def _show_did(content: Mapping[str, Any], console: Console) -> None:
    table = _table("What each rank did", "ranks", "number", "did")
    for group in content["did"][:_MOST]:
        _row(table, spans(group["ranks"]), str(len(group["ranks"])), Text(group["text"]))
    console.print(table)
    _more(content["did"], console)


def _more(rows: list[Any], console: Console) -> None:
    if len(rows) > _MOST:
        console.print(f"  and {len(rows) - _MOST} more, in the file", style="dim")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: str | Text) -> None:
    """Cells as they are: nothing in them is markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
