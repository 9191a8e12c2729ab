"""Small states travel as bytes without pickle and come out the same, to the last bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_tft.encode import EncodeError
from mindspeed_tft.recovery.record import SmallState


def state(**changes: Any) -> SmallState:
    values: dict[str, Any] = {
        "step": 6,
        "rng": {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "rng_tracker_states": {"model-parallel-rng": torch.tensor([1, 255], dtype=torch.uint8)},
        },
        "counters": {"curr_iteration": 5, "consumed_train_samples": 96},
        "scheduler": {"max_lr": 1e-3, "num_steps": 96, "lr_decay_style": "cosine", "override": None, "on": True},
        "scalers": [{"scale": torch.tensor([65536.0]), "growth_tracker": 3}, {}],
        "flops": 1.0 / 3.0 * 1e15,
    }
    return SmallState(**{**values, **changes})


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if torch.is_tensor(one):
        assert (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


def test_a_state_comes_back_bit_by_bit() -> None:
    before = state()
    after = SmallState.from_bytes(before.to_bytes())
    for name in ("step", "rng", "counters", "scheduler", "scalers", "flops"):
        assert_same(getattr(before, name), getattr(after, name))


def test_the_generators_go_on_as_they_would_have() -> None:
    after = SmallState.from_bytes(state().to_bytes())
    expected = (random.random(), np.random.rand(), torch.rand(1))
    random.setstate(after.rng["random_rng_state"])
    np.random.set_state(after.rng["np_rng_state"])
    torch.set_rng_state(after.rng["torch_rng_state"])
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0, 3), torch.ones(2, 3).t(), torch.tensor(True)],
)
def test_tensors_of_any_form(tensor: torch.Tensor) -> None:
    assert_same(SmallState.from_bytes(state(scalers=[{"x": tensor}]).to_bytes()).scalers[0]["x"], tensor.contiguous())


def test_what_has_no_encoding_is_named() -> None:
    with pytest.raises(EncodeError, match="a object has no encoding"):
        state(counters={"odd": object()}).to_bytes()


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"\x80\x04", state().to_bytes()[:-9], b'{"step": {"tensor": "load"}}']
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(EncodeError):
        SmallState.from_bytes(data)
