"""Real Megatron moves to another network link while it trains, and back, and every byte is as if nobody had touched it.

All are marked `full`; what the groups do on the way is in tests/unit/test_link_processes.py, which runs always.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import netns
import psutil
import pytest

from mindspeed_tft.faults import gpt_job, inject
from mindspeed_tft.faults.plans import Plan, plugin_flags
from mindspeed_tft.faults.spec import format_faults, parse_fault, parse_layout

from .test_operate import PATIENCE, Operated

pytestmark = [pytest.mark.megatron, pytest.mark.full]
MOST_ELSEWHERE = 0.1  # of the traffic: the job's store, and the control plane


class Switched(Operated):
    """A job that starts on one link, with faults if the plan has some."""

    network: netns.Network
    started_on = "eth0"
    flags: tuple[str, ...] = ()  # of the plugin

    def _go(self) -> None:
        places = ("--save", str(self.dump), "--save-interval", str(self.plan.steps + 1))
        flags = (*plugin_flags(self.plan), *places, *self.flags)
        env = {
            "XDG_RUNTIME_DIR": str(self.place),
            "GLOO_SOCKET_IFNAME": self.started_on,
            gpt_job.ENV_STEPS: str(self.broken_steps),
            inject.ENV_FAULTS: format_faults(self.plan.faults),
            inject.ENV_SEED: str(self.plan.seed),
            inject.ENV_LOG: str(self.fault_log),
        }
        self.end = self._run("operated", gpt_job.WITH_PLUGIN, flags, env, self.plan.launcher)

    def link(self) -> dict[str, str]:
        found: dict[str, str] = self.status()["link"]
        return found

    def traffic(self) -> list[int]:
        """Bytes of eth0 and of eth1, on both hosts together."""
        return [sum(host.bytes(f"eth{number}") for host in self.network) for number in (0, 1)]

    def steps_go_over(self, number: int, since: list[int], steps: int) -> None:
        """Since that look, so many steps at least were trained over this interface and not over the other one."""
        grown = [now - before for now, before in zip(self.traffic(), since, strict=True)]
        assert grown[number] > steps * 1_000_000 and grown[1 - number] < MOST_ELSEWHERE * grown[number], grown

    def is_exact(self, reference: Path) -> None:
        end = self.finished()
        assert (end.returncode, end.leftover) == (0, ()), end.tail()
        assert self.saved_equals(reference, self.plan.steps).different == 0


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path, for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="tft", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def network() -> Iterator[netns.Network]:
    if reason := netns.why_not():
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(prefix="tft", dir="/tmp") as folder,
        netns.Network(2, Path(folder), links=2) as made,
    ):
        yield made


def on_two_hosts(network: netns.Network, place: Path, tmp_path: Path, references: Path, **more: Any) -> Switched:
    plan = Plan(
        parse_layout("dp4"), more.pop("faults", ()), timeout=PATIENCE, launcher="tftrun", nodes=2,
        hosts=tuple(host.words() for host in network), master=network[0].address, **more,
    )  # fmt: skip
    made = Switched(plan, tmp_path / "job", references, place)
    made.network = network
    return made


def test_under_load_to_the_other_interface_and_back(
    network: netns.Network, place: Path, tmp_path: Path, references: Path
) -> None:
    job = on_two_hosts(network, place, tmp_path, references, steps=20)
    reference = job.reference()
    job.start()
    moved = job.ask("switch-link", link="eth1")
    assert moved.ok and moved.data["link"] == "eth1" and moved.data["before"] == "default", moved
    before, step = job.traffic(), moved.data["step"]
    paused = job.ask("pause", step=str(step + 5))
    assert paused.ok, paused
    job.steps_go_over(1, before, paused.data["step"] - step)
    told = json.loads(job.tftctl("status", "--json").stdout)["link"]
    assert (told["name"], told["before"], told["since"]) == ("eth1", "default", moved.data["since"])
    back = job.tftctl("switch-back", "--json")  # while it is paused, which it stays
    assert back.returncode == 0 and json.loads(back.stdout)["data"]["link"] == "default", back
    assert job.status()["pause"]["paused"]
    before, step = job.traffic(), paused.data["step"]
    assert job.ask("resume").ok
    paused = job.ask("pause", step=str(step + 5))
    job.steps_go_over(0, before, paused.data["step"] - step)
    assert job.ask("resume").ok
    job.is_exact(reference)


def test_a_link_that_does_not_work_is_left_again_and_training_goes_on(
    network: netns.Network, place: Path, tmp_path: Path, references: Path
) -> None:
    job = on_two_hosts(network, place, tmp_path, references, steps=20)
    job.flags = ("--tft-deadline", "40")  # the time that a group may take is a share of it
    reference = job.reference()
    network.cut(1, link=1)
    job.start()
    failed = job.ask("switch-link", link="eth1")
    assert not failed.ok and "could not build the groups on link eth1" in failed.text, failed
    assert failed.text.endswith("Link default is put back, and tested")
    assert job.ask("pause").ok
    down = job.tftctl("switch-link", "eth7")
    assert down.returncode == 7 and "nothing was changed" in down.stderr and "eth7 is not on host" in down.stderr
    loopback = job.tftctl("switch-link", "lo")
    assert (
        loopback.returncode == 7 and "the hosts node0, node1 have the same address on it, 127.0.0.1" in loopback.stderr
    )
    assert job.link() == {"name": "default"} and job.status()["incidents"] == 0
    assert job.ask("resume").ok
    job.is_exact(reference)


def test_a_process_that_dies_afterwards_is_replaced_on_the_new_link(
    network: netns.Network, place: Path, tmp_path: Path, references: Path
) -> None:
    faults = (parse_fault("kill@1:8:update"),)
    job = on_two_hosts(network, place, tmp_path, references, faults=faults, preset="recover", steps=16)
    reference = job.reference()
    job.start()
    moved = job.ask("switch-link", link="eth1")
    assert moved.ok and moved.data["step"] < 8, moved
    paused = job.ask("pause", step="9")
    assert paused.ok, paused
    status = job.status()
    assert status["incidents"] == 1 and status["link"]["name"] == "eth1"
    before = job.traffic()
    assert job.ask("resume").ok
    assert job.ask("pause", step="14").ok
    job.steps_go_over(1, before, 4)
    assert job.ask("switch-back").ok  # the newcomer takes part, and knows where to
    assert job.link()["name"] == "default"
    assert job.ask("resume").ok
    job.is_exact(reference)


@pytest.mark.parametrize(
    ("layout", "dtype", "extra"),
    [
        ("tp2dp2", "bf16", ("--overlap-grad-reduce", "--overlap-param-gather")),
        ("pp2dp2", "fp32", ()),
    ],
)
def test_all_groups_of_other_layouts(
    place: Path, tmp_path: Path, references: Path, layout: str, dtype: str, extra: tuple[str, ...]
) -> None:
    """On one host: from the loopback interface to another one that it has, and back, twice."""
    others = [name for name, state in psutil.net_if_stats().items() if state.isup and name != "lo"]
    if not others or not any(entry.family == 2 for entry in psutil.net_if_addrs()[others[0]]):
        pytest.skip("this host has no interface but loopback")
    plan = Plan(parse_layout(layout), (), dtype=dtype, timeout=PATIENCE, extra=extra)
    job = Switched(plan, tmp_path / "job", references, place)
    job.started_on = "lo"
    reference = job.reference()
    job.start()
    for link in (others[0], "default", others[0]):
        moved = job.ask("switch-link", link=link)
        assert moved.ok and moved.data["groups"] > 3, moved
    assert job.ask("switch-back").ok
    job.is_exact(reference)


def test_the_controller_dies_in_the_middle(
    network: netns.Network, place: Path, tmp_path: Path, references: Path
) -> None:
    """Nobody knows what became of the move: the next controller has all groups built anew, and training goes on. Who
    asked gets an answer, from that one."""
    job = on_two_hosts(network, place, tmp_path, references, preset="retry", steps=16)
    job.flags = ("--tft-deadline", "60")
    reference = job.reference()
    network.cut(1, link=1)  # so that the move takes its time
    job.start()
    told = job.status()
    asking = subprocess.Popen(
        [sys.executable, "-m", "mindspeed_tft.cli.main", "switch-link", "eth1", "--json"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(place)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    while job.status()["epoch"] == 0:  # of the groups: the move has begun
        time.sleep(0.02)
    os.kill(told["controller"]["pid"], signal.SIGKILL)
    answer, _ = asking.communicate(timeout=PATIENCE)
    assert not json.loads(answer)["ok"], answer
    job.is_exact(reference)
    reports = [json.loads(path.read_text()) for path in (job.dump / "tft_incidents").glob("incident-*.json")]
    assert any("the controller was lost while collectives moved" in each["summary"] for each in reports), reports
