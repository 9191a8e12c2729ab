"""Parse and validate many command lines in one process, as rank 0 of four; prints a JSON line for each.

A case with "options" (a command line with many options, and the attributes that they set) is validated once for each
attribute: the command line of the case with this one value of the other. Parsing takes most of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch  # noqa: F401

for module in os.environ.get("IMPORTED_BEFORE", "").split():
    importlib.import_module(module)
import mindspeed_tft.adaptor  # noqa: E402, F401
from mindspeed_tft.registry import REGISTRY  # noqa: E402

before = {name for name in sys.modules if name.split(".")[0] in ("megatron", "torch_npu")}
from megatron.training import arguments as megatron_arguments  # noqa: E402

cases = json.loads(sys.stdin.read())
print("CLEAN", json.dumps(sorted(before)), flush=True)


def parsed(words: list[str]) -> argparse.Namespace:
    sys.argv = ["pretrain_gpt.py", *words]
    space: argparse.Namespace = megatron_arguments.parse_args()
    return space


def outcome(namespace: Callable[[], argparse.Namespace]) -> dict[str, object]:
    err, begin = io.StringIO(), time.monotonic()
    code: object = 0
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            megatron_arguments.validate_args(namespace())
        except SystemExit as exc:
            code = exc.code
        except Exception:
            code = traceback.format_exc()
    state = {
        "groups": sorted({row.group for row in REGISTRY.list() if row.state == "applied"}),
        "threads": threading.active_count(),
        "ours": sorted(name for name in sys.modules if name.startswith("mindspeed_tft.") and sys.modules[name]),
    }
    return {"code": code, "err": err.getvalue(), "seconds": time.monotonic() - begin, "state": state}


def outcomes(case: dict[str, Any]) -> Iterator[dict[str, object]]:
    if "options" not in case:
        yield outcome(lambda: parsed(case["words"]))
        return
    plain, given = parsed(case["words"]), parsed(case["options"])
    for attribute in case["attributes"]:
        space = copy.deepcopy(plain)
        setattr(space, attribute, getattr(given, attribute))
        yield outcome(lambda space=space: space)  # type: ignore[misc]


for case in cases:
    environ = dict(os.environ)
    os.environ.update({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", **case["environ"]})
    for found in outcomes(case):
        print("CASE", json.dumps(found), flush=True)
    os.environ.clear()
    os.environ.update(environ)
