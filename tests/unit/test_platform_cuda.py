"""What an online repair asks of a GPU, and that the other platforms have nothing to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mindspeed_tft.platforms import cpu, cuda_names
from mindspeed_tft.platforms import cuda as cuda_platform
from mindspeed_tft.platforms.base import Platform
from mindspeed_tft.platforms.cpu import CpuPlatform
from mindspeed_tft.platforms.cuda import CudaPlatform

HAS_GPU = bool(cuda_names.original(torch.cuda, "is_available")())


@pytest.fixture
def cuda() -> Iterator[CudaPlatform]:
    """On a real GPU where there is one, else on the names of CUDA that mean the CPU."""
    if not HAS_GPU:
        cpu.install()
    yield CudaPlatform()
    if not HAS_GPU:
        cpu.uninstall()


def test_the_default_stream_becomes_current(cuda: CudaPlatform) -> None:
    side = torch.cuda.Stream()
    torch.cuda.set_stream(side)
    assert torch.cuda.current_stream() == side != torch.cuda.default_stream()  # control: it was another one
    cuda.default_streams()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_an_error_of_the_device_is_passed_on_unchanged(cuda: CudaPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered")

    def fail(stream: Any) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "set_stream", fail)
    with pytest.raises(RuntimeError) as caught:
        cuda.default_streams()
    assert caught.value is error


@pytest.mark.parametrize("platform", [CudaPlatform(), CpuPlatform()], ids=lambda platform: platform.name)
def test_nothing_to_stop_restart_or_make_safe(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls nothing of torch's device at all: it may run on any thread, while the device is in any state."""
    for name in ("synchronize", "current_device", "set_stream", "empty_cache", "init"):
        monkeypatch.delattr(torch.cuda, name)
    tensor = torch.arange(3.0)
    assert platform.why_no_repair({"PYTORCH_NO_NPU_MEMORY_CACHING": "1"}) is None
    platform.claim_device()
    platform.stop_device()
    platform.stop_device()
    platform.restart_device()
    assert platform.damaged_memory() == "some"
    assert platform.make_safe([tensor]) == 0
    group: Any = object()
    assert platform.rebuild_in_place(group) is False
    assert tensor.tolist() == [0.0, 1.0, 2.0]


def test_the_cpu_has_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "set_stream")
    CpuPlatform().default_streams()


@pytest.mark.parametrize("first", ["ib0", None])
def test_nccl_is_told_of_its_interface(cuda: CudaPlatform, monkeypatch: pytest.MonkeyPatch, first: str | None) -> None:
    """By its environment, before communicators are made; and of the one from the start, if there was one."""
    monkeypatch.setattr(cuda_platform, "_STARTED_WITH", {})
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", first or "")
    if first is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    for link, expected in (("eth1", "=eth1"), ("eth2,eth3", "=eth2,eth3"), ("", first)):
        assert cuda.switch_link(link, range(2)) is False
        assert os.environ.get("NCCL_SOCKET_IFNAME") == expected
