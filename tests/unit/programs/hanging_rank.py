"""A rank without training that steps until a file appears, and then hangs as its JSON argument says, or waits for who
does. It writes what happens to it."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import time

from mindspeed_tft.control import launch, stacks
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.control.processor import Processor
from mindspeed_tft.engine import types as t

words = json.loads(sys.argv[1])
rank = words["rank"]
out = open(words["log"], "a", buffering=1)  # noqa: SIM115 (lives as long as the process)


def tell(what: str, **values: object) -> None:
    out.write(json.dumps({"what": what, "at": time.monotonic(), **values}) + "\n")


def hold_the_lock_for_ever() -> None:
    """A native call that keeps the interpreter's lock: a mutex that is locked twice."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def sleep_for_ever() -> None:
    time.sleep(1000)


def wait_to_be_stopped() -> None:
    while not processor.stopping:
        time.sleep(0.001)


HANGS = {"native": hold_the_lock_for_ever, "sleep": sleep_for_ever, "stopped": wait_to_be_stopped}

logging.basicConfig(level=logging.INFO)
config = ControlConfig.from_json(words["config"])
waiting = False
processor = Processor(
    launch.ensure_host(config, rank, words["local_rank"]),
    config.deadlines,
    on_stop=lambda epoch, reason: tell("stop", epoch=epoch, reason=reason),
    waits=lambda: waiting,
)
offered = stacks.offer()
ok = processor.start(t.RankInfo(rank, config.host, os.getpid(), "p0", rank, ("p0/0",)), 10.0)
tell("started", ok=ok, offered=offered)
end = time.monotonic() + 60
processor.phase = "forward-backward"
while not os.path.exists(words["go"]) and not processor.stopping:
    processor.step += 1
    time.sleep(0.02)
processor.step = 1_000_000  # all in the same step
if rank == words["hangs"]:
    tell("hangs")
    HANGS[words["how"]]()
waiting = True
while not processor.stopping and time.monotonic() < end:
    time.sleep(0.02)
waiting = False
report = t.RankReport(rank, processor.step, t.Commit.NONE, t.Update.UNTOUCHED, epoch=processor.stop_epoch)
processor.report(report)
while time.monotonic() < end:
    order = processor.next_order(1.0)
    if order is not None:
        processor.order_done(order.id, True, "done", {"path": "/save/iter", "resume": "run it again"})
        if order.kind is t.OrderKind.EXIT:
            processor.close()
            sys.exit(int(str(order.payload["code"])))
sys.exit(4)
