"""What belongs to the hash of an optimizer shard of Megatron: main parameters and moments, where they lie.

Raw bytes in the order in which shards travel, without the padding of buckets and the gaps between parameters, so that
all holders of a shard come to the same hash. Loss scalers are not in it: they change before the commit.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mindspeed_tft.patches import megatron_kinds
from mindspeed_tft.replica.digest import Shard

if TYPE_CHECKING:
    from mindspeed_tft.patches.megatron_host import MegatronHost


def shards(host: MegatronHost) -> dict[str, Shard]:
    """This rank's shards by their ids."""
    return {shard: _of(host.optimizer_of(shard)) for shard in host.info().holds}


def _of(optimizer: Any) -> Shard:
    # Its layers are on other stages, or nothing of them is trained.
    if optimizer is None or getattr(optimizer, "optimizer", None) is None:
        return Shard([])
    return Shard(megatron_kinds.of(optimizer).in_place(optimizer), partial(_updates, optimizer))


def _updates(optimizer: Any) -> list[Any]:
    """How many updates are counted, per group or per parameter, wherever this optimizer does."""
    inner, found = optimizer.optimizer, []
    for group in inner.param_groups:
        if "step" in group and group["params"]:
            found.append(group["step"])
        found += [inner.state[main]["step"] for main in group["params"] if "step" in inner.state.get(main, {})]
    return found
