"""An optimizer that is not sharded, as shards: taken out and put back, bit by bit; hashed where it lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_tft.patches import megatron_kinds
from mindspeed_tft.patches.apex_on_cpu import FusedAdam
from mindspeed_tft.replica.digest import Shard, digest


def optimizer(seed: int, steps: int = 0) -> Any:
    """With two groups, as Megatron's mixed-precision optimizer has it: a wrapper around Adam."""
    torch.manual_seed(seed)
    shapes = [[(3, 5), (7,)], [(2, 2)]]
    groups = [{"params": [torch.nn.Parameter(torch.randn(shape)) for shape in of_group]} for of_group in shapes]
    inner = FusedAdam(groups, lr=0.01)
    for _ in range(steps):
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            parameter.grad = torch.randn_like(parameter)
        inner.step()
    return SimpleNamespace(optimizer=inner)


def tensors(of: Any) -> list[torch.Tensor]:
    kind = megatron_kinds.of(of)
    assert kind is megatron_kinds.WHOLE
    return kind.in_place(of)


def test_what_is_taken_out_and_put_in_elsewhere_is_the_same() -> None:
    one, other = optimizer(1, steps=3), optimizer(2)  # the other one has made no step yet: it has no moments
    assert len(tensors(other)) == 3
    shard = megatron_kinds.WHOLE.take(one)
    assert {name: tuple(tensor.shape) for name, tensor in shard.items() if name.startswith("0/0")} == {
        "0/0/param": (15,), "0/0/exp_avg": (15,), "0/0/exp_avg_sq": (15,),
    }  # fmt: skip
    megatron_kinds.WHOLE.put(other, shard, with_state=True)
    assert len(tensors(other)) == 9
    assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))
    assert digest(Shard(tensors(one))) == digest(Shard(tensors(other)))


def test_a_shard_is_a_copy() -> None:
    one = optimizer(1, steps=1)
    shard = megatron_kinds.WHOLE.take(one)
    before = shard["1/0/param"].clone()
    tensors(one)[2].fill_(float("nan"))
    assert torch.equal(shard["1/0/param"], before)


def test_before_the_first_step_moments_are_forgotten() -> None:
    one, other = optimizer(1, steps=2), optimizer(2)
    megatron_kinds.WHOLE.put(one, megatron_kinds.WHOLE.take(other), with_state=False)
    assert len(tensors(one)) == 3
    assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def test_a_shard_of_another_optimizer_is_noticed() -> None:
    shard = megatron_kinds.WHOLE.take(optimizer(1))
    with pytest.raises(KeyError):
        megatron_kinds.WHOLE.put(optimizer(2), {name: t for name, t in shard.items() if "1/0" not in name}, True)


def test_the_optimizer_of_experts_is_known_by_its_groups() -> None:
    dense, expert = optimizer(1), optimizer(2)
    dense.optimizer.param_groups[0]["is_expert_parallel"] = False
    expert.optimizer.param_groups[0]["is_expert_parallel"] = True
    assert not megatron_kinds.is_expert(dense)
    assert megatron_kinds.is_expert(expert)


@pytest.mark.parametrize("asks_megatron", [False, True])
def test_a_look_at_moments_that_do_not_exist_makes_none(asks_megatron: bool) -> None:
    """Megatron loads a checkpoint's moments only into an optimizer that has some, or has no state at all."""
    one = optimizer(1)
    parameter = one.optimizer.param_groups[0]["params"][1]
    one.model_param_group_index_map = {parameter: (0, 1)}
    if asks_megatron:
        one._get_main_param_and_optimizer_states = lambda _: {"param": parameter, **one.optimizer.state[parameter]}
    assert list(megatron_kinds.main_and_state(one, parameter)) == ["param"]
    assert len(one.optimizer.state) == 0
