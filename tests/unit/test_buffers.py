"""Buffers that a step changes by itself: read, and written back bit by bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_tft.patches import megatron_buffers
from mindspeed_tft.patches.megatron_buffers import Buffers


class Router(torch.nn.Module):
    """Two buffers, as Megatron's router has them: one of them is saved in checkpoints."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("expert_bias", torch.arange(4, dtype=torch.float32).to(dtype))
        self.register_buffer("counts", torch.zeros((), dtype=torch.long), persistent=False)


def model(*modules: torch.nn.Module) -> list[Any]:
    """Chunks as Megatron has them: a wrapper around each."""
    return [SimpleNamespace(module=module, modules=module.modules) for module in modules]


def test_what_was_read_is_written_back() -> None:
    chunks = model(torch.nn.Sequential(Router(), Router()), Router())
    buffers = Buffers(chunks)
    before = buffers.read()
    names = {f"{place}.{name}" for place in ("0/0", "0/1", "1/") for name in ("expert_bias", "counts")}
    assert set(before) == names
    for chunk in chunks:
        for buffer in chunk.module.buffers():
            buffer.add_(1)
    assert before["1/.expert_bias"].tolist() == [0, 1, 2, 3]  # copies
    assert buffers.read()["1/.expert_bias"].tolist() == [1, 2, 3, 4]
    buffers.write(before)
    found = buffers.read()
    assert all(torch.equal(found[name], value) for name, value in before.items())


def test_a_buffer_takes_the_type_of_what_it_is_given() -> None:
    """In bf16, the bias of a process that has made no forward pass yet would lose bits."""
    given, newcomer = model(Router()), model(Router(torch.bfloat16))
    given[0].module.expert_bias.fill_(0.1)
    Buffers(newcomer).write(Buffers(given).read())
    assert torch.equal(newcomer[0].module.expert_bias, given[0].module.expert_bias)


def test_a_buffer_has_the_type_of_its_first_step_before_it() -> None:
    class Changing(Router):
        def _maintain_float32_expert_bias(self) -> None:
            self.expert_bias.data = self.expert_bias.data.float()

    found = Buffers(model(Changing(torch.bfloat16))).read()
    assert found["0/.expert_bias"].dtype is torch.float32


def test_tables_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    chunks = model(Router())
    chunks[0].module.register_buffer("table", torch.zeros(megatron_buffers.LARGEST // 4 + 1))
    assert "0/.table" not in Buffers(chunks).read()
    assert "0/.table" in caplog.text


def test_a_model_without_buffers_has_nothing_to_read() -> None:
    assert Buffers(model(torch.nn.Linear(2, 2))).read() == {}
