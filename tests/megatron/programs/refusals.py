"""Parse and validate many command lines in one process, as rank 0 of four; prints a JSON line for each."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
import traceback

import torch  # noqa: F401

import mindspeed_tft.adaptor  # noqa: F401
from mindspeed_tft.registry import REGISTRY

before = {name for name in sys.modules if name.split(".")[0] in ("megatron", "torch_npu")}
from megatron.training import arguments as megatron_arguments  # noqa: E402

cases = json.loads(sys.stdin.read())
print("CLEAN", json.dumps(sorted(before)), flush=True)
for case in cases:
    environ = dict(os.environ)
    os.environ.update({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", **case["environ"]})
    sys.argv = ["pretrain_gpt.py", *case["words"]]
    err, begin = io.StringIO(), time.monotonic()
    code: object = 0
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            megatron_arguments.validate_args(megatron_arguments.parse_args())
        except SystemExit as exc:
            code = exc.code
        except Exception:
            code = traceback.format_exc()
    os.environ.clear()
    os.environ.update(environ)
    seconds = time.monotonic() - begin
    state = {
        "groups": sorted({row.group for row in REGISTRY.list() if row.state == "applied"}),
        "threads": threading.active_count(),
        "ours": sorted(name for name in sys.modules if name.startswith("mindspeed_tft.") and sys.modules[name]),
    }
    print("CASE", json.dumps({"code": code, "err": err.getvalue(), "seconds": seconds, "state": state}), flush=True)
