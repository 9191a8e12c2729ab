"""The measure of device memory itself: it must see what is allocated there, and only that."""

from __future__ import annotations

import pytest
import torch
from device_memory import OnDevice


def test_copies_to_and_from_the_host_take_nothing() -> None:
    device = torch.zeros(1000, dtype=torch.bfloat16)
    with OnDevice([device]) as seen:
        host = torch.zeros(1000)
        host[:500].copy_(device.detach().reshape(-1)[:500])
        device.view(10, 100).copy_(torch.cat([host, host])[:1000].view(10, 100))
        moved = device.to("cpu", torch.float32, copy=True)
        moved.mul(2)
    assert (seen.allocated, seen.operations) == (0, {})
    assert seen.touched > 5


@pytest.mark.parametrize(
    ("operation", "size"),
    [
        (lambda t: t.clone(), 2000),
        (lambda t: t.float(), 4000),
        (lambda t: torch.cat([t[:10], t[:10]]), 40),
        (lambda t: t.clone().clone(), 4000),  # what is made there stays there
        (lambda t: t.view(10, 100).t().reshape(-1), 2000),  # looks like a view
    ],
)
def test_new_tensors_there_are_counted(operation: object, size: int) -> None:
    device = torch.zeros(1000, dtype=torch.bfloat16)
    with OnDevice([device]) as seen:
        operation(device)  # type: ignore[operator]
    assert seen.allocated == size == sum(seen.operations.values())
