"""`tftctl config`: the settings of a job, where each comes from, and the timeouts that follow from them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mindspeed_tft import arguments
from mindspeed_tft import settings as settings_module
from mindspeed_tft.cli import consoles, dry_run, job_file
from mindspeed_tft.cli.job_file import JobFile
from mindspeed_tft.settings import Refused, Settings

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": False}  # everything after `--` is for training
REFUSED = 2  # exit status, as that of a job that is refused at start-up


@dataclass(frozen=True)
class Resolved:
    """What the layers say together; `settings` is None where a single value cannot be."""

    settings: Settings | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    refusals: tuple[Refused, ...] = ()


def _checked(patience: float | None) -> float | None:
    """The value of --patience, which has to be a time."""
    if patience is None or 0 < patience < math.inf:
        return patience
    raise typer.BadParameter(
        f"{patience:g} is no time in which survivors could end: give seconds above 0, or leave it out where the"
        " launcher waits for as long as the deadline asks for"
    )


def command(
    context: typer.Context,
    tft_config: Annotated[
        Optional[str],  # noqa: UP045  typer reads this annotation on Python 3.10 as well
        typer.Option(metavar="PRESET|FILE", help="YAML preset by name, or a YAML file; as the flag of the same name."),
    ] = None,
    patience: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            metavar="SECONDS",
            callback=_checked,
            help="How long the launcher lets the survivors of a fault live, where that is shorter than the deadline: "
            "30 under torchrun. Default: as long as it takes, as under tftrun.",
        ),
    ] = None,
    from_job: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="FILE",
            help="A Kubernetes job file: what its labels, annotations, environment and flags turn on, instead of the "
            "environment here.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a YAML file, for editors.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all settings as docs/flags.md.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Print nothing but the reasons of a refusal.")] = False,
    megatron: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="DIR|installed",
            help="Let Megatron parse and validate all flags, as a job would, without a job: a checkout, or the one of"
            " this environment. Adds one line on what it says.",
        ),
    ] = None,
    mindspeed: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="DIR|installed",
            help="With --megatron: MindSpeed beside it. Needs a torch_npu that can be imported.",
        ),
    ] = None,
    world_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            metavar="RANKS",
            help="With --megatron: ranks of the job. Default: two copies of its model. None of them is started.",
        ),
    ] = None,
) -> None:
    """Show the settings that a job would have here: value, origin and meaning of each, and every timeout.

    The flags of the training program may follow after `--`; those of Megatron are passed over, unless --megatron lets
    it judge them. Environment beats flags, flags beat YAML, YAML beats defaults. What depends on Megatron's own flags
    is checked when a job starts, and with --megatron. Exit status: 0, or 2 when a job would be refused.
    """
    if schema:
        print(json.dumps(settings_module.schema(), indent=2))
        return
    if markdown:
        print(as_markdown(), end="")
        return
    words = [*(["--tft-config", tft_config] if tft_config is not None else []), *context.args]
    if megatron is None and (mindspeed is not None or world_size is not None):
        raise typer.BadParameter("--mindspeed and --world-size say how Megatron is asked; add --megatron")
    job = read_job(from_job) if from_job is not None else None
    environ = os.environ if job is None else job.environ
    words = words if job is None else [*job.words, *words]
    found = resolve(words, environ, patience)
    verdict = _ask(words, environ, megatron, mindspeed, world_size) if megatron is not None else None
    of_job = job.refusals if job is not None else ()
    if verdict is not None:
        named = {refusal.flag for refusal in (*of_job, *found.refusals)}
        more = tuple(refusal for refusal in verdict.refusals if refusal.flag not in named)
        found = dataclasses.replace(found, refusals=(*found.refusals, *more))
    refusals = (*of_job, *found.refusals)
    if as_json and not check:
        told = {"megatron": _verdict_as_data(verdict)} if verdict is not None else {}
        print(json.dumps({**as_data(found, patience, job), **told}, indent=2))
    elif not check:
        console = consoles.for_tables()
        show_job(job, console)
        show(found, patience, console)
    if verdict is not None and not as_json:
        print(verdict)
    for refusal in refusals:
        print(f"tftctl config: error: {refusal}", file=sys.stderr)
    raise typer.Exit(REFUSED if refusals else 0)


def read_job(path: Path) -> JobFile:
    """A job file; one that cannot be read is one with that refusal."""
    try:
        return job_file.read(path)
    except Refused as refusal:
        return JobFile(refusals=(refusal,))


def _ask(
    words: Sequence[str],
    environ: Mapping[str, str],
    megatron: str,
    mindspeed: str | None,
    world_size: int | None,
) -> dry_run.Verdict:
    try:
        return dry_run.ask(words, megatron, mindspeed, world_size, {**os.environ, **environ})
    except dry_run.CannotAsk as error:
        print(f"tftctl config: error: Megatron cannot be asked: {error}", file=sys.stderr)
        raise typer.Exit(REFUSED) from None


def _verdict_as_data(verdict: dry_run.Verdict) -> dict[str, Any]:
    names = ("megatron", "mindspeed", "parsed", "world_size")
    return {("version" if name == "megatron" else name): getattr(verdict, name) for name in names}


# ------------------------------------------------------------------------------------------------ resolve


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        flag, _, reason = message.removeprefix("argument ").partition(": ")
        raise Refused(flag, reason, "give a value that fits, see tftctl config --markdown")


def resolve(words: Sequence[str], environ: Mapping[str, str], patience: float | None = None) -> Resolved:
    """The settings of a job with these flags (those of Megatron among them) and this environment.

    Args:
        patience: seconds that the launcher lets the survivors of a fault live, where that is known.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    arguments.add_flags(parser)
    try:
        space, rest = parser.parse_known_args(list(words))
        unknown = tuple(arguments.misspelt(rest))
        settings, origin = arguments.collect(space, environ)
    except Refused as refusal:
        return Resolved(refusals=(refusal,))
    return Resolved(settings, origin, (*unknown, *arguments.conflicts(settings, origin, patience)))


