"""A rank's side of another link, without a network: what it looks up, what it remembers, how it says that it cannot."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from mindspeed_tft.engine.types import LinkState, Order, OrderKind
from mindspeed_tft.groups import links
from mindspeed_tft.groups.links import LinkUnusable
from mindspeed_tft.patches import megatron_link, torch_distributed
from mindspeed_tft.patches.megatron_host import MegatronHost
from mindspeed_tft.platforms.cpu import CpuPlatform
from mindspeed_tft.platforms.npu import NpuPlatform
from mindspeed_tft.recovery.hold import NotDone
from mindspeed_tft.recovery.link import Links
from tests.unit.fake_torch_npu import Cann, FakeTorchNpu

LOOPBACK = next(name for name, all_ in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in all_))


def test_addresses_of_links() -> None:
    assert links.addresses("") == ()
    found = links.addresses(LOOPBACK)
    assert found[0] == "127.0.0.1" and links.addresses(f"{LOOPBACK},{LOOPBACK}") == found + found
    assert links.name_of("127.0.0.1") == LOOPBACK and links.name_of("203.0.113.9") == ""
    assert links.words(LOOPBACK) == f"link {LOOPBACK}" and links.words("") == "the default link"


@pytest.mark.parametrize("name", ["eth/1", "an-endless-interface", "eth1:2", "eth1,,eth2", " "])
def test_names_that_no_interface_can_have(name: str) -> None:
    with pytest.raises(LinkUnusable, match="cannot be the name of a network interface"):
        links.interfaces(name)


def test_an_interface_that_is_not_there_or_down(monkeypatch: pytest.MonkeyPatch) -> None:
    here = socket.gethostname()
    with pytest.raises(LinkUnusable, match=f"interface tft-none is not on host {here}, which has .*{LOOPBACK}"):
        links.addresses("tft-none")
    down = psutil.net_if_stats()[LOOPBACK]._replace(isup=False)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {LOOPBACK: down, "bare0": down._replace(isup=True)})
    with pytest.raises(LinkUnusable, match=f"interface {LOOPBACK} of host {here} is down"):
        links.addresses(LOOPBACK)
    with pytest.raises(LinkUnusable, match=f"interface bare0 of host {here} has no address"):
        links.addresses("bare0")


def test_addresses_are_compared_as_the_kernel_means_them() -> None:
    assert [links.plain(text) for text in ("fe80::1%eth0", "::ffff:10.1.2.3", "10.1.2.3")] == [
        "fe80::1", "10.1.2.3", "10.1.2.3",
    ]  # fmt: skip


def test_groups_that_cannot_be_built_anew_cannot_be_moved(tmp_path: Path) -> None:
    """As those on nccl are; here plain groups on gloo, made while the feature is off, stand for them."""
    assert megatron_link.check(CpuPlatform(), LOOPBACK)[0] == "127.0.0.1"
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(LinkUnusable, match="groups on gloo cannot be built anew by this version"):
            megatron_link.check(CpuPlatform(), LOOPBACK)
    finally:
        dist.destroy_process_group()


def test_the_device_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTorchNpu()
    Cann(monkeypatch)
    monkeypatch.setitem(sys.modules, "torch_npu", fake.module)
    with pytest.raises(LinkUnusable, match="hccl knows the links main and backup"):
        megatron_link.check(NpuPlatform(), LOOPBACK)
    assert megatron_link.check(NpuPlatform(), "backup") == []


def test_a_device_with_links_of_its_own_moves_no_group_on_gloo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither there, nor back to how it started, nor when the groups are built anew on that link after a fault."""
    fake, table = FakeTorchNpu(), torch_distributed.table()
    Cann(monkeypatch)
    fake.set_device(0)
    monkeypatch.setitem(sys.modules, "torch_npu", fake.module)
    monkeypatch.setattr(table, "link", "")
    monkeypatch.setattr(table, "audit", None)
    host = MegatronHost(NpuPlatform())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for epoch, link in enumerate(("backup", ""), start=1):
            assert host.check_link(link) == []
            host.move_groups(link, 2 * epoch, seconds=1.0)
            host.regroup(2 * epoch + 1, link)
            assert table.link == ""
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ orders


class Groups:
    """The framework's side: notes what is asked, and refuses when told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.refusal = ""

    def _note(self, *words: object) -> None:
        self.asked.append(words)
        if self.refusal:
            raise RuntimeError(self.refusal)

    def check_link(self, link: str) -> list[str]:
        self._note("check", link)
        return ["10.78.0.1", "fe80::1"]

    def move_groups(self, link: str, epoch: int, seconds: float) -> None:
        self._note("move", link, epoch, seconds)

    def test_groups(self, seconds: float) -> dict[str, str]:
        self._note("test", seconds)
        return {"groups": "3"}


KEPT = {"name": "eth1", "before": "eth0", "since": "2026-12-01T00:00:00", "epoch": "4"}


class Rank:
    def __init__(self) -> None:
        self.host, self.told = Groups(), list[LinkState]()
        self.links = Links(self.host, self.told.append)

    def order(self, act: str, **payload: str | int | dict[str, str]) -> dict[str, str]:
        return self.links.carry_out(Order(1, 0, OrderKind.LINK, {"act": act, **payload}))


def test_a_link_is_remembered_when_it_is_kept_and_not_before() -> None:
    rank = Rank()
    assert rank.order("check", link="eth1") == {"addresses": "10.78.0.1,fe80::1"}
    assert rank.order("move", link="eth1", epoch=4, seconds="2.5") == {}
    assert rank.told == [LinkState(unsettled=4)]  # another controller has to know that this has no end yet
    tested = rank.order("test", seconds="20")
    assert tested["groups"] == "3" and tested["at"].endswith("+00:00")
    assert rank.links.state == LinkState(unsettled=4)
    assert rank.order("keep", link=KEPT) == {}
    assert rank.told[-1] == rank.links.state == LinkState("eth1", "eth0", "2026-12-01T00:00:00", 4)
    assert rank.host.asked == [("check", "eth1"), ("move", "eth1", 4, 2.5), ("test", 20.0)]


def test_a_move_back_settles_it_once_it_is_tested() -> None:
    rank = Rank()
    rank.order("keep", link=KEPT)
    rank.host.refusal = "Connect timeout\nand much more"
    with pytest.raises(NotDone, match=r"^Connect timeout$"):
        rank.order("move", link="eth2", epoch=5, seconds="2")
    assert rank.links.state.unsettled == 5
    rank.host.refusal = ""
    rank.order("move", link="eth1", epoch=6, seconds="2")
    assert rank.links.state.unsettled == 6
    rank.order("test", seconds="20")
    assert rank.links.state == LinkState("eth1", "eth0", "2026-12-01T00:00:00", 4)


def test_a_regroup_says_which_link_it_is() -> None:
    rank = Rank()
    rank.order("move", link="eth1", epoch=5, seconds="2")
    rank.links.settle(KEPT)
    assert rank.told[-1] == LinkState("eth1", "eth0", "2026-12-01T00:00:00", 4)
    rank.links.settle(None)  # the job was never moved, as far as its controller knows
    assert rank.told[-1] == LinkState()


def test_an_act_of_a_later_version() -> None:
    with pytest.raises(NotDone, match="unknown act 'dance'"):
        Rank().order("dance")
