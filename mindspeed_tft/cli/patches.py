"""`tftctl patches`: every patch that the plugin may put on Megatron, MindSpeed and torch, and what becomes of it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from mindspeed_tft.registry import Row

PARTS = ("core", "training")  # folders of a Megatron's package
WIDE = 500  # columns where there is no terminal: no line is folded
COLOURS = {"applied": "green", "declared": "green", "missing": "red", "conflict": "red", "skipped": "yellow"}
BAD = ("missing", "conflict")


def command(
    megatron: Annotated[
        Optional[Path],  # noqa: UP045  typer reads this annotation on Python 3.10 as well
        typer.Option(metavar="DIR", help="A Megatron-LM checkout; without it the installed Megatron."),
    ] = None,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Import Megatron here and apply all patches, as a job would; else only sources."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List every patch: target, kind, what asks for it, versions, state, and where it is declared.

    States: declared (its target is there, or its host is not installed), waiting (active, its module is not imported),
    applied, skipped (it may be missing), missing, conflict (somebody else's patch is over ours). Nothing of Megatron is
    imported without --apply. Exit status: 0, or 1 when a patch is missing or in conflict, 2 bad arguments.
    """
    if megatron is not None:
        if not all((megatron / "megatron" / part).is_dir() for part in PARTS):
            raise typer.BadParameter(f"{megatron} holds no megatron/core and megatron/training; give a checkout")
        sys.path.insert(0, str(megatron.resolve()))
    rows, troubles = look(apply=apply)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        show(rows, Console() if sys.stdout.isatty() else Console(width=WIDE))
    for trouble in troubles:
        print(f"tftctl patches: error: {trouble}", file=sys.stderr)
    raise typer.Exit(1 if troubles or any(row.state in BAD for row in rows) else 0)


def look(*, apply: bool) -> tuple[tuple[Row, ...], list[str]]:
    """All patches, and what stood in the way of applying them."""
    from mindspeed_tft import arguments
    from mindspeed_tft.patches import (  # noqa: F401  (importing declares)
        high_availability,
        megatron_arguments,
        megatron_drill,
        mindspeed,
        torch_elastic,
    )
    from mindspeed_tft.registry import REGISTRY

    troubles = _apply() if apply else []
    mindspeed.install(REGISTRY, arguments.add_flags)
    return REGISTRY.survey(), troubles


def _apply() -> list[str]:
    """Import all that is patched, activate and verify all groups; returns what did not work."""
    importlib.import_module("mindspeed_tft.adaptor")
    from mindspeed_tft.patches.mindspeed import GROUP
    from mindspeed_tft.registry import REGISTRY, PatchError

    troubles = []
    rows = [row for row in REGISTRY.survey() if row.place and row.group != GROUP]
    for module in sorted({row.target.partition(":")[0] for row in rows}):
        try:
            importlib.import_module(module)
        except ImportError as error:
            troubles.append(f"{module} cannot be imported: {error}")
    for group in sorted({row.group for row in rows}):
        try:
            REGISTRY.activate(group)
            REGISTRY.verify(group)
        except PatchError as error:
            troubles.append(str(error))
    return troubles


def show(rows: tuple[Row, ...], console: Console) -> None:
    """A table for each group, a line for each patch, and how many are in which state."""
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        needs = sorted({row.needs for row in members if row.needs})
        title = f"group {group}" + (f", for {' '.join(needs)}" if needs else "")
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for column in ("state", "kind", "target", "versions", "declared at"):
            table.add_column(column, overflow="fold")
        for row in members:
            state = f"[{COLOURS.get(row.state, 'default')}]{row.state}[/]"
            table.add_row(state, row.kind, escape(row.target), _versions(row), escape(_short(row.origin)))
        console.print(table)
    for row in rows:
        if row.state in (*BAD, "skipped") and row.detail:
            console.print(f"{row.state}: {row.target}: {row.detail}", markup=False, highlight=False)
        if row.others:
            console.print(f"also patched: {row.target} by {', '.join(row.others)}", markup=False, highlight=False)
    count = Counter(row.state for row in rows)
    console.print(f"{len(rows)} patches: {', '.join(f'{number} {state}' for state, number in sorted(count.items()))}")


def _versions(row: Row) -> str:
    here = f" (here {row.host_version})" if row.host_version else ""
    return f"{row.target.partition('.')[0]} {row.versions or 'any'}{here}"


def _short(origin: str) -> str:
    """`folder/file.py:line` of file:line; --json has it all."""
    return "/".join(Path(origin).parts[-2:])