# --------------------------------------------------------------------------------------------------- show


def as_data(found: Resolved, patience: float | None, job: JobFile | None = None) -> dict[str, Any]:
    """All that is shown, as plain data. Settings and timeouts are empty where they cannot be told."""
    settings = found.settings
    of_job = {} if job is None else {"job": [dataclasses.asdict(item) for item in job.items]}
    refusals = (*(job.refusals if job is not None else ()), *found.refusals)
    return {
        **of_job,
        "settings": {
            key: {
                "name": settings_module.flag_of(key),
                "value": getattr(settings, key),
                "origin": found.origin[key],
                "meaning": settings_module.meaning(key),
            }
            for key in (Settings.model_fields if settings is not None else ())
        },
        "strategies": list(settings.strategies()) if settings and settings.enable_high_availability else [],
        "timeouts": [dataclasses.asdict(each) for each in timeouts(settings, patience, found.origin)]
        if settings
        else [],
        "refused": [{"flag": refusal.flag, "reason": refusal.reason, "remedy": refusal.remedy} for refusal in refusals],
    }


@dataclass(frozen=True)
class Timeout:
    name: str
    seconds: float
    formula: str
    meaning: str


def timeouts(
    settings: Settings, patience: float | None, origin: Mapping[str, str] | None = None
) -> tuple[Timeout, ...]:
    """The deadline and all that follow from it; none where they are refused, which is told with the refusals."""
    try:
        deadlines = settings.deadlines(patience)
    except Refused:
        return ()
    values = {"deadline": settings.deadline(patience), **dataclasses.asdict(deadlines)}
    return tuple(Timeout(name, values[name], *how) for name, how in settings.derivation(patience, origin).items())


def show_job(job: JobFile | None, console: Console) -> None:
    """A table of what a job file says."""
    if job is None or not job.items:
        return
    table = _table(f"Job file ({job.framework})", "where", "name", "value", "meaning")
    for item in job.items:
        table.add_row(item.where, escape(item.name), escape(item.value), escape(item.meaning))
    console.print(table)


