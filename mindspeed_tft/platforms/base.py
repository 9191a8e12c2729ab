"""What a device platform must be able to do for the plugin.

One subclass a platform (npu, cuda, cpu), and nothing outside `mindspeed_tft.platforms` names a device. It is not a
device abstraction for models: it holds only what recovery needs, and it grows only when recovery needs more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:  # a torch that only looks like it may lack them
    import torch
    from torch.distributed import ProcessGroup

# What a memory error has hit: no live tensor; some tensors (which ones is not asked: all of this rank are replaced);
# or memory that this process cannot give back, so that nothing on this device can be trusted or repaired.
Damage = Literal["none", "some", "lost"]
Reason = tuple[str, str]  # why something cannot be, and the remedy


class Platform(ABC):
    """A kind of device, seen from the rank that runs on one. Instances hold no state of a job.

    What is not abstract has a default that is right for a device without work of that kind. Errors of the device are
    passed on unchanged, because their text tells what kind of fault they are.
    """

    name: ClassVar[str]  # as in --tft-platform
    backend: ClassVar[str]  # of torch.distributed
    device_type: ClassVar[str]  # of the tensors: torch.device(device_type)
    unproved: ClassVar[str] = ""  # what the user of this platform has to know of its proof
    stops: ClassVar[bool] = False  # the device itself frees a thread from a collective of `backend`
    links: ClassVar[tuple[str, ...]] = ()  # that the device has itself; all others are network interfaces of the host

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

    def translate_cuda(self) -> None:  # noqa: B027  # where CUDA's names mean what they say, or are mapped elsewhere
        """Have CUDA's names mean this device, for a program that was written for them. Before it uses any."""

    def beside(self) -> Callable[[], AbstractContextManager[Any]] | None:
        """For the main thread: a context in which another thread may read, without holding up training, what the
        device was told to compute until now. None: no such way is proved on this device."""
        return None

    def moment(self) -> int:
        """Microseconds on the clock that the device's errors are dated with, now that all is done which it was told on
        the current stream (and which is waited for). 0: it has no such clock."""
        return 0

    # ------------------------------------------------------- at start-up: what cannot be, and the remedy

    def why_no_abort(self, backend: str) -> Reason | None:
        """Why a rank of a job with this `--distributed-backend` cannot be taken out of a collective; None when it
        can."""
        if backend == "gloo":
            return None
        return (
            f"a rank cannot be taken out of a collective of {backend} in this version yet, so survivors could not save",
            "use --distributed-backend gloo, or train without --enable-high-availability",
        )

    def why_no_repair(self, environ: Mapping[str, str]) -> Reason | None:
        """Why this device, with this environment, cannot be repaired online; None when it can."""
        return None

    # ------------------------------------------------------- online repair, in the order in which it is asked for

    def claim_device(self) -> None:  # noqa: B027  # nothing to do is an answer, here and below
        """Remember the current device of the calling thread as that of this rank.

        For the main thread, once it has chosen its device and before `stop_device` may come: the current device
        belongs to a thread, and that of another thread is device 0, which is some other rank's.
        """

    def share_device(self) -> None:  # noqa: B027
        """Make the device that `claim_device` remembered current on the calling thread, too: for functions of others
        that run on a thread of ours, and ask for the current device."""

    def stop_device(self) -> None:  # noqa: B027
        """Free a main thread that sits in a device operation; called from the control plane's worker thread, and by
        the main thread of a rank whose memory failed, before `damaged_memory`.

        Returns when the device has taken the order; the main thread gets an error in its own time. From here until
        `restart_device` every operation on the device fails. Again is harmless.

        Raises:
            RuntimeError: the device refuses, or `claim_device` was not called.
        """

    def default_streams(self) -> None:  # noqa: B027
        """Make the default stream current on the calling thread, whatever stream a broken step left it on."""

    def damaged_memory(self) -> Damage:
        """Ask the device what a memory error has hit; where it cannot tell, "some".

        For the main thread of the rank that had the error: after `stop_device`; after everything that the broken
        step held was released, because memory that is still in use counts as hit; and before `restart_device`, which
        clears what the device knows. May give cached memory back to the device.
        """
        return "some"

    def restart_device(self) -> None:  # noqa: B027
        """Make a stopped device usable again, and its memory too, with the content of all healthy tensors kept.

        For the main thread of every stopped rank, after each stop and before anything else is asked of the device:
        while the groups of the broken epoch still have their backends, and before new ones are built.
        """

    def rebuild_in_place(self, group: ProcessGroup) -> bool:
        """Whether the device rebuilds the links of `group` below the backend that it has; it has then let go of the
        old ones. False, with nothing done: the group needs a new backend.

        No rank may communicate on the group before all its members are back from this call: a late one would delete
        what a quick one has published for the new links.
        """
        return False

    def make_safe(self, tensors: Iterable[torch.Tensor]) -> int:
        """Tell the device, after `restart_device`, that the content of these tensors is about to be replaced, so that
        it lets damaged ones be written. Returns how many it was told.

        It counts for all the memory that a tensor shares: who names one view of a buffer replaces the whole buffer,
        or what the others read is damaged and nobody says so.
        """
        return 0

    # ------------------------------------------------------- another link, between two steps

    def why_no_link(self, link: str) -> str | None:
        """Why the device's communication cannot use `link` ("": as at the start), and the remedy; None when it can, or
        when only the host knows."""
        return None

    def switch_link(self, link: str, ranks: Sequence[int]) -> bool:
        """Let the device's communication use `link` from now on; all `ranks` of the job call it, none communicates.
        True: done, on the groups as they are. False: it counts for groups that are built from now on.

        Raises:
            RuntimeError: the device refuses.
        """
        return False

    # ------------------------------------------------------- a test of the device, while all ranks are held

    def why_no_stress(self, kind: str) -> str | None:
        """Why the device cannot be put under stress of this kind, and the remedy; None when it can."""
        return f"{self.name} has no stress test of its own (use the vendor's tools outside the job)"

    def stress(self, kind: str) -> None:
        """Put this rank's device under stress, for minutes; nothing else runs on it meanwhile.

        Raises:
            RuntimeError: the device failed, or cannot be tested.
        """
        raise RuntimeError(self.why_no_stress(kind))
