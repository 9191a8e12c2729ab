"""The rehearsal: run the job unbroken, break it, let it go on or go on from what it left behind, compare.

    reference   stock Megatron, unbroken; keeps a checkpoint of every step, in a soak of the last one (shared between
                drills)
    broken      the same job with the plugin and the ordered faults
    resumed     stock Megatron from the dump to the last step; not needed where the broken job trains to its end

The two jobs of stock Megatron never import the plugin. Judging is `verdict`'s part, showing is `cli`'s.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mindspeed_tft.agent import policy, spare, standby
from mindspeed_tft.faults import gpt_job, inject, jobs, releases, spec, verdict
from mindspeed_tft.faults.plans import (
    PROGRAM,
    Plan,
    megatron_sources,
    megatron_version,
    plugin_flags,
    save_interval,
    stock_flags,
)
from mindspeed_tft.faults.references import ReferenceCache, environment_facts, sources_digest
from mindspeed_tft.faults.spec import FaultSpec, format_faults
from mindspeed_tft.faults.traces import (
    read_fired,
    read_incidents,
    read_steps,
    recovery_of,
    saved_step,
    stage_seconds,
)
from mindspeed_tft.faults.verdict import Compared, Evidence, Verdict


class Listener(Protocol):
    """Is told how a rehearsal goes on."""

    def stage(self, name: str, text: str, first: int, last: int) -> None:
        """A stage begins; steps `first` to `last` will be computed in it (0, 0: none)."""

    def step(self, number: int) -> None:
        """A step of this stage ended."""

    def done(self, text: str) -> None:
        """The stage ended."""


@dataclass
class Report:
    """All that a drill found out."""

    plan: Plan
    verdict: Verdict
    reasons: tuple[str, ...]
    evidence: Evidence
    seconds: dict[str, float | None]
    processes_restarted: tuple[int, ...]
    strategy: str
    tries: tuple[dict[str, Any], ...]
    incident: Path | None
    dump: Path | None
    reference: Path | None
    logs: tuple[Path, ...]
    fired_at: tuple[float, ...] = ()  # wall clock
    tail: str = ""  # the end of the log that explains a loss
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The keys that DRILL.md fixes, and what they rest on."""
        return {
            "verdict": self.verdict.value,
            "reasons": list(self.reasons),
            "strategy": self.strategy,
            "tries": list(self.tries),
            "step_at_fault": self.plan.step_at_fault,
            "resumed_at": verdict.resumed_at(self.evidence),
            "steps_lost": verdict.steps_lost(self.evidence),
            "seconds": self.seconds,
            "processes_restarted": list(self.processes_restarted),
            "compared": totals(self.evidence.comparisons),
            "incident": str(self.incident) if self.incident else None,
            "preset": self.plan.preset,
            "layout": str(self.plan.layout),
            "dtype": self.plan.dtype,
            "replicas": self.plan.replicas,
            "steps": self.plan.steps,
            "seed": self.plan.seed,
            "launcher": self.plan.launcher,
            "nodes": self.plan.nodes,
            "rendezvous": self.plan.rendezvous,
            "warm_standby": self.plan.warm_standby,
            "faults": [str(fault) for fault in self.plan.faults],
            "faults_fired": [str(fault) for fault in self.evidence.fired],
            "completed_before": self.evidence.completed,
            "comparisons": [vars(compared) for compared in self.evidence.comparisons],
            "processes_left_behind": list(self.evidence.leftover),
            "recoveries": [vars(recovery) for recovery in self.evidence.recoveries],
            "notes": self.notes,
            "dump": str(self.dump) if self.dump else None,
            "logs": [str(log) for log in self.logs],
        }


class JobFailed(RuntimeError):
    """A job that had to succeed did not; carries how it ended."""

    def __init__(self, ended: jobs.Ended) -> None:
        how = "did not end by its deadline" if ended.timed_out else f"failed with exit status {ended.returncode}"
        super().__init__(f"the {ended.name} run {how}")
        self.ended = ended


def totals(comparisons: Sequence[Compared]) -> dict[str, Any]:
    """All comparisons of a drill as one."""
    first = next((c.first_difference for c in comparisons if c.first_difference is not None), None)
    return {
        "tensors": sum(c.tensors for c in comparisons),
        "bytes": sum(c.bytes for c in comparisons),
        "different": sum(c.different for c in comparisons),
        "first_difference": first,
        "padding": sum(c.padding for c in comparisons),
    }


# --------------------------------------------------------------------------------------------------- flags


# torch's record of the last 2000 collectives takes megabytes until it is full, which would look like a leak.
_LEVELS = {gpt_job.ENV_LEVELS: "1", "TORCH_FR_BUFFER_SIZE": "0"}


