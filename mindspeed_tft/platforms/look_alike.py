"""A torch that is none: MSAdapter, a package of this name over MindSpore's tensors. Nothing here recovers on it.

Training there is left as it is. What a recovery needs of torch below its public names (groups that can be aborted and
built anew, storages, the launcher's inside) is not there, so each feature is refused at start-up, by its flag.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch

from mindspeed_tft.platforms.base import Platform
from mindspeed_tft.settings import Refused, Settings, flag_of

_FOLDERS = ("msadapter", "mindtorch")
_REMEDY = (
    "leave it out; a MindSpore program of its own is protected by the callback of mindspeed_tft, see docs/mindspore.md"
)
_LACKING = {
    "enable_worker_reboot": "its launcher starts no single worker again, and none could join MindSpore's collectives",
    "enable_hbmfault_repair": "its process groups cannot be aborted and built anew while the processes stay",
    "enable_elastic_training": "its process groups cannot be built anew with fewer ranks",
    "enable_high_availability": "a rank cannot be taken out of a collective, so survivors of a fault could not save",
}


def what() -> str:
    """What stands in the place of torch, in words; "" for torch itself."""
    inside = sys.modules.get("torch._C")  # the compiled part, which torch has loaded when it is imported
    if inside is not None and not str(getattr(inside, "__file__", "")).endswith((".py", ".pyc")):
        return ""
    folder = Path(torch.__file__ or "").parent
    named = any(word in part.lower() for part in folder.parts for word in _FOLDERS)
    if not named and "mindspore" not in sys.modules and importlib.util.find_spec("mindspore") is None:
        return ""  # something else is wrong with it, which shows soon enough
    return f"the torch of this process is MSAdapter's, over MindSpore ({folder})"


class LookAlikePlatform(Platform):
    """What `auto` gives there. It can only be named: whoever asks it for more has passed a refusal."""

    name = "mindspore"
    backend = "mindspore"
    device_type = "mindspore"

    def why_unavailable(self) -> str | None:
        return None if what() else "this is torch itself"

    def description(self) -> str:
        return what()

    def _nothing(self) -> NoReturn:
        raise Refused(flag_of("enable_high_availability"), f"{what()}, and nothing recovers there", _REMEDY)

    def synchronize(self) -> None:
        self._nothing()

    def rng_state(self) -> torch.Tensor:
        self._nothing()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._nothing()

    def memory_allocated(self) -> int:
        self._nothing()


def refuse(settings: Settings) -> None:
    """Refuse each feature that these settings ask for, where torch is a look-alike.

    Raises:
        Refused: with the first flag, and the reasons for all.
    """
    found = what()
    wanted = [key for key in _LACKING if getattr(settings, key)]
    if found and wanted:
        raise Refused(flag_of(wanted[0]), f"{found}: {_reasons(wanted, _LACKING)}", _REMEDY)


def _reasons(wanted: list[str], lacking: Mapping[str, str]) -> str:
    first, *others = wanted
    return "; ".join([lacking[first], *(f"nor can {flag_of(key)} be, because {lacking[key]}" for key in others)])
