"""TaskD's names: what they are, who may offer them, what they refuse, and the documented scripts as real processes."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from taskd_support import MANAGER, edited_launcher

from mindspeed_tft import names
from mindspeed_tft.control import keepers
from mindspeed_tft.control.config import ENV_JOB, ControlConfig, ControlRefused
from mindspeed_tft.control.processor import Processor
from mindspeed_tft.engine.incident import EXIT_UNDECIDED
from mindspeed_tft.engine.types import RankInfo
from mindspeed_tft.settings import Refused, Settings
from mindspeed_tft.taskd import agent, manager, proxy, worker

if TYPE_CHECKING:
    from tests.conftest import Processes

# Module to its functions, with their parameters as scripts pass them. Facts of an interface.
CONTRACT: dict[str, dict[str, str]] = {
    "api.taskd_manager_api": {"init_taskd_manager": "config", "start_taskd_manager": ""},
    "api.taskd_proxy_api": {"init_taskd_proxy": "config", "destroy_taskd_proxy": ""},
    "api.taskd_worker_api": {
        "init_taskd_worker": "rank_id, upper_limit_of_disk_in_mb=5000, framework='pt'",
        "start_taskd_worker": "",
        "destroy_taskd_worker": "",
    },
    "api.taskd_agent_api": {
        "init_taskd_agent": "config=None, cls=None",
        "start_taskd_agent": "",
        "register_func": "operator, func",
    },
}


def parameters(function: Callable[..., Any]) -> str:
    found = inspect.signature(function).parameters.values()
    plain = (one.replace(annotation=inspect.Parameter.empty) for one in found)
    return ", ".join(map(str, plain))


def test_names_and_parameters_are_those_of_taskd() -> None:
    whole = importlib.import_module("mindspeed_tft.names.taskd.taskd.api")
    for module, functions in CONTRACT.items():
        found = importlib.import_module(f"mindspeed_tft.names.taskd.taskd.{module}")
        assert sorted(found.__all__) == sorted(functions)
        for name, words in functions.items():
            assert parameters(getattr(found, name)) == words
            assert getattr(whole, name) is getattr(found, name)


def test_two_packages_of_the_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(names.directory("taskd")))
    names.claim("taskd")
    logs = tmp_path / "logs" / "taskd"  # a folder of that name is no package
    logs.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(logs.parent))
    names.claim("taskd")
    theirs = tmp_path / "site" / "taskd" / "__init__.py"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    monkeypatch.syspath_prepend(str(theirs.parents[1]))
    with pytest.raises(ImportError, match=rf"two packages of this name.*{theirs}.*Remedy: uninstall"):
        names.claim("taskd")
    monkeypatch.syspath_prepend(str(names.directory("taskd")))  # also where ours is found first
    with pytest.raises(ImportError, match="two packages"):
        names.claim("taskd")


def test_the_directory_is_printed_for_the_path(capsys: pytest.CaptureFixture[str]) -> None:
    from mindspeed_tft.names.__main__ import main

    assert main(["taskd"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "taskd" / "api" / "taskd_worker_api.py").is_file()
    assert main(["torch"]) == 2
    assert "taskd" in capsys.readouterr().err


JOB = {"job_id": "job", "node_nums": 1, "proc_per_node": 2}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: manager.init_taskd_manager("job"), "its argument is a str. Remedy: give a dictionary"),
        (lambda: manager.init_taskd_manager({**JOB, "nodes": 1}), "init_taskd_manager 'nodes': there is no such"),
        (lambda: manager.init_taskd_manager({**JOB, "job_id": None}), "MINDX_TASK_ID is not set, .* export MINDX_"),
        (lambda: manager.init_taskd_manager({**JOB, "node_nums": "XX"}), "'node_nums': 'XX' is no whole number"),
        (lambda: manager.init_taskd_manager({**JOB, "proc_per_node": 0}), "'proc_per_node': 0 is no whole number"),
        (lambda: manager.init_taskd_manager({**JOB, "plugin_dir": "/p"}), "plugins of TaskD are not run"),
        (lambda: manager.init_taskd_manager({**JOB, "cluster_infos": [{}]}), "found by MINDX_SERVER_IP"),
        (lambda: manager.init_taskd_manager({**JOB, "fault_recover": "yes"}), "'yes' is neither 'on' nor 'off'"),
        (lambda: proxy.init_taskd_proxy({"Framework": "TensorFlow"}), "'Framework': 'TensorFlow' is unknown"),
        (lambda: proxy.init_taskd_proxy({"ListenAddr": "0.0.0.0"}), "can be reached from other hosts"),
        (lambda: proxy.init_taskd_proxy({"ListenPort": "0"}), "'ListenPort': '0' is no whole number"),
        (lambda: proxy.init_taskd_proxy({"Role": "Mgr"}), "'Role': 'Mgr' is another role"),
        (lambda: proxy.init_taskd_proxy({}), "MINDX_TASK_ID is not set"),
        (lambda: worker.init_taskd_worker(-1), "'rank_id': -1 is no whole number from 0 to 4095"),
        (lambda: worker.init_taskd_worker(True), "'rank_id': True is no whole number"),
        (lambda: worker.init_taskd_worker(3, 5000, "tf"), "'framework': 'tf' is unknown"),
        (lambda: worker.init_taskd_worker(3, -5), "'upper_limit_of_disk_in_mb': -5 is no whole"),
        (lambda: worker.init_taskd_worker(4), "'rank_id': 4 contradicts RANK=3. Remedy: pass torch.distributed"),
        (lambda: agent.init_taskd_agent({"Framework": "PyTorch"}), "no agent of ours for 'PyTorch'.*tftrun"),
        (lambda: agent.register_func("MONITOR", print), "no agent that would call it for 'MONITOR'"),
    ],
)
def test_what_cannot_be_is_refused(call: Callable[[], object], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_JOB, raising=False)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(Refused, match=says) as caught:
        call()
    assert caught.value.reason and caught.value.remedy


def test_a_start_before_its_init_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "_manager", None)
    for start in (manager.start_taskd_manager, worker.start_taskd_worker):
        with pytest.raises(RuntimeError, match="was not called before"):
            start()
    assert proxy.destroy_taskd_proxy() is False and worker.destroy_taskd_worker() is False


def test_a_manager_is_for_one_job_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_JOB, "another")
    with pytest.raises(Refused, match="'job' contradicts MINDX_TASK_ID=another"):
        manager.init_taskd_manager(JOB)
    config = ControlConfig.from_env(Settings().deadlines(), "/incidents", {"WORLD_SIZE": "4"})
    with pytest.raises(ControlRefused, match=r"1 nodes with 2 ranks each are not the 4 ranks.*correct node_nums"):
        manager.Manager("job", 1, 2).judge(config)
    assert manager.Manager("job", 2, 2).judge(config) is config


def test_a_keeper_says_why_it_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal reaches the rank that asked; where nobody keeps anything, the rank is told to do it itself."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(ENV_JOB, "job")
    config = ControlConfig.from_env(Settings().deadlines(), str(tmp_path), {"WORLD_SIZE": "4"})
    assert keepers.ask(config, keepers.CONTROLLER, []) is None
    door = keepers.door("job", keepers.CONTROLLER, 0)
    keeper = keepers.Keeper(door, keepers.CONTROLLER, manager.Manager("job", 1, 2).judge)
    with pytest.raises(ControlRefused, match="keeps the controller of this job already"):
        keepers.Keeper(door, keepers.CONTROLLER)
    assert keeper.serve(1.0) is None  # who looked whether it lives
    asked = keepers.ask(config, keepers.CONTROLLER, ["--socket", str(tmp_path / "ctl.sock")])
    assert asked is not None and keeper.serve(5.0) is None
    status, text = asked.failure(time.monotonic() + 5) or (0, "")
    assert status == 2 and "are not the 4 ranks of this job" in text
    keeper.close()
    assert keepers.ask(config, keepers.CONTROLLER, []) is None and not door.parent.exists()


def test_a_rank_that_has_a_processor_is_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under our adaptor nothing more is started, and what is told is whether a controller hears the rank."""
    monkeypatch.setattr(worker, "_worker", None)
    monkeypatch.setenv("RANK", "0")
    own = Processor(tmp_path / "relay.sock", Settings().deadlines(), on_stop=lambda _epoch, _reason: None)
    own.start(RankInfo(0, "host", os.getpid(), "tp0-pp0", 0, ()), 0.0)
    try:
        assert worker.init_taskd_worker(0, 5000, "ms") and worker.start_taskd_worker() is False
        assert worker._worker is None
    finally:
        own.close()


