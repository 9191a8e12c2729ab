"""Any number of replicas on real Megatron, and hosts: who holds what Megatron builds, and where the holders run.

Drills lose all holders of a shard but one, at once. With one more gone the state is lost: that is the control.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mindspeed_tft.faults import gpt_job, jobs, plans
from mindspeed_tft.faults.spec import parse_layout
from mindspeed_tft.replica.holders import holders
from mindspeed_tft.replica.layout import Sizes, data_parallel_lists

from .conftest import Drilled
from .test_refusals import BASE, HA

pytestmark = pytest.mark.megatron
PROGRAMS = Path(__file__).parent / "programs"
full = pytest.mark.full


# ------------------------------------------------------------------------------------------------ who holds what

LAYOUTS = [
    Sizes(8),
    Sizes(8, tensor=2, pipeline=2),
    Sizes(8, pipeline=2, data_last=True),
    Sizes(8, tensor=2, context=2),
    Sizes(16, tensor=2, pipeline=4, data_last=True),
    Sizes(12, tensor=3, pipeline=2),
    Sizes(8, experts=2),
    Sizes(16, tensor=2, pipeline=2, experts=2, expert_tensor=2),
    Sizes(16, tensor=2, experts=4, expert_tensor=1),
    Sizes(16, context=2, pipeline=2, experts=2, expert_tensor=1, data_last=True),
]
REPLICAS = 2


def as_megatron(sizes: Sizes) -> dict[str, Any]:
    """The arguments of `initialize_model_parallel`."""
    return {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.experts or 1,
        "expert_tensor_parallel_size": sizes.expert_tensor or None,
        "num_distributed_optimizer_instances": REPLICAS,
        "order": "tp-cp-ep-pp-dp" if sizes.data_last else "tp-cp-ep-dp-pp",
    }


def test_lists_and_holders_are_those_of_the_groups_that_megatron_builds() -> None:
    cases = [{"world": sizes.world, "layout": as_megatron(sizes)} for sizes in LAYOUTS]
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "real_groups.py")],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert len(found) == len(LAYOUTS), done.stderr
    for sizes, ranks in zip(LAYOUTS, found, strict=True):
        lists = data_parallel_lists(sizes)
        assert len(ranks) == sizes.world
        for rank, groups in enumerate(ranks):
            name, real, instance = groups["dense"]
            assert list(lists[name]) == real, (sizes, rank)
            _assert_holds(real, instance, rank)
            (tensor, pipeline, expert), real, instance = groups["expert"]
            apart = f"-ep{expert}" if sizes.experts > 1 else ""
            if sizes.experts:
                assert list(lists[f"tp{tensor}-pp{pipeline}{apart}/expert"]) == real, (sizes, rank)
                _assert_holds(real, instance, rank)


def _assert_holds(ranks: list[int], instance: list[int], rank: int) -> None:
    """The shard of a rank is its number in its instance of the optimizer."""
    (shard,) = [s for s, positions in enumerate(holders(len(ranks), REPLICAS)) if ranks.index(rank) in positions]
    assert instance.index(rank) == shard


# ------------------------------------------------------------------------------------------------ how many may go


def _faults(kind: str, ranks: Sequence[int], place: str) -> list[str]:
    return [f"{kind}@{rank}:{place}" for rank in ranks]


def _arguments(layout: str, replicas: int, faults: Sequence[str]) -> list[str]:
    words = [word for fault in faults for word in ("--fault", fault)]
    return ["--layout", layout, "--replicas", str(replicas), *words]


def _assert_exact(found: Drilled, faults: Sequence[str], preset: str = "dump") -> None:
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert sorted(report["faults_fired"]) == sorted(faults)
    assert (report["steps_lost"], report["compared"]["different"]) == (0, 0)
    wanted = {"dump", "end"} if preset == "dump" else {"end"}
    assert {entry["what"] for entry in report["comparisons"]} == wanted
    assert all(entry["tensors"] > 30 and entry["bytes"] > 1_000_000 for entry in report["comparisons"])


# (layout, N, the ranks that die at once, flags for Megatron): one holder of each shard is left.
LOST = [
    ("dp4", 4, (0, 1, 2), ()),
    ("dp2", 2, (0,), ()),
    ("tp2dp2", 2, (0, 1), ()),
    ("pp2dp2", 2, (0, 1), ("--use-tp-pp-dp-mapping",)),  # in Megatron's usual order these two are all of a stage
    ("dp6", 3, (0, 2, 1, 5), ("--global-batch-size", "24")),
    ("dp8", 2, (3, 4), ()),
    ("dp8", 4, (1, 3, 5, 2, 4, 6), ()),
    ("dp8", 8, (0, 1, 2, 3, 4, 5, 6), ()),
    ("tp2dp4", 4, (0, 2, 4), ()),
]


@full
@pytest.mark.parametrize(("layout", "replicas", "dead", "flags"), LOST, ids=[f"{one[0]}-{one[1]}" for one in LOST])
def test_one_holder_of_each_shard_is_enough(
    drill: Callable[..., Drilled], layout: str, replicas: int, dead: tuple[int, ...], flags: tuple[str, ...]
) -> None:
    """All die in the update of step 7, which nobody but the last holder can end."""
    faults = _faults("kill", dead, "7:update")
    found = drill(*_arguments(layout, replicas, faults), *(("--", *flags) if flags else ()))
    _assert_exact(found, faults)
    assert found.report["resumed_at"] == 7


@full
@pytest.mark.parametrize(("replicas", "verdict"), [(2, "lost"), (4, "exact")])
def test_what_more_replicas_are_for(drill: Callable[..., Drilled], replicas: int, verdict: str) -> None:
    """The control: the same two ranks hold a shard alone, or together with two others."""
    faults = _faults("kill", (1, 3), "7:update")
    found = drill(*_arguments("dp4", replicas, faults))
    assert (found.report["verdict"], sorted(found.report["faults_fired"])) == (verdict, sorted(faults)), found.output


@full
@pytest.mark.parametrize(("preset", "kind"), [("retry", "uce"), ("recover", "kill")])
def test_three_of_four_holders_are_repaired_by_the_last(drill: Callable[..., Drilled], preset: str, kind: str) -> None:
    faults = _faults(kind, (0, 1, 3), "7:update")
    _assert_exact(drill("--preset", preset, *_arguments("dp4", 4, faults)), faults, preset)


@full
@pytest.mark.parametrize(("preset", "fault"), [("retry", "uce@1:7:update"), ("recover", "kill@1:7:update")])
@pytest.mark.parametrize("layout", ["dp4", "tp2dp2"])
def test_without_replicas_the_shard_comes_from_the_last_checkpoint(
    drill: Callable[..., Drilled], preset: str, fault: str, layout: str
) -> None:
    """N = 1: exact, and the steps since the checkpoint are computed once more."""
    found = drill("--preset", preset, *_arguments(layout, 1, [fault]))
    report = found.report
    assert (report["faults_fired"], report["compared"]["different"]) == ([fault], 0), found.output
    assert (found.status, report["verdict"]) == (0, "exact"), found.output
    strategy = {"retry": "rewind", "recover": "recover"}[preset]
    assert report["recoveries"] == [{"strategy": strategy, "step": 4, "again": [5, 6, 7]}]


# ------------------------------------------------------------------------------------------------ on which hosts


def hosts_can_be_made() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "--uts", "true"], capture_output=True).returncode == 0


needs_hosts = pytest.mark.skipif(not hosts_can_be_made(), reason="host names of their own need root (unshare --uts)")
WANTED = "--tft-require-separate-hosts"


def launch(directory: Path, layout: str, hosts: dict[str, int], steps: int, flags: Sequence[str]) -> jobs.Ended:
    """A job on hosts of these names, each with so many ranks; they are host names on this machine."""
    plan = plans.Plan(layout=parse_layout(layout), faults=(), steps=steps)
    saves = ("--save", str(directory / "save"), "--save-interval", "100")
    commands = []
    with jobs.held_ports(2) as (master, controller):
        port = ("--tft-controller-port", str(controller))
        program = (plans.PROGRAM, gpt_job.WITH_PLUGIN, *plans.plugin_flags(plan), *saves, *port, *flags)
        for node, (name, ranks) in enumerate(hosts.items()):
            called = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name)
            shape = ("--nnodes", str(len(hosts)), "--nproc-per-node", str(ranks), "--node-rank", str(node))
            where = ("--master-addr", "127.0.0.1", "--master-port", str(master))
            launcher = (sys.executable, "-m", "torch.distributed.run", *shape, *where)
            commands.append((*called, *launcher, "-m", *program))
        environ = {"GLOO_SOCKET_IFNAME": "lo"}
        return jobs.run(jobs.Job("hosts", tuple(commands), directory / "hosts.log", 120, environ))


@pytest.mark.full
def test_hosts_that_the_launcher_tells_are_refused_at_once(tmp_path: Path) -> None:
    """Before any process group exists, each rank by itself."""
    on = [*BASE, *HA, "--save", str(tmp_path / "save"), "--save-interval", "1000"]
    two = {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    stages = ["--pipeline-model-parallel-size", "2"]
    cases = [
        {"words": [*on, WANTED, *stages], "environ": two},
        {"words": [*on, WANTED, *stages, "--use-tp-pp-dp-mapping"], "environ": two},
        {"words": [*on, WANTED], "environ": two},
        {"words": [*on, WANTED], "environ": {**two, "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}},
        {"words": [*on, WANTED], "environ": {**two, "LOCAL_WORLD_SIZE": "1"}},  # uneven: only known when all have met
        {"words": [*on, *stages], "environ": two},  # only warned of
    ]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TFT_", "TTP_", "HIGH_AVAILABILITY"))}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "refusals.py")],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
        env=clean,
    )
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert [one["code"] for one in found] == [2, 0, 0, 2, 0, 0], done.stdout + done.stderr
    assert found[0]["err"] == (
        "mindspeed_tft: error: --tft-require-separate-hosts: with host node 0 all holders of 1 shard would be lost"
        " (tp0-pp0/dense/0), and 1 more host would take shards along as well. Remedy: add --use-tp-pp-dp-mapping.\n"
    )
    assert "all 4 ranks run on one host (node 0)" in found[3]["err"]
    assert "Remedy: use two or more hosts." in found[3]["err"]


@needs_hosts
@full
def test_nodes_of_different_sizes_are_refused_when_the_ranks_have_met(tmp_path: Path) -> None:
    """Every rank comes to the same answer, so none is left waiting."""
    ended = launch(tmp_path, "dp4", {"small": 1, "large": 3}, 3, [WANTED])
    log = ended.log.read_text()
    assert not ended.timed_out and ended.returncode != 0 and ended.leftover == (), ended.tail(60)
    assert log.count("mindspeed_tft: error: ") == 1, log
    assert (
        "--tft-require-separate-hosts: with host large all holders of 1 shard would be lost (tp0-pp0/dense/1). Remedy:"
        " set --optimizer-replica-num to 4." in log
    )
    first, second = log.split("----- node 1 -----")
    assert "exitcode  : 2 " in first and "exitcode  : 2 " in second, log
    assert " iteration " not in log


@full
@needs_hosts
@pytest.mark.parametrize(
    ("hosts", "flags", "said"),
    [
        (
            {"one": 2, "two": 2},
            (),
            "*** hosts: with host one all holders of 1 shard would be lost (tp0-pp0/dense/0), and 1 more host would"
            " take shards along as well. Remedy: add --use-tp-pp-dp-mapping. --tft-require-separate-hosts makes this an"
            " error. ***",
        ),
        ({"one": 2, "two": 2}, ("--use-tp-pp-dp-mapping", WANTED), "hosts: no host holds all replicas of a shard"),
        (
            {"one": 4},
            (),
            "hosts: all 4 ranks run on one host (one), whose loss takes all holders of every shard along; to survive"
            " that, use two or more hosts",
        ),
    ],
    ids=["exposed", "cured", "alone"],
)
def test_what_one_host_can_take_away_is_said_at_start_up(
    tmp_path: Path, hosts: dict[str, int], flags: tuple[str, ...], said: str
) -> None:
    ended = launch(tmp_path, "pp2dp2", hosts, 3, flags)
    assert (ended.returncode, ended.leftover) == (0, ()), ended.tail(60)
    lines = [line for line in ended.log.read_text().splitlines() if "hosts: " in line]
    assert lines == [f"[mindspeed_tft] {said}"]


@full
@needs_hosts
def test_two_nodes_on_one_host_do_not_pass_for_two_hosts(tmp_path: Path) -> None:
    """The launcher tells of two nodes; the ranks know that they run on the same host."""
    with jobs.held_ports(1) as (master,):
        plan = plans.Plan(layout=parse_layout("dp4"), faults=(), steps=3)
        flags = (*plans.plugin_flags(plan), "--save", str(tmp_path / "save"), "--save-interval", "100", WANTED)
        size = jobs.Size(4, 2, port=master)
        commands = jobs.torchrun(size, plans.PROGRAM, (gpt_job.WITH_PLUGIN, *flags))
        ended = jobs.run(jobs.Job("hosts", commands, tmp_path / "hosts.log", 120, {}))
    log = ended.log.read_text()
    assert ended.returncode not in (None, 0) and "all 4 ranks run on one host" in log, ended.tail(60)
