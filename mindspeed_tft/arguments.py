"""Flags, environment and YAML presets -> `Settings`.

Only collects and merges; what a value means together with Megatron's own flags is checked in
`patches.megatron_arguments`, and what it does is decided elsewhere.
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_tft import settings as settings_module
from mindspeed_tft.settings import Refused, Settings

# (flag, options for argparse). Every flag defaults to None: "not given" must differ from "given as off", or a YAML
# preset could never take effect.
FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--enable-high-availability", {"action": "store_true", "help":
        "master switch: on a fault the surviving ranks save the last completed step as an ordinary checkpoint"}),
    ("--enable-hbmfault-repair", {"action": "store_true", "help":
        "repair a device-memory or link fault online, no process restarts (needs --enable-high-availability)"}),
    ("--enable-worker-reboot", {"action": "store_true", "help":
        "restart only the process that died (needs --enable-high-availability)"}),
    ("--enable-elastic-training", {"action": "store_true", "help":
        "go on with fewer data-parallel ranks when there is no spare (needs --enable-high-availability)"}),
    ("--distributed-optimizer-no-replica", {"action": "store_true", "help":
        "keep no replica: recoveries read the missing shard from the last periodic checkpoint"}),
    ("--optimizer-replica-num", {"type": int, "metavar": "N", "help":
        "data-parallel ranks that hold each optimizer shard (default 2)"}),
    ("--tft-config", {"metavar": "PRESET|FILE", "help": "YAML preset by name, or a YAML file, of the flags here"}),
    ("--tft-platform", {"metavar": "auto|cpu|cuda|npu", "help": "device to train on (default: what the machine has)"}),
    ("--tft-deadline", {"type": float, "metavar": "SECONDS", "help":
        "from a fault to the end of the job (twice that if a repair fails first); all timeouts follow (default 120)"}),
    ("--tft-reboot-wait", {"type": float, "metavar": "SECONDS", "help":
        "how long a process that was started again may take until it can join (default 60)"}),
    ("--tft-hang-seconds", {"type": float, "metavar": "SECONDS", "help":
        "no progress for so long is a hang of the rank that others wait for: its stacks are kept, its process is killed"
        " (default 0: by the step time; -1: no watch)"}),
    ("--tft-warm-standby", {"action": argparse.BooleanOptionalAction, "help":
        "with worker reboot: keep a process per node that has imported everything (some 300 MB; default on)"}),
    ("--tft-controller-port", {"type": int, "metavar": "PORT", "help":
        "TCP port of the controller; needed for more than one host, otherwise no port is opened"}),
    ("--tft-tls-dir", {"metavar": "DIR", "help": "ca.crt, node.crt and node.key for mutual TLS between hosts"}),
    ("--tft-insecure", {"action": "store_true", "help": "allow an unencrypted controller port (logged loudly)"}),
    ("--tft-fault-rules", {"metavar": "FILE", "help": "YAML list of {pattern, kind, platform}: more error texts"}),
    ("--tft-incident-dir", {"metavar": "DIR", "help": "where incident reports go (default: SAVE/tft_incidents)"}),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags, each only if nobody has defined it yet (MindSpeed-LLM defines some of them too)."""
    group = parser.add_argument_group(title="mindspeed_tft fault tolerance")
    for flag, options in FLAGS:
        if flag not in parser._option_string_actions:
            group.add_argument(flag, default=None, **options)


def presets() -> Path:
    """The directory of the YAML presets that the package brings."""
    return Path(str(importlib.resources.files("mindspeed_tft.configs")))


def resolve(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> tuple[Settings, dict[str, str]]:
    """Settings and the origin of each value, by precedence environment > flag > YAML > default.

    Raises:
        Refused: any value that cannot be.
    """
    flags = {
        key: getattr(args, key)
        for key in Settings.model_fields
        if getattr(args, key, None) is not None and (getattr(args, key) is not False or key.startswith("tft_"))
    }  # fmt: skip
    layers: list[tuple[str, Mapping[str, Any]]] = [
        ("environment", settings_module.from_environment(environ)),
        ("flag", flags),
    ]
    config = getattr(args, "tft_config", None)
    if config:
        layers.append((f"--tft-config {config}", settings_module.load_yaml(config, presets())))
    found, origin = settings_module.build(layers)
    _refuse_without_master(found)
    return found, origin


def _refuse_without_master(found: Settings) -> None:
    if found.enable_high_availability:
        return
    for key in ("enable_hbmfault_repair", "enable_worker_reboot", "enable_elastic_training"):
        if getattr(found, key):
            raise Refused(
                settings_module.flag_of(key),
                "it needs the master switch, which is off",
                "add --enable-high-availability, or set HIGH_AVAILABILITY",
            )


def store(found: Settings, args: argparse.Namespace) -> None:
    """Write the resolved values back, so that Megatron prints and saves what is really in force."""
    for key in Settings.model_fields:
        if hasattr(args, key):
            setattr(args, key, getattr(found, key))


def or_exit(action: Callable[[], Any], rank: int) -> Any:
    """Run a start-up check; a refusal ends the job with one clear message on rank 0.

    Every rank finds the same fault, but a launcher ends the others as soon as the first one exits: the other ranks
    hold still for a moment, or rank 0 might be ended before it has printed.
    """
    try:
        return action()
    except Refused as exc:
        leave(str(exc), rank)


def leave(message: str, rank: int) -> NoReturn:
    """End this rank before training began; only rank 0 speaks."""
    if rank == 0:
        print(f"mindspeed_tft: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(3.0)
    raise SystemExit(2)