ABANDONED = """
import sys, time
from dataclasses import replace
from mindspeed_tft.settings import Settings
from mindspeed_tft.taskd.worker import Worker

class Line:  # of a controller that died after its stop
    connected, stop_epoch = False, 1
    def report(self, report): print("reported", report.epoch, flush=True)
    def next_order(self, seconds): time.sleep(0.05)
    def close(self): print("closed", flush=True)

worker = Worker(3)
worker._link = Line()
worker._stopped.set()
worker._obey(replace(Settings().deadlines(), stop=0.5))
"""


def test_a_worker_whose_controller_died_after_a_stop_ends_within_the_deadlines(processes: Processes) -> None:
    """Its main thread may be in a collective that never ends."""
    worker = processes.start([sys.executable, "-c", ABANDONED])
    output, _ = worker.communicate(timeout=30)
    assert worker.returncode == EXIT_UNDECIDED
    assert "reported 1" in output and "the controller is gone, nobody can decide" in output and "closed" in output


# The start script of a pod and its manager, as documented, in our words. `sed` has edited the launcher.
START = """
export TASKD_PROCESS_ENABLE="on"
if [[ "${RANK}" == 0 ]]; then
    export MASTER_ADDR=${POD_IP}
    python manager.py 2>> error.log &
fi
python run.py --nproc-per-node 2 --master-port $PORT %s
"""


