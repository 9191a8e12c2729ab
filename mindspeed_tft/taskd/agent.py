"""TaskD's agent as a library. Under torchrun it has no part: the launcher itself is taught (`torchrun`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_tft.settings import Refused

_REMEDY = (
    "start with torchrun, with the line `import taskd.python.adaptor.patch` in torch/distributed/run.py or with"
    " --logs-specs mindspeed_tft, or with tftrun"
)


def init_taskd_agent(config: dict[str, Any] | None = None, cls: object = None) -> bool:
    """An agent with a loop of its own.

    Raises:
        Refused: always.
    """
    framework = (config or {}).get("Framework", "")
    raise Refused(
        "init_taskd_agent 'Framework'",
        f"there is no agent of ours for {framework or 'no framework'!r} that runs its own loop",
        _REMEDY,
    )


def register_func(operator: str, func: Callable[..., Any]) -> bool:
    """A launcher's own way to do something to its processes.

    Raises:
        Refused: always, as there is no agent.
    """
    raise Refused("register_func", f"there is no agent that would call it for {operator!r}", _REMEDY)


def start_taskd_agent() -> Any:
    """The agent's loop.

    Raises:
        Refused: always, as there is no agent.
    """
    raise Refused("start_taskd_agent", "there is no agent", _REMEDY)
