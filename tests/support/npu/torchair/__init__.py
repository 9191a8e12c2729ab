"""The graph compiler that comes with torch_npu: MindSpeed registers converters that eager training never runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchair import ge  # noqa: F401


def register_fx_node_ge_converter(_: Any) -> Callable[[Any], Any]:
    return lambda function: function