def test_the_documented_scripts_run_unchanged(
    root: Path, tmp_path: Path, processes: Processes, free_ports: Callable[[int], list[int]]
) -> None:
    """Manager, launcher with proxy, two workers: one is killed, the other one is ended, the manager ends by itself."""
    edited_launcher(tmp_path)
    (tmp_path / "manager.py").write_text(MANAGER.format(ranks=2))
    program = root / "tests" / "unit" / "programs" / "taskd_job.py"
    (tmp_path / "start.sh").write_text(START % f"{program} {tmp_path}")
    env = {
        "PYTHONPATH": str(names.directory("taskd")),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "MINDX_TASK_ID": "job-of-a-test",
        "POD_IP": "127.0.0.1",
        "RANK": "0",
        "PORT": str(free_ports(1)[0]),
        "OMP_NUM_THREADS": "1",
    }
    script = processes.start(["bash", "start.sh"], cwd=tmp_path, env=env)
    output, _ = script.communicate(timeout=90)
    told = (tmp_path / "error.log").read_text()
    both = f"{output}\n----- error.log\n{told}"
    assert script.returncode == 1, both  # torchrun's, for the killed worker
    assert (tmp_path / "rank-0").read_text() == (tmp_path / "rank-1").read_text() == "True 9601", both
    assert "nobody ended this rank" not in output
    assert "the relay of node 0 is here" in output, both
    assert "the manager of job job-of-a-test waits for its rank 0" in told
    assert "the controller of 2 ranks is here: no port, on a single host; strategies dump" in told
    assert "job job-of-a-test is over" in told and "over: True" in output, both
    (incident,) = (tmp_path / "taskd_log").glob("incident-*.json")
    found = json.loads(incident.read_text())
    # The launcher ends the other rank at the same moment: by its signal or by our order, whatever is faster.
    assert found["outcome"] == "failed" and found["faults"][0]["rank"] == 1, found
    why = ("no step was completed, there is nothing to save", "no rank with training state is left")
    assert any(words in json.dumps(found) for words in why), found
    assert not list(tmp_path.glob("tft-*/*")), "sockets and directories are left behind"


