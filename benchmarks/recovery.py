"""Seconds from a fault to the end of the first step that was not complete before it: with us, and launched again.

    python benchmarks/recovery.py --repeats 10 --json recovery.json

In each repeat the same job on this machine is broken in four ways, one after the other:

    retry    device memory of rank 1 destroyed, repaired online          tftctl drill --preset retry
    cold     rank 1 killed, it alone is started again                    tftctl drill --preset recover
    warm     the same, with a warm standby                               tftctl drill --preset recover --warm-standby
    rival    rank 1 killed; stock Megatron without us, launched again by torchrun as soon as the broken job has ended,
             from the last periodic checkpoint: saved every 7 steps, killed in the 7th one after

The rival is treated well: it is launched again at once, nobody is asked, no queue is waited for, its checkpoint lies on
the local disk, and the steps that it computes again are tiny. Prints the stages as a Markdown table, medians with
[least, most], and the ratios rival/ours, each of one repeat with itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_tft.cli.drill import make_plan
from mindspeed_tft.faults import gpt_job, jobs
from mindspeed_tft.faults.plans import PROGRAM, stock_flags
from mindspeed_tft.faults.traces import StepLog, read_steps

ROOT = Path(__file__).resolve().parent.parent
STEPS, INTERVAL = 20, 7
BROKEN_STEP = 2 * INTERVAL  # the last one before the next checkpoint
VICTIM = 1
POLL = 0.002
LIMIT = 300.0  # seconds for one job

STAGES = {
    "detect": "fault noticed",
    "stop": "all ranks stopped, reported",
    "decide": "decided",
    "reboot": "processes started again",
    "regroup": "process groups built anew",
    "repair": "state moved",
    "rollback": "rolled back",
    "again": "completed steps computed again",
    "first_step": "first step",
    "total": "**total**",
}
COLUMNS = {
    "retry": "memory fault, repaired online",
    "cold": "rank killed, reboot",
    "warm": "rank killed, reboot, warm standby",
    "rival": "rank killed, stock: all again",
}
DRILLS: Mapping[str, Sequence[str]] = {
    "retry": ("--preset", "retry", "--fault", f"uce@{VICTIM}:7:backward"),
    "cold": ("--preset", "recover", "--fault", f"kill@{VICTIM}:7:backward"),
    "warm": ("--preset", "recover", "--warm-standby", "--fault", f"kill@{VICTIM}:7:backward"),
}

Seconds = Mapping[str, float]


@dataclass(frozen=True)
class Bench:
    """One invocation: the job, and where its files go."""

    folder: Path
    layout: str
    dtype: str

    def drill(self, name: str, number: int) -> Seconds:
        """The stages of one drill.

        Raises:
            RuntimeError: it was not exact, so its time means nothing.
        """
        work = self.folder / f"{name}-{number}"
        work.mkdir()
        report = work / "report.json"
        command = [sys.executable, "-m", "mindspeed_tft.cli.main", "drill", *DRILLS[name], "--layout", self.layout]
        command += ["--dtype", self.dtype, "--json", str(report), "--keep", str(work)]
        environ = {**os.environ, "TFT_DRILL_CACHE": str(self.folder / "references")}
        ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=3 * LIMIT)
        if ended.returncode != 0:
            raise RuntimeError(f"{name}: the drill ended with {ended.returncode}:\n{ended.stdout[-3000:]}")
        found: dict[str, Any] = json.loads(report.read_text())
        return {stage: float(spent) for stage, spent in found["seconds"].items() if spent is not None}

    def rival(self, number: int) -> Seconds:
        """Stock Megatron under torchrun, one rank killed, and the same command once more.

        Raises:
            RuntimeError: it was not killed where it should have been, or did not train to its end.
        """
        work = self.folder / f"rival-{number}"
        work.mkdir()
        plan = make_plan(preset="retry", layout=self.layout, dtype=self.dtype, steps=STEPS)
        places = ("--save", str(work / "save"), "--load", str(work / "save"), "--save-interval", str(INTERVAL))
        arguments = (gpt_job.WITHOUT_PLUGIN, *stock_flags(plan), *places)
        command = jobs.torchrun(jobs.Size(plan.layout.world_size), PROGRAM, arguments)
        env = {**jobs.bytecode_cache(self.folder / "references" / "bytecode"), gpt_job.ENV_STEPS: str(work / "steps")}
        killer = Killer(work / "steps" / f"rank{VICTIM}.jsonl", BROKEN_STEP - 1)
        killer.start()
        try:
            broken = jobs.run(jobs.Job("broken", command, work / "broken.log", LIMIT, env))
        finally:
            killer.stop()
        if not broken.returncode or killer.killed_at is None:
            raise RuntimeError(f"rival: ended with {broken.returncode}, {killer}:\n{broken.explanation()}")
        ended = jobs.run(jobs.Job("again", command, work / "again.log", LIMIT, env))
        if ended.returncode != 0:
            raise RuntimeError(f"rival: launched again, ended with {ended.returncode}:\n{ended.explanation()}")
        return rival_seconds(read_steps(work / "steps"), killer.killed_at)


class Killer(threading.Thread):
    """Kills the rank that writes a step log as soon as it has ended a step; so it dies in the next one."""

    def __init__(self, log: Path, step: int) -> None:
        super().__init__(daemon=True)
        self.killed_at: float | None = None  # wall clock
        self._log, self._step = log, step
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(POLL):
            for record in self._records():
                if record["step"] == self._step:
                    self.killed_at = time.time()
                    os.kill(record["pid"], signal.SIGKILL)
                    return

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _records(self) -> list[dict[str, Any]]:
        whole = self._log.read_text().rpartition("\n")[0] if self._log.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def __str__(self) -> str:
        return f"rank {VICTIM} killed after step {self._step}" if self.killed_at else f"rank {VICTIM} not killed"


def rival_seconds(log: StepLog, killed: float) -> Seconds:
    """The stages of a launch of all ranks. `killed`: wall clock.

    Raises:
        RuntimeError: the step that was to be broken was complete, and so was saved.
    """
    records = [record for of_rank in log.steps.values() for record in of_rank]
    complete = max(record["step"] for record in records if record["end_wall"] <= killed)
    if complete != BROKEN_STEP - 1:
        raise RuntimeError(f"rival: killed after step {complete} instead of {BROKEN_STEP - 1}: the machine is too busy")
    later = [record for record in records if record["begin_wall"] > killed]
    begun = min(record["begin_wall"] for record in later)
    broken = [record for record in later if record["step"] == BROKEN_STEP]
    resumed, ended = min(record["begin_wall"] for record in broken), max(record["end_wall"] for record in broken)
    stages = {"reboot": begun - killed, "again": resumed - begun, "first_step": ended - resumed}
    return {**stages, "total": ended - killed}


# ----------------------------------------------------------------------------------------------- the report


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]" if values else "-"


def table(found: Mapping[str, Sequence[Seconds]]) -> str:
    """Seconds of each stage, in Markdown."""
    lines = [f"| seconds | {' | '.join(COLUMNS[name] for name in found)} |", f"|---|{'---|' * len(found)}"]
    for stage, words in STAGES.items():
        cells = [spread([run[stage] for run in runs if stage in run]) for runs in found.values()]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratios(found: Mapping[str, Sequence[Seconds]]) -> dict[str, list[float]]:
    """rival/ours, by the way in which we recovered."""
    rival = [run["total"] for run in found["rival"]]
    return {
        name: [slow / run["total"] for slow, run in zip(rival, found[name], strict=True)]
        for name in found
        if name != "rival"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--layout", default="dp4")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[Seconds]] = {name: [] for name in COLUMNS}
    with tempfile.TemporaryDirectory(prefix="tft-recovery-") as folder:
        bench = Bench(Path(folder), given.layout, given.dtype)
        for number in range(given.repeats):
            for name, runs in found.items():
                runs.append(bench.rival(number) if name == "rival" else bench.drill(name, number))
            totals = ", ".join(f"{name} {runs[-1]['total']:.2f} s" for name, runs in found.items())
            print(f"{number + 1}: {totals}", flush=True)
    print(f"\n{table(found)}\n")
    for name, values in ratios(found).items():
        print(f"rival / {name}: {spread(values)}")
    if given.json:
        given.json.write_text(json.dumps({"seconds": found, "ratios": ratios(found)}, indent=1))


if __name__ == "__main__":
    main()
