"""All that differs between devices. `select` names the platform of this process; nothing else names a device."""

from __future__ import annotations

from mindspeed_tft.platforms import look_alike
from mindspeed_tft.platforms.base import Damage, Platform
from mindspeed_tft.platforms.cpu import CpuPlatform
from mindspeed_tft.platforms.cuda import CudaPlatform
from mindspeed_tft.platforms.look_alike import LookAlikePlatform
from mindspeed_tft.platforms.npu import NpuPlatform
from mindspeed_tft.settings import Refused

__all__ = ["Damage", "Platform", "look_alike", "select"]

# In the order in which `auto` tries them; the CPU is always there. A new platform is a module and a line here.
_PLATFORMS: tuple[Platform, ...] = (NpuPlatform(), CudaPlatform(), CpuPlatform())
_FLAG = "--tft-platform"


def select(name: str = "auto") -> Platform:
    """The platform called `name`, or with "auto" the first one that this process can use: npu, cuda, cpu.

    Raises:
        Refused: when there is no platform of that name, or this process cannot use it.
    """
    if alike := look_alike.what():  # not even looked at: the CPU's platform would change it
        if name != "auto":
            raise Refused(_FLAG, f"{name} cannot be used here, {alike}", "leave it out")
        return LookAlikePlatform()
    if name == "auto":
        return next(platform for platform in _PLATFORMS if platform.available())
    usable = [platform.name for platform in _PLATFORMS if platform.available()]
    remedy = f"pass {_FLAG} auto, or one that can be used here: {', '.join(usable)}"
    for platform in _PLATFORMS:
        if platform.name == name:
            reason = platform.why_unavailable()
            if reason is not None:
                raise Refused(_FLAG, f"{name} cannot be used here, {reason}", remedy)
            return platform
    known = ", ".join(platform.name for platform in _PLATFORMS)
    raise Refused(_FLAG, f"{name!r} is no platform (there are {known})", remedy)
