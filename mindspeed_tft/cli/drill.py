"""`tftctl drill`: rehearse a fault, get a verdict."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mindspeed_tft.cli import consoles
from mindspeed_tft.cli.progress import listener_for
from mindspeed_tft.faults import jobs, spec, verdict
from mindspeed_tft.faults.imports import NONE, Imports
from mindspeed_tft.faults.plans import Plan, megatron_sources
from mindspeed_tft.faults.rehearsal import Report, rehearse, totals
from mindspeed_tft.faults.spec import SpecError

ENV_CACHE = "TFT_DRILL_CACHE"

# Everything after `--` is for Megatron.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": False}

DEFAULT_REPLICAS = 2

COLOURS = {"exact": "green", "inexact": "red", "degraded": "yellow", "lost": "red"}


def command(
    context: typer.Context,
    preset: Annotated[str, typer.Option(help="What is rehearsed: dump, retry or recover.")] = "dump",
    layout: Annotated[str, typer.Option(help="Parallel sizes, such as dp4, tp2dp2, pp2dp2, ep2dp4.")] = "dp4",
    fault: Annotated[
        Optional[list[str]],  # noqa: UP045  typer reads this annotation on Python 3.10 as well
        typer.Option(
            metavar="KIND@RANK:STEP[:PHASE]",
            help="Repeatable; STEP is the step being computed, the first is 1; the same fault given n times comes n "
            "times. KIND: kill segv exc oom uce (device memory destroyed), without preset recover also term; with "
            "presets retry and recover also uce-low (none of it in use) link (connections cut); with preset retry "
            "also nan (a gradient corrupted, silently); with all presets controller (the process that decides is "
            "killed); with presets dump and recover node (all processes of the rank's node killed); with preset "
            "recover agent (its launcher killed). PHASE: data forward backward grad-reduce clip commit update "
            "param-gather; without preset dump also save eval, and, in the repair of another fault of that step, "
            "regroup repair rollback; none: chosen by the seed. Default kill@1:7:backward, with preset retry "
            "uce@1:7:backward.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the whole training.")] = 12,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    replicas: Annotated[
        int,
        typer.Option(
            help="Copies of each shard of the optimizer; without preset dump also 1: then a lost shard comes from the "
            "last periodic checkpoint, and steps since then are computed again."
        ),
    ] = DEFAULT_REPLICAS,
    distributed_optimizer: Annotated[
        bool,
        typer.Option(
            "--distributed-optimizer/--no-distributed-optimizer",
            help="Megatron's --use-distributed-optimizer. Without it every data-parallel rank holds everything.",
        ),
    ] = True,
    save_interval: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="N",
            help="Periodic checkpoints of the broken job. Default: none but the last; where training may have to go "
            "back to one, an interval of half the steps before the fault.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the training, and of what the drill chooses by chance.")] = 1234,
    megatron: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A Megatron-LM checkout; without it the installed megatron-core."),
    ] = None,
    imported: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Repeatable: what all jobs import before the adaptor, such as mindspeed.megatron_adaptor.",
        ),
    ] = None,
    imported_after: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--import-after", metavar="MODULE", help="The same, after the adaptor."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="Compare with the unbroken run.")] = True,
    json_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", metavar="FILE", help="Write the report there too."),
    ] = None,
    keep: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="Keep logs and checkpoints there, and the unbroken runs for later drills."),
    ] = None,
    launcher: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Of the broken job: torchrun, tftrun, or torchrun-logs-specs, which is torchrun --logs-specs "
            "mindspeed_tft. Default torchrun, with preset recover tftrun."
        ),
    ] = None,
    warm_standby: Annotated[
        bool,
        typer.Option(
            "--warm-standby/--no-warm-standby",
            help="With preset recover: keep a process ready that has imported everything (TFT_WARM_STANDBY).",
        ),
    ] = False,
    nodes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="N",
            help="Nodes of the broken job, all on this host, each with a launcher of its own. Default 1; 2 for a fault "
            "of kind node or agent.",
        ),
    ] = None,
    rendezvous: Annotated[
        str, typer.Option(help="How several nodes find each other: static (--master-addr, --node-rank) or c10d.")
    ] = jobs.RENDEZVOUS[0],
    tls: Annotated[
        bool, typer.Option("--tls", help="The nodes speak mutual TLS, with certificates that are made for the drill.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that each job may take.")] = 240.0,
) -> None:
    """Break a small real Megatron job on purpose, let the plugin recover, and compare every byte with an unbroken run.

    Megatron flags may follow after `--`. Exit status: 0 exact, 3 inexact, 4 degraded, 5 lost, 2 bad arguments.
    """
    try:
        plan = make_plan(
            preset=preset,
            layout=layout,
            faults=fault,
            steps=steps,
            dtype=dtype,
            replicas=replicas,
            seed=seed,
            megatron=megatron,
            compare=compare,
            launcher=launcher,
            timeout=timeout,
            extra=context.args,
            save_interval=save_interval,
            warm_standby=warm_standby,
            nodes=nodes,
            rendezvous=rendezvous,
            sharded=distributed_optimizer,
            imports=Imports(tuple(imported or ()), tuple(imported_after or ())),
        )
        if tls and plan.nodes == 1:
            raise SpecError("--tls: a single host opens no port that TLS could protect; add --nodes 2")
        check_files(json_file, keep)
    except SpecError as error:
        raise typer.BadParameter(str(error)) from error
    console = consoles.make()
    with workspace(keep) as (work, cache):
        if tls:
            plan = dataclasses.replace(plan, tls_dir=str(certificates(work)))
        with listener_for(console) as listener:
            report = rehearse(plan, work, cache, listener)
        if json_file is not None:
            write_json(report, json_file, kept=keep is not None)
        show(report, console, kept=keep is not None)
    raise typer.Exit(report.verdict.exit_status)


def make_plan(
    preset: str = "dump",
    layout: str = "dp4",
    faults: list[str] | None = None,
    steps: int = 12,
    dtype: str = "fp32",
    replicas: int = DEFAULT_REPLICAS,
    seed: int = 1234,
    megatron: Path | None = None,
    compare: bool = True,
    launcher: str | None = None,
    timeout: float = 240.0,
    extra: list[str] | None = None,
    save_interval: int | None = None,
    warm_standby: bool = False,
    nodes: int | None = None,
    rendezvous: str = jobs.RENDEZVOUS[0],
    sharded: bool = True,
    imports: Imports = NONE,
) -> Plan:
    """Read and check all arguments of a drill.

    Raises:
        SpecError: names the argument and what would be right.
    """
    sizes = spec.parse_layout(layout)
    if not sharded and replicas != DEFAULT_REPLICAS:
        raise SpecError(f"--replicas {replicas}: with --no-distributed-optimizer every data-parallel rank holds all")
    replicas = replicas if sharded else max(1, sizes.dp // sizes.ep)
    wanted = tuple(spec.parse_fault(text) for text in faults or [spec.DEFAULT_FAULT.get(preset, "kill@1:7:backward")])
    nodes = spec.default_nodes(wanted) if nodes is None else nodes
    spec.check_drill(preset, sizes, wanted, steps, replicas, dtype, save_interval, nodes)
    launcher = check_launcher(preset, launcher, warm_standby)
    if rendezvous not in jobs.RENDEZVOUS:
        raise SpecError(f"--rendezvous {rendezvous}: expected one of {', '.join(jobs.RENDEZVOUS)}")
    if timeout <= 0:
        raise SpecError(f"--timeout {timeout:g}: expected a positive number of seconds")
    if extra and not extra[0].startswith("-"):
        raise SpecError(f"{extra[0]!r}: unexpected argument; flags for Megatron follow after `--`")
    megatron_sources(megatron)
    imports.roots()
    return Plan(
        layout=sizes,
        faults=tuple(fault.settled(seed) for fault in wanted),
        steps=steps,
        dtype=dtype,
        replicas=replicas,
        seed=seed,
        preset=preset,
        megatron=megatron,
        compare=compare,
        launcher=launcher,
        timeout=timeout,
        extra=tuple(extra or ()),
        save_interval=save_interval,
        warm_standby=warm_standby,
        nodes=nodes,
        rendezvous=rendezvous,
        sharded=sharded,
        imports=imports,
    )


def certificates(work: Path) -> Path:
    """A --tft-tls-dir for all nodes of a drill, which are this host."""
    from mindspeed_tft.control.authority import Authority

    return Authority.create(work / "certs").node(os.uname().nodename, ["127.0.0.1"])


def check_launcher(preset: str, launcher: str | None, warm_standby: bool) -> str:
    """The launcher of the broken job: the one that was asked for, or that of the preset.

    Raises:
        SpecError: it is unknown, or cannot do what the preset needs.
    """
    if launcher is None:
        launcher = jobs.default_launcher(preset)
    if launcher not in jobs.LAUNCHERS:
        raise SpecError(f"--launcher {launcher!r}: unknown; known: {' '.join(jobs.LAUNCHERS)}")
    if preset == "recover" and launcher not in jobs.REBOOTING:
        raise SpecError(
            f"--launcher {launcher}: with preset recover a dead rank is started again alone, and a plain torchrun ends "
            f"all ranks instead; use {' or '.join(jobs.REBOOTING)}"
        )
    if warm_standby and preset != "recover":
        raise SpecError(f"--warm-standby: with preset {preset} no process is started again; use it with preset recover")
    return launcher


def check_files(json_file: Path | None, keep: Path | None) -> None:
    """A report that cannot be written is noticed before the drill, not after it."""
    if json_file is not None and not json_file.resolve().parent.is_dir():
        raise SpecError(f"--json {json_file}: the directory {json_file.resolve().parent} does not exist; create it")
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(
                f"--keep {keep}: cannot be created ({error.strerror}); give a writable directory"
            ) from error


@contextmanager
def workspace(keep: Path | None) -> Iterator[tuple[Path, Path]]:
    """A directory for one drill, and one for the unbroken runs; removed afterwards unless they are to be kept."""
    work = Path(tempfile.mkdtemp(prefix="tft-drill-" if keep is None else "drill-", dir=keep)).resolve()
    shared = os.environ.get(ENV_CACHE)
    cache = Path(shared) if shared else (keep or work) / "references"
    try:
        yield work, cache.resolve()
    finally:
        if keep is None:
            shutil.rmtree(work)


def write_json(report: Report, file: Path, kept: bool, content: dict[str, Any] | None = None) -> None:
    """Write the report, or `content`, which is made from it; what it points at is copied beside it when the drill's
    directory will be removed."""
    content = report.as_json() if content is None else content
    if not kept:
        content["dump"], content["logs"] = None, []
        if report.incident is not None:
            beside = file.with_name(f"{file.stem}-incident.json")
            shutil.copyfile(report.incident, beside)
            content["incident"] = str(beside)
    file.write_text(json.dumps(content, indent=2) + "\n")


def show(report: Report, console: Console, kept: bool) -> None:
    """Print the report as a table, with what explains it below."""
    console.print(table_of(report, kept))
    explain(report, console)


def explain(report: Report, console: Console) -> None:
    """Print why the verdict is not a better one."""
    for reason in report.reasons:
        console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"  note: {note}", markup=False, highlight=False, soft_wrap=True)
    if report.tail:
        console.print(f"the end of {report.logs[-1].name}:", highlight=False)
        console.print(report.tail, markup=False, highlight=False, soft_wrap=True)


def table_of(report: Report, kept: bool) -> Table:
    """The report, one line for each thing that matters."""
    word = report.verdict.value
    seen = report.evidence
    compared = totals(seen.comparisons)
    plan = report.plan
    table = Table(title="Drill", show_header=False, title_justify="left")
    table.add_column("what", style="bold")
    table.add_column("value", overflow="fold")
    rows = {
        "verdict": f"[bold {COLOURS[word]}]{word}[/]",
        "job": f"{plan.layout} {plan.dtype}, {plan.replicas} replicas, {plan.steps} steps"
        + (f", {plan.nodes} nodes" if plan.nodes > 1 else ""),
        "fault": " ".join(str(fault) for fault in seen.fired) or "none fired",
        "strategy": report.strategy,
        "step at fault": str(plan.step_at_fault),
        "went on after step" if seen.online else "step saved": _or_none(verdict.resumed_at(seen)),
        "steps lost": _or_none(verdict.steps_lost(seen)),
        "seconds": seconds_text(report),
        "processes restarted": " ".join(map(str, report.processes_restarted)) or "none",
        "compared": f"{compared['tensors']} tensors, {compared['bytes']} bytes, {compared['different']} different",
    }
    if compared["first_difference"]:
        rows["first difference"] = escape(compared["first_difference"])
    if kept and report.incident is not None:
        rows["incident"] = escape(str(report.incident))
    if kept and report.logs:
        rows["logs"] = escape(str(report.logs[0].parent))
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def seconds_text(report: Report) -> str:
    """The stages whose time is known."""
    known = {name: value for name, value in report.seconds.items() if value is not None}
    return ", ".join(f"{name} {value:.2f}" for name, value in known.items()) or "not known"


def _or_none(number: int | None) -> str:
    return "none" if number is None else str(number)
