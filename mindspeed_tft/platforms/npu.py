"""Huawei Ascend NPUs, by torch_npu and hccl. All calls into torch_npu are in this module.

torch_npu is imported inside functions only: where there is no NPU it is not installed, and where there is one it takes
seconds and touches the device.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_tft.platforms.base import Damage, Platform

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)

# Every name of torch_npu that is used here, with the parameters that are passed, always by name.
NAMES: dict[str, tuple[str, ...]] = {
    "torch_npu.npu.is_available": (),
    "torch_npu.npu.get_device_name": (),
    "torch_npu.npu.synchronize": (),
    "torch_npu.npu.get_rng_state": (),
    "torch_npu.npu.set_rng_state": ("new_state",),
    "torch_npu.npu.memory_allocated": (),
    "torch_npu.npu.current_device": (),
    "torch_npu.npu.set_device": ("device",),
    "torch_npu.npu.default_stream": (),
    "torch_npu.npu.set_stream": ("stream",),
    "torch_npu.npu.stop_device": ("device_id",),
    "torch_npu.npu.check_uce_in_memory": ("device_id",),
    "torch_npu.npu.restart_device": ("device_id", "rebuild_all_resources"),
    "torch_npu.npu._recovery.update_npu_tensor_to_safe": ("tensor_obj",),
    "torch_npu.distributed.reinit_process_group": ("group", "rebuild_link"),
    "torch_npu.npu._comm_switch_nic": ("ranks", "useBackup"),
}
_SWITCH = "torch_npu.npu._comm_switch_nic"  # not needed for a repair
MAIN, BACKUP = "main", "backup"  # the two links that hccl knows for each device

# What check_uce_in_memory returns after a memory error. Codes that are not here prove nothing: the memory is lost.
DAMAGE: dict[int, Damage] = {
    # No address is on record. That is no proof of health: the record of a multi-bit error stays empty when the driver
    # does not answer the question for its addresses.
    0: "some",
    # The address is outside the pool of torch's allocator (communication buffers, the runtime's own): beyond repair.
    1: "lost",
    # It was in the pool, in a block that no tensor held, and which has just been given back: no live tensor was hit.
    2: "none",
    # It is in a block that is in use, now marked unsafe: reading it fails until `make_safe`. Also every multi-bit
    # ECC error, whatever it has hit.
    3: "some",
}

_CACHING_OFF = "PYTORCH_NO_NPU_MEMORY_CACHING"


class NpuPlatform(Platform):
    name = "npu"
    backend = "hccl"
    device_type = "npu"
    links = (MAIN, BACKUP)

    def __init__(self) -> None:
        self._device: int | None = None  # this rank's, as `claim_device` found it
        self._switched = False  # hccl was told of a link once

    def why_unavailable(self) -> str | None:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        try:
            available = _call("torch_npu.npu.is_available")
        except Exception as error:  # without a working CANN it fails in many ways: the reason is passed on
            return f"torch_npu cannot be imported ({type(error).__name__}: {error})"
        return None if available else "torch_npu finds no usable NPU"

    def description(self) -> str:
        return str(_call("torch_npu.npu.get_device_name"))

    def synchronize(self) -> None:
        _call("torch_npu.npu.synchronize")

    def rng_state(self) -> torch.Tensor:
        state: torch.Tensor = _call("torch_npu.npu.get_rng_state")
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        _call("torch_npu.npu.set_rng_state", new_state=state)

    def memory_allocated(self) -> int:
        return int(_call("torch_npu.npu.memory_allocated"))

    # ------------------------------------------------------------------------------------------- online repair

    def why_no_repair(self, environ: Mapping[str, str]) -> str | None:
        if _is_on(environ.get(_CACHING_OFF, "")):
            return (
                f"{_CACHING_OFF}={environ[_CACHING_OFF]} turns the caching allocator off, which alone knows whether a"
                " damaged address belongs to a tensor (unset it)"
            )
        needed = {name: parameters for name, parameters in NAMES.items() if name != _SWITCH}
        missing = [text for name, parameters in needed.items() if (text := _missing(name, parameters))]
        if missing:
            return f"the installed torch_npu does not have {', '.join(missing)} (install a version that has)"
        return None

    def claim_device(self) -> None:
        self._device = int(_call("torch_npu.npu.current_device"))

    def share_device(self) -> None:
        if self._device is not None:
            _call("torch_npu.npu.set_device", device=self._device)

    def stop_device(self) -> None:
        if self._device is None:
            raise RuntimeError(
                "the NPU of this rank is not known, and this thread's current one may be another rank's: call"
                " claim_device on the main thread first"
            )
        refused = _call("torch_npu.npu.stop_device", device_id=self._device)
        if refused:
            raise RuntimeError(f"NPU {self._device} refuses to abort its work (stop_device returned {refused})")

    def default_streams(self) -> None:
        _call("torch_npu.npu.set_stream", stream=_call("torch_npu.npu.default_stream"))

    def damaged_memory(self) -> Damage:
        code = int(_call("torch_npu.npu.check_uce_in_memory", device_id=_current()))
        if code not in DAMAGE:
            log.error("check_uce_in_memory returned %d, whose meaning is not known: the memory counts as lost", code)
        return DAMAGE.get(code, "lost")

    def restart_device(self) -> None:
        # Rebuilding all resources would mark every tensor as unsafe, also the healthy ones that a repair keeps.
        _call("torch_npu.npu.restart_device", device_id=_current(), rebuild_all_resources=False)

    def rebuild_in_place(self, group: ProcessGroup) -> bool:
        """Only where hccl is all that the group has: of one with gloo beside it, gloo's part would stay broken."""
        config = torch.distributed.get_backend_config(group)  # such as "npu:hccl" or "cpu:gloo,npu:hccl"
        if {part.rpartition(":")[2] for part in config.split(",")} != {self.backend}:
            return False
        _call("torch_npu.distributed.reinit_process_group", group=group, rebuild_link=True)
        return True

    def make_safe(self, tensors: Iterable[torch.Tensor]) -> int:
        count = 0
        for tensor in tensors:
            _call("torch_npu.npu._recovery.update_npu_tensor_to_safe", tensor_obj=tensor)
            count += 1
        return count

    # ------------------------------------------------------------------------------------------- another link

    def why_no_link(self, link: str) -> str | None:
        if link not in ("", *self.links):
            return f"link {link!r}: hccl knows the links {MAIN} and {BACKUP} of a device, and no names of interfaces"
        if text := _missing(_SWITCH, NAMES[_SWITCH]):
            return f"the installed torch_npu does not have {text} (install a version that has)"
        return None

    def switch_link(self, link: str, ranks: Sequence[int]) -> bool:
        """hccl moves its communicators itself. Every rank names all of them: communicators contain both ends."""
        if link in ("", MAIN) and not self._switched:
            return True
        self._switched = True
        backup = [link == BACKUP] * len(ranks)
        if not _call("torch_npu.npu._comm_switch_nic", ranks=list(ranks), useBackup=backup):
            raise RuntimeError(f"hccl could not move all of its groups to the {link or MAIN} link")
        return True


def _call(name: str, /, **arguments: Any) -> Any:
    """Call a function of `NAMES`."""
    return _find(name)(**arguments)


def _find(name: str) -> Any:
    import torch_npu

    return operator.attrgetter(name.partition(".")[2])(torch_npu)


def _current() -> int:
    """The calling thread's device; for the main thread, where it is this rank's."""
    return int(_call("torch_npu.npu.current_device"))


def _missing(name: str, parameters: tuple[str, ...]) -> str:
    """What the installed torch_npu lacks of a function, in words; "" when nothing."""
    try:
        found = inspect.signature(_find(name)).parameters
    except AttributeError:
        return name
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found.values()):
        return ""  # a wrapper, which does not say what it takes
    absent = [parameter for parameter in parameters if parameter not in found]
    return f"{name}({', '.join(absent)})" if absent else ""


def _is_on(value: str) -> bool:
    """As torch_npu reads its switches: the number at the beginning, and anything but zero is on."""
    number = re.match(r"\s*[+-]?\d+", value)
    return number is not None and int(number[0]) != 0