def _standby(plan: Plan) -> dict[str, str]:
    """The standby imports what the job's program does, which is the default list. The job is so short that a fault has
    to wait until the standby is ready."""
    if not plan.warm_standby:
        return {spare.ENV_STANDBY: "0"}
    return {spare.ENV_STANDBY: "1", standby.ENV_IMPORTS: standby.DEFAULT_IMPORTS, inject.ENV_WAIT: "1"}


# ---------------------------------------------------------------------------------------------------- jobs


class Rehearsal:
    """The jobs of one drill in one directory."""

    def __init__(self, plan: Plan, work: Path, cache: Path, listener: Listener) -> None:
        self.plan = plan
        self.work = work
        self._cache = ReferenceCache(cache)
        self._bytecode = cache / "bytecode"
        self._listener = listener
        self._sources = megatron_sources(plan.megatron)
        self.ended: list[jobs.Ended] = []

    def reference(self) -> Path:
        """The unbroken run's `--save` directory, with a checkpoint of every step.

        Raises:
            JobFailed: stock Megatron itself does not run here.
        """
        self._listener.stage(
            "reference",
            f"the same job unbroken, stock Megatron {self._instances}"
            if self.plan.sharded
            else "the same job unbroken, stock Megatron without distributed optimizer",
            1,
            self.plan.steps,
        )
        entry, kept = self._cache.get(self._reference_key, self._make_reference)
        self._listener.done("taken from an earlier drill" if kept else "")
        return entry / "save"

    def broken(self) -> jobs.Ended:
        """The job with the plugin and the faults: it should leave a dump and an exit status that is not 0, or with a
        preset that repairs online the last checkpoint and exit status 0."""
        plan = self.plan
        last = plan.step_at_fault if plan.preset == "dump" else plan.steps
        self._listener.stage("broken", f"with the plugin, {_faults_text(plan.faults)}", 1, last)
        env = {
            inject.ENV_FAULTS: format_faults(plan.faults),
            inject.ENV_SEED: str(plan.seed),
            inject.ENV_LOG: str(self.fault_log),
            gpt_job.ENV_STEPS: str(self.broken_steps),
            **(_LEVELS if plan.levels else {}),
            **_standby(plan),
            **({inject.ENV_PACE: str(plan.pace), policy.ENV_LIMIT: str(len(plan.faults))} if plan.pace else {}),
        }
        flags = (*plugin_flags(plan), "--save", str(self.dump), "--save-interval", str(save_interval(plan)))
        ended = self._run("broken", gpt_job.WITH_PLUGIN, flags, env, plan.launcher)
        self._listener.done(_how(ended, broken=plan.preset == "dump"))
        return ended

    def resumed(self, saved: int) -> jobs.Ended:
        """Stock Megatron from the dump to the last step."""
        plan = self.plan
        self._listener.stage("resumed", "from the dump, without the plugin", saved + 1, plan.steps)
        places = ("--load", str(self.dump), "--save", str(self.final), "--save-interval", str(plan.steps))
        env = {gpt_job.ENV_STEPS: str(self.resumed_steps)}
        ended = self._run("resumed", gpt_job.WITHOUT_PLUGIN, (*stock_flags(plan), *places), env)
        self._listener.done(_how(ended))
        return ended

    def compare(self, reference: Path, saved: int) -> tuple[Compared, ...]:
        """The dump and the end, each against the unbroken run."""
        return self._compare(
            (verdict.DUMP_COMPARISON, reference, self.dump, saved),
            (verdict.FINAL_COMPARISON, reference, self.final, self.plan.steps),
        )

    def compare_end(self, reference: Path) -> tuple[Compared, ...]:
        """The end of the broken job against the unbroken run."""
        return self._compare((verdict.FINAL_COMPARISON, reference, self.dump, self.plan.steps))

    def _compare(self, *pairs: tuple[str, Path, Path, int]) -> tuple[Compared, ...]:
        self._listener.stage("compare", "every byte", 0, 0)
        places = [(what, expected, found, f"iter_{step:07d}") for what, expected, found, step in pairs]
        found = tuple(_compared(what, one / step, other / step) for what, one, other, step in places)
        self._listener.done(f"{sum(c.tensors for c in found)} tensors, {sum(c.different for c in found)} different")
        return found

    @property
    def _instances(self) -> str:
        """Before there were instances a run without replicas has the same bytes as one with them."""
        known = releases.knows(megatron_version(self.plan.megatron), "--num-distributed-optimizer-instances")
        return f"with {self.plan.replicas} optimizer instances" if known else "without replicas"

    @property
    def dump(self) -> Path:
        return self.work / "dump"

    @property
    def final(self) -> Path:
        return self.work / "final"

    @property
    def broken_steps(self) -> Path:
        return self.work / "broken-steps"

    @property
    def resumed_steps(self) -> Path:
        return self.work / "resumed-steps"

    @property
    def fault_log(self) -> Path:
        return self.work / "faults.jsonl"

    def _make_reference(self, entry: Path) -> None:
        flags = (*stock_flags(self.plan), "--save", str(entry / "save"), "--save-interval", str(self._kept_interval))
        ended = self._run("reference", gpt_job.WITHOUT_PLUGIN, flags, {})
        if ended.returncode != 0:
            raise JobFailed(ended)

    @property
    def _kept_interval(self) -> int:
        return 1 if self.plan.every_step else self.plan.steps

    def _reference_key(self) -> dict[str, Any]:
        modules = (PROGRAM, *((self.plan.program,) if self.plan.program != PROGRAM else ()), *_CPU_MODULES)
        program = sources_digest(*(_module_path(name) for name in modules))
        return {
            "flags": (*stock_flags(self.plan), "--save-interval", str(self._kept_interval)),
            "world_size": self.plan.layout.world_size,
            "program": program,
            "megatron": sources_digest(*self._sources),
            **self._imported(),
            **environment_facts(),
        }

    def _imported(self) -> dict[str, Any]:
        """Only where there is something: the keys of other runs stay as they are."""
        wanted = self.plan.imports
        return {"imports": [*map(list, wanted), sources_digest(*wanted.roots())]} if any(wanted) else {}

    def _run(
        self, name: str, mode: str, flags: Sequence[str], env: Mapping[str, str], launcher: str = "torchrun"
    ) -> jobs.Ended:
        plan = self.plan
        size = jobs.Size(plan.layout.world_size)
        env = {
            **jobs.bytecode_cache(self._bytecode),
            **self._python_path(),
            **plan.imports.environment(),
            **env,
        }
        going = [fault for fault in plan.faults if fault.kind == "node" or plan.takes_nodes]
        replacements = len(going) if plan.preset == "recover" else 0
        with jobs.held_ports(2) as (master, controller):
            if mode == gpt_job.WITH_PLUGIN and plan.nodes > 1:
                size = jobs.Size(
                    plan.layout.world_size, plan.nodes, plan.master, master, plan.hosts, rendezvous=plan.rendezvous
                )
                flags = (*flags, "--tft-controller-port", str(controller))  # several jobs may run on this host at once
            commands = jobs.LAUNCHERS[launcher](size, plan.program, (mode, *flags))
            job = jobs.Job(name, commands, self.work / f"{name}.log", plan.timeout, env, replacements, plan.takes_nodes)
            ended = jobs.run(job, self._listener.step)
        self.ended.append(ended)
        return ended

    def _python_path(self) -> dict[str, str]:
        """What this process has of it stays, behind the checkout."""
        if self.plan.megatron is None:
            return {}
        before = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([str(self.plan.megatron.resolve()), *([before] if before else [])])}


