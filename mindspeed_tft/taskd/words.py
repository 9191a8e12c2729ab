"""What the functions of all roles take: one way to look at a dictionary, and one to refuse."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from mindspeed_tft.control.config import ENV_JOB
from mindspeed_tft.settings import Refused

MANAGER_PORT, PROXY_PORT = 9601, 9602
LOOPBACK = "127.0.0.1"
PYTORCH, MINDSPORE = "PyTorch", "MindSpore"
Config = Mapping[str, Any]


def check_keys(function: str, config: Any, known: Collection[str]) -> Config:
    """The dictionary that a function was given.

    Raises:
        Refused: it is none, or has keys that no role has.
    """
    if not isinstance(config, Mapping):
        raise Refused(function, f"its argument is a {type(config).__name__}", "give a dictionary")
    unknown = [str(key) for key in config if key not in known]
    if unknown:
        raise Refused(f"{function} {unknown[0]!r}", "there is no such key", f"use {', '.join(sorted(known))}")
    return config


def number(function: str, key: str, value: Any, least: int, most: int) -> int:
    """A whole number, also as text.

    Raises:
        Refused: it is none, or out of range.
    """
    try:
        found = int(str(value)) if not isinstance(value, bool) else None
    except ValueError:
        found = None
    if found is None or not least <= found <= most:
        raise Refused(f"{function} {key!r}", f"{value!r} is no whole number from {least} to {most}", "correct it")
    return found


def port(function: str, key: str, value: Any) -> int:
    return number(function, key, value, 1, 65535)


def job(function: str, key: str, given: Any = None) -> str:
    """The cluster's name of this job.

    Raises:
        Refused: there is none, or there are two.
    """
    here = os.environ.get(ENV_JOB, "")
    name = here if given is None else str(given)
    if not name:
        raise Refused(
            f"{function} {key!r}",
            f"{ENV_JOB} is not set, and by that name the ranks of the job find it",
            f"export {ENV_JOB}=NAME, any name, the same in the whole job",
        )
    if here and here != name:
        raise Refused(
            f"{function} {key!r}",
            f"{name!r} contradicts {ENV_JOB}={here}, by which the ranks look for it",
            f"pass os.getenv({ENV_JOB!r})",
        )
    return name
