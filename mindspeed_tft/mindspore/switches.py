"""What the environment of a MindSpore job turns on, in the names that its users set already. Knows no MindSpore.

`MS_ENABLE_TFT='{TTP:1,TSP:1}'` names features; what this plugin cannot do is refused by its name, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_tft.settings import Refused

TFT, IP, PORT, RETRY = "MS_ENABLE_TFT", "MS_TFT_IP", "MS_TFT_PORT", "HCCL_OP_RETRY_ENABLE"
SERVED = {
    "TTP": "a dying gasp when a rank is lost",
    "TSP": "pause, save and link switch between two steps",
    "RSC": "restarts of the job by the agent under msrun",
}
_IN_PLACE = "MindSpore's groups cannot be built anew in a running process, which a repair in place needs"
_RESTART = "use TTP:1 with the agent under msrun: the job is saved, started again, and loses no completed step"
REFUSED = {
    "UCE": (_IN_PLACE, _RESTART),
    "HCCE": (_IN_PLACE, _RESTART),
    "ARF": ("a single process that was started again cannot join the groups of the others", _RESTART),
    "TRE": ("nothing here judges a loss or a norm", "leave it out, or use MindFormers' own callback for it"),
}
_PAIR = re.compile(r"\s*([A-Za-z_]+)\s*:\s*(\d+)\s*")
_LEVEL = re.compile(r"\s*(L[012])\s*:\s*([01])\s*")


@dataclass(frozen=True)
class Switches:
    """The features of one job."""

    named: bool = False  # MS_ENABLE_TFT is set: otherwise the line in the script is the wish, and all is on
    dump: bool = True
    pause: bool = True
    restart: bool = False
    address: str | None = None  # host of the controller
    port: int | None = None  # its TCP port; None: the plugin's own choice, and no port at all on a single host
    retries: Mapping[str, bool] = field(default_factory=dict)  # of HCCL's operators, by level; {}: nothing was said

    @property
    def any(self) -> bool:
        """Whether a training process has anything to do."""
        return self.dump or self.pause


def read(environ: Mapping[str, str]) -> Switches:
    """The switches in an environment.

    Raises:
        Refused: a switch that is unknown, malformed, or not served here; it names the variable, reason and remedy.
    """
    found = _features(environ[TFT]) if environ.get(TFT, "").strip() else None
    return Switches(
        named=found is not None,
        dump=found is None or bool(found.get("TTP")),
        pause=found is None or bool(found.get("TSP")),
        restart=found is not None and bool(found.get("RSC")),
        address=environ.get(IP, "").strip() or None,
        port=_port(environ.get(PORT, "").strip()),
        retries=_retries(environ.get(RETRY, "").strip()),
    )


def _features(text: str) -> dict[str, int]:
    inside = text.strip().strip("'\"").strip()
    if not (inside.startswith("{") and inside.endswith("}")):
        raise Refused(TFT, f"{text!r} is not of the form {{TTP:1,TSP:1}}", "write it so, in quotes for the shell")
    found: dict[str, int] = {}
    for word in filter(str.strip, inside[1:-1].split(",")):
        pair = _PAIR.fullmatch(word)
        if pair is None:
            raise Refused(TFT, f"{word.strip()!r} is not of the form NAME:0 or NAME:1", "write it so")
        name, value = pair[1].upper(), int(pair[2])
        if name not in SERVED and name not in REFUSED:
            known = ", ".join([*SERVED, *REFUSED])
            raise Refused(TFT, f"unknown feature {name!r} (known are {known})", "correct its name")
        if name in REFUSED and value:
            reason, remedy = REFUSED[name]
            raise Refused(f"{TFT}={{{name}:{value}}}", reason, remedy)
        if name in SERVED and value > 1:
            raise Refused(f"{TFT}={{{name}:{value}}}", "it is on with 1 and off with 0", f"write {name}:1")
        found[name] = value
    return found


def _port(text: str) -> int | None:
    if not text:
        return None
    if not text.isdigit() or not 1024 <= int(text) <= 65535:
        raise Refused(PORT, f"{text!r} is no port of a user's process", "give a number from 1024 to 65535")
    return int(text)


def _retries(text: str) -> dict[str, bool]:
    """Levels of HCCL's own retry of an operator, `L0:0, L1:1, L2:1`."""
    found: dict[str, bool] = {}
    for word in filter(str.strip, text.split(",")):
        level = _LEVEL.fullmatch(word)
        if level is None:
            raise Refused(RETRY, f"{word.strip()!r} is not of the form L1:0 or L1:1", 'write "L0:0, L1:1, L2:1"')
        found[level[1]] = level[2] == "1"
    return found


def why_no_link_switch(switches: Switches) -> str:
    """Why HCCL could not move to another link; "" where it could."""
    missing = [level for level in ("L1", "L2") if not switches.retries.get(level)]
    if not missing:
        return ""
    return f'HCCL moves to another link only with {RETRY}="L0:0, L1:1, L2:1", and {", ".join(missing)} is not on'
