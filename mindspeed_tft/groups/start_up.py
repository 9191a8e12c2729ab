"""A process that takes the place of a dead one starts without its peers: what its start-up would hear from them.

In the first life of a rank a `Journal` keeps the small results of every communication before training begins, by the
place in the program that asked for it. A newcomer runs the same start-up over groups that talk to nobody: each
operation is over at once, with the result that the journal has for its place, and otherwise with what it would be if
all peers were equal to this rank. Large results (the first parameters) are not kept: a newcomer gets its tensors later,
from the holders of its shards.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch.distributed import Work

from mindspeed_tft import encode

# Of one result, or of what one rank gives to a gather. Flags, sizes, pickled descriptions of parameter groups are far
# below, but gathered from thousands of ranks they are not: of these only those that differ are kept.
KEPT_BYTES = 16384
KEPT_IN_ALL = 4 << 20
_GATHERS = ("allgather", "_allgather_base", "all_gather_single")
_OURS = ("torch.", "mindspeed_tft.")


def place() -> str:
    """Module and line of the nearest caller that is neither torch nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != "torch" and not name.startswith(_OURS):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "?"


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested lists, in order."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def _key(group: str, operation: str, outputs: Sequence[torch.Tensor]) -> str:
    forms = groupby(f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in outputs)  # thousands, of a gather, are equal
    shapes = ",".join(f"{len(list(equal))}x{form}" for form, equal in forms)
    return f"{place()} {group} {operation} {shapes}"


def _size(found: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in found)


def _share(operation: str, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> int:
    """Bytes that each rank gives to a gather; 0: it is none."""
    share = _size(list(tensors(args[1]))) if operation in _GATHERS and len(args) > 1 else 0
    return share if share and _size(outputs) % share == 0 else 0


def _fold(outputs: Sequence[torch.Tensor], share: int) -> list[torch.Tensor]:
    """Equal tensors, or one of equal parts of `share` bytes: the different ones among them, uint8 (different, share),
    and which of these each one is, uint8 or int32 (parts,)."""
    rows = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in outputs]).cpu()
    different, which = torch.unique(rows.view(-1, share), dim=0, return_inverse=True)
    return [different, which.to(torch.uint8 if len(different) <= 256 else torch.int32)]


def _unfold(outputs: Sequence[torch.Tensor], different: torch.Tensor, which: torch.Tensor) -> None:
    rows = different[which.long()].view(-1)
    start = 0
    for output in outputs:
        end = start + output.numel() * output.element_size()
        output.copy_(rows[start:end].clone().view(output.dtype).view(output.shape))
        start = end


class Journal:
    """Keeps results. Launches come from several threads."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Any]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def expect(self, group: str, operation: str, args: Sequence[Any]) -> Entry | None:
        """An operation starts: where its result is to be kept. None: it is too large, or has none."""
        outputs = list(tensors(args[0])) if args else []
        share = _share(operation, args, outputs)
        with self._lock:
            if not outputs or (share or _size(outputs)) > KEPT_BYTES:
                return None
            entry = Entry(outputs, share, self._room)
            self._kept.setdefault(_key(group, operation, outputs), []).append(entry)
        return entry

    def _room(self, size: int) -> bool:
        with self._lock:
            room = self._bytes + size <= KEPT_IN_ALL
            self._bytes += size if room else 0
        return room

    def to_bytes(self) -> bytes:
        """For `Answers`; the entries of operations that nobody waited for are left out."""
        with self._lock:
            kept = {key: [entry.result for entry in entries] for key, entries in self._kept.items()}
        return encode.dumps(kept)


class Entry:
    """The result of one operation, once somebody has waited for it."""

    def __init__(self, outputs: list[torch.Tensor], share: int, room: Callable[[int], bool]) -> None:
        """`share`: bytes that each rank gave to a gather; 0: it was none. `room(bytes)`: whether so much more may be
        kept."""
        self._outputs, self._share, self._room = outputs, share, room
        self.result: list[torch.Tensor] | None = None

    def ended(self) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            found = (
                _fold(outputs, self._share) if self._share else [tensor.detach().cpu().clone() for tensor in outputs]
            )
            self.result = found if self._room(_size(found)) else None


class Answers:
    """What a newcomer's communications return."""

    def __init__(self, read_journal: Callable[[], bytes]) -> None:
        """`read_journal`: gives the journal of this rank's first life, once there is a store to read it from; b"" if
        there is none: then all peers are taken to be equal to this rank."""
        self._read, self._kept = read_journal, dict[str, list[Any]]()
        self._open = False
        self.known = self.guessed = 0
        self._lock = threading.Lock()

    def _journal(self) -> dict[str, list[Any]]:
        if not self._open:
            data = self._read()
            self._kept, self._open = encode.loads(data) if data else {}, True
        return self._kept

    @torch.no_grad()
    def give(self, group: str, operation: str, args: Sequence[Any], rank: int) -> Work:
        """Carry out an operation of this rank of the group without anybody else."""
        outputs = list(tensors(args[0])) if args else []
        with self._lock:
            waiting = self._journal().get(_key(group, operation, outputs), [])
            found = waiting.pop(0) if waiting else None
            self.known, self.guessed = self.known + (found is not None), self.guessed + (found is None)
        if found is not None and _share(operation, args, outputs):
            _unfold(outputs, *found)
        elif found is not None:
            for tensor, value in zip(outputs, found, strict=True):
                tensor.copy_(value)
        else:
            _as_if_equal(operation, args, rank)
        return _Over(args[0] if args else [])


def _as_if_equal(operation: str, args: Sequence[Any], rank: int) -> None:
    inputs = list(tensors(args[1])) if len(args) > 1 else []
    if operation == "allgather":
        for outputs, mine in zip(args[0], inputs, strict=True):
            for tensor in outputs:
                tensor.copy_(mine)
    elif operation in ("_allgather_base", "all_gather_single"):
        for chunk in torch.split(args[0].view(-1), inputs[0].numel()):
            chunk.copy_(inputs[0].reshape(-1))
    elif operation == "reduce_scatter":
        for output, parts in zip(args[0], args[1], strict=True):
            output.copy_(parts[rank])
    elif operation in ("_reduce_scatter_base", "reduce_scatter_single"):
        args[0].view(-1).copy_(torch.split(inputs[0].reshape(-1), args[0].numel())[rank])
    # All others leave in their outputs what this rank has put there.


class _Over(Work):
    """The handle of an operation that is over."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing runs."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return list(tensors(self._result))

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future
