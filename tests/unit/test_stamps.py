"""The hashes that a rank keeps of its shards: taken beside training, and void as soon as the shards change."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mindspeed_tft.recovery import stamps as stamps_module
from mindspeed_tft.recovery.stamps import Mode, Stamps
from mindspeed_tft.replica.digest import LANES, Shard, digest

WAIT = 20.0  # seconds, at most


class Held:
    """One shard of one tensor, and what another thread may do to it."""

    def __init__(self, words: int = 100) -> None:
        self.tensor = torch.arange(words, dtype=torch.float32)

    def shards(self) -> dict[str, Shard]:
        return {"a": Shard([self.tensor])}


def test_a_hash_is_taken_after_each_change() -> None:
    held = Held()
    stamps = Stamps(held.shards)
    seen = set()
    for _ in range(3):
        stamps.changing()
        assert stamps.known == {}
        held.tensor += 1
        stamps.changed()
        assert stamps.settle(WAIT)
        assert stamps.known == {"a": digest(Shard([held.tensor]))} == stamps.now()
        seen.add(stamps.known["a"])
    assert len(seen) == 3


def test_a_bit_that_flips_later_is_seen() -> None:
    held = Held()
    stamps = Stamps(held.shards)
    stamps.changed()
    assert stamps.settle(WAIT)
    held.tensor.view(torch.int32)[50] ^= 1
    assert stamps.now() != stamps.known


def test_who_is_overtaken_by_the_next_update_has_no_hash() -> None:
    """And nobody waits: the thread is in the middle of it when the update begins."""
    begun, go_on = threading.Event(), threading.Event()

    @contextmanager
    def slow() -> Iterator[None]:
        begun.set()
        assert go_on.wait(WAIT)
        yield

    held = Held(4 * LANES)
    stamps = Stamps(held.shards, beside=lambda: slow)
    stamps.changed()
    assert begun.wait(WAIT)
    stamps.changing()
    go_on.set()
    assert stamps.settle(WAIT)
    assert stamps.known == {}


def test_a_hash_that_was_kept_is_not_replaced_by_a_late_one() -> None:
    begun, go_on = threading.Event(), threading.Event()

    @contextmanager
    def slow() -> Iterator[None]:
        begun.set()
        assert go_on.wait(WAIT)
        yield

    held = Held()
    stamps = Stamps(held.shards, beside=lambda: slow)
    stamps.changed()
    assert begun.wait(WAIT)
    kept = stamps.now()
    stamps.keep(kept)
    held.tensor.view(torch.int32)[50] ^= 1
    go_on.set()
    assert stamps.settle(WAIT)
    assert stamps.known == kept != stamps.now()


def test_tensors_that_were_replaced_are_no_flipped_bits(caplog: pytest.LogCaptureFixture) -> None:
    held = Held()
    stamps = Stamps(held.shards)
    stamps.changed()
    assert stamps.settle(WAIT)
    held.tensor = held.tensor + 1
    assert stamps.now() == {"a": digest(Shard([held.tensor]))}
    assert stamps.known == {}
    assert "does not lie where it was hashed" in caplog.text
    stamps.changed()
    assert stamps.settle(WAIT)
    assert stamps.known == stamps.now()


def test_hashing_stays_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hash takes a second here, so that 200 seconds have to pass until the next one."""
    wall, used = [1000.0], [0.0]
    clocks = SimpleNamespace(monotonic=lambda: wall[0], thread_time=lambda: used[0])
    monkeypatch.setattr(stamps_module, "time", clocks)

    @contextmanager
    def slow() -> Iterator[None]:
        used[0] += 1.0
        yield

    held = Held()
    stamps = Stamps(held.shards, "auto", beside=lambda: slow)
    hashed = []
    for step in range(50):
        stamps.changed()
        assert stamps.settle(WAIT)
        if stamps.known:
            hashed.append(step)
        wall[0] += 10.0
    assert hashed == [0, 20, 40]
    assert stamps.now()  # at a stop, whatever was spent


@pytest.mark.parametrize("mode", ["stop", "never"])
def test_without_hashes_in_every_step_there_is_no_thread(mode: str) -> None:
    held = Held()
    before = threading.active_count()
    stamps = Stamps(held.shards, mode)  # type: ignore[arg-type]
    stamps.changed()
    assert threading.active_count() == before
    assert stamps.known == {}
    assert stamps.now() == ({} if mode == "never" else {"a": digest(Shard([held.tensor]))})


@pytest.mark.parametrize("mode", ["auto", "step"])
def test_a_device_without_a_place_beside_training_hashes_at_a_stop_or_at_once(mode: Mode) -> None:
    held = Held()
    stamps = Stamps(held.shards, mode, beside=lambda: None)
    before = threading.active_count()
    stamps.changed()
    here = {"a": digest(Shard([held.tensor]))}
    assert stamps.known == (here if mode == "step" else {})
    assert stamps.now() == here and threading.active_count() == before
    stamps.changing()
    assert stamps.known == {}


def test_what_breaks_in_the_thread_is_told_and_costs_this_hash_only(caplog: pytest.LogCaptureFixture) -> None:
    broken = iter([True, False])

    @contextmanager
    def place() -> Iterator[None]:
        if next(broken):
            raise RuntimeError("the device is stopped")
        yield

    held = Held()
    stamps = Stamps(held.shards, beside=lambda: place)
    stamps.changed()
    assert stamps.settle(WAIT)
    assert stamps.known == {}
    assert "the device is stopped" in caplog.text
    stamps.changed()
    assert stamps.settle(WAIT)
    assert stamps.known == stamps.now()


def test_what_cannot_be_read_in_place_is_told_once_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    held = Held()
    held.tensor = torch.zeros(4, 4).t()
    stamps = Stamps(held.shards)
    stamps.changed()
    stamps.changed()
    assert caplog.text.count("no hashes of shards are taken in this job") == 1
    assert stamps.now() == {}


def test_after_the_end_nothing_is_hashed() -> None:
    held = Held(200 * LANES)
    stamps = Stamps(held.shards)
    stamps.changed()
    stamps.end(WAIT)
    assert stamps.known == {}  # it was given up, or is void
    stamps.changed()
    assert stamps.settle(WAIT)
    assert stamps.known == {}


def test_a_process_that_ends_while_it_hashes_is_not_aborted() -> None:
    """A daemon thread that comes back from torch while the interpreter shuts down ends the process with SIGABRT."""
    program = (
        "import atexit, torch\n"
        "from mindspeed_tft.recovery.stamps import Mode, Stamps\n"
        "from mindspeed_tft.replica.digest import Shard\n"
        "tensor = torch.zeros(40_000_000)\n"
        "stamps = Stamps(lambda: {'a': Shard([tensor])})\n"
        "atexit.register(stamps.end)\n"
        "stamps.changed()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
