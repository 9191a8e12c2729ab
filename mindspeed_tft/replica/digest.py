"""The hash of an optimizer shard: certain to notice a single flipped bit, and cheap enough for every update.

The words of all tensors of a shard, one after the other, are cut into rows of `LANES` 32-bit words, and each lane keeps
the polynomial of its column: lane = word + lane * FACTOR, modulo 2^32. FACTOR is odd, so that the weight of a word is
odd too and no difference of a single bit, nor of a single word, can vanish in it. Errors of different lanes cannot make
up for each other: all lanes go into the digest. It is no defence against somebody who wants to forge a shard.

This module reads tensors where they lie. It knows no ranks and keeps nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Of 32 bits. An operation on fewer than 2^15 elements stays on the thread that asks for it, and a row and the lanes fit
# into a core's cache together: measured, 7 GB/s on one core, with longer rows hardly more.
LANES = 31 * 1024
FACTOR = 1664525  # 5 modulo 8: its powers repeat after 2^30 rows only, so that the place of a row counts
GROUP = 64  # rows that a device takes at once: a launch costs as much as some megabytes
LENGTH = 32  # characters of a digest

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@dataclass(frozen=True)
class Shard:
    """What belongs to one shard, in an order that is the same on all of its holders."""

    tensors: Sequence[torch.Tensor]  # contiguous: main parameters and moments, without padding
    # How many updates are counted now, by whatever counts them: numbers, or tensors of one.
    updates: Callable[[], Sequence[Any]] = tuple


class Reader:
    """Reads the digest of one shard, again and again: where its words lie is found out once."""

    def __init__(self, shard: Shard) -> None:
        """
        Raises:
            ValueError: a tensor is not contiguous, so that it cannot be read in place.
        """
        self._places = _places(shard.tensors)
        flat = [_words(tensor) for tensor in shard.tensors if tensor.numel()]
        self.words = sum(piece.numel() for piece in flat)
        self._device = flat[0].device if flat else torch.device("cpu")
        self.on_host = self._device.type == "cpu"
        self._group = 1 if self.on_host else GROUP
        self._rows = _cut(flat, LANES * self._group)
        self._updates = shard.updates

    def like(self, other: Reader) -> bool:
        """Whether both look at the same tensors in the same places."""
        return self._places == other._places

    @torch.no_grad()
    def digest(self, wanted: Callable[[], bool] = lambda: True) -> str | None:
        """32 hex digits, then a colon and the numbers of updates that are counted; None when it was not wanted to the
        end, which is asked before each row."""
        lanes = torch.zeros(LANES * self._group, dtype=torch.int32, device=self._device)
        _fold(self._rows, lanes, _power(self._group), wanted)
        if self._group > 1:  # the same polynomial: what is left is a row for each of the group
            wide, lanes = lanes, torch.zeros(LANES, dtype=torch.int32, device=self._device)
            _fold([[row] for row in torch.split(wide, LANES)], lanes, FACTOR, wanted)
        if not wanted():
            return None
        used = lanes[LANES - min(self.words, LANES) :].cpu().contiguous()
        text = hashlib.sha256(f"{self.words} ".encode() + used.numpy().tobytes()).hexdigest()[:LENGTH]
        return f"{text}:{_counted(self._updates())}"


def digest(shard: Shard) -> str:
    """The digest of a shard as it is now, as `Reader.digest`."""
    found = Reader(shard).digest()
    assert found is not None
    return found


def _counted(updates: Sequence[Any]) -> str:
    """The numbers of updates, each once; usually there is one."""
    tensors = [update.detach().reshape(()) for update in updates if torch.is_tensor(update)]
    numbers = {float(update) for update in updates if not torch.is_tensor(update)}
    numbers.update(torch.stack(tensors).tolist() if tensors else ())
    return "+".join(f"{number:.17g}" for number in sorted(numbers))


def _fold(rows: Sequence[Sequence[torch.Tensor]], lanes: torch.Tensor, factor: int, wanted: Callable[[], bool]) -> None:
    """The first row may be short: it is as if zeros came before it."""
    for pieces in rows:
        if not wanted():
            return
        row = pieces[0] if len(pieces) == 1 else torch.cat([_wide(piece) for piece in pieces])
        part = lanes[lanes.numel() - row.numel() :]
        torch.add(_wide(row), part, alpha=factor, out=part)


def _cut(flat: Sequence[torch.Tensor], width: int) -> list[list[torch.Tensor]]:
    """Rows of `width` words each but the first, each of them of pieces of tensors. Counted from the end, so that any
    multiple of a width cuts at the same places."""
    total = sum(piece.numel() for piece in flat)
    rows: list[list[torch.Tensor]] = []
    room = 0
    for piece in flat:
        begin = 0
        while begin < piece.numel():
            if not room:
                room = total % width or width if not rows else width
                rows.append([])
            taken = min(room, piece.numel() - begin)
            rows[-1].append(piece[begin : begin + taken])
            begin, room = begin + taken, room - taken
    return rows


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as integers of at most 32 bits, in place."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    return tensor.detach().view(-1).view(_WORDS[tensor.element_size()])


def _wide(words: torch.Tensor) -> torch.Tensor:
    return words if words.dtype is torch.int32 else words.to(torch.int32)


def _power(exponent: int) -> int:
    """FACTOR to that power modulo 2^32, as a signed number."""
    value = pow(FACTOR, exponent, 1 << 32)
    return value - (1 << 32) if value >= 1 << 31 else value


def _places(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, torch.dtype]]:
    return [(tensor.data_ptr(), tensor.numel(), tensor.dtype) for tensor in tensors]
