"""A process breaks itself as ordered: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_tft.faults import classify, inject
from mindspeed_tft.faults.spec import SpecError

# What a training loop does, without the training.
LOOP = """
import sys
from mindspeed_tft.faults.inject import reach
for step in range(1, 6):
    for phase in ("data", "forward", "forward", "backward", "grad-reduce", "clip", "commit", "update", "param-gather"):
        reach(phase, step)
        print("passed", step, phase, flush=True)
"""


def _loop(log: Path | None = None, rank: int = 1, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TFT_")}
    if log is not None:
        environ["TFT_DRILL_LOG"] = str(log)
    return subprocess.run(
        [sys.executable, "-c", LOOP],
        env={**kept, "RANK": str(rank), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("kind", "number"), [("kill", signal.SIGKILL), ("term", signal.SIGTERM), ("segv", signal.SIGSEGV)]
)
def test_signals_end_the_process(tmp_path: Path, kind: str, number: signal.Signals) -> None:
    log = tmp_path / "faults.jsonl"
    before = time.time()
    ended = _loop(log, TFT_DRILL_FAULTS=f"{kind}@1:3:backward")
    assert ended.returncode == -number
    passed = [line for line in ended.stdout.splitlines() if line.startswith("passed")]
    assert passed[-1] == "passed 3 forward"
    (line,) = log.read_text().splitlines()
    record = json.loads(line)
    assert (record["fault"], record["rank"], record["step"]) == (f"{kind}@1:3:backward", 1, 3)
    assert before <= record["wall"] <= time.time()
    assert f"drill: rank 1 fires {kind}@1:3:backward" in ended.stdout


def test_an_exception_is_raised_in_the_training_code() -> None:
    ended = _loop(TFT_DRILL_FAULTS="exc@1:2:update")
    assert ended.returncode == 1
    assert "DrillException: drill: exc@1:2:update" in ended.stderr
    assert "passed 2 commit" in ended.stdout
    assert "passed 2 update" not in ended.stdout


def test_a_fault_fires_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ = {"RANK": "1", "TFT_DRILL_FAULTS": "exc@1:3:forward", "TFT_DRILL_LOG": str(tmp_path / "log")}
    injector = inject.from_environment(environ)
    assert injector is not None
    injector.reach("forward", 2)
    injector.reach("update", 3)
    assert injector.due("forward", 3)
    assert not injector.due("forward", 2)
    with pytest.raises(inject.DrillException, match="exc@1:3:forward"):
        injector.reach("forward", 3)
    assert not injector.due("forward", 3)
    injector.reach("forward", 3)
    started_again = inject.from_environment(environ)
    assert started_again is not None
    started_again.reach("forward", 3)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the hooks were asked to do."""
    asked: list[str] = []

    def ask(what: str) -> str:
        asked.append(what)
        return f"{what} done"

    monkeypatch.setattr(inject, "_hooks", None)
    inject.register(inject.Hooks("npu", lambda: ask("damage"), lambda: ask("cut")))
    return asked


def _reach(fault: str) -> None:
    injector = inject.from_environment({"RANK": "1", "TFT_DRILL_FAULTS": fault})
    assert injector is not None
    injector.reach("forward", 3)


def test_a_memory_error_destroys_and_then_says_so_in_the_words_of_the_platform(
    done: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match=r"^UCE ERROR \(drill: uce@1:3:forward\)$") as raised:
        _reach("uce@1:3:forward")
    assert done == ["damage"]
    assert type(raised.value) is RuntimeError  # as a device would raise it: nothing may know it by its class
    assert classify.classify(str(raised.value), "npu").kind == "memory"
    assert "drill: uce@1:3:forward: damage done" in capsys.readouterr().out


def test_a_memory_error_that_hits_no_live_tensor_destroys_nothing(done: list[str]) -> None:
    with pytest.raises(RuntimeError, match="UCE ERROR") as raised:
        _reach("uce-low@1:3:forward")
    assert done == []
    assert classify.classify(str(raised.value), "npu").kind == "memory-low"


def test_a_broken_link_is_cut_and_nothing_is_raised(done: list[str]) -> None:
    _reach("link@1:3:forward")
    assert done == ["cut"]


