"""MindSpore, as far as the protection of a rank uses it. It is imported inside functions."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_tft.recovery import files
from mindspeed_tft.recovery.hold import NotDone

log = logging.getLogger(__name__)

BACKUP = "backup"  # the other link of each device; the one without a name is the main one
STEP = "tft_step"  # name in the checkpoint file beside those that MindFormers reads: step_num, epoch_num
_HALF = 30  # bits
Handler = Callable[[list[int], list[bool]], bool]


class Snapshots:
    """Copies of all parameters in host memory, of the last two steps that ended. Bytes: twice those of the parameters,
    optimizer states included."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """`parameters`: MindSpore's, by their names: all that a checkpoint holds."""
        self._parameters = dict(parameters)
        self._kept: dict[int, dict[str, Any]] = {}
        # numpy has no bfloat16, and MindSpore's own needs a numpy of its own release: its bytes are as good.
        self._raw = {each.dtype for each in self._parameters.values() if str(each.dtype).lower() == "bfloat16"}

    def keep(self, step: int) -> None:
        """Copy them as the state of `step`. Waits for the device; shapes and dtypes are those of the parameters."""
        room: dict[str, Any] = {}
        if len(self._kept) > 1 or step in self._kept:
            room = self._kept.pop(step if step in self._kept else min(self._kept))
        for name, parameter in self._parameters.items():
            if parameter.dtype in self._raw:
                room[name] = parameter.get_bytes()
                continue
            found = parameter.asnumpy()
            if name in room and room[name].shape == found.shape and room[name].dtype == found.dtype:
                room[name][...] = found
            else:
                room[name] = found.copy()
        self._kept[step] = room

    def tensor(self, name: str, kept: Any) -> Any:
        """What was kept of a parameter, as a tensor of MindSpore."""
        import mindspore as ms

        if isinstance(kept, bytes):
            parameter = self._parameters[name]
            return ms.Tensor(ms.Tensor.convert_bytes_to_tensor(kept, parameter.shape, parameter.dtype))
        return ms.Tensor(kept)

    def of(self, step: int) -> dict[str, Any]:
        """What was kept of `step`, by the names of parameters: arrays, or bytes where numpy lacks the dtype.

        Raises:
            DumpError: they were not kept.
        """
        if step not in self._kept:
            raise files.DumpError(f"there is no copy of step {step} in host memory, but of {sorted(self._kept)}")
        return self._kept[step]


class MindSpore:
    """See `member.Framework`."""

    def __init__(
        self, parameters: Mapping[str, Any], world_size: int, notes: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        """
        Args:
            parameters: of the cell that trains, those of the optimizer in it included.
            notes: what a checkpoint says beside its tensors: numbers, truth values and texts by name.
        """
        self._snapshots = Snapshots(parameters)
        self._notes = notes
        self._noted: dict[int, dict[str, Any]] = {}
        self._gather: Any = None
        self._world_size = world_size

    def keep(self, step: int) -> None:
        self._snapshots.keep(step)
        self._noted[step] = {**self._notes(), STEP: step}
        for old in sorted(self._noted)[:-2]:
            del self._noted[old]

    def write(self, step: int, path: Path) -> str:
        import mindspore as ms

        kept = self._snapshots.of(step)
        listed = [{"name": name, "data": self._snapshots.tensor(name, one)} for name, one in kept.items()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            ms.save_checkpoint(listed, str(path), append_dict=self._noted[step])
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            found = ms.load_checkpoint(str(path))
        except (OSError, RuntimeError, ValueError) as exc:
            raise files.DumpError(f"cannot write {path}: {exc}") from exc
        for name, one in kept.items():
            wanted = one if isinstance(one, bytes) else one.tobytes()
            if name not in found or found[name].get_bytes() != wanted:
                raise files.DumpError(f"{path} does not read back as written: parameter {name}")
        return files.sha256_of(path)

    def agree(self, numbers: Sequence[int]) -> list[int]:
        if self._world_size == 1:  # nobody else is there, and perhaps no group
            return list(numbers)
        import mindspore as ms
        from mindspore import ops

        if self._gather is None:
            self._gather = ops.AllGather()  # MindSpore's collectives on a CPU reduce nothing to its maximum
        # In halves: on a CPU the upper half of a 64-bit number does not arrive (MindSpore 2.10).
        halves = [half for number in numbers for half in (number >> _HALF, number & ((1 << _HALF) - 1))]
        told = self._gather(ms.Tensor(halves, ms.int32)).asnumpy().reshape(self._world_size, len(numbers), 2)
        return [max((int(high) << _HALF) + int(low) for high, low in told[:, i]) for i in range(len(numbers))]


class Link:
    """Moves HCCL between the two links of each device, or does what a handler does. See `recovery.link.LinkHost`."""

    def __init__(self, world_size: int, agree: Callable[[Sequence[int]], list[int]], handler: Handler | None,
                 why_not: Callable[[], str]) -> None:  # fmt: skip
        """
        Args:
            agree: a collective of all ranks, to try the link with.
            handler: called with all ranks, and for each whether it is to use its backup link; whether it worked.
                None: MindSpore's own.
            why_not: why there is nothing to move; "" where there is.
        """
        self._ranks, self._agree, self._handler, self._why_not = list(range(world_size)), agree, handler, why_not

    def check_link(self, link: str) -> list[str]:
        if link not in ("", BACKUP):
            raise NotDone(f"a job of MindSpore knows the links {BACKUP!r} and 'default', and not {link!r}")
        if why := self._why_not():
            raise NotDone(why)
        return []

    def move_groups(self, link: str, epoch: int, seconds: float) -> None:
        if not (self._handler or own_handler())(self._ranks, [link == BACKUP] * len(self._ranks)):
            raise NotDone(f"the switch to link {link or 'default'} was refused by its handler")

    def test_groups(self, seconds: float) -> dict[str, str]:
        ranks = len(self._ranks)
        if self._agree([ranks]) != [ranks]:
            raise NotDone("an all-gather of the world gave a wrong number")
        return {"groups": "1", "bytes": "8"}


def own_handler() -> Handler:
    """MindSpore's own switch of links, as its documents name it.

    Raises:
        NotDone: this MindSpore has none.
    """
    from mindspore.communication import management

    found: Handler | None = getattr(management, "_comm_switch_nic", None)
    if found is None:
        raise NotDone("this MindSpore cannot switch links: it has no _comm_switch_nic (2.7 and newer have)")
    return found


def world_size() -> int:
    """Ranks that MindSpore trains with; 1 where its communication was not initialized."""
    from mindspore.communication import GlobalComm, get_group_size

    return int(get_group_size()) if GlobalComm.INITED else 1


def on_ascend() -> bool:
    """Whether this process trains on an Ascend device."""
    import mindspore as ms

    return bool(ms.get_context("device_target") == "Ascend")


def why_no_dump_of(parameters: Mapping[str, Any]) -> str:
    """Why these parameters cannot be copied to host memory as they are; "" where they can."""
    odd = sorted(name for name, parameter in parameters.items() if not hasattr(parameter, "asnumpy"))
    if odd:
        return f"parameter {odd[0]} ({type(parameters[odd[0]]).__name__}) has no plain copy in host memory"
    return ""
