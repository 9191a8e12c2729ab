"""Random states of several ranks, for the case that each data-parallel rank has its own.

Then a dead rank's randomness can be had from nobody by chance. So ranks hand theirs to the others that hold the same
shard, at the end of each step, and every rank keeps what it was given: here is the book, and the form on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mindspeed_tft import encode

RandomStates = dict[str, Any]  # of one rank, in the form that Megatron's checkpoints hold


def to_bytes(states: RandomStates) -> bytes:
    """The states of one rank. The length is the same for all ranks that have the same generators, and stays the same:
    what varies in size as text lies in arrays.

    Raises:
        EncodeError: numpy's global generator is not the one that it starts with.
    """
    if not isinstance(states["np_rng_state"], tuple):
        raise encode.EncodeError("numpy's global generator was replaced: only MT19937 is handed to other ranks")
    version, words, python_gauss = states["random_rng_state"]
    name, keys, position, has_gauss, numpy_gauss = states["np_rng_state"]
    has_one, one = python_gauss is not None, 0.0 if python_gauss is None else python_gauss
    fixed = {
        "random_rng_state": (version, np.array(words, np.uint32), np.array([has_one, one], np.float64)),
        "np_rng_state": (name, keys, np.array([position, has_gauss], np.int64), np.array([numpy_gauss], np.float64)),
    }
    return encode.dumps({**states, **fixed})


def from_bytes(data: bytes) -> RandomStates:
    """The opposite of `to_bytes`.

    Raises:
        EncodeError: not such bytes.
    """
    try:
        states: RandomStates = encode.loads(data)
        version, words, (has_one, one) = states["random_rng_state"]
        name, keys, (position, has_gauss), (numpy_gauss,) = states["np_rng_state"]
    except (KeyError, TypeError, ValueError) as exc:
        raise encode.EncodeError(f"{len(data)} bytes are no random states: {exc}") from exc
    states["random_rng_state"] = (version, tuple(words.tolist()), float(one) if has_one else None)
    states["np_rng_state"] = (name, keys, int(position), int(has_gauss), float(numpy_gauss))
    return states


class Book:
    """Which random states this rank knows: of itself and of others, as bytes, at the ends of the last two steps.

    Two, because after a fault the last completed step may be the one that was just committed or the one before.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[int, bytes]] = {}  # step -> data-parallel rank -> states

    def keep(self, step: int, known: Mapping[int, bytes]) -> None:
        """These are the states of the end of `step`; what is known of other steps than the one before it is dropped."""
        before = {step - 1: self._known[step - 1]} if step - 1 in self._known else {}
        self._known = {**before, step: dict(known)}

    def forget(self, step: int) -> None:
        """What is known of the end of `step` has turned out to be wrong."""
        self._known.pop(step, None)

    def at(self, step: int) -> dict[int, bytes]:
        """By data-parallel rank."""
        return dict(self._known.get(step, {}))

    def to_bytes(self) -> bytes:
        """The whole book, for a newcomer."""
        return encode.dumps(self._known)

    def take(self, data: bytes) -> None:
        """Know what another rank knows, and nothing else.

        Raises:
            EncodeError: not the bytes of a book.
        """
        found = encode.loads(data)
        if not isinstance(found, dict):
            raise encode.EncodeError(f"{len(data)} bytes are no random states of other ranks")
        self._known = found

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """The whole book as bytes in tensors, to lie beside a shard in a file."""
        return {
            f"{_PREFIX}{step}/{rank}": torch.frombuffer(bytearray(states), dtype=torch.uint8)
            for step, known in self._known.items()
            for rank, states in known.items()
        }


_PREFIX = "random/"


def in_tensors(tensors: Mapping[str, torch.Tensor], step: int) -> dict[int, bytes]:
    """Of what `Book.to_tensors` made, among others: the states of the end of `step`, by data-parallel rank."""
    prefix = f"{_PREFIX}{step}/"
    return {
        int(name.removeprefix(prefix)): tensor.numpy().tobytes()
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def merge(*several: Mapping[int, bytes]) -> dict[int, bytes]:
    """One account from several ranks.

    Raises:
        ValueError: two of them differ about the same rank.
    """
    merged: dict[int, bytes] = {}
    for known in several:
        for rank, states in known.items():
            if merged.setdefault(rank, states) != states:
                raise ValueError(f"two ranks know different random states of data-parallel rank {rank}")
    return merged
