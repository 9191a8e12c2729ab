"""Connects one rank to the control plane: settings -> control processes -> processor -> member."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from mindspeed_tft.control import launch, stacks
from mindspeed_tft.control.config import ControlConfig, ControlUnavailable
from mindspeed_tft.control.processor import Processor
from mindspeed_tft.mindspore import places, switches
from mindspeed_tft.mindspore.framework import Handler, on_ascend
from mindspeed_tft.mindspore.member import Member
from mindspeed_tft.mindspore.places import Place
from mindspeed_tft.observe import logs
from mindspeed_tft.settings import Settings

log = logging.getLogger(__name__)

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def protect(member: Member, place: Place, found: Settings, mode: str) -> None:
    """Start the control processes of this host where it is this rank's turn, and connect `member`. Training goes on,
    with a loud warning, where that fails.

    Args:
        mode: how the ranks share their work, for who reads an incident.

    Raises:
        ControlRefused: a setting has to be corrected.
    """
    rank, info, deadlines = place.rank, member.info, places.deadlines(found, os.environ)
    logs.bind(rank=rank, host=place.host)
    logs.install(found.tft_log_format)
    config = place.config(
        deadlines,
        found.tft_incident_dir or str(member.save / "tft_incidents"),
        port=found.tft_controller_port,
        tls_dir=found.tft_tls_dir,
        tls_key_password_file=found.tft_tls_key_password_file,
        tls_decrypt=found.tft_tls_decrypt,
        insecure=found.tft_insecure,
        strategies=("dump",),
        metrics_port=found.tft_metrics_port,
        metrics_host=found.tft_metrics_host,
        otel_endpoint=found.tft_otel_endpoint,
        clusterd=found.clusterd,
        clusterd_job=found.tft_clusterd_job or "",
        job={"framework": "mindspore", "layout": f"{mode} x {place.world_size}", "strategies": "dump"},
        log_format=found.tft_log_format,
    )
    if found.tft_controller_address:
        config = dataclasses.replace(config, controller_host=found.tft_controller_address)
    if config.clusterd:
        from mindspeed_tft.clusterd.address import beside

        config = beside(config)
    path, unavailable = _meet(config, rank, place.local_rank)
    revive = None if unavailable else launch.reviver(config, place.local_rank)
    link = Processor(path, deadlines, on_stop=member.stopped, revive=revive)
    member.connect(link)
    stacks.offer()
    started = link.start(info, 1.0 if unavailable else config.start)
    if not started:
        log.error("*** rank %d trains WITHOUT protection for now: %s ***", rank, unavailable or "see above")
    logs.bind(step=lambda: link.step, epoch=lambda: link.stop_epoch)
    _catch_endings(member)
    _catch_uncaught(member)
    atexit.register(goodbye, link)
    if started:
        log.info("pid %d is protected: part %s of %d ranks", info.pid, info.part, place.world_size)


def why_no_link(switched: switches.Switches, handler: Handler | None) -> str:
    """Why there is no other link to move to; "" where there is one, or a handler that knows."""
    if handler is not None:
        return ""
    if not on_ascend():
        return "this job has one link: only HCCL has two; for something else give FaultTolerance a link_handler"
    return switches.why_no_link_switch(switched)


def _meet(config: ControlConfig, rank: int, local_rank: int) -> tuple[Path, str]:
    """Where this host's relay listens, or will, and why it does not ("" when it does). A refusal ends the job here."""
    try:
        return launch.ensure_host(config, rank, local_rank), ""
    except (ControlUnavailable, OSError) as exc:
        return launch.meeting_place(config), str(exc)


def goodbye(link: Processor) -> None:
    """This rank ends in the ordinary way."""
    link.goodbye()
    link.close()


def _catch_endings(member: Member) -> None:
    """A signal that asks this rank to end is a fault of the job. A handler that somebody installed stays."""
    if threading.current_thread() is not threading.main_thread():
        log.warning("not on the main thread: a signal ends this rank without a dump")
        return
    for number in ENDING:
        previous = signal.getsignal(number)
        if previous in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _handler(member, previous))


def _handler(member: Member, previous: Any) -> Any:
    def handle(number: int, frame: FrameType | None) -> None:
        if member.terminated(signal.Signals(number).name):
            return
        if callable(previous):
            previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return handle


def _catch_uncaught(member: Member) -> None:
    """Faults outside `Model.train` reach the interpreter's own hook."""
    previous = sys.excepthook

    def handle(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        atexit.unregister(goodbye)
        member.failed(exc)
        previous(kind, exc, trace)

    sys.excepthook = handle
