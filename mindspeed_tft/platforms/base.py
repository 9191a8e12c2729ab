"""What a device platform must be able to do for the plugin.

One subclass a platform (npu, cuda, cpu), and nothing outside `mindspeed_tft.platforms` names a device. It is not a
device abstraction for models: it holds only what recovery needs, and it grows only when recovery needs more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch


class Platform(ABC):
    """A kind of device, seen from the rank that runs on one. Instances hold no state of a job."""

    name: ClassVar[str]  # as in --tft-platform
    backend: ClassVar[str]  # of torch.distributed
    device_type: ClassVar[str]  # of the tensors: torch.device(device_type)

    @abstractmethod
    def why_unavailable(self) -> str | None:
        """The reason why this process cannot use the platform, for an error message; None when it can."""

    def available(self) -> bool:
        return self.why_unavailable() is None

    @abstractmethod
    def description(self) -> str:
        """The device of this rank, in a few words for a person."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """State of the current device's default generator, as a byte tensor on the host."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Put back what `rng_state` returned."""

    @abstractmethod
    def memory_allocated(self) -> int:
        """Bytes that this process holds on the current device."""
