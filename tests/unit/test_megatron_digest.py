"""What of Megatron's optimizers belongs to the hash of a shard, with optimizers that count updates in either place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_tft.patches import megatron_digest
from mindspeed_tft.patches.apex_on_cpu import FusedAdam
from mindspeed_tft.recovery.stamps import Stamps
from mindspeed_tft.replica.digest import digest

MINE, EMPTY = "tp0-pp0/dense/0", "tp0-pp0-ep0/expert/1"


class Host:
    """One optimizer, which is not sharded, and a shard of another one that has no parameters here."""

    def __init__(self, kind: Any) -> None:
        self.main = torch.nn.Parameter(torch.arange(20.0))
        self.inner = kind([self.main])
        self.optimizer = SimpleNamespace(optimizer=self.inner)

    def info(self) -> Any:
        return SimpleNamespace(holds=(MINE, EMPTY))

    def optimizer_of(self, shard: str) -> Any:
        return self.optimizer if shard == MINE else None

    def update(self) -> None:
        self.main.grad = torch.ones(20)
        self.inner.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdam])
def test_hashes_of_a_running_optimizer(kind: Any) -> None:
    """What the thread takes after each step is what a fresh look finds; holders that compute the same agree."""
    host, other = Host(kind), Host(kind)
    stamps = Stamps(lambda: megatron_digest.shards(host))  # type: ignore[arg-type]
    for step in range(1, 4):
        stamps.changing()
        host.update()
        other.update()
        stamps.changed()
        assert stamps.settle(20.0)
        assert stamps.known == stamps.now()
        assert stamps.known[MINE].endswith(f":{step}")
        assert stamps.known == {name: digest(found) for name, found in megatron_digest.shards(other).items()}  # type: ignore[arg-type]
    for tensor in (host.main, host.inner.state[host.main]["exp_avg"], host.inner.state[host.main]["exp_avg_sq"]):
        words = tensor.detach().view(torch.int32)
        words[7] ^= 1
        assert stamps.now()[MINE] != stamps.known[MINE]
        assert stamps.now()[EMPTY] == stamps.known[EMPTY]
        words[7] ^= 1
    assert stamps.now() == stamps.known


def test_before_the_first_step_there_are_no_moments() -> None:
    host = Host(torch.optim.AdamW)
    (found, nothing) = megatron_digest.shards(host).values()  # type: ignore[arg-type]
    assert [tensor.numel() for tensor in found.tensors] == [20]
    assert digest(found).endswith(":")
    assert not nothing.tensors
