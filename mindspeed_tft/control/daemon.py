"""How a control process leaves the training process that started it, and tells it whether it came up.

The starter runs the module with --detach and waits, with a deadline, for that first process: it forks the one that
stays (so that no training process ever has a child it does not know), and ends with 0 when that one is ready, or with
its exit code and its last line on stdout. Nothing heavy may be imported before the fork.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mindspeed_tft.control.config import ControlConfig, ControlRefused
from mindspeed_tft.observe import logs

OK, FAILED, REFUSED = 0, 1, 2
_ROLES = {"host": "relay"}  # how a control process is called in its log, where that is not its module's name

Ready = Callable[[], None]


def run(name: str, argv: list[str] | None, serve: Callable[[ControlConfig, argparse.Namespace, Ready], None]) -> None:
    """The main function of both control processes; ends the process."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}")
    parser.add_argument("--config", required=True, help="JSON file with the ControlConfig, - for stdin")
    parser.add_argument("--socket", required=True, help="path of the Unix socket to listen on")
    parser.add_argument("--index", type=int, default=0, help="number of this controller in the job (controller only)")
    parser.add_argument("--starting", action="store_true", help="the relay and the first controller start together")
    parser.add_argument("--detach", action="store_true", help="stay behind as a process of its own once ready")
    args = parser.parse_args(argv)
    config = ControlConfig.from_json(sys.stdin.read() if args.config == "-" else Path(args.config).read_text())
    tell = detach(config.start) if args.detach else sys.stdout.fileno()
    sys.exit(_guarded(name, config, args, serve, tell, args.detach))


def _guarded(
    name: str,
    config: ControlConfig,
    args: argparse.Namespace,
    serve: Callable[[ControlConfig, argparse.Namespace, Ready], None],
    tell: int,
    detached: bool,
) -> int:
    # Our words may be the only ones in a torchrun log: they carry a name and a time.
    short = name.rsplit(".", 1)[-1].removesuffix("_main")
    logs.bind(host=config.host)
    logs.install("json" if config.log_format == "json" else "text", _ROLES.get(short, short), whole=True)
    logging.raiseExceptions = False  # a stderr that is gone with its job must not stop the last work of this process
    told = False

    def ready() -> None:
        nonlocal told
        if not told:
            told = True
            os.write(tell, b"ready\n")
            if detached:
                os.close(tell)

    try:
        serve(config, args, ready)
    except ControlRefused as error:
        if told or not detached:
            logs.say(f"{short}: {error}", sys.stderr, short)
        if not told and detached:
            os.write(tell, f"{error}\n".encode())
        return REFUSED
    except Exception as error:
        logging.exception("%s failed", short)
        if not told and detached:
            os.write(tell, f"{type(error).__name__}: {error}\n".encode())
        return FAILED
    return OK


def detach(timeout: float) -> int:
    """Forks. The parent waits for the child's word and exits; the child gets the descriptor to give it on."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(out)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)
        return into
    os.close(into)
    end = time.monotonic() + timeout
    text = b""
    while not text.endswith(b"\n"):
        readable, _, _ = select.select([out], [], [], max(0.0, end - time.monotonic()))
        if not readable:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            _leave(FAILED, f"not ready within {timeout:.0f} s")
        data = os.read(out, 4096)
        if not data:
            break
        text += data
    if text == b"ready\n":
        try:
            _leave(OK, "ready")
        except BrokenPipeError:  # who wanted it is dead: it would only wait for somebody to come
            os.kill(child, signal.SIGKILL)
            os._exit(FAILED)
    _, status = os.waitpid(child, 0)
    _leave(os.waitstatus_to_exitcode(status) or FAILED, text.decode().strip() or "ended before it was ready")
    raise AssertionError("unreachable")


def _leave(code: int, text: str) -> None:
    print(text, flush=True)
    os._exit(code & 0xFF)
