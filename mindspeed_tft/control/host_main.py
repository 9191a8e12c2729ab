"""`python -m mindspeed_tft.control.host_main --config FILE --socket PATH`: the relay of a host."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from pathlib import Path

from mindspeed_tft.control import daemon
from mindspeed_tft.control.config import ControlConfig


def serve(config: ControlConfig, args: argparse.Namespace, ready: daemon.Ready) -> None:
    # Imported here: gRPC does not survive the fork that detaches this process.
    from mindspeed_tft.control import tls
    from mindspeed_tft.control import wire_pb2 as wire
    from mindspeed_tft.control.candidates import Candidates
    from mindspeed_tft.control.codec import PROTOCOL
    from mindspeed_tft.control.relay import Relay
    from mindspeed_tft.control.uplink import Uplink

    path = Path(args.socket)
    transport = tls.transport(config) if config.nnodes > 1 else None
    tls.say_how_safe(config)
    hello = wire.HostHello(
        protocol=PROTOCOL, host=config.host, node_rank=config.node_rank, pid=os.getpid(), run=config.run_name
    )

    async def main() -> None:
        listener = listen(path)
        loop = asyncio.get_running_loop()
        # A cluster that ends a job sends SIGTERM to everything: the ranks' dump needs this process to the last.
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(name, lambda: None)
        uplink = Uplink(hello, config.deadlines, Candidates(config, path.parent), transport)
        relay = Relay(listener, path, uplink, config, args.starting)
        ready()
        await relay.run()

    asyncio.run(main())


def listen(path: Path) -> socket.socket:
    """A listening socket that only this user can reach, in place of whatever an earlier job left there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listener.bind(str(temporary))
    finally:
        os.umask(before)
    listener.listen(1024)
    os.rename(temporary, path)
    return listener


if __name__ == "__main__":
    daemon.run("mindspeed_tft.control.host_main", None, serve)
