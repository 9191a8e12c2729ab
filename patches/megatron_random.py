"""--data-parallel-random-init: each data-parallel rank has random states of its own, which must not die with it.

The ranks that hold the same optimizer shard give each other their states, by one small all-gather. It comes right
before the commit of each step, so that whoever passes that commit has what its partners had at the end of the step:
nothing in Megatron draws after it. Where something may draw before the next step (an evaluation whose batches are made
with random numbers), they are given once more when that step begins.

Without the flag all ranks of a part have the same states, and none of this happens.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mindspeed_tft.patches import megatron_releases, megatron_shards
from mindspeed_tft.recovery import files, random_states
from mindspeed_tft.recovery.random_states import Book, RandomStates

log = logging.getLogger(__name__)


def _mpu() -> Any:
    return importlib.import_module("megatron.core.parallel_state")


class Partners:
    """This rank and those that hold the same shard: what each knows of the other's random states."""

    def __init__(self, states: Callable[[], RandomStates], sharded: bool) -> None:
        """`states()`: those of this rank, now. `sharded`: the optimizer is; otherwise all data-parallel ranks hold the
        same and are partners."""
        self._states = states
        self._sharded = sharded
        self._book = Book()
        self._given = False  # the states of the end of some step, since training began

    @property
    def _me(self) -> int:
        return int(_mpu().get_data_parallel_rank())

    def give(self, step: int) -> None:
        """The states of this rank are those of the end of `step`: a collective of all partners.

        Raises:
            CommunicationAborted: a rank is gone or this one was told to stop.
        """
        mine = random_states.to_bytes(self._states())
        group = megatron_releases.holders_group() if self._sharded else _mpu().get_data_parallel_group()
        if group is None or group.size() == 1:  # no replica: where this rank's shard is lost, so is the step
            self._book.keep(step, {self._me: mine})
        else:
            self._book.keep(step, dict(zip(_positions(group), _gather(mine, group), strict=True)))
        self._given = True

    def step_begins(self, step: int, evaluated: bool) -> None:
        """Before the first draw of `step`. A collective of all partners where it is the first step of all or
        `evaluated`: there was an evaluation since the step before."""
        if evaluated or not self._given:
            self.give(step - 1)
        elif self._book.at(step - 1).get(self._me) != random_states.to_bytes(self._states()):
            self._book.forget(step - 1)
            log.warning(
                "random numbers were drawn between step %d and step %d: the random states of a rank that dies in step"
                " %d would be known to nobody (--data-parallel-random-init)", step - 1, step, step,
            )  # fmt: skip

    def send(self, target: int) -> None:
        """To a partner that has lost what it knew."""
        megatron_shards.send_bytes(self._book.to_bytes(), target)

    def receive(self, source: int) -> None:
        """Take what `send` sends."""
        self._book.take(megatron_shards.receive_bytes(source))

    def mine(self, step: int) -> RandomStates:
        """What a newcomer's predecessor had at the end of `step`.

        Raises:
            DumpError: no partner knows.
        """
        found = self._book.at(step).get(self._me)
        if found is None:
            raise files.DumpError(
                f"no partner of data-parallel rank {self._me} knows its random states of step {step}, and no other rank"
                " has the same (--data-parallel-random-init)"
            )
        return random_states.from_bytes(found)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """What this rank knows, to lie beside its shard in a file."""
        return self._book.to_tensors()

    def of_all(self, step: int, own: RandomStates, staged: Sequence[Mapping[str, torch.Tensor]]) -> list[RandomStates]:
        """The states of all data-parallel ranks at the end of `step`, in their order, as Megatron's checkpoint wants
        them: from `own`, from this rank's partners, and from what the holders of other shards left in files.

        Raises:
            DumpError: those of some rank are known to nobody, or in different ways.
        """
        accounts = [{self._me: random_states.to_bytes(own)}, self._book.at(step)]
        accounts += [random_states.in_tensors(tensors, step) for tensors in staged]
        try:
            known = random_states.merge(*accounts)
        except ValueError as exc:
            raise files.DumpError(f"{exc} at the end of step {step}") from exc
        ranks = range(_mpu().get_data_parallel_world_size())
        if unknown := [rank for rank in ranks if rank not in known]:
            raise files.DumpError(
                f"the random states of data-parallel rank {unknown[0]} at the end of step {step} are known to nobody,"
                " and no other rank has the same (--data-parallel-random-init)"
            )
        return [random_states.from_bytes(known[rank]) for rank in ranks]


def partners(space: Any, states: Callable[[], RandomStates]) -> Partners | None:
    """For a job of which each data-parallel rank has random states of its own; None for all others."""
    wanted = getattr(space, "data_parallel_random_init", False)
    return Partners(states, bool(space.use_distributed_optimizer)) if wanted else None


def _positions(group: Any) -> list[int]:
    """The data-parallel ranks of the members of a group, in its order."""
    everybody = torch.distributed.get_process_group_ranks(_mpu().get_data_parallel_group())
    return [everybody.index(rank) for rank in torch.distributed.get_process_group_ranks(group)]


def _gather(data: bytes, group: Any) -> list[bytes]:
    """The bytes of all members, which have the same length."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(megatron_shards.message_device())
    found = torch.empty(len(data) * group.size(), dtype=torch.uint8, device=mine.device)
    torch.distributed.all_gather_into_tensor(found, mine, group=group)
    return [part.numpy().tobytes() for part in torch.split(found.cpu(), len(data))]
