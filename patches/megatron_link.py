"""Megatron's process groups on another network link, between two steps: see `recovery.link`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from mindspeed_tft.groups import links
from mindspeed_tft.groups.links import LinkUnusable
from mindspeed_tft.patches import torch_distributed, torch_links
from mindspeed_tft.platforms import Platform


def check(platform: Platform, link: str) -> list[str]:
    """Addresses of this host on the link; none where it is not made of network interfaces.

    Raises:
        LinkUnusable: the device or this host cannot use it.
    """
    if why := platform.why_no_link(link):
        raise LinkUnusable(why)
    if platform.links and link in ("", *platform.links):
        return []
    if others := sorted(_foreign_backends()):
        raise LinkUnusable(
            f"groups on {', '.join(others)} cannot be built anew by this version, and so cannot be moved"
            " (docs/link-switch.md)"
        )
    return list(links.addresses(link))


def _foreign_backends() -> set[str]:
    """Backends of groups that are not swappable."""
    import torch.distributed.distributed_c10d as c10d

    swappable = {id(group) for group in torch_distributed.table().groups()}
    return {str(name) for group, (name, _) in c10d._world.pg_map.items() if id(group) not in swappable}


def move(platform: Platform, model: list[Any], link: str, epoch: int, seconds: float) -> None:
    """All ranks, none of which communicates. For errors see `torch_distributed.move`."""
    _finish_gathers(model)
    platform.synchronize()
    if not platform.switch_link(link, range(torch.distributed.get_world_size())):
        torch_distributed.move(link, epoch, timedelta(seconds=seconds))


def _finish_gathers(model: list[Any]) -> None:
    """A gather of parameters that was begun for the next step is waited for, on its old group; it stays for whoever
    asks for its end. Gradients are not under way between two steps."""
    for chunk in model:
        groups = [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]
        for group in groups:
            if (handle := getattr(group, "param_gather_handle", None)) is not None:
                handle.wait()


def test(platform: Platform, seconds: float) -> dict[str, str]:
    """What was tested, in numbers of this rank."""
    tested = torch_links.try_groups(timedelta(seconds=seconds), platform.device_type)
    return {"groups": str(tested.groups), "bytes": str(tested.bytes), "seconds": f"{tested.seconds:.3f}"}