@pytest.mark.full
def test_an_edited_launcher_refuses_flags_that_cannot_be(tmp_path: Path, processes: Processes) -> None:
    edited = edited_launcher(tmp_path)
    (tmp_path / "program.py").write_text("print('ran')")
    env = {"PYTHONPATH": str(names.directory("taskd")), "XDG_RUNTIME_DIR": str(tmp_path), ENV_JOB: "job"}
    launcher = processes.start([sys.executable, edited, "program.py", "--tft-deadline", "1"], cwd=tmp_path, env=env)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 2 and "mindspeed_tft: error: --tft-deadline: " in output
    assert "Traceback" not in output and "ran" not in output.split()
    assert not list(tmp_path.glob("tft-*/*"))


PROXY = """
import signal, threading
from taskd.api.taskd_proxy_api import destroy_taskd_proxy, init_taskd_proxy

ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
here = {{"ServerRank": "{node}", "ListenAddr": "127.0.0.1", "ListenPort": "9602", "Framework": "PyTorch"}}
assert init_taskd_proxy({{**here, "UpstreamAddr": "127.0.0.1", "UpstreamPort": "{port}"}})
print("listens", flush=True)
ended.wait()
print("destroyed:", destroy_taskd_proxy())
"""
WORKER = """
import os, time
from taskd.api import init_taskd_worker, start_taskd_worker

assert init_taskd_worker(int(os.environ["RANK"]), 5000, "pt")
print("started:", start_taskd_worker(), flush=True)
time.sleep(60)
"""


@pytest.mark.full
def test_two_nodes_meet_at_the_manager(
    tmp_path: Path, processes: Processes, free_ports: Callable[[int], list[int]]
) -> None:
    """Manager, a proxy and a rank on each of two nodes (of this machine): their relays find the controller at the port
    that the proxies name, and the death of one rank ends the other."""
    port = free_ports(1)[0]
    common = {
        "PYTHONPATH": str(names.directory("taskd")),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "MINDX_TASK_ID": "two-nodes",
        "TFT_DEFAULT_PORT": str(port),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }

    def start(code: str, **env: str) -> Any:
        return processes.start([sys.executable, "-c", code], cwd=tmp_path, env={**common, **env})

    two_nodes = MANAGER.format(ranks=1).replace('"node_nums": 1', '"node_nums": 2')
    manager_of_both = start(two_nodes)
    proxies = [start(PROXY.format(node=node, port=port)) for node in (0, 1)]
    assert "the manager of job two-nodes waits" in manager_of_both.stdout.readline()
    assert [one.stdout.readline() for one in proxies] == ["listens\n"] * 2
    ranks = [start(WORKER, RANK=str(node), GROUP_RANK=str(node)) for node in (0, 1)]
    assert [one.stdout.readline() for one in ranks] == ["started: True\n"] * 2
    ranks[1].kill()
    said, _ = ranks[0].communicate(timeout=30)
    assert ranks[0].returncode == 76, said
    for one in proxies:
        one.terminate()
    words, _ = manager_of_both.communicate(timeout=30)
    assert f"the controller of 2 ranks is here: port {port} of 127.0.0.1" in words and "over: True" in words
    assert "Training stopped: rank 1 lost" in words
    for node, one in enumerate(proxies):
        text, _ = one.communicate(timeout=30)
        assert f"the relay of node {node} is here, and goes to port {port} of 127.0.0.1" in text
        assert one.returncode == 0 and "destroyed: True" in text, text
