"""Step time with the plugin on, over stock Megatron with the same number of optimizer replicas.

    python benchmarks/overhead.py [--layout dp4] [--replicas 2] [--pairs 5] [--steps 60] [--json FILE]
                                  [--parts] [-- MEGATRON FLAGS]

Runs alternate in one invocation, each plugin run between two stock runs, so that a machine that gets slower or busier
does so for both. The second stock run of each pair is compared with the first in the same way: that ratio is what
this method says about no difference at all. Times are from the begin of a step to the begin of the next, taken by the
job itself with the same clocks in all runs: on the wall, by rank 0, and of the processors, summed over all ranks. On a
machine that others use, the second is the one to trust.

With --parts one more run with the plugin times its own functions on the path of a step: what each of them costs can be
told where the whole difference drowns in the noise of the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import parts_rank
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mindspeed_tft.faults import gpt_job, jobs
from mindspeed_tft.faults.plans import PROGRAM, Plan, training_flags
from mindspeed_tft.faults.references import environment_facts
from mindspeed_tft.faults.spec import SpecError, check_replicas, parse_layout
from mindspeed_tft.faults.traces import read_steps

# Larger than a drill's job: a step of a few milliseconds would make any fixed cost look huge.
MODEL_FLAGS = ("--num-layers", "4", "--hidden-size", "256", "--ffn-hidden-size", "1024", "--seq-length", "128",
               "--max-position-embeddings", "128")  # fmt: skip
RESAMPLES = 2000

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Ratio:
    """A ratio of step times with the interval that holds it in 95 of 100 resamplings."""

    median: float
    low: float
    high: float
    pairs: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.median:.4f}  [{self.low:.4f}, {self.high:.4f}]"


def paired_ratio(over: Sequence[Times], base: Sequence[Times], seed: int = 0) -> Ratio:
    """The median over pairs of the ratio of median step times; steps and pairs are resampled for the interval."""
    generator = np.random.default_rng(seed)

    def resampled(times: Times) -> float:
        return float(np.median(generator.choice(times, size=times.size)))

    ratios = tuple(float(np.median(o) / np.median(b)) for o, b in zip(over, base, strict=True))
    drawn = []
    for _ in range(RESAMPLES):
        chosen = generator.integers(len(ratios), size=len(ratios))
        drawn.append(float(np.median([resampled(over[i]) / resampled(base[i]) for i in chosen])))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high), ratios)


@dataclass(frozen=True)
class Run:
    """Milliseconds of each step of a run that counts."""

    wall: Times  # on rank 0
    cpu: Times  # summed over all ranks


CLOCKS = {"wall": "on the wall", "cpu": "processors, all ranks"}


@dataclass(frozen=True)
class Part:
    """Means over the steps, in milliseconds: not every step has every part."""

    wall: float  # of the rank where it is largest
    cpu: float  # summed over all ranks


class Bench:
    """Runs the job in its two ways."""

    def __init__(self, plan: Plan, warmup: int, work: Path, console: Console) -> None:
        self._plan, self._warmup, self._work, self._console = plan, warmup, work, console
        self._runs = 0

    def stock(self) -> Run:
        return self._run("stock", gpt_job.WITHOUT_PLUGIN, ["--num-distributed-optimizer-instances"])

    def plugin(self) -> Run:
        # The plugin wants a place for its dump; neither of the two saves anything while it is measured.
        return self._run("plugin", gpt_job.WITH_PLUGIN, ["--enable-high-availability", "--optimizer-replica-num"])

    def parts(self) -> tuple[dict[str, Part], Run]:
        """What each part of the plugin costs, and the run in which that was measured."""
        place = self._work / "parts"
        place.mkdir()
        flags = ["--enable-high-availability", "--optimizer-replica-num"]
        environ = {parts_rank.ENV_PARTS: str(place), "PYTHONPATH": str(Path(__file__).parent)}
        run = self._run("parts", gpt_job.WITH_PLUGIN, flags, parts_rank.__name__, environ)
        ranks = [json.loads(file.read_text()) for file in sorted(place.glob("rank*.json"))]
        assert len(ranks) == self._plan.layout.world_size

        def times(part: str, clock: str) -> list[Times]:
            return [np.array(rank[part][clock][self._warmup :]) for rank in ranks]

        found = {
            part: Part(
                max(float(np.mean(each)) for each in times(part, "wall")),
                float(np.mean(np.sum(times(part, "cpu"), axis=0))),
            )
            for part in parts_rank.PARTS
        }
        return found, run

    def _run(
        self, name: str, mode: str, flags: list[str], program: str = PROGRAM, more: Mapping[str, str] | None = None
    ) -> Run:
        self._runs += 1
        work = self._work / f"{self._runs:02d}-{name}"
        work.mkdir()
        saving = ["--save", str(work / "save"), "--save-interval", str(self._plan.steps + 1)]
        arguments = (mode, *training_flags(self._plan), *flags, str(self._plan.replicas), *saving)
        command = jobs.torchrun(jobs.Size(self._plan.layout.world_size), program, arguments)
        env = {gpt_job.ENV_STEPS: str(work / "steps"), **jobs.bytecode_cache(self._work / "bytecode"), **(more or {})}
        ended = jobs.run(jobs.Job(name, command, work / "log", self._plan.timeout, env))
        if ended.returncode != 0:
            raise SystemExit(f"the {name} run ended with {ended.returncode}; its log ends with:\n{ended.tail()}")
        shutil.rmtree(work / "save", ignore_errors=True)
        run = self._read(work / "steps")
        medians = f"{np.median(run.wall):.2f} ms on the wall, {np.median(run.cpu):.2f} ms of the processors"
        self._console.print(f"{work.name}: median {medians}", highlight=False, soft_wrap=True)
        return run

    def _read(self, steps: Path) -> Run:
        ranks = read_steps(steps).steps
        wall = np.diff([record["begin"] for record in ranks[0]])
        cpu = np.sum([np.diff([record["cpu"] for record in records]) for records in ranks.values()], axis=0)
        return Run(wall[self._warmup :] * 1000.0, cpu[self._warmup :] * 1000.0)


def measure(bench: Bench, pairs: int) -> dict[str, list[Run]]:
    """Stock, plugin, and stock again, in changing order."""
    found: dict[str, list[Run]] = {"stock": [], "plugin": [], "again": []}
    for pair in range(pairs):
        for name in ("stock", "plugin", "again") if pair % 2 == 0 else ("again", "plugin", "stock"):
            found[name].append(bench.plugin() if name == "plugin" else bench.stock())
    return found


def table_of(runs: Mapping[str, Sequence[Run]], ratios: Mapping[str, Mapping[str, Ratio]]) -> Table:
    table = Table(title="A step, plugin on over stock Megatron", title_justify="left")
    for column in ("clock", "stock, ms", "plugin, ms", "plugin / stock  [95 %]", "stock / stock  [95 %]"):
        table.add_column(column)
    for clock, text in CLOCKS.items():
        stock, plugin = (
            float(np.median([np.median(getattr(run, clock)) for run in runs[name]])) for name in ("stock", "plugin")
        )
        found = ratios[clock]
        table.add_row(text, f"{stock:.2f}", f"{plugin:.2f}", str(found["plugin"]), str(found["again"]))
    return table


def table_of_parts(parts: Mapping[str, Part], run: Run, ranks: int) -> Table:
    wall, cpu = float(np.mean(run.wall)), float(np.mean(run.cpu))
    table = Table(title=f"Of a step of {wall:.0f} ms ({cpu:.0f} ms of the processors)", title_justify="left")
    for column in (
        *("part", "ms on the wall, of the slowest rank", "ms of the processors, all ranks"),
        *("of the step's", "of the ranks' time"),
    ):
        table.add_column(column)
    total = Part(0.0, sum(part.cpu for part in parts.values()))
    for name, part in [*parts.items(), ("all", total)]:
        shares = (f"{part.cpu / cpu:.2%}", f"{part.cpu / (ranks * wall):.2%}")
        table.add_row(name, f"{part.wall:.3f}" if part.wall else "", f"{part.cpu:.3f}", *shares)
    return table


def ratios_of(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Ratio]]:
    """By clock, the ratios of the plugin's and of the second stock runs to the first ones."""

    def times(name: str, clock: str) -> list[Times]:
        return [getattr(run, clock) for run in runs[name]]

    return {
        clock: {name: paired_ratio(times(name, clock), times("stock", clock)) for name in ("plugin", "again")}
        for clock in CLOCKS
    }