_CPU_MODULES = (
    "mindspeed_tft.on_cpu",
    "mindspeed_tft.platforms",
    "mindspeed_tft.patches.megatron_on_cpu",
    "mindspeed_tft.patches.megatron_06_on_cpu",
    "mindspeed_tft.patches.apex_on_cpu",
    "mindspeed_tft.patches.megatron_grad_norm",
    "mindspeed_tft.patches.megatron_reshardable",
)


def _module_path(name: str) -> Path:
    """The file of a module, or the directory of a package."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(name)
    origin = Path(found.origin)
    return origin.parent if origin.name == "__init__.py" else origin


def _faults_text(faults: Sequence[FaultSpec], shown: int = 8) -> str:
    more = len(faults) - shown
    return format_faults(faults) if more <= 0 else f"{format_faults(faults[:shown])} and {more} more"


def _how(ended: jobs.Ended, broken: bool = False) -> str:
    """In a few words; that a broken job ends with another status than 0 is what it has to do."""
    if broken and ended.returncode:
        return f"ended as it had to, exit status {ended.returncode}"
    return "killed at its deadline" if ended.timed_out else f"exit status {ended.returncode}"


def _compared(what: str, expected: Path, found: Path) -> Compared:
    from mindspeed_tft.faults import compare

    try:
        result = compare.compare_checkpoints(expected, found)
    except compare.CheckpointError as error:
        return Compared(what, 0, 0, 1, str(error))
    return Compared(what, result.tensors, result.bytes, result.different, result.first_difference, result.padding)


# ------------------------------------------------------------------------------------------------- reading


# ----------------------------------------------------------------------------------------------- the whole


def rehearse(plan: Plan, work: Path, cache: Path, listener: Listener) -> Report:
    """Run a drill and judge it. Whatever fails on the way becomes a part of the report."""
    run = Rehearsal(plan, work, cache, listener)
    reference: Path | None = None
    if plan.compare:
        try:
            reference = run.reference()
        except JobFailed as failed:
            return _without_reference(run, failed)
    broken = run.broken()
    fired, _ = read_fired(run.fault_log, plan.faults)
    incidents = [incident for _, incident in read_incidents(run.dump)]
    steps = read_steps(run.broken_steps)
    seen = Evidence(
        fired=fired,
        steps=plan.steps,
        faulty_exit=broken.returncode,
        completed=steps.completed,
        saved=saved_step(run.dump),
        compare=plan.compare,
        reported=_reported(incidents),
        leftover=broken.leftover,
        preset=plan.preset,
        ordered=plan.faults,
        recoveries=tuple(recovery_of(incident) for incident in incidents),
        computed_again=steps.computed_again,
        restarted=steps.restarted,
        replicas=plan.replicas,
        per_node=plan.per_node,
        takes_nodes=plan.takes_nodes,
    )
    if seen.online and reference is not None and seen.saved == plan.steps:
        seen = replace(seen, comparisons=run.compare_end(reference))
    elif seen.saved is not None and broken.returncode and plan.every_step:
        seen = _go_on(run, seen, seen.saved, reference)
    return _report(run, seen, reference)


def _reported(incidents: Sequence[Mapping[str, Any]]) -> int | None:
    """The step that the last incident says is on disk, or from which training went on; None if it says so of none."""
    step = int(incidents[-1]["step"]) if incidents else -1
    return step if step >= 0 else None


def _go_on(run: Rehearsal, seen: Evidence, saved: int, reference: Path | None) -> Evidence:
    resumed = run.resumed(saved)
    first = read_steps(run.resumed_steps).first()
    comparisons: tuple[Compared, ...] = ()
    if reference is not None and resumed.returncode == 0:
        comparisons = run.compare(reference, saved)
    return replace(
        seen,
        resumed_exit=resumed.returncode,
        resumed_first=first[0] if first else None,
        comparisons=comparisons,
        leftover=seen.leftover + resumed.leftover,
    )


def _without_reference(run: Rehearsal, failed: JobFailed) -> Report:
    """Stock Megatron does not run here: nothing was rehearsed, and nothing can be said about the plugin."""
    nothing = Evidence(fired=(), steps=run.plan.steps, faulty_exit=None, completed=0, saved=None)
    report = _report(run, nothing, None)
    report.reasons = (f"{failed}; nothing was rehearsed",)
    report.tail = failed.ended.explanation()
    return report


def _report(run: Rehearsal, seen: Evidence, reference: Path | None) -> Report:
    plan = run.plan
    word, reasons = verdict.judge(seen)
    incidents = read_incidents(run.dump)
    path, incident = (incidents[0] if seen.online else incidents[-1]) if incidents else (None, None)
    _, fired_at = read_fired(run.fault_log, plan.faults)
    fault_wall = fired_at[0] if fired_at else None
    before, after = read_steps(run.broken_steps), read_steps(run.resumed_steps)
    first = before.first(fault_wall or 0.0) if seen.online else after.first()
    restarted = {rank for rank, pid in after.pids.items() if before.pids.get(rank) != pid} | set(seen.restarted)
    silent = [str(fault) for fault in spec.without(plan.faults, seen.fired)]
    return Report(
        plan=plan,
        verdict=word,
        reasons=reasons,
        evidence=seen,
        seconds=stage_seconds(fault_wall, incident, first, relaunched=not seen.online),
        processes_restarted=tuple(sorted(restarted)),
        strategy=_strategy(seen),
        tries=tuple(entry for _, report in incidents for entry in _tries(report)),
        incident=path,
        dump=run.dump if seen.saved is not None and not seen.online else None,
        reference=reference,
        logs=tuple(ended.log for ended in run.ended),
        fired_at=fired_at,
        tail=run.ended[-1].explanation() if word is Verdict.LOST and run.ended else "",
        notes=[f"did not fire, the job was over before: {' '.join(silent)}"] if silent else [],
    )


def _strategy(seen: Evidence) -> str:
    """The one in which the broken job's last recovery ended."""
    if not seen.online:
        return "dump" if seen.saved is not None else "none"
    return seen.recoveries[-1].strategy if seen.recoveries else "none"


def _tries(incident: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """What the engine chose, in order, each with its reason, as the incident tells it."""
    strategy = recovery_of(incident).strategy
    return tuple({"strategy": strategy, "reason": text} for text in incident["decision"])
