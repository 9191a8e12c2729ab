"""Runs without a fault: with all features off Megatron's own bytes, with replicas on those of N optimizer instances."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_tft.faults import compare, gpt_job, jobs, plans, rehearsal
from mindspeed_tft.faults.spec import parse_layout

pytestmark = pytest.mark.megatron


class Quiet:
    """A listener that hears nothing."""

    def stage(self, name: str, text: str, first: int, last: int) -> None: ...
    def step(self, number: int) -> None: ...
    def done(self, text: str) -> None: ...


@pytest.fixture
def run(references: Path, tmp_path: Path) -> Callable[[bool], tuple[Path, Path, str]]:
    """`run(on)`: train unbroken with the plugin imported; (reference checkpoint, own checkpoint, log)."""
    plan = plans.Plan(layout=parse_layout("dp4"), faults=())
    made = rehearsal.Rehearsal(plan, tmp_path, references, Quiet())

    def go(on: bool) -> tuple[Path, Path, str]:
        reference = made.reference()
        flags = plans.plugin_flags(plan) if on else plans.stock_flags(plan)
        save = tmp_path / "save"
        flags = (gpt_job.WITH_PLUGIN, *flags, "--save", str(save), "--save-interval", str(plan.steps))
        command = jobs.torchrun(jobs.Size(plan.layout.world_size), plans.PROGRAM, flags)
        ended = jobs.run(jobs.Job("unbroken", command, tmp_path / "unbroken.log", 150, {}))
        assert (ended.returncode, ended.leftover) == (0, ()), ended.tail(60)
        end = f"iter_{plan.steps:07d}"
        return reference / end, save / end, ended.log.read_text()

    return go


@pytest.mark.parametrize("on", [False, True], ids=["features off", "replicas on"])
def test_an_unbroken_run_has_the_bytes_of_megatron_alone(
    run: Callable[[bool], tuple[Path, Path, str]], on: bool
) -> None:
    reference, own, log = run(on)
    found = compare.compare_checkpoints(reference, own)
    assert found.tensors > 30 and found.bytes > 1_000_000
    assert found.different == 0, found.first_difference
    assert ("[mindspeed_tft]" in log) is on
    if on:
        assert "shard 0 on positions [0, 2]; shard 1 on positions [1, 3]" in log
        assert "= 12.000 bytes a parameter (formula 12;" in log
        logged, said = own_lines(log)
        assert sorted(logged) == [("rank", str(rank)) for rank in range(4)], "one line a rank, and none per step"
        # What concerns the job, once, by rank 0.
        facts = ("high availability is on", "N = ", "memory: ", "hosts: ", "note: ", "memory measured on rank 0")
        assert len(said) == len(facts) and all(text.startswith(fact) for text, fact in zip(said, facts, strict=True))


def own_lines(log: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Who logged at INFO (rank and number, or relay or controller and host), and what was said to the user."""
    lines = [line.removeprefix("[mindspeed_tft") for line in log.splitlines() if line.startswith("[mindspeed_tft")]
    logged = [(line.split()[0], line.split()[1].rstrip("]")) for line in lines if " INFO " in line]
    return logged, [line.removeprefix("] ") for line in lines if line.startswith("] ")]