def arguments() -> argparse.Namespace:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="dp4")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--warmup", type=int, default=10, help="steps at the begin of each run that do not count")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a run may take")
    parser.add_argument("--parts", action="store_true", help="time the plugin's own functions as well")
    parser.add_argument("--json", type=Path)
    found = parser.parse_args(words[:split])
    found.extra = tuple(words[split + 1 :])
    if found.steps < found.warmup + 10:
        parser.error(f"--steps {found.steps}: expected at least {found.warmup + 10}, ten more than --warmup")
    if found.pairs < (0 if found.parts else 1):
        parser.error(f"--pairs {found.pairs}: expected at least 1, or 0 with --parts")
    return found


def main() -> None:
    chosen = arguments()
    console = Console()
    try:
        layout = parse_layout(chosen.layout)
        check_replicas(layout, chosen.replicas)
    except SpecError as error:
        raise SystemExit(f"overhead: {error}") from error
    plan = Plan(layout=layout, faults=(), steps=chosen.steps, dtype=chosen.dtype, replicas=chosen.replicas,
                timeout=chosen.timeout, extra=(*MODEL_FLAGS, *chosen.extra))  # fmt: skip
    content: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tft-overhead-") as work:
        bench = Bench(plan, chosen.warmup, Path(work), console)
        if chosen.pairs:
            runs = measure(bench, chosen.pairs)
            ratios = ratios_of(runs)
            console.print(table_of(runs, ratios))
            content |= as_json(runs, ratios)
        if chosen.parts:
            parts, run = bench.parts()
            console.print(table_of_parts(parts, run, layout.world_size))
            content["parts"] = {name: asdict(part) for name, part in parts.items()}
    if chosen.json is not None:
        write_json(chosen.json, plan, content)


def as_json(runs: Mapping[str, Sequence[Run]], ratios: Mapping[str, Mapping[str, Ratio]]) -> dict[str, Any]:
    return {
        "ratios": {clock: {name: asdict(ratio) for name, ratio in found.items()} for clock, found in ratios.items()},
        "milliseconds": {
            name: [{clock: np.round(getattr(run, clock), 3).tolist() for clock in CLOCKS} for run in found]
            for name, found in runs.items()
        },
    }


def write_json(file: Path, plan: Plan, content: Mapping[str, Any]) -> None:
    about = {
        "layout": str(plan.layout),
        "dtype": plan.dtype,
        "replicas": plan.replicas,
        "flags": training_flags(plan),
        "machine": environment_facts(),
    }
    file.write_text(json.dumps({**content, **about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
