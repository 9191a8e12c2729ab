"""`tftctl soak`: hundreds of random faults in one job, and nothing may add up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table

from mindspeed_tft.cli import consoles, drill
from mindspeed_tft.cli.progress import listener_for
from mindspeed_tft.faults import soak
from mindspeed_tft.faults.plans import megatron_sources
from mindspeed_tft.faults.rehearsal import totals
from mindspeed_tft.faults.spec import REPAIR_PHASES, SpecError


def command(
    faults: Annotated[int, typer.Option(help="How many; two or three steps from one to the next.")] = 200,
    seed: Annotated[
        int, typer.Option(help="Of the faults: the same seed breaks the same ranks at the same places.")
    ] = 1,
    preset: Annotated[
        str,
        typer.Option(help="retry, or recover: then half of the ranks also die now and then, and are not judged."),
    ] = "retry",
    layout: Annotated[str, typer.Option(help="Parallel sizes, such as dp4, tp2dp2, pp2dp2.")] = "dp4",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    replicas: Annotated[int, typer.Option(help="Copies of each shard of the optimizer.")] = 2,
    json_file: Annotated[
        Optional[Path],  # noqa: UP045  typer reads this annotation on Python 3.10 as well
        typer.Option("--json", metavar="FILE", help="Write the report there too."),
    ] = None,
    keep: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIR", help="Keep logs and checkpoints there, and the unbroken runs for later soaks."),
    ] = None,
    timeout: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Seconds that each of the two jobs may take. Default: ten times what is expected."),
    ] = None,
) -> None:
    """Break one Megatron job hundreds of times (damaged memory, cut links, also in the middle of a repair).

    It has to train to its end, where every byte is compared with an unbroken run, and no rank may use more memory,
    threads, files or process groups than after the first few recoveries.

    Exit status: 0 exact and flat, 3 inexact, 4 something has grown or a weaker strategy was needed, 5 lost, 2 bad
    arguments.
    """
    try:
        plan = soak.make_plan(layout, dtype, replicas, faults, seed, timeout, preset)
        megatron_sources(plan.megatron)
        drill.check_files(json_file, keep)
    except SpecError as error:
        raise typer.BadParameter(str(error)) from error
    console = consoles.make()
    console.print(f"soak: {faults} faults in {plan.steps} steps, --seed {seed}", highlight=False)
    with drill.workspace(keep) as (work, cache):
        with listener_for(console) as listener:
            found = soak.soak(plan, seed, work, cache, listener)
        if json_file is not None:
            drill.write_json(found.report, json_file, kept=keep is not None, content=found.as_json())
        show(found, console)
    raise typer.Exit(found.verdict.exit_status)


def show(found: soak.Soaked, console: Console) -> None:
    """Print what was found, and below it why the verdict is not a better one."""
    console.print(table_of(found))
    for reason in found.reasons:
        console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)
    if found.verdict.value == "lost" and found.report.logs:
        console.print(f"the end of {found.report.logs[-1].name}:", highlight=False)
        console.print(found.report.tail, markup=False, highlight=False, soft_wrap=True)


def table_of(found: soak.Soaked) -> Table:
    """One line for each thing that matters."""
    word, report = found.verdict.value, found.report
    fired = report.evidence.fired
    kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(fault.kind for fault in fired).most_common())
    in_repair = sum(fault.phase in REPAIR_PHASES for fault in fired)
    compared = totals(report.evidence.comparisons)
    table = Table(title="Soak", show_header=False, title_justify="left")
    table.add_column("what", style="bold")
    table.add_column("value", overflow="fold")
    rows = {
        "verdict": f"[bold {drill.COLOURS[word]}]{word}[/]",
        "job": f"{report.plan.layout} {report.plan.dtype}, {report.plan.replicas} replicas, {report.plan.steps} steps",
        "seed": str(found.seed),
        "faults": f"{len(fired)} of {len(report.plan.faults)} fired: {kinds or 'none'}; {in_repair} in a repair",
        "recoveries": f"{len(found.recoveries)}, with {found.tries} tries",
        "processes restarted": " ".join(map(str, report.processes_restarted)) or "none",
        "seconds, fault to end of first step": ", ".join(f"{name} {s:.2f}" for name, s in found.seconds.items()),
        "compared": f"{compared['tensors']} tensors, {compared['bytes']} bytes, {compared['different']} different",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for rank, seconds in sorted(found.winding_up.items()):
        levels = found.levels.get(rank)
        unknown = f"not judged: a recovery is still being wound up, for {seconds:.0f} s, or there were too few"
        if rank in report.processes_restarted:
            unknown = "not judged: it was started again"
        table.add_row(f"rank {rank}", _levels_text(levels) if levels is not None else unknown)
    return table


def _levels_text(levels: soak.Levels) -> str:
    first, last = levels.first, levels.last
    counts = [f"{name} {getattr(first, name)} to {getattr(last, name)}" for name in ("threads", "files", "groups")]
    sizes = [
        f"{name} {getattr(first, name) / 2**20:.1f} to {getattr(last, name) / 2**20:.1f} MiB "
        f"({levels.per_repair(name) / 1024:+.1f} KiB a repair)"
        for name in ("heap", "memory")
    ]
    return ", ".join([*counts, *sizes])
