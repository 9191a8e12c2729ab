"""TaskD's agent as a library, which msrun calls: it is `mindspeed_tft.mindspore.agent`.

Under torchrun there is none that runs a loop of its own: the launcher itself is taught (`torchrun`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_tft.settings import Refused
from mindspeed_tft.taskd import words

_REMEDY = (
    "start with torchrun, with the line `import taskd.python.adaptor.patch` in torch/distributed/run.py or with"
    " --logs-specs mindspeed_tft, or with tftrun"
)
_ours = False  # msrun has called


def init_taskd_agent(config: Mapping[str, Any] | None = None, cls: object = None) -> bool:
    """For msrun, with {"Framework": "MindSpore"}: True, and our agent takes over.

    Raises:
        Refused: another framework.
    """
    global _ours
    framework = (config or {}).get("Framework")
    if config is None or framework != words.MINDSPORE:
        raise Refused(
            "init_taskd_agent 'Framework'",
            f"there is no agent of ours for {framework or 'no framework'!r} that runs its own loop",
            _REMEDY,
        )
    from mindspeed_tft.mindspore import agent

    _ours = agent.init_taskd_agent(config, cls)
    return _ours


def register_func(operator: str, func: Callable[..., Any]) -> bool:
    """How msrun does something to its processes.

    Raises:
        Refused: there is no agent that would call it.
    """
    if not _ours:
        raise Refused("register_func", f"there is no agent that would call it for {operator!r}", _REMEDY)
    from mindspeed_tft.mindspore import agent

    return agent.register_func(operator, func)


def start_taskd_agent() -> None:
    """The agent's loop, to the end of the job.

    Raises:
        Refused: there is no agent.
    """
    if not _ours:
        raise Refused("start_taskd_agent", "there is no agent", _REMEDY)
    from mindspeed_tft.mindspore import agent

    agent.start_taskd_agent()
