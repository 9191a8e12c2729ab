"""Operators at real Megatron: it is paused between two steps, looked at, saved and let go on, and every byte is as if
nobody had touched it.

One that runs always; marker `full` breaks paused jobs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_tft.control import operator_client
from mindspeed_tft.faults import gpt_job, jobs
from mindspeed_tft.faults.plans import Plan, plugin_flags
from mindspeed_tft.faults.rehearsal import Rehearsal
from mindspeed_tft.faults.spec import parse_layout
from mindspeed_tft.faults.traces import read_steps
from mindspeed_tft.faults.verdict import Compared

from .conftest import Quiet

pytestmark = pytest.mark.megatron

PATIENCE = 90.0


class Operated(Rehearsal):
    """A job with an operator. Its meeting place is the test's own, so that no other job is found there."""

    def __init__(self, plan: Plan, work: Path, cache: Path, place: Path) -> None:
        work.mkdir()
        super().__init__(plan, work, cache, Quiet())
        self.place = place
        self.end: jobs.Ended | None = None
        self._thread = threading.Thread(target=self._go, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _go(self) -> None:
        flags = (*plugin_flags(self.plan), "--save", str(self.dump), "--save-interval", str(self.plan.steps + 1))
        env = {"XDG_RUNTIME_DIR": str(self.place), gpt_job.ENV_STEPS: str(self.broken_steps)}
        self.end = self._run("operated", gpt_job.WITH_PLUGIN, flags, env, self.plan.launcher)

    def finished(self) -> jobs.Ended:
        self._thread.join(PATIENCE)
        assert self.end is not None, "the job does not end"
        return self.end

    def ask(self, kind: str, patience: float = PATIENCE, **args: str) -> operator_client.Reply:
        """As soon as there is a job, and it has begun."""
        end, why = time.monotonic() + PATIENCE, ""
        while time.monotonic() < end and self._thread.is_alive():
            for job in operator_client.jobs([self.place / f"tft-{os.getuid()}"]):
                try:
                    reply = operator_client.Client(lambda job=job: job.routes).ask(kind, patience, **args)  # type: ignore[misc]
                except operator_client.Unreachable as exc:
                    why = str(exc)  # it is just coming up
                    continue
                if "training has not begun" not in reply.text:
                    return reply
            time.sleep(0.02)
        raise AssertionError(f"nobody answered: {why}; {self.end and self.end.tail()}")

    def tftctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        (job,) = operator_client.jobs([self.place / f"tft-{os.getuid()}"])
        env = {**os.environ, "XDG_RUNTIME_DIR": str(self.place), "COLUMNS": "200"}
        command = [sys.executable, "-m", "mindspeed_tft.cli.main", *words, "--job", f"{job.run}@{job.key}"]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    def status(self) -> dict[str, Any]:
        return self.ask("status").data

    def saved_equals(self, reference: Path, step: int) -> Compared:
        (found,) = self._compare((f"step {step}", reference, self.dump, step))
        assert found.tensors >= 25 and found.bytes > 1_000_000, found
        return found


@pytest.fixture
def operated(references: Path, tmp_path: Path) -> Iterator[Callable[..., Operated]]:
    with tempfile.TemporaryDirectory(prefix="tft", dir="/tmp") as place:
        made: list[Operated] = []

        def make(layout: str = "dp4", dtype: str = "fp32", **more: Any) -> Operated:
            plan = Plan(parse_layout(layout), (), dtype=dtype, timeout=PATIENCE, **more)
            made.append(Operated(plan, tmp_path / "job", references, Path(place)))
            return made[-1]

        yield make
        for job in made:
            job.finished()


def _assert_exact(job: Operated, reference: Path) -> None:
    end = job.finished()
    assert (end.returncode, end.leftover) == (0, ()), end.tail()
    assert job.saved_equals(reference, job.plan.steps).different == 0


def test_pause_status_dump_resume_and_the_end_is_exact(operated: Callable[..., Operated]) -> None:
    job = operated()
    reference = job.reference()
    job.start()
    paused = job.ask("pause", step="4")
    assert paused.ok and paused.data["step"] >= 4, paused
    step = paused.data["step"]
    shown = job.tftctl("status", "--json")
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert told["pause"]["paused"] and told["pause"]["step"] == step and told["protection"]["level"] == "full"
    assert [(rank["step"], rank["phase"]) for rank in told["ranks"]] == [(step, "held")] * 4
    assert told["shards"]["tp0-pp0/dense/0"]["ranks"] == [0, 2]
    assert {one["fault"]: one["result"] for one in told["outlook"]}["process"] == "a dump"
    assert read_steps(job.broken_steps).completed == step, "nobody computes"
    page = job.tftctl("status")
    assert f"paused after step {step}" in page.stdout and "What a fault would lead to now" in page.stdout
    dump = job.tftctl("dump", "--json")
    assert dump.returncode == 0, dump.stderr
    assert json.loads(dump.stdout)["data"]["step"] == step
    assert job.saved_equals(reference, step).different == 0
    resumed = job.tftctl("resume")
    assert (resumed.returncode, resumed.stdout) == (0, f"training goes on after step {step}\n"), resumed.stderr
    _assert_exact(job, reference)


def _paused(job: Operated, step: int = 4) -> tuple[Path, dict[str, Any]]:
    """The reference, and the status of a job that is held after `step` or a later one."""
    reference = job.reference()
    job.start()
    assert job.ask("pause", step=str(step)).ok
    return reference, job.status()


def _assert_saved_and_resumed(job: Operated, reference: Path, step: int) -> None:
    """The job ended with a dump of `step`, and what goes on from it with stock Megatron ends exact."""
    end = job.finished()
    assert (end.returncode != 0, end.leftover) == (True, ()), end.tail()
    assert job.saved_equals(reference, step).different == 0
    assert job.resumed(step).returncode == 0
    assert [compared.different for compared in job.compare(reference, step)] == [0, 0]


@pytest.mark.full
def test_a_dump_in_training_and_a_pause_on_another_layout(operated: Callable[..., Operated]) -> None:
    job = operated("tp2dp2", "bf16")
    reference = job.reference()
    job.start()
    first = job.ask("dump")
    assert first.ok, first
    paused = job.ask("pause")
    assert paused.ok, paused
    assert job.saved_equals(reference, first.data["step"]).different == 0
    assert job.ask("resume").ok
    _assert_exact(job, reference)


@pytest.mark.full
def test_a_rank_that_dies_while_it_is_held_is_saved(operated: Callable[..., Operated]) -> None:
    job = operated()
    reference, told = _paused(job)
    os.kill(told["ranks"][1]["pid"], signal.SIGKILL)
    _assert_saved_and_resumed(job, reference, told["pause"]["step"])


@pytest.mark.full
def test_a_rank_that_dies_while_it_is_held_is_replaced_and_held_again(operated: Callable[..., Operated]) -> None:
    job = operated(preset="recover", launcher="tftrun")
    reference, told = _paused(job)
    os.kill(told["ranks"][1]["pid"], signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while (now := job.status())["pause"]["step"] <= told["pause"]["step"] or not now["pause"]["paused"]:
        assert time.monotonic() < end, now
        time.sleep(0.1)
    assert now["last_incident"]["outcome"] == "rebooted"
    assert now["ranks"][1]["pid"] != told["ranks"][1]["pid"]
    assert job.ask("resume").ok
    _assert_exact(job, reference)


@pytest.mark.full
def test_another_controller_knows_of_the_pause(operated: Callable[..., Operated]) -> None:
    job = operated()
    reference, told = _paused(job)
    end = time.monotonic() + PATIENCE
    while not job.status()["standbys"]:
        assert time.monotonic() < end
        time.sleep(0.1)
    os.kill(told["controller"]["pid"], signal.SIGKILL)
    while (now := job.status())["controller"] == told["controller"] or not now["pause"]["paused"]:
        assert time.monotonic() < end, now
        time.sleep(0.1)
    assert now["pause"]["step"] == told["pause"]["step"]
    assert job.ask("resume").ok
    _assert_exact(job, reference)


@pytest.mark.full
def test_a_sigterm_while_it_is_held_saves(operated: Callable[..., Operated]) -> None:
    job = operated()
    reference, told = _paused(job)
    os.kill(told["ranks"][2]["pid"], signal.SIGTERM)
    _assert_saved_and_resumed(job, reference, told["pause"]["step"])


@pytest.mark.full
def test_a_pause_ends_by_itself(operated: Callable[..., Operated]) -> None:
    job = operated("pp2dp2", "fp16")
    reference = job.reference()
    job.start()
    assert job.ask("pause", step="3", limit="2").ok
    _assert_exact(job, reference)


_ALONE = (
    "MegatronHost.commit = (lambda real: lambda self, step, hold=0, save=0, limit=0: "
    "(real(self, step, hold, save, limit), "
    "(hold if step % 4 == module.torch.distributed.get_rank() else 0, 0, limit))[1])(module.MegatronHost.commit)"
)


@pytest.mark.full
def test_without_the_agreement_no_pause_comes_true(
    operated: Callable[..., Operated], spoil: Callable[..., None]
) -> None:
    """The control: ranks that decide alone ask the others at different places whether to wait."""
    spoil("megatron_host", _ALONE)
    job = operated()
    job.start()
    reply = job.ask("pause", 10.0, step="4")
    assert (reply.ok, reply.late) == (False, True), reply
    assert "of 4 ranks held" in reply.text


@pytest.mark.full
def test_a_dump_is_complete_when_it_is_answered_also_one_that_megatron_writes_in_the_background(
    operated: Callable[..., Operated],
) -> None:
    background = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
    job = operated(extra=("--ckpt-format", "torch_dist", *background))
    reference, told = _paused(job)
    step = told["pause"]["step"]
    dumped = job.ask("dump")
    assert dumped.ok and dumped.data["step"] == step, dumped
    assert (job.dump / "latest_checkpointed_iteration.txt").read_text().strip() == str(step)
    assert job.saved_equals(reference, step).different == 0
    assert job.ask("resume").ok
    again = job.ask("dump")  # in training
    assert again.ok and job.saved_equals(reference, again.data["step"]).different == 0
    _assert_exact(job, reference)
