"""torch.distributed: does every group work on the link that it was moved to? One small all-reduce on each tells.

A group that was built has connections, which proves little: a link may carry small packets and drop large ones (frames
longer than a switch on the way allows), or the kernel may send what is meant for this interface through another one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mindspeed_tft.groups import CommunicationAborted, SwappableGroup, links, waiting
from mindspeed_tft.patches import torch_distributed

NUMBERS = 1 << 16  # int64 of one test, half a megabyte: many frames of any length


class LinkFailed(RuntimeError):
    """A group does not work on its link, and which one, and how that shows."""


@dataclass(frozen=True)
class Tested:
    """What was proved of the groups of this rank that have more than one member."""

    groups: int
    bytes: int  # of the tensors that were reduced
    seconds: float


def try_groups(timeout: timedelta, device: str = "cpu") -> Tested:
    """All-reduce on every group, in the order of their creation, and compare the sum with what it has to be; before,
    look that the connections of the group use the addresses of its link. All ranks call it at the same time.

    Args:
        timeout: for all groups together; for those of a device its own limit counts.
        device: where such groups have their tensors.

    Raises:
        LinkUnusable: the interface is gone.
        LinkFailed: a group gave a wrong sum, none in time, or does not use the link.
        CommunicationAborted: a peer is gone, or a stop came.
    """
    table = torch_distributed.table()
    begin = time.monotonic()
    until, tested = begin + timeout.total_seconds(), 0
    mine = links.addresses(table.link)
    for group in table.groups():
        if group.size() > 1:
            if group.device_backend:
                _reduce_on(group, device)
            else:
                _check_ends(group, table.link, mine)
                _reduce(group, until, timeout)
            tested += 1
    for other in _others():
        _reduce_on(other, device)
        tested += 1
    return Tested(tested, tested * NUMBERS * 8, time.monotonic() - begin)


def _others() -> list[dist.ProcessGroup]:
    """Groups whose backend the device moves itself, of more than one member."""
    import torch.distributed.distributed_c10d as c10d

    made = (group for group in c10d._world.pg_map if not isinstance(group, SwappableGroup))
    return [group for group in made if group.size() > 1]


def _check_ends(group: SwappableGroup, link: str, mine: tuple[str, ...]) -> None:
    """Each member has a connection to each other one, on each interface. There may be more: another thread may have
    opened one while the group was built."""
    names = links.interfaces(link)
    ends = [(links.plain(local), links.plain(remote)) for local, remote in group.ends()]
    right = [local for local, _ in ends if local in mine]
    if names and len(right) < (group.size() - 1) * len(names):
        wrong = sorted(f"{local} ({links.name_of(local)}) to {remote}" for local, remote in ends if local not in mine)
        raise LinkFailed(
            f"group {group.group_name} does not use {link} ({', '.join(sorted(mine))}), but {'; '.join(wrong[:3])}:"
            " the other ranks' addresses are routed through another interface"
        )


def _reduce(group: SwappableGroup, until: float, timeout: timedelta) -> None:
    where, mine, expected = _task(group)
    work = dist.all_reduce(mine, group=group, async_op=True)
    assert work is not None
    try:
        waiting.wait_in_slices(work, torch_distributed.table().aborted, until)
    except waiting.Interrupted as exc:
        raise CommunicationAborted(f"{where}: stopped ({exc})") from None
    except RuntimeError as exc:
        if not str(exc).startswith(waiting.TIMED_OUT):
            raise
        raise LinkFailed(f"{where} did not end, all tests had {timeout.total_seconds():g} s") from None
    _compare(where, mine, expected)


def _reduce_on(group: dist.ProcessGroup, device: str) -> None:
    where, mine, expected = _task(group)
    mine = mine.to(device)
    dist.all_reduce(mine, group=group)
    _compare(where, mine.cpu(), expected)


def _task(group: dist.ProcessGroup) -> tuple[str, torch.Tensor, torch.Tensor]:
    """A test in words, this rank's share of it, and what has to come of it."""
    members = dist.get_process_group_ranks(group)
    numbers = torch.arange(NUMBERS, dtype=torch.int64)
    where = f"the test all-reduce of group {group.group_name} (ranks {_some(members)})"
    return where, numbers + members[group.rank()], numbers * len(members) + sum(members)


def _compare(where: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found, expected):
        wrong = int((found != expected).sum())
        raise LinkFailed(f"{where} gave {wrong} wrong sums of {NUMBERS}")


def _some(members: list[int]) -> str:
    return ", ".join(map(str, members[:8])) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
