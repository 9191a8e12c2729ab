"""Huawei Ascend NPUs, by torch_npu and hccl. All calls into torch_npu are in this module.

torch_npu is imported inside functions only: where there is no NPU it is not installed, and where there is one it takes
seconds and touches the device. Which release of it has what is in `torch_npu_names`, as read from its wheels.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
import logging
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mindspeed_tft.platforms import torch_npu_names
from mindspeed_tft.platforms.base import Damage, Platform, Reason

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
    "torch_npu.npu.stress_detect": ("detect_type",),
    "torch_npu.npu.Event": ("enable_timing",),
}
# Methods of what `NAMES` returns.
METHODS: dict[str, tuple[str, ...]] = {"torch_npu.npu.Event": ("record", "synchronize", "recorded_time")}

_SWITCH, _STRESS, _EVENT = "torch_npu.npu._comm_switch_nic", "torch_npu.npu.stress_detect", "torch_npu.npu.Event"
_STOP = ("torch_npu.npu.current_device", "torch_npu.npu.stop_device", "torch_npu.npu.restart_device")
_ELSEWHERE = (_SWITCH, _STRESS, _EVENT)  # not needed for a repair

# What torch_npu asks CANN for in these calls. It looks the functions up when it needs them, so that one which an old
# CANN lacks shows in the middle of a recovery and not before.
CANN: dict[str, tuple[str, ...]] = {
    "libascendcl.so": ("aclrtDeviceTaskAbort", "aclrtGetMemUceInfo", "aclrtMemUceRepair"),
    "libhccl.so": ("HcclCommWorkingDevNicSet",),
}
_CANN_STOP = ("aclrtDeviceTaskAbort",)
_CANN_REPAIR = CANN["libascendcl.so"]

# Releases up to 2.1.0.post8 have this, and make the whole default group anew, whichever group they are asked for.
_REINIT_ALL = "torch_npu.distributed.distributed_c10d._reinit_process_group"
STRESS = ("aic", "hccs")  # the cores of the device; the links between the devices of a host
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
    stops: ClassVar[bool] = True
    unproved = "no recovery has run on an NPU yet: rehearse with tftctl drill (docs/npu.md says what is proved)"

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

    def translate_cuda(self) -> None:
        importlib.import_module("torch_npu.contrib.transfer_to_npu")

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

    def moment(self) -> int:
        if not _has_clock():
            return 0
        event = _call("torch_npu.npu.Event", enable_timing=True)
        event.record()
        event.synchronize()
        return int(event.recorded_time())

    # ------------------------------------------------------------------------------------------- at start-up

    def why_no_abort(self, backend: str) -> Reason | None:
        if backend not in ("nccl", self.backend):  # Megatron says nccl, which means hccl here
            return super().why_no_abort(backend)
        return _why_not(_STOP) or _why_not_cann("libascendcl.so", _CANN_STOP)

    def why_no_repair(self, environ: Mapping[str, str]) -> Reason | None:
        if _is_on(environ.get(_CACHING_OFF, "")):
            return (
                f"{_CACHING_OFF}={environ[_CACHING_OFF]} turns the caching allocator off, which alone knows whether a"
                " damaged address belongs to a tensor",
                "unset it",
            )
        needed = [name for name in NAMES if name not in _ELSEWHERE]
        return _why_not(needed) or _why_not_cann("libascendcl.so", _CANN_REPAIR)

    # ------------------------------------------------------------------------------------------- online repair

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
        if _exists(_REINIT_ALL):
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
        why = _why_not([_SWITCH]) or _why_not_cann("libhccl.so", CANN["libhccl.so"])
        return f"{why[0]} ({why[1]})" if why else None

    def switch_link(self, link: str, ranks: Sequence[int]) -> bool:
        """hccl moves its communicators itself. Every rank names all of them: communicators contain both ends."""
        if link in ("", MAIN) and not self._switched:
            return True
        self._switched = True
        backup = [link == BACKUP] * len(ranks)
        if not _call("torch_npu.npu._comm_switch_nic", ranks=list(ranks), useBackup=backup):
            raise RuntimeError(f"hccl could not move all of its groups to the {link or MAIN} link")
        return True

    # ------------------------------------------------------------------------------------------- under stress

    def why_no_stress(self, kind: str) -> str | None:
        if kind not in STRESS:
            return f"stress {kind!r}: there are {' and '.join(STRESS)}"
        if kind == "aic" and _exists(_STRESS):
            return None  # which is all that releases without a parameter know
        why = _why_not([_STRESS])
        return f"{why[0]} ({why[1]})" if why else None

    def stress(self, kind: str) -> None:
        """For "hccs" all ranks of the job call it: torch_npu makes groups for it at the first time."""
        if why := self.why_no_stress(kind):
            raise RuntimeError(why)
        if _missing(_STRESS, NAMES[_STRESS]):
            code = _find(_STRESS)()
        else:
            code = _call("torch_npu.npu.stress_detect", detect_type=kind)
        if code:
            raise RuntimeError(f"NPU {_current()} failed the stress test {kind} (stress_detect returned {code})")


def _installed() -> str:
    return str(_find("torch_npu.__version__"))


def _why_not(names: Iterable[str]) -> Reason | None:
    """What the installed torch_npu lacks of these names of `NAMES`, and who has it; None when nothing."""
    missing = {name: text for name in names if (text := _missing(name, NAMES[name]))}
    if not missing:
        return None
    having = torch_npu_names.having({name: NAMES[name] for name in missing})
    who = f"known to have it: {', '.join(having)}" if having else "none is known that has"
    return (
        f"the installed torch_npu {_installed()} does not have {', '.join(missing.values())}",
        f"install a torch_npu that has it ({who})",
    )


def _why_not_cann(library: str, functions: Sequence[str]) -> Reason | None:
    """What the installed CANN lacks of these functions; None when nothing."""
    try:
        loaded = ctypes.CDLL(library)
    except OSError as error:
        return (
            f"CANN's {library} cannot be loaded, so it is not known whether it can do what a recovery asks of it"
            f" ({error})",
            "source CANN's set_env.sh before the job",
        )
    missing = [function for function in functions if not hasattr(loaded, function)]
    if not missing:
        return None
    return f"the installed CANN is too old: its {library} has no {', '.join(missing)}", "install a newer CANN"


@functools.cache
def _has_clock() -> bool:
    """Whether events say when the device came to them."""
    found = _exists(_EVENT) and all(_exists(f"{_EVENT}.{method}") for method in METHODS[_EVENT])
    if not found:
        log.warning(
            "torch_npu %s has no clock: a memory error that is told late counts as older than the last update, and all"
            " ranks go back to a checkpoint", _installed(),
        )  # fmt: skip
    return found


def _exists(name: str) -> bool:
    try:
        _find(name)
    except AttributeError:
        return False
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
