"""A device that stops with every stop, and goes on only when the stop is through."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mindspeed_tft.engine.types import OrderKind, RankReport
from mindspeed_tft.groups import CommunicationAborted
from mindspeed_tft.recovery import session as session_module
from mindspeed_tft.recovery.halt import Halt
from mindspeed_tft.recovery.record import SmallState
from mindspeed_tft.recovery.session import Session
from tests.unit.test_session import DEADLINES, Left, ToyHost, ToyLink, compute, ordered, repair_orders


class Device:
    def __init__(self) -> None:
        self.did: list[str] = []
        self.may_stop = threading.Event()
        self.may_stop.set()
        self.error: Exception | None = None

    def stop(self) -> None:
        assert self.may_stop.wait(10)
        if self.error is not None:
            raise self.error
        self.did.append("stop")

    def restart(self) -> None:
        self.did.append("restart")


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def halt(device: Device) -> Halt:
    return Halt(device.stop, device.restart)


def test_a_restart_waits_for_the_stop_that_it_answers(device: Device, halt: Halt) -> None:
    """The main thread may hear of a stop before the worker has got to the device: a restart that comes first would be
    undone by it, for good."""
    device.may_stop.clear()
    worker = threading.Thread(target=halt.stop, args=(1,))
    worker.start()
    with pytest.raises(RuntimeError, match=r"was not stopped within 0\.05 s"):
        halt.restart(1, 0.05)
    assert device.did == []
    main = threading.Thread(target=halt.restart, args=(1, 10.0))
    main.start()
    device.may_stop.set()
    main.join(10)
    worker.join(10)
    assert device.did == ["stop", "restart"]


def test_each_stop_has_its_restart(device: Device, halt: Halt) -> None:
    for epoch in (1, 2):
        halt.stop(epoch)
        halt.restart(epoch, 1.0)
    assert device.did == ["stop", "restart"] * 2
    halt.stop(3)
    halt.stop(4)
    halt.restart(4, 1.0)
    assert device.did[4:] == ["stop", "stop", "restart"]


def test_a_stop_that_stops_nothing_needs_no_restart(device: Device, halt: Halt) -> None:
    halt.passed(1)
    halt.restart(1, 0.0)
    assert device.did == []
    halt.stop(2)
    halt.passed(3)  # the groups were built for it already; the device is still stopped
    halt.restart(3, 0.0)
    assert device.did == ["stop", "restart"]


def test_a_device_that_could_not_be_stopped_is_not_restarted(device: Device, halt: Halt) -> None:
    device.error = RuntimeError("NPU 3 refuses")
    with pytest.raises(RuntimeError, match="NPU 3 refuses"):
        halt.stop(1)
    with pytest.raises(RuntimeError, match="could not be stopped: RuntimeError: NPU 3 refuses"):
        halt.restart(1, 0.0)
    assert device.did == []


# ------------------------------------------------------------------------------------------------ in a session


@pytest.fixture
def stopped(tmp_path: Path, device: Device, halt: Halt) -> tuple[Session[ToyHost], ToyHost, ToyLink]:
    """A session whose control plane stops the device when it stops the rank."""
    host, link = ToyHost(tmp_path), ToyLink()
    session: Session[ToyHost] = Session(host, link, DEADLINES, str, lambda _text: "exception", halt=halt)
    compute(session, host, 1)
    compute(session, host, 2, "forward")
    link.stop_epoch = 1
    return session, host, link


def test_the_device_goes_on_before_anything_is_read(
    stopped: tuple[Session[ToyHost], ToyHost, ToyLink], device: Device, halt: Halt
) -> None:
    """The report has hashes of what lies on the device, and an order may be to finish an update."""
    session, host, link = stopped
    halt.stop(1)
    reported = link.report

    def report(found: RankReport) -> None:
        device.did.append("report")
        reported(found)

    link.report = report  # type: ignore[method-assign]
    link.orders = repair_orders(1)
    session.recover(CommunicationAborted("x"))
    assert device.did == ["stop", "restart", "report"]
    assert host.done == ["regroup 1", "roll back to 1 again"]


def test_a_rank_whose_device_does_not_go_on_is_no_source(
    stopped: tuple[Session[ToyHost], ToyHost, ToyLink], device: Device, halt: Halt, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _host, link = stopped

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(session_module.os, "_exit", leave)
    device.error = RuntimeError("NPU 3 refuses")
    with pytest.raises(RuntimeError):
        halt.stop(1)
    link.orders = [*repair_orders(1)[:-1], ordered(OrderKind.EXIT, 9, code=76, summary="")]
    with pytest.raises(Left):
        session.recover(CommunicationAborted("x"))
    assert ("fault", "device", True) in link.said
    (report,) = link.reports
    assert not report.trusted and "NPU 3 refuses" in report.fault
    assert ("done", 3, False, "DumpError: this rank's memory was damaged and not repaired", {}) in link.said


def test_memory_that_cannot_be_read_hinders_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NPU refuses to read what it has marked as damaged, until it is about to be replaced."""
    host, link = ToyHost(tmp_path), ToyLink()
    session: Session[ToyHost] = Session(host, link, DEADLINES, str, lambda _text: "memory")
    compute(session, host, 1)
    compute(session, host, 2, "commit")

    def unreadable(_step: int) -> SmallState:
        raise RuntimeError("There is unsafe data in the input tensor")

    with monkeypatch.context() as patched:
        patched.setattr(host, "small_state", unreadable)
        session._damaged = True
        session.report()
    assert (link.reports[0].rng_end, link.reports[0].trusted) == ("", False)
    session.report()
    assert link.reports[1].rng_end != ""  # control
