"""`python -m mindspeed_tft.control.controller_main --config FILE --socket PATH --index N`: a controller of a job."""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import secrets
import signal
from pathlib import Path

from mindspeed_tft.control import daemon
from mindspeed_tft.control.config import ControlConfig

# An incident of thousands of ranks makes a million objects that live to its end. With the usual thresholds a quarter of
# the time goes into looking at them again and again.
_COLLECT_AFTER = 100_000  # new objects


def serve(config: ControlConfig, args: argparse.Namespace, ready: daemon.Ready) -> None:
    # Imported here: gRPC does not survive the fork that detaches this process.
    from mindspeed_tft.control import native_log
    from mindspeed_tft.control.candidate import Candidate
    from mindspeed_tft.control.controller import EngineLike

    module, _, name = config.engine.partition(":")
    kind = getattr(importlib.import_module(module), name)

    def make_engine(epoch: int, issued: int) -> EngineLike:
        engine: EngineLike = kind(
            config.deadlines,
            config.world_size,
            epoch=epoch,
            issued=issued,
            tag=secrets.token_hex(3),
            strategies=frozenset(config.strategies),
        )
        return engine

    async def main() -> None:
        loop = asyncio.get_running_loop()
        # A cluster that ends a job sends SIGTERM to everything: the ranks' dump needs this process to the last.
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, lambda: None)
        directory = Path(args.socket).parent
        gc.freeze()  # what was imported stays
        gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
        if config.tcp():
            native_log.divert()
        await Candidate(config, args.index, directory, make_engine, args.starting).run(args.socket, ready)

    asyncio.run(main())


if __name__ == "__main__":
    daemon.run("mindspeed_tft.control.controller_main", None, serve)
