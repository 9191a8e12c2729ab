"""A rank without training: does what its JSON argument says, and writes what happens to it."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mindspeed_tft.control import launch
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.control.processor import Processor
from mindspeed_tft.engine import types as t
from mindspeed_tft.recovery.hold import Boundary, HoldBroken

words = json.loads(sys.argv[1])
rank = words["rank"]
out = open(words["log"], "a", buffering=1)  # noqa: SIM115 (lives as long as the process)


def tell(what: str, **values: object) -> None:
    out.write(json.dumps({"what": what, "at": time.monotonic(), **values}) + "\n")


def reach(boundary: Boundary, processor: Processor, say: Callable[..., None]) -> bool:
    """The end of a step. False: a stop came while this rank was held."""

    def save() -> Path:
        say("save", step=processor.step)
        return Path(f"/save/iter_{processor.step}")

    hold, wanted, limit = boundary.offer(processor.step)  # no commit here: what the others know is not asked
    boundary.agree(hold, wanted, limit)
    if hold:
        say("holds", step=processor.step)
    try:
        boundary.reach(processor.step, save, leaves=False)
    except HoldBroken:
        return False
    if hold:
        say("goes on", step=processor.step)
    return True


def main() -> int:
    logging.basicConfig(level=logging.INFO)
    config = ControlConfig.from_json(words["config"])
    try:
        path = launch.ensure_host(config, rank, words["local_rank"])
    except Exception as error:
        tell("failed", type=type(error).__name__, text=str(error))
        return 3
    told = threading.Event()

    def on_stop(epoch: int, reason: str) -> None:
        tell("stop", epoch=epoch, reason=reason)
        told.set()

    processor = Processor(
        path,
        config.deadlines,
        on_stop=on_stop,
        on_lost=lambda reason: tell("lost", reason=reason),
        revive=launch.reviver(config, words["local_rank"]),
    )
    holds = tuple(words.get("holds", [f"tp0-pp0/dense/{rank}"]))
    info = t.RankInfo(rank, config.host, os.getpid(), "tp0-pp0", rank, holds)
    ok = processor.start(info, words.get("start", 10.0), bare=bool(words.get("bare")))
    tell("started", ok=ok, pid=os.getpid(), grpc="grpc" in sys.modules)
    if words.get("fork"):
        child = os.fork()
        if child == 0:
            time.sleep(words["fork"])
            os._exit(0)
        tell("forked", pid=child)
    end = time.monotonic() + words.get("seconds", 30.0)
    was, parked = ok, ""
    boundary = Boundary(processor, lambda: processor.stopping, config.deadlines.order)
    while not processor.stopping and time.monotonic() < end:
        if words.get("operated") and not reach(boundary, processor, tell):
            break
        if processor.parked != parked:
            parked = processor.parked
            tell("parked", why=parked)
        processor.step += 1
        if "peer_fault" in words and os.path.exists(words["peer_fault"]):
            processor.fault("peer", "connection closed by peer", own=False)
            processor.wait_stop(5.0)
        time.sleep(0.01)
        if processor.connected != was:
            was = processor.connected
            tell("connected" if was else "disconnected")
    if not processor.stopping:
        tell("goodbye", ok=processor.goodbye())
        processor.close()
        return 0
    told.wait(5.0)
    time.sleep(words.get("report_after", 0.0))
    step = words.get("step", processor.step)
    reported = 0
    while time.monotonic() < end:
        if reported < (epoch := processor.stop_epoch):
            processor.report(t.RankReport(rank, step, t.Commit.NONE, t.Update.UNTOUCHED, rng_start="r", epoch=epoch))
            reported = epoch
        order = processor.next_order(0.1)
        if order is None:
            continue
        tell("order", kind=order.kind.value, payload=order.payload)
        result = {"by": str(rank), "path": "/save/iter", "resume": "run it again"}
        processor.order_done(order.id, True, "done", result)
        if order.kind is t.OrderKind.RESUME:
            processor.resumed()
            tell("goodbye", ok=processor.goodbye())
            processor.close()
            return 0
        if order.kind is t.OrderKind.EXIT:
            processor.close()
            return int(order.payload["code"])
    return 4


faulthandler.register(signal.SIGUSR1)  # where it hangs, for whoever looks for a failure
signal.signal(signal.SIGTERM, signal.SIG_IGN if words.get("ignore_term") else signal.SIG_DFL)
sys.exit(main())
