"""NVIDIA GPUs, by torch.cuda and nccl."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from mindspeed_tft.platforms import cuda_names
from mindspeed_tft.platforms.base import Platform

_BESIDE: dict[int, Any] = {}  # device to the stream of what runs beside training
_INTERFACE = "NCCL_SOCKET_IFNAME"
_STARTED_WITH: dict[str, str | None] = {}  # what the environment said before the first switch


class CudaPlatform(Platform):
    """A GPU has no order that aborts its work: a thread that waits in a collective is freed by the abort of the
    communicator, and there is nothing to restart. Which tensors an ECC error has hit is not told, hence "some"."""

    name = "cuda"
    backend = "nccl"
    device_type = "cuda"

    def why_unavailable(self) -> str | None:
        if torch.version.cuda is None and torch.version.hip is None:
            return "this build of torch has no CUDA"
        # Not torch.cuda.is_available: once the names are mapped onto the CPU, that one says yes.
        is_available: Any = cuda_names.original(torch.cuda, "is_available")
        return None if is_available() else "torch finds no usable GPU"

    def description(self) -> str:
        return f"{torch.cuda.get_device_name()} (CUDA {torch.version.cuda})"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def beside(self) -> Callable[[], AbstractContextManager[Any]]:
        device = torch.cuda.current_device()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        @contextmanager
        def stream() -> Iterator[None]:
            torch.cuda.set_device(device)  # of this thread: another thread's is device 0
            if device not in _BESIDE:  # each stream has a cache of memory of its own
                _BESIDE[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            own = _BESIDE[device]
            own.wait_event(done)
            with torch.cuda.stream(own):
                yield

        return stream

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def switch_link(self, link: str, ranks: Sequence[int]) -> bool:
        """nccl reads the name of its interface when a communicator is made."""
        _STARTED_WITH.setdefault(_INTERFACE, os.environ.get(_INTERFACE))
        first = _STARTED_WITH[_INTERFACE]
        if link:
            os.environ[_INTERFACE] = f"={link}"  # exactly these: without the sign they are beginnings of names
        elif first is not None:
            os.environ[_INTERFACE] = first
        else:
            os.environ.pop(_INTERFACE, None)
        return False

    def default_streams(self) -> None:
        torch.cuda.set_stream(torch.cuda.default_stream())
