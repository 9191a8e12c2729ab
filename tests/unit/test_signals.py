"""Real signals, sent to this process: being asked to end becomes a fault of the job, and an update is never torn."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import FrameType, ModuleType, SimpleNamespace

import pytest

from mindspeed_tft.patches import megatron_training
from mindspeed_tft.recovery import signals

ALL = (*signals.ENDING, signal.SIGCHLD)


class Protected:
    """A session that only listens."""

    def __init__(self) -> None:
        self.connected, self.ending, self.updating = True, False, False
        self.asked: list[str] = []
        self.deferred: list[Exception] = []

    def terminated(self, name: str) -> bool:
        if self.connected:
            self.asked.append(name)
        return self.connected

    def defer(self, exc: Exception) -> bool:
        if self.updating:
            self.deferred.append(exc)
        return self.updating


@pytest.fixture
def session() -> Iterator[Protected]:
    before = {number: signal.getsignal(number) for number in ALL}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    yield Protected()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", signals.ENDING)
def test_a_protected_rank_lives_on_and_tells(session: Protected, number: signal.Signals) -> None:
    signals.catch_endings(session)  # type: ignore[arg-type]
    signal.raise_signal(number)
    assert session.asked == [number.name]


def test_ctrl_c_without_protection_is_what_it_always_was(session: Protected) -> None:
    session.connected = False
    signals.catch_endings(session)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_somebody_else_stays(session: Protected) -> None:
    """Megatron's --exit-signal-handler saves at the end of the step by itself."""
    seen: list[int] = []

    def theirs(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    signal.signal(signal.SIGTERM, theirs)
    signals.catch_endings(session)  # type: ignore[arg-type]
    signal.raise_signal(signal.SIGTERM)
    assert (seen, session.asked) == ([signal.SIGTERM], [])


MEGATRON = next(iter(getattr(find_spec("megatron"), "submodule_search_locations", ())), "")


@pytest.mark.skipif(not MEGATRON, reason="Megatron is not installed")
def test_a_held_rank_sees_the_signal_that_megatron_keeps_for_the_end_of_a_step(
    session: Protected, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_from_file_location("dist_signal_handler", f"{MEGATRON}/training/dist_signal_handler.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    handler = module.DistributedSignalHandler(signal.SIGTERM).__enter__()
    signals.catch_endings(session)  # type: ignore[arg-type]
    args, known = SimpleNamespace(exit_signal_handler=True), ModuleType("global_vars")
    vars(known).update(get_args=lambda: args, get_signal_handler=lambda: handler)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", known)
    megatron_training.look_for_signal(session)
    assert session.asked == []
    signal.raise_signal(signal.SIGTERM)
    assert session.asked == []
    megatron_training.look_for_signal(session)
    assert session.asked == ["SIGTERM"]
    args.exit_signal_handler = False  # then Megatron has no handler to be asked
    vars(known)["get_signal_handler"] = lambda: pytest.fail("it is not initialized")
    megatron_training.look_for_signal(session)


def loader_dies(text: str) -> None:
    """What torch does with the news of a dead loader worker."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise RuntimeError(text)

    signal.signal(signal.SIGCHLD, handler)


KILLED, ASKED = "DataLoader worker (pid 7) is killed by signal: Killed.", "DataLoader worker is killed by: Terminated."


def test_a_loader_that_dies_by_itself_is_told_at_once(session: Protected) -> None:
    loader_dies(KILLED)
    signals.guard_children(session)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Killed"):
        signal.raise_signal(signal.SIGCHLD)


def test_in_an_update_it_waits(session: Protected) -> None:
    loader_dies(KILLED)
    signals.guard_children(session)  # type: ignore[arg-type]
    session.updating = True
    signal.raise_signal(signal.SIGCHLD)
    assert [str(exc) for exc in session.deferred] == [KILLED]


def test_a_loader_that_was_asked_to_end_means_that_the_rank_was(session: Protected) -> None:
    loader_dies(ASKED)
    signals.guard_children(session)  # type: ignore[arg-type]
    signal.raise_signal(signal.SIGCHLD)
    assert session.asked == ["SIGTERM (as its data loader did)"]


def test_once_the_job_ends_nobody_needs_loaders(session: Protected) -> None:
    loader_dies(KILLED)
    signals.guard_children(session)  # type: ignore[arg-type]
    session.ending = True
    signal.raise_signal(signal.SIGCHLD)
    assert session.deferred == []


def test_without_loaders_nothing_is_guarded(session: Protected) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signals.guard_children(session)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
