"""`tftctl patches`: every patch that the plugin may put on Megatron, MindSpeed and torch, and what becomes of it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from mindspeed_tft.registry import Row, Sources

PARTS = ("core", "training")  # packages in a Megatron's package
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: patches and troubles.")] = False,
) -> None:
    """List every patch: target, kind, what asks for it, versions, state, and where it is declared.

    States: declared (its target is there, or its host is not installed), waiting (its module is not imported, or its
    group is not applied because of another patch), applied, skipped (it may be missing), missing, conflict (somebody
    else's patch is over ours, or a way to the target leads past ours). Nothing of Megatron is imported without --apply.
    Exit status: 0, or 1 when a patch is missing or in conflict or something cannot be read, 2 bad arguments.
    """
    if megatron is not None:
        # A folder without it is merged by Python with the Megatron that is installed.
        files = [f"megatron/{part}/__init__.py" for part in PARTS]
        if not all((megatron / file).is_file() for file in files):
            raise typer.BadParameter(f"{megatron} holds no {' and no '.join(files)}; give a checkout of Megatron-LM")
        sys.path.insert(0, str(megatron.resolve()))
    with _stdout_to_stderr():
        rows, troubles = look(apply=apply, megatron=megatron)
    if as_json:
        print(json.dumps({"patches": [dataclasses.asdict(row) for row in rows], "troubles": troubles}, indent=2))
    elif rows:
        show(rows, Console(emoji=False) if sys.stdout.isatty() else Console(width=WIDE, emoji=False))
    for trouble in troubles:
        print(f"tftctl patches: error: {trouble}", file=sys.stderr)
    raise typer.Exit(1 if troubles or any(row.state in BAD for row in rows) else 0)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What others print while they are imported is not our answer: libraries too, which know only the descriptor."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(ours, 1)
        os.close(ours)


def look(*, apply: bool, megatron: Path | None = None) -> tuple[tuple[Row, ...], list[str]]:
    """All patches, and what stood in the way of applying them or of telling.

    `megatron`: of this checkout alone, which must be the first that an import finds.
    """
    trouble = _declare()
    if trouble:
        return (), [trouble]
    from mindspeed_tft import arguments
    from mindspeed_tft.patches import mindspeed
    from mindspeed_tft.registry import REGISTRY, PatchError

    try:
        sources = _sources(megatron)
        troubles = _apply(sources) if apply else []
        mindspeed.install(REGISTRY, arguments.add_flags)
        return REGISTRY.survey(sources), troubles
    except PatchError as error:  # a version cannot be read
        return (), [str(error)]


def _declare() -> str:
    """Returns why the patches cannot be loaded, "" if they can."""
    for name in ("high_availability", "megatron_arguments", "megatron_drill", "mindspeed", "torch_elastic"):
        trouble = _import(f"mindspeed_tft.patches.{name}")
        if trouble:
            return f"{trouble}. Remedy: mend what is named, or use an environment in which Megatron and torch import"
    return ""


def _sources(megatron: Path | None) -> Sources:
    """Where targets are looked up. A checkout has its own version, and nothing of the installed Megatron besides."""
    from mindspeed_tft.registry import REGISTRY, Sources
    from mindspeed_tft.registry.versions import folders_of, version_in

    if megatron is None:
        return Sources()
    folder = megatron.resolve() / "megatron"
    info = folder / "core" / "package_info.py"
    REGISTRY.host("megatron", lambda: version_in(info) if info.is_file() else None)
    return Sources(lambda package: [folder] if package == "megatron" else folders_of(package))


def _apply(sources: Sources) -> list[str]:
    """Import all that is patched, activate and verify all groups; returns what did not work."""
    troubles = [_import("mindspeed_tft.adaptor")]
    from mindspeed_tft.patches.mindspeed import GROUP
    from mindspeed_tft.registry import REGISTRY, PatchError

    # Those too whose target is not found: perhaps because their module cannot be read.
    rows = [r for r in REGISTRY.survey(sources) if (r.place or r.state == "missing") and r.group != GROUP]
    troubles += [_import(module) for module in sorted({row.target.partition(":")[0] for row in rows})]
    for group in sorted({row.group for row in rows}):
        try:
            REGISTRY.activate(group)
            REGISTRY.verify(group)
        except PatchError as error:
            troubles.append(str(error))
    return [trouble for trouble in troubles if trouble]


def _import(module: str) -> str:
    """Returns why a module cannot be imported, and in which file that is; "" if it can."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever somebody's code does at its import
        return f"{module} cannot be imported: {type(error).__name__}: {error}{_where(error)}"
    return ""


def _where(error: BaseException) -> str:
    """The file and line of an error at an import; "" where no file was come to."""
    if isinstance(error, SyntaxError) and error.filename:  # also of a file that is not UTF-8
        return f" ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    files = [each for each in frames if each.filename not in (__file__, importlib.__file__) and each.filename[0] != "<"]
    return f" ({files[-1].filename}:{files[-1].lineno})" if files else ""


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
    for absent, number in Counter(row.detail for row in rows if row.state == "declared" and row.detail).items():
        console.print(f"{absent}: {number} patches have nothing to be looked up in", markup=False, highlight=False)
    count = Counter(row.state for row in rows)
    console.print(f"{len(rows)} patches: {', '.join(f'{number} {state}' for state, number in sorted(count.items()))}")


def _versions(row: Row) -> str:
    here = f" (here {row.host_version})" if row.host_version else ""
    return f"{row.target.partition('.')[0]} {row.versions or 'any'}{here}"


def _short(origin: str) -> str:
    """`folder/file.py:line` of file:line; --json has it all."""
    return "/".join(Path(origin).parts[-2:])
