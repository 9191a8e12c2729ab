"""Where ClusterD is, how it is spoken to, and whether a TaskD does so already."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from mindspeed_tft.clusterd.words import PORT
from mindspeed_tft.control.config import ControlConfig

TASKD_PORT = 9601  # of TaskD's manager, on the first node
_PROBE = 1.0  # seconds
_LIBRARY = Path("python", "cython_api", "libs", "libtaskd.so")


@dataclass(frozen=True)
class Address:
    """The URL of --tft-clusterd."""

    host: str
    port: int
    tls: bool

    @staticmethod
    def parse(url: str) -> Address:
        """
        Raises:
            ValueError: it is no URL of a host.
        """
        found = urlsplit(url)
        if found.scheme not in ("http", "https") or not found.hostname or found.path.strip("/"):
            raise ValueError(f"{url!r} is no URL of a host")
        return Address(found.hostname, found.port or PORT, found.scheme == "https")

    @property
    def target(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.target} ({'TLS' if self.tls else 'plain'})"


def installed_taskd(environ: Mapping[str, str]) -> str:
    """Where the real TaskD is installed, which speaks to ClusterD by itself; "" where it is not, or is switched off."""
    if environ.get("TASKD_PROCESS_ENABLE", "").strip().lower() == "off":
        return ""
    with contextlib.suppress(ModuleNotFoundError, ValueError):
        spec = importlib.util.find_spec("taskd")
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (Path(place) / _LIBRARY).exists():
                return str(place)
    return ""


def beside(config: ControlConfig) -> ControlConfig:
    """Where TaskD's manager would be, which must not be there, unless our own controller is."""
    if not config.clusterd or (config.tcp() and config.tcp_port() == TASKD_PORT):
        return config
    return replace(config, clusterd_taskd=f"{config.master.rpartition(':')[0]}:{TASKD_PORT}")


async def taskd_at(place: str) -> str:
    """Why somebody else is ClusterD's client for this job: its manager listens at "host:port". "" where it does not."""
    if not place:
        return ""
    host, _, port = place.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), _PROBE)
    except (OSError, asyncio.TimeoutError):
        return ""
    writer.close()
    return f"a TaskD manager listens at {place}"
