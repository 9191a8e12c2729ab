"""Real Megatron on several nodes: a whole node dies and another one takes its place, and so may the controller.

The nodes are launchers of their own on this machine; in the last test they have networks of their own, too.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import netns
import pytest

from mindspeed_tft.control.authority import Authority
from mindspeed_tft.faults.plans import Plan
from mindspeed_tft.faults.rehearsal import Report, rehearse
from mindspeed_tft.faults.spec import parse_fault, parse_layout

from .conftest import Drilled, Quiet

pytestmark = pytest.mark.megatron


@pytest.fixture
def recover(drill: Callable[..., Drilled]) -> Callable[..., Drilled]:
    """`recover(fault, ..., *more)`: a drill with preset `recover`; words that begin with a dash are more arguments."""

    def run(*words: str) -> Drilled:
        first = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
        faults = [word for fault in words[:first] for word in ("--fault", fault)]
        return drill("--preset", "recover", *faults, *words[first:])

    return run


def _plan(network: netns.Network, fault: str = "node@0:7:backward", tls_dir: str = "", timeout: float = 240.0) -> Plan:
    """Two nodes of two ranks, each in a network of its own."""
    return Plan(
        layout=parse_layout("dp4"),
        faults=(parse_fault(fault),),
        preset="recover",
        launcher="tftrun",
        nodes=2,
        hosts=tuple(host.words() for host in network),
        master=network[0].address,
        tls_dir=tls_dir,
        timeout=timeout,
    )


def _assert_exact(found: Drilled, *restarted: int) -> None:
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert report["processes_restarted"] == [*restarted]
    assert (report["steps_lost"], report["processes_left_behind"]) == (0, [])
    (compared,) = report["comparisons"]
    assert (compared["what"], compared["different"]) == ("end", 0)
    assert compared["tensors"] > 30


@pytest.mark.full
def test_the_controller_dies_and_then_a_rank(recover: Callable[..., Drilled]) -> None:
    """What the next controller can do is not less."""
    found = recover("controller@0:7:forward", "kill@1:8:backward")
    _assert_exact(found, 1)
    log = (found.directory / "broken.log").read_text()
    assert re.search(r"controller \d on host \S+ leads now", log)  # that of the newcomer, where it was there in time
    assert [each["strategy"] for each in found.report["recoveries"]] == ["recover"]


def test_a_node_is_replaced(recover: Callable[..., Drilled]) -> None:
    found = recover("node@2:7:backward")
    _assert_exact(found, 2, 3)
    (incident,) = found.incidents
    assert incident["outcome"] == "rebooted"
    assert "its host" in incident["summary"]


@pytest.mark.full
@pytest.mark.parametrize("phase", ["data", "commit", "update", "param-gather", "save"])
def test_the_node_of_the_controller_and_of_the_store_is_replaced(recover: Callable[..., Drilled], phase: str) -> None:
    found = recover(f"node@0:7:{phase}")
    _assert_exact(found, 0, 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "dtype", "fault"),
    [
        ("tp2dp2", "bf16", "node@3:7:grad-reduce"),
        ("dp4", "bf16", "node@3:7:update"),
        ("dp4", "fp32", "node@2:7:param-gather"),
        ("tp2dp2", "fp32", "node@2:7:eval"),
    ],
)
def test_another_node_is_replaced(recover: Callable[..., Drilled], layout: str, dtype: str, fault: str) -> None:
    _assert_exact(recover(fault, "--layout", layout, "--dtype", dtype), 2, 3)


@pytest.mark.full
def test_both_nodes_one_after_the_other(recover: Callable[..., Drilled]) -> None:
    found = recover("node@2:4:forward", "node@0:9:backward")
    _assert_exact(found, 0, 1, 2, 3)


@pytest.mark.full
@pytest.mark.parametrize("victim", (0, 2))
def test_nodes_that_find_each_other_by_c10d(recover: Callable[..., Drilled], victim: int) -> None:
    """Which node gets which ranks is settled by their meeting; the store may live on the node that dies."""
    found = recover(f"node@{victim}:7:backward", "--rendezvous", "c10d")
    _assert_exact(found, victim, victim + 1)


@pytest.mark.full
def test_one_of_four_nodes(recover: Callable[..., Drilled]) -> None:
    _assert_exact(recover("node@0:7:backward", "--nodes", "4"), 0)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["kill@0:7:backward", "kill@2:7:update"])
def test_the_only_rank_of_a_node(recover: Callable[..., Drilled], fault: str) -> None:
    """Its relay ends with it, and the next one has to find the controller that lives on: on node 0 the leading one."""
    _assert_exact(recover(fault, "--nodes", "4"), int(fault[5]))


@pytest.mark.full
def test_controllers_die_one_after_the_other(recover: Callable[..., Drilled]) -> None:
    faults = ("controller@0:4:data", "kill@1:5:clip", "controller@0:7:data", "kill@2:9:update")
    _assert_exact(recover(*faults), 1, 2)


@pytest.mark.full
def test_a_controller_dies_and_nothing_else(recover: Callable[..., Drilled]) -> None:
    found = recover("controller@3:7:commit")
    _assert_exact(found)
    assert found.report["recoveries"] == []


@pytest.mark.full
def test_the_launcher_of_a_node_dies_and_its_ranks_train_on(recover: Callable[..., Drilled]) -> None:
    _assert_exact(recover("agent@2:7:forward"))


@pytest.mark.full
@pytest.mark.parametrize("faults", [("node@2:7:backward",), ("controller@0:6:data", "kill@3:8:update")])
def test_without_another_node_the_others_save(drill: Callable[..., Drilled], faults: tuple[str, ...]) -> None:
    found = drill("--preset", "dump", *(word for fault in faults for word in ("--fault", fault)))
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert (report["steps_lost"], report["compared"]["different"]) == (0, 0)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short path, for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="tft"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.full
@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "namespaces can be made")
@pytest.mark.parametrize("victim", [0, 2])
def test_nodes_with_networks_of_their_own(
    references: Path, tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with netns.Network(2, short) as network:
        plan = _plan(network, f"node@{victim}:7:backward")
        report: Report = rehearse(plan, tmp_path, references, Quiet())
    assert report.verdict.value == "exact", (report.reasons, report.tail)
    assert report.processes_restarted == (victim, victim + 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "dtype", "faults"),
    [
        ("dp4", "fp32", ("node@0:7:backward",)),
        ("tp2dp2", "bf16", ("controller@0:6:data", "kill@3:8:update")),
    ],
)
def test_drills_stay_exact_with_tls(
    recover: Callable[..., Drilled], layout: str, dtype: str, faults: tuple[str, ...]
) -> None:
    found = recover(*faults, "--layout", layout, "--dtype", dtype, "--nodes", "2", "--tls")
    _assert_exact(found, *((0, 1) if "node" in faults[0] else (3,)))


@pytest.mark.full
@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "namespaces can be made")
def test_nodes_that_know_each_other_by_certificates(
    references: Path, tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of the first controller is replaced: relays, successor and newcomer meet over mutual TLS only."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    authority = Authority.create(tmp_path / "certs")
    with netns.Network(2, short) as network:
        for host in network:
            authority.node(host.name, [host.address])
        plan = _plan(network, tls_dir=str(authority.directory))
        report: Report = rehearse(plan, tmp_path, references, Quiet())
    assert report.verdict.value == "exact", (report.reasons, report.tail)
    assert report.processes_restarted == (0, 1)
    log = (tmp_path / "broken.log").read_text()
    assert "--tft-insecure" not in log
    assert re.search(r"controller \d on host \S+ leads now", log)  # that of the newcomer, where it was there in time


@pytest.mark.full
@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "namespaces can be made")
def test_a_node_with_another_certificate_does_not_begin(
    references: Path, tmp_path: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: TLS is really in the way of whoever has no certificate."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    authority = Authority.create(tmp_path / "certs")
    with netns.Network(2, short) as network:
        authority.node(network[0].name, [network[0].address])
        other = network[1].name
        authority.node("elsewhere").rename(authority.directory / other)
        plan = _plan(network, tls_dir=str(authority.directory), timeout=60.0)  # the other node waits in vain
        report: Report = rehearse(plan, tmp_path, references, Quiet())
    assert report.verdict.value != "exact"
    words = f"node.crt is for elsewhere, and the others want to see {other}"
    assert words in (tmp_path / "broken.log").read_text()
