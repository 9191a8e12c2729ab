"""A process breaks itself as ordered: real processes, real signals."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_tft.faults import classify, inject
from mindspeed_tft.faults.spec import SpecError
from mindspeed_tft.recovery.stamps import Stamps
from mindspeed_tft.replica.digest import Shard

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
    flip: Callable[[random.Random], str] = lambda _chance: ask("flip")  # noqa: E731
    inject.register(inject.Hooks("npu", lambda: ask("damage"), lambda: ask("cut"), exhaust, flip))
    return asked


def exhaust() -> None:
    raise MemoryError("1 EiB")


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


def test_an_allocator_that_is_asked_for_too_much_raises_its_own_error(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MemoryError, match="1 EiB"):
        _reach("oom@1:3:forward")
    monkeypatch.setattr(inject, "_hooks", inject.Hooks("npu", lambda: "", lambda: "", lambda: None, lambda _chance: ""))
    with pytest.raises(SpecError, match="gave what no machine has"):
        _reach("oom@1:3:forward")


def test_no_memory_is_taken_on_the_way_to_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_tft.patches import megatron_drill

    monkeypatch.setattr(megatron_drill.runtime, "platform", lambda: SimpleNamespace(device_type="cpu"))
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        megatron_drill._exhaust()
    assert classify.classify(str(raised.value), "cpu").kind == "exception"


@pytest.mark.parametrize("kind", ["uce", "uce-low", "link", "oom"])
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


def _injector(faults: str, log: Path | None = None) -> inject.Injector:
    environ = {"RANK": "1", "TFT_DRILL_FAULTS": faults, **({"TFT_DRILL_LOG": str(log)} if log else {})}
    injector = inject.from_environment(environ)
    assert injector is not None
    return injector


def _fires(injector: inject.Injector, phase: str, step: int) -> bool:
    try:
        injector.reach(phase, step)
    except (inject.DrillException, RuntimeError):
        return True
    return False


def test_a_fault_that_is_given_several_times_comes_once_in_each_try(tmp_path: Path) -> None:
    text, log = "exc@1:3:forward", tmp_path / "log"
    injector = _injector(",".join([text] * 3), log)
    fired = []
    for _ in range(5):
        injector.begin(3)
        fired.append([_fires(injector, "forward", 3) for _ in range(2)])  # two micro-batches
    assert fired == [[True, False]] * 3 + [[False, False]] * 2
    assert [json.loads(line)["fault"] for line in log.read_text().splitlines()] == [text] * 3
    started_again = _injector(",".join([text] * 4), log)  # one has not fired yet
    assert _fires(started_again, "forward", 3)
    started_again.begin(3)
    assert not _fires(started_again, "forward", 3)


def test_a_fault_that_breaks_off_leaves_the_others_for_the_next_try(done: list[str]) -> None:
    injector = _injector("link@1:3:forward,exc@1:3:forward,uce@1:3:forward")
    injector.begin(3)
    assert _fires(injector, "forward", 3)
    assert done == ["cut"]
    injector.begin(3)
    assert _fires(injector, "forward", 3)
    assert done == ["cut", "damage"]


@pytest.mark.parametrize(
    ("begun", "order", "fires"),
    [
        (7, 7, True),  # everybody stands in step 7, which is computed again
        (7, 8, True),  # step 7 could be finished
        (6, 7, True),  # this rank was stopped before it began step 7
        (8, 7, True),  # it had begun the step after it
        (7, 5, True),  # all go back to a checkpoint
        (5, 6, False),  # the repair of an earlier fault
    ],
)
def test_a_fault_in_a_repair_fires_when_its_step_was_reached(begun: int, order: int, fires: bool) -> None:
    injector = _injector("exc@1:7:rollback")
    injector.begin(begun)
    assert not _fires(injector, "regroup", order)
    assert _fires(injector, "rollback", order) is fires


def test_a_repair_that_is_tried_again_breaks_again_when_so_ordered() -> None:
    injector = _injector("exc@1:7:rollback,exc@1:7:rollback")
    assert [_fires(injector, "rollback", 7) for _ in range(3)] == [True, True, False]


def test_a_corrupted_gradient_is_silent_and_left_to_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    injector = _injector("nan@1:3:backward,nan@1:3:backward")
    injector.begin(3)
    assert injector.reach("backward", 2) is False
    assert injector.breaks_off("backward", 3) is False
    assert [injector.reach("backward", 3) for _ in range(2)] == [True, False]
    injector.begin(3)
    assert injector.reach("backward", 3) is True
    assert "drill: nan@1:3:backward: the gradient that passes here becomes NaN" in capsys.readouterr().out


def _lives(log: Path, faults: str, passes: list[tuple[str, int]]) -> list[list[str]]:
    """The faults that fire in each life of rank 1, one life after the other until one lives through all passes."""
    lives: list[list[str]] = []
    for _ in range(9):
        injector, before = _injector(faults, log), len(log.read_text().splitlines()) if log.exists() else 0
        died = False
        for phase, step in passes:
            if phase == "data":
                injector.begin(step)
            died = _fires(injector, phase, step)
            if died:
                break
        lines = log.read_text().splitlines()[before:] if log.exists() else []
        lives.append([json.loads(line)["fault"] for line in lines])
        if not died:
            return lives
    raise AssertionError(f"it never lived: {lives}")


def test_in_its_next_life_a_rank_breaks_where_it_has_not_broken_yet(tmp_path: Path) -> None:
    faults = "exc@1:3:forward,exc@1:4:update"
    steps = [(phase, step) for step in (3, 4) for phase in ("data", "forward", "update")]
    assert _lives(tmp_path / "log", faults, steps) == [["exc@1:3:forward"], ["exc@1:4:update"], []]


def test_a_fault_that_is_given_several_times_comes_once_in_each_life(tmp_path: Path) -> None:
    text = "exc@1:3:forward"
    passes = [("data", 3), ("forward", 3), ("forward", 3)]
    assert _lives(tmp_path / "log", ",".join([text] * 3), passes) == [[text]] * 3 + [[]]


def test_a_rank_may_die_in_its_own_repair(tmp_path: Path) -> None:
    """A newcomer is given its state before it has begun any step."""
    faults = "exc@1:3:forward,exc@1:3:repair,exc@1:3:rollback"
    passes = [("regroup", 3), ("repair", 3), ("rollback", 3), ("data", 3), ("forward", 3)]
    fired = _lives(tmp_path / "log", faults, passes)
    assert fired == [["exc@1:3:repair"], ["exc@1:3:rollback"], ["exc@1:3:forward"], []]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_all_ranks_wait_for_a_standby_before_a_process_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: str
) -> None:
    waited: list[Path] = []
    monkeypatch.setattr(inject, "_wait_for", waited.append)
    faults = "link@1:2:forward,exc@1:3:forward,kill@0:4:rollback,kill@0:5:save"
    environ = {"RANK": rank, "TFT_DRILL_FAULTS": faults, "TFT_DRILL_WAIT": "1", "TFT_AGENT_DIR": str(tmp_path)}
    environ["TFT_DRILL_LOG"] = str(tmp_path / "log")
    for wait, expected in (("0", []), ("1", [3, 5])):
        injector = inject.from_environment({**environ, "TFT_DRILL_WAIT": wait})
        assert injector is not None
        held = []
        for step in (2, 3, 3, 4, 5, 6):  # step 3 is computed again: by then somebody has died in it
            injector.begin(step)
            held += [step] * len(waited)
            waited.clear()
        assert held == expected
    (tmp_path / "log").write_text(json.dumps({"fault": "exc@1:3:forward", "wall": 1.0}) + "\n")
    newcomer = inject.from_environment(environ)
    assert newcomer is not None
    newcomer.begin(3)
    assert waited == []
    newcomer.begin(5)
    assert waited == [tmp_path / "standby-ready"]


def test_a_rank_dies_no_sooner_than_its_pace_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log, slept = tmp_path / "log", []
    monkeypatch.setattr(inject.time, "sleep", slept.append)
    environ = {"RANK": "1", "TFT_DRILL_LOG": str(log), "TFT_DRILL_PACE": "21"}
    environ["TFT_DRILL_FAULTS"] = "exc@1:3:forward,exc@0:3:forward,exc@1:4:forward,link@1:5:forward"
    for step, earlier in ((3, [{"fault": "exc@0:3:forward", "wall": time.time()}]), (4, [])):
        with log.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in earlier)
        injector = inject.from_environment(environ)
        assert injector is not None
        injector.begin(step)
        assert _fires(injector, "forward", step)
    assert slept[0] == 0.0  # it was another rank that died
    assert 10 < slept[1] <= 21
    assert len(slept) == 2


def test_without_a_standby_in_time_a_drill_that_needs_one_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "standby-ready").touch()
    inject._wait_for(tmp_path / "standby-ready")
    monkeypatch.setattr(inject, "STANDBY_LIMIT", 0.1)
    with pytest.raises(SpecError, match=r"no warm standby after 0\.1 s"):
        inject._wait_for(tmp_path / "none")


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


def test_one_bit_of_the_shard_flips_once_its_hash_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_tft.patches import megatron_drill, megatron_kinds

    host = _Host()
    tensors = megatron_kinds.of(host.optimizer).in_place(host.optimizer)
    stamps = Stamps(lambda: {"shard": Shard(tensors)})
    monkeypatch.setattr(megatron_drill.runtime, "session", lambda: SimpleNamespace(host=host, stamps=stamps))
    stamps.changed()
    before = torch.cat(tensors).view(torch.int32)
    said = megatron_drill._flip(random.Random("flip@0:7"))
    changed = before ^ torch.cat(tensors).view(torch.int32)
    (bit,) = changed[changed != 0].tolist()
    assert bit in [1 << bit for bit in range(8, 16)]
    assert said.endswith("of 3 flipped; hashes are known")
    assert stamps.known != stamps.now()


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


def test_the_gradient_of_a_micro_batch_becomes_nan_on_its_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_tft.patches import megatron_drill

    monkeypatch.setattr(megatron_drill, "_reach", lambda phase: phase == "backward")
    weight = torch.ones(3, requires_grad=True)
    output = weight * 2
    output.register_hook(megatron_drill._backward)
    output.sum().backward()
    assert weight.grad is not None
    assert weight.grad.isnan().all()
    monkeypatch.setattr(megatron_drill, "_reach", lambda phase: False)
    weight.grad = None
    output = weight * 2
    output.register_hook(megatron_drill._backward)
    output.sum().backward()
    assert weight.grad.tolist() == [2, 2, 2]


def test_an_order_of_a_repair_names_the_step_that_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_tft.engine.types import OrderKind
    from mindspeed_tft.patches import megatron_drill

    reached: list[tuple[str, int]] = []
    monkeypatch.setattr(megatron_drill.inject, "reach", lambda phase, step: reached.append((phase, step)))
    for kind in OrderKind:
        assert megatron_drill.action(lambda *given: given[0], None, (kind, {"step": 6}), {}) is kind
    assert reached == [("regroup", 7), ("repair", 7), ("rollback", 7)]