@pytest.mark.parametrize("kind", ["uce", "uce-low", "link"])
def test_without_hooks_it_is_an_error_to_ask_for_them(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(inject, "_hooks", None)
    with pytest.raises(SpecError, match="nothing here says how"):
        _reach(f"{kind}@1:3:forward")


@pytest.mark.parametrize(
    ("faults", "breaks_off"),
    [("term@1:3:update", False), ("link@1:3:update", False), ("uce@1:3:update", True), ("kill@1:3:update", True),
     ("link@1:3:update,exc@1:3:update", True), ("exc@1:4:update", False)],
)  # fmt: skip
def test_it_is_known_before_whether_the_work_at_hand_goes_on(faults: str, breaks_off: bool) -> None:
    injector = inject.from_environment({"RANK": "1", "TFT_DRILL_FAULTS": faults})
    assert injector is not None
    assert injector.breaks_off("update", 3) is breaks_off


def test_only_the_named_rank_breaks() -> None:
    assert _loop(rank=0, TFT_DRILL_FAULTS="kill@1:3:backward").returncode == 0


def test_several_faults_fire_in_turn(tmp_path: Path) -> None:
    environ = {"RANK": "0", "TFT_DRILL_FAULTS": "exc@0:2:update, exc@0:2:commit,exc@1:2:update"}
    injector = inject.from_environment(environ)
    assert injector is not None
    for phase in ("commit", "update"):
        with pytest.raises(inject.DrillException, match=phase):
            injector.reach(phase, 2)


def test_a_fault_without_phase_fires_at_the_seeded_one_and_says_which() -> None:
    ended = _loop(TFT_DRILL_FAULTS="kill@1:4", TFT_DRILL_SEED="5")
    assert ended.returncode == -signal.SIGKILL
    again = _loop(TFT_DRILL_FAULTS="kill@1:4", TFT_DRILL_SEED="5")

    def said(text: str) -> str:
        return text.partition("fires ")[2].split()[0]

    assert said(ended.stdout).startswith("kill@1:4:")
    assert said(ended.stdout) == said(again.stdout)


def test_without_the_variable_nothing_is_armed() -> None:
    assert inject.from_environment({"RANK": "1"}) is None
    assert inject.from_environment({"RANK": "1", "TFT_DRILL_FAULTS": " "}) is None


def test_a_launcher_that_inherits_the_variable_is_no_rank() -> None:
    assert inject.from_environment({"TFT_DRILL_FAULTS": "kill@0:3"}) is None


def test_nonsense_in_the_environment_is_an_error() -> None:
    with pytest.raises(SpecError, match="KIND@RANK"):
        inject.from_environment({"RANK": "1", "TFT_DRILL_FAULTS": "kill"})
    with pytest.raises(SpecError, match="TFT_DRILL_SEED='x'"):
        inject.from_environment({"RANK": "1", "TFT_DRILL_FAULTS": "kill@1:3", "TFT_DRILL_SEED": "x"})


class _Scaler:
    def __init__(self) -> None:
        self.scale = torch.tensor([65536.0])


class _Host:
    """The parts of Megatron that hold state: one chunk in a data-parallel wrapper, one optimizer with a scaler."""

    def __init__(self) -> None:
        chunk = torch.nn.Linear(4, 3)
        chunk.register_buffer("counted", torch.arange(5), persistent=False)
        self.memory = torch.cat([parameter.data.reshape(-1) for parameter in chunk.parameters()])
        begin = 0
        for parameter in chunk.parameters():  # as Megatron does it: all parameters are views of one buffer
            parameter.data = self.memory[begin : begin + parameter.numel()].view(parameter.shape)
            begin += parameter.numel()
        self.grads = SimpleNamespace(grad_data=torch.ones(15), param_data=self.memory)
        chunk.buffers = [self.grads]  # type: ignore[assignment]
        main = torch.nn.Parameter(torch.ones(15))
        inner = torch.optim.Adam([main])
        main.grad = torch.ones(15)
        inner.step()
        self.model, self.inner, self.main = [chunk], inner, main
        self.optimizer = SimpleNamespace(optimizer=inner, grad_scaler=_Scaler())

    def optimizers(self) -> list[Any]:
        return [self.optimizer]


def test_a_damaged_rank_has_no_byte_of_its_state_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_tft.patches import megatron_drill

    host = _Host()
    monkeypatch.setattr(megatron_drill.runtime, "session", lambda: SimpleNamespace(host=host))
    said = megatron_drill._damage()
    state = host.inner.state[host.main]
    gone = [*host.model[0].parameters(), host.memory, host.grads.grad_data, host.main, host.main.grad]
    gone += [state["exp_avg"], state["exp_avg_sq"], host.optimizer.grad_scaler.scale]
    assert all(tensor.isnan().all() for tensor in gone)
    assert host.model[0].counted.tolist() == [-1] * 5
    assert state["step"].item() == 1  # in the host's memory
    floats, integers = 15 * 6 + 1, 5
    assert said == f"{4 * floats + 8 * integers} bytes of 8 storages destroyed"
