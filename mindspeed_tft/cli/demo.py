"""`tftctl demo`: the first rescue, told from begin to end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from mindspeed_tft.cli import consoles, drill
from mindspeed_tft.cli.progress import listener_for
from mindspeed_tft.faults import verdict
from mindspeed_tft.faults.rehearsal import Report, rehearse, totals

FAULT = "kill@1:7:backward"

# What the stages of a report mean to somebody who has not read about them.
STAGES = {
    "detect": "until the fault was noticed",
    "stop": "until all ranks had stopped and reported",
    "decide": "to decide what to save",
    "dump": "to write and verify the checkpoint",
    "exit": "to leave",
    "reboot": "start of the new job (Megatron's own)",
    "first_step": "first step of the new job",
}

STORY = """\
A GPT is pre-trained with Megatron on 4 data-parallel ranks. In step 7 rank 1 is killed (SIGKILL) in the middle of its
backward pass. The survivors write a complete checkpoint of step 6, the last completed one, and the job ends. Megatron
without the plugin goes on from it. In the end every byte is compared with the same training without the fault.
"""


@dataclass(frozen=True)
class Control:
    """What the comparison said about a copy of the dump with one byte changed."""

    change: str
    different: int
    first_difference: str | None


def command() -> None:
    """Kill a rank of a real Megatron job and show that no completed step is lost.

    Exit status: 0 exact, 3 inexact, 4 degraded, 5 lost, or the comparison missed a byte that was changed on purpose.
    """
    console = consoles.make()
    console.print(" ".join(STORY.split()), markup=False, highlight=False)
    plan = drill.make_plan(faults=[FAULT])
    with drill.workspace(None) as (work, cache):
        with listener_for(console) as listener:
            report = rehearse(plan, work, cache, listener)
        control = run_control(report, work)
    console.print(table_of(report, control))
    drill.explain(report, console)
    raise typer.Exit(exit_status(report, control))


def run_control(report: Report, work: Path) -> Control | None:
    """Compare a damaged copy of the dump with the unbroken run; None when there is no dump."""
    from mindspeed_tft.faults import compare, control

    saved = report.evidence.saved
    if saved is None or report.dump is None or report.reference is None:
        return None
    step = f"iter_{saved:07d}"
    change = control.damaged_copy(report.dump / step, work / "damaged" / step)
    found = compare.compare_checkpoints(report.reference / step, work / "damaged" / step)
    return Control(change, found.different, found.first_difference)


def exit_status(report: Report, control: Control | None) -> int:
    """That of the verdict, but a comparison that misses a changed byte proves nothing."""
    if report.verdict is verdict.Verdict.EXACT and (control is None or control.different != 1):
        return verdict.Verdict.LOST.exit_status
    return report.verdict.exit_status


def table_of(report: Report, control: Control | None) -> Table:
    """The story's end in numbers."""
    seen, compared = report.evidence, totals(report.evidence.comparisons)
    table = Table(title="The rescue", title_justify="left", show_header=False)
    table.add_column("what", style="bold")
    table.add_column("value", overflow="fold")
    table.add_row("fault", " ".join(str(fault) for fault in seen.fired) or "none fired")
    table.add_row(
        "step saved", "none" if seen.saved is None else f"{seen.saved} (step {FAULT.split(':')[1]} was broken)"
    )
    table.add_row("steps lost", str(verdict.steps_lost(seen)))
    for name, value in report.seconds.items():
        if value is not None:
            table.add_row(f"seconds, {STAGES.get(name, name)}", f"{value:.2f}")
    table.add_row("compared", f"{compared['tensors']} tensors, {compared['bytes']} bytes")
    table.add_row("different", str(compared["different"]))
    if control is not None:
        table.add_row("self-check", escape(_control_text(control)))
    exact = report.verdict is verdict.Verdict.EXACT
    meaning = ": every byte is that of the unbroken run, no completed step was lost" if exact else ""
    table.add_row("verdict", report.verdict.value + meaning)
    return table


def _control_text(control: Control) -> str:
    if control.different == 1:
        return f"one byte of a copy of the dump was changed, and the comparison found it: {control.first_difference}"
    return (
        f"one byte of a copy changed ({control.change}), but {control.different} differences found: NOT to be trusted"
    )
