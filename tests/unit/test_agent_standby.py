"""A standby becomes the program that Python would have started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_support import until

from mindspeed_tft.agent.reboot import ENV_DIRECTORY
from mindspeed_tft.agent.spare import Spare, wanted
from mindspeed_tft.agent.standby import ENV_IMPORTS, Order, environment_of

# torch takes seconds to import; the real one is in test_agent_torchrun.py.
TORCH = """
import os
class cuda:
    is_initialized = staticmethod(lambda: bool(os.environ.get("DEVICE_TOUCHED")))
"""

# What a program can see of how it was started; `torch` in it is how a standby gives itself away.
PROGRAM = """
import json, multiprocessing, os, random, sys, threading

def double(number):
    return 2 * number

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        doubled = pool.apply(double, (21,))
    import beside
    facts = [os.path.abspath(sys.argv[0]), sys.argv[1:], __name__, os.path.abspath(__file__), sys.path[0], os.getcwd(),
             __spec__ and __spec__.name, dict(os.environ), doubled, beside.__file__, threading.active_count(),
             sorted(os.listdir("/proc/self/fd"))]
    print(json.dumps(facts), "torch" in sys.modules)
    print("warning", file=sys.stderr)
    sys.exit(7)
"""


def environment(directory: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return {**kept, "LC_ALL": "C.UTF-8", ENV_DIRECTORY: str(directory), **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "program.py").write_text(PROGRAM)
    (tmp_path / "work" / "torch.py").write_text(TORCH)
    (tmp_path / "work" / "numpy.py").write_text("")
    (tmp_path / "work" / "beside.py").write_text("print('imported')\n")
    return tmp_path


@pytest.fixture
def spares() -> Iterator[list[Spare]]:
    made: list[Spare] = []
    yield made
    for spare in made:
        spare.close()


def ready(spare: Spare, capsys: pytest.CaptureFixture[str]) -> str:
    """Keep one until it is ready, or given up; what was said."""
    said = ""

    def look() -> bool:
        nonlocal said
        spare.look(calm=True)
        said += capsys.readouterr().err
        return bool(said)

    until(look, "a standby is ready")
    return said


@pytest.mark.parametrize("program", [["program.py", "--flag", "x"], ["-m", "program", "--flag", "x"]])
def test_it_is_the_program(
    folder: Path,
    program: list[str],
    spares: list[Spare],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder / "work")
    env = environment(folder, RANK="1", TOLD="yes")
    cold = subprocess.run([sys.executable, "-u", *program], env=env, capture_output=True, text=True, timeout=60)
    spares.append(spare := Spare(sys.executable, program, environment(folder, **{ENV_IMPORTS: "beside"}), folder))
    said = ready(spare, capsys)
    assert f"standby (pid {spare.pid}) is ready" in said and "MiB" in said
    (folder / "out").write_text("before\n")
    order = Order(env=env, argv=program, cwd=os.getcwd(), stdout=str(folder / "out"), stderr=str(folder / "err"))
    pid = spare.pid
    process = spare.take(order)
    assert process is not None and process.pid == pid and spare.pid == 0
    assert process.wait(60) == cold.returncode == 7
    before, facts, torch = (folder / "out").read_text().replace("] ", "]\n").splitlines()
    imported, cold_facts, cold_torch = cold.stdout.replace("] ", "]\n").splitlines()
    assert (before, imported, torch, cold_torch) == ("before", "imported", "True", "False")
    assert json.loads(facts) == json.loads(cold_facts)
    assert (folder / "err").read_text() == "imported\nwarning\n", "what imports printed is in the worker's log"


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({ENV_IMPORTS: "not_there,broken"}, "OSError: no such library"),
        ({ENV_IMPORTS: "beside", "DEVICE_TOUCHED": "1"}, "initialises CUDA when it is imported"),
    ],
)
def test_one_that_cannot_be_is_said_once_and_not_tried_again(
    folder: Path, env: dict[str, str], reason: str, spares: list[Spare], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "work" / "broken.py").write_text("raise OSError('no such library')\n")
    program = [str(folder / "work" / "program.py")]
    spares.append(spare := Spare(sys.executable, program, environment(folder, **env), folder))
    said = ready(spare, capsys)
    assert "ended with status 1 (" in said and reason in said
    spare.look(calm=True)
    assert spare.pid == 0 and capsys.readouterr().err == ""


def test_one_that_is_not_ready_is_not_taken(folder: Path, spares: list[Spare]) -> None:
    spares.append(spare := Spare(sys.executable, ["program.py"], environment(folder), folder))
    spare.look(calm=False)
    assert spare.pid == 0, "not while workers start"
    spare.look(calm=True)
    pid = spare.pid
    assert pid and spare.take(Order(env={}, argv=[], cwd="/", stdout="", stderr="")) is None
    assert spare.pid == 0 and not os.path.exists(f"/proc/{pid}")


def test_it_ends_with_its_launcher(folder: Path) -> None:
    reading, writing = os.pipe()
    program = str(folder / "work" / "program.py")
    command = [sys.executable, "-m", "mindspeed_tft.agent.standby", str(reading), program]
    process = subprocess.Popen(command, env=environment(folder, **{ENV_IMPORTS: ""}), pass_fds=(reading,))
    os.close(reading)
    os.close(writing)
    assert process.wait(60) == 0


def test_it_is_wanted_when_it_is_asked_for() -> None:
    assert [wanted({}), wanted({"TFT_WARM_STANDBY": "0"}), wanted({"TFT_WARM_STANDBY": "1"})] == [False, False, True]
    with pytest.raises(ValueError, match="TFT_WARM_STANDBY='yes'"):
        wanted({"TFT_WARM_STANDBY": "yes"})


def test_what_imports_have_set_holds_in_the_worker_as_after_a_cold_start() -> None:
    before = {"PATH": "/bin", "GIVEN": "8", "OWN": "a"}
    after = {"PATH": "/bin", "GIVEN": "1", "OWN": "b", "NEW": "1"}
    worker = {"PATH": "/bin", "GIVEN": "8", "OWN": "c", "RANK": "1"}
    assert environment_of(worker, before, after) == {
        "PATH": "/bin",
        "GIVEN": "1",
        "OWN": "c",  # what was given to this worker alone
        "NEW": "1",
        "RANK": "1",
    }