def show(found: Resolved, patience: float | None, console: Console) -> None:
    """Two tables; nothing where a value cannot be."""
    if found.settings is None:
        return
    table = _table("Settings", "setting", "value", "origin", "meaning")
    for key in Settings.model_fields:
        name, value = settings_module.flag_of(key), _text(getattr(found.settings, key))
        origin = found.origin[key]
        table.add_row(name, escape(value), escape(origin), escape(settings_module.meaning(key)),
                      style="dim" if origin == "default" else None)  # fmt: skip
    console.print(table)
    rows = timeouts(found.settings, patience, found.origin)
    if not rows:
        return
    title = "Timeouts" if found.settings.enable_high_availability else "Timeouts (not in use: high availability is off)"
    table = _table(title, "timeout", "seconds", "follows from", "limits")
    for row in rows:
        table.add_row(row.name, f"{row.seconds:g}", escape(row.formula), escape(row.meaning))
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(value: object) -> str:
    """As it would be written in YAML."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


# ----------------------------------------------------------------------------------------------- markdown

_HEAD = """\
# Flags, environment, YAML

All settings, as `tftctl config --markdown` prints them; a test compares. The environment beats flags, flags beat YAML,
YAML beats defaults. `tftctl config -- TRAINING FLAGS` shows what a job would get, and where each value comes from;
`tftctl config --schema` is a JSON schema of the YAML file, for editors.

| setting | YAML key | default | meaning |
|---|---|---|---|
"""
_ENVIRONMENT = """
| environment | meaning |
|---|---|
| `HIGH_AVAILABILITY` | comma list of {words}; each switches its flag and the master switch on, none switches off |
| `TTP_OT` | {dump} |
| `TTP_ADDR` | {address} |
| `MINDIO_WAIT_MINDX_TIME` | {wait} |
| `PROCESS_RECOVER=on` with `MINDX_TASK_ID` and `MINDX_SERVER_IP` | ClusterD at that address decides, \
as `--tft-clusterd http://MINDX_SERVER_IP:{port}` says; with `LOCAL_PROXY_ENABLE=on`: through its proxy at 127.0.0.1. \
Weaker than flags and YAML, because its operator puts it into every job |
"""
_TIMEOUTS = """
## Timeouts

Every timeout of a recovery, in seconds, with the defaults and `--enable-worker-reboot`. `--tft-deadline` moves them,
`TTP_OT` sets the dump's share; what cannot be is refused at start-up. Under torchrun, which ends the survivors of a
fault after 30 seconds, the deadline is 27, and `TTP_OT` has to fit into that (`tftctl config --patience 30`).

| timeout | default | follows from | limits |
|---|---|---|---|
"""


def as_markdown() -> str:
    """docs/flags.md."""
    text = (
        _HEAD + f"| `{arguments.CONFIG}` | | none | {dict(arguments.FLAGS)[arguments.CONFIG]['help']}: {_presets()} |\n"
    )
    for key, model in Settings.model_fields.items():
        name = settings_module.flag_of(key)
        text += f"| `{name}` | `{key.replace('_', '-')}` | {_text(model.default)} | {settings_module.meaning(key)} |\n"
    text += _ENVIRONMENT.format(
        words=", ".join(f"`{word}`" for word in settings_module.STRATEGIES),
        dump=settings_module.meaning("tft_dump_seconds"),
        address=settings_module.meaning("tft_controller_address"),
        wait=settings_module.meaning("tft_clusterd_wait"),
        port=settings_module.CLUSTERD_PORT,
    )
    text += _TIMEOUTS
    for row in timeouts(Settings(enable_high_availability=True, enable_worker_reboot=True), None):
        text += f"| {row.name} | {row.seconds:g} | `{row.formula}` | {row.meaning} |\n"
    return text


def _presets() -> str:
    return ", ".join(f"`{path.stem}`" for path in sorted(arguments.presets().glob("*.yaml")))
