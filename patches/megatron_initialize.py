"""megatron.training.initialize: protection begins once the ranks have met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tft import runtime
from mindspeed_tft.patches.groups import HA
from mindspeed_tft.patches.megatron_host import MegatronHost
from mindspeed_tft.registry import REGISTRY


@REGISTRY.wrap("megatron.training.initialize:_initialize_distributed", **HA)
def initialize_distributed(
    wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    result = wrapped(*args, **kwargs)
    runtime.protect(MegatronHost(runtime.platform(), regroup_seconds=runtime.regroup_seconds()))
    return result
