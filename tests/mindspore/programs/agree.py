"""All ranks see the highest of each number, also of those with more than 32 bits: ids of wishes have them."""

from __future__ import annotations

import mindspore as ms
from mindspore.communication import get_group_size, get_rank, init

from mindspeed_tft.mindspore.framework import MindSpore

BIG, BIGGER = (1 << 32) + 1, (1 << 58) + 12345

ms.set_context(mode=0, device_target="CPU")
init()
rank = get_rank()
framework = MindSpore({}, get_group_size())
for step in range(3):
    assert framework.agree([step, -step, BIG * rank, 0, 3600]) == [step, -step, BIG, 0, 3600]
    assert framework.agree([rank]) == [1]
    assert framework.agree([-BIG if rank else -BIGGER, BIGGER + rank]) == [-BIG, BIGGER + 1]
    assert framework.agree([(1 << 30) + rank, -(1 << 30) - rank]) == [(1 << 30) + 1, -(1 << 30)]
print("agreed", flush=True)
