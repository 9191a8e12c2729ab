"""Saves in the background: their processes end with their rank, and what they write does not change any more."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from mindspeed_tft.groups import CommunicationAborted
from mindspeed_tft.patches import megatron_async_save, megatron_on_cpu

WAITING = "import signal; print('here', flush=True); signal.pause()"
BESIDE = (
    "import signal, sys; from mindspeed_tft.patches import megatron_async_save as saves\n"
    "saves._end_with(int(sys.argv[1])); print('here', flush=True); signal.pause()"
)


def _start(processes: Any, *words: str) -> subprocess.Popen[str]:
    started: subprocess.Popen[str] = processes.start([sys.executable, "-c", *words])
    assert started.stdout is not None and started.stdout.readline() == "here\n"
    return started


def test_the_writing_process_ends_when_its_rank_is_killed(processes: Any) -> None:
    rank = _start(processes, WAITING)
    writer = _start(processes, BESIDE, str(rank.pid))
    assert writer.poll() is None
    rank.kill()
    assert writer.wait(timeout=10) == 1


def test_a_rank_that_is_gone_already_leaves_no_writing_process(processes: Any) -> None:
    rank = _start(processes, WAITING)
    processes.kill(rank)
    assert processes.start([sys.executable, "-c", BESIDE, str(rank.pid)]).wait(timeout=30) == 1


class Writer:
    """As Megatron's: tensors that lie on the host already are taken as they are."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.write_buckets = tensor, None  # type: tuple[torch.Tensor, Any]

    def prepare_write_data(self, item: str) -> None:
        self.write_buckets = [("/iter/file", "file", ([("object", b"")], [(item, self.tensor)]))]


@pytest.mark.parametrize("staged", [True, False])
def test_what_is_written_in_the_background_is_a_copy(monkeypatch: pytest.MonkeyPatch, staged: bool) -> None:
    module = ModuleType("filesystem_async")
    monkeypatch.setattr(Writer, "prepare_write_data", Writer.prepare_write_data)  # put back afterwards
    vars(module)["FileSystemWriterAsync"] = Writer
    if staged:
        megatron_on_cpu._filesystem_async(module)
    writer = Writer(torch.zeros(4))
    writer.prepare_write_data("moment")
    writer.tensor += 1  # training goes on
    ((path, name, (objects, tensors)),) = writer.write_buckets
    assert (path, name, objects, tensors[0][0]) == ("/iter/file", "file", [("object", b"")], "moment")
    assert tensors[0][1].tolist() == [0 if staged else 1] * 4


class Queue:
    """As Megatron's: each look is a collective, by which all ranks learn together what is complete."""

    def __init__(self, looks: int) -> None:
        self.looks, self.stopped_at = looks, 0

    def get_num_unfinalized_calls(self) -> int:
        return int(self.looks > 0)

    def look(self, blocking: bool = False) -> None:
        assert not blocking, "a stop would wait for the storage"
        self.looks -= 1
        if self.looks == self.stopped_at > 0:
            raise CommunicationAborted("stopped")


def test_before_a_hold_saves_get_their_end_and_a_stop_is_heard_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("async_utils")
    queue = Queue(looks=3)
    vars(module).update(_async_calls_queue=queue, maybe_finalize_async_save=queue.look)
    monkeypatch.setitem(sys.modules, megatron_async_save.TRAINING, module)
    monkeypatch.setattr(megatron_async_save, "LOOK", 0.001)
    megatron_async_save.end_all()
    assert queue.looks == 0
    queue.looks, queue.stopped_at = 3, 1
    with pytest.raises(CommunicationAborted):
        megatron_async_save.end_all()
    assert queue.looks == 1
    vars(module)["_async_calls_queue"] = None  # nothing was ever saved
    megatron_async_save.end_all()
