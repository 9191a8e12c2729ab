"""A rank in a job whose collectives cannot be aborted: real processes, real control plane, a toy
for the framework. Which step is saved, and from which copy."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import control_support
import pytest

from mindspeed_tft.engine.types import RankInfo
from mindspeed_tft.mindspore import layout
from mindspeed_tft.mindspore.member import Member
from mindspeed_tft.recovery import files
from mindspeed_tft.recovery.hold import NotDone
from mindspeed_tft.settings import Settings

PROGRAM = Path(__file__).parent / "programs" / "member_rank.py"
DEADLINES = Settings().deadlines()
TWO_PARTS = ["a", "a", "b", "b"]


class Hub:
    """Gives all ranks the highest of their numbers, once all have come. Of a lost one it waits for ever."""

    def __init__(self, world: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, args=(world,), daemon=True).start()

    def _serve(self, world: int) -> None:
        ranks = [self._listener.accept()[0] for _ in range(world)]
        files_ = [rank.makefile("rb") for rank in ranks]
        while all(lines := [file.readline() for file in files_]):
            highest = [max(numbers) for numbers in zip(*map(json.loads, lines), strict=True)]
            for rank in ranks:
                rank.sendall(json.dumps(highest).encode() + b"\n")
        threading.Event().wait()  # connections stay open: nobody is told


class Ranks:
    """Four of them, and what they leave."""

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.save = tmp, tmp / "save"
        self.started: list[subprocess.Popen[str]] = []

    def run(self, where: str, parts: list[str], copies: int = 2, lazy: bool = False) -> dict[int, int]:
        """Rank 3 is killed in step 5; exit statuses by rank."""
        config = control_support.config(self.tmp, 4, engine="mindspeed_tft.engine.machine:Engine")
        words = {"config": config.to_json(), "port": Hub(4).port, "save": str(self.save), "steps": 8, "parts": parts,
                 "copies": copies, "lazy": lazy, "fault": {"rank": 3, "step": 5, "where": where}}  # fmt: skip
        for rank in range(4):
            command = [sys.executable, str(PROGRAM), json.dumps({**words, "rank": rank})]
            self.started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)))
        for process in self.started:
            process.wait(90)
        return {rank: process.returncode for rank, process in enumerate(self.started)}

    def saved(self) -> tuple[int | None, dict[str, str]]:
        """The step that the tracker names, and the parts of its checkpoint, which verifies."""
        step = layout.latest(self.save)
        if step is None:
            return None, {}
        directory = layout.checkpoint(self.save, step)
        files.verify_checkpoint(directory)
        return step, {path.stem: path.read_text() for path in directory.glob("*.ckpt")}


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    found.save.mkdir()
    yield found
    for process in found.started:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def test_a_rank_is_lost_in_a_step_and_the_one_before_is_saved(four: Ranks) -> None:
    assert four.run("compute", TWO_PARTS) == {0: 75, 1: 75, 2: 75, 3: -9}
    assert four.saved() == (4, {"a": "a 4", "b": "b 4"})


def test_a_rank_that_waits_for_its_device_answers_a_stop(four: Ranks) -> None:
    """The copy of a step is the first to wait for it, and a peer of that step is lost: it will never end."""
    assert four.run("compute", TWO_PARTS, lazy=True) == {0: 75, 1: 75, 2: 75, 3: -9}
    assert four.saved() == (4, {"a": "a 4", "b": "b 4"})


@pytest.mark.full
def test_a_step_that_ended_on_one_rank_counts_where_each_holds_everything(four: Ranks) -> None:
    assert four.run("update", []) == {0: 75, 1: 75, 2: 75, 3: -9}
    assert four.saved() == (5, {"whole": "whole 5"})


@pytest.mark.full
def test_without_the_copy_of_the_step_before_nothing_is_saved(four: Ranks) -> None:
    """The control: where ranks hold different parts, a step that has ended here is not yet one of the job."""
    assert four.run("update", TWO_PARTS, copies=1) == {0: 76, 1: 76, 2: 76, 3: -9}
    assert four.saved() == (None, {})


def test_with_it_the_step_before_is(four: Ranks) -> None:
    assert four.run("update", TWO_PARTS) == {0: 75, 1: 75, 2: 75, 3: -9}
    assert four.saved() == (4, {"a": "a 4", "b": "b 4"})


class Pair:
    """A framework of two ranks in this process. `full`: the rank whose disk is."""

    def __init__(self, full: int) -> None:
        self.full, self.told = full, dict[int, list[int]]()
        self.here = threading.Barrier(2)

    def of(self, rank: int) -> SimpleNamespace:
        def agree(numbers: Sequence[int]) -> list[int]:
            self.told[rank] = list(numbers)
            self.here.wait(10)
            highest = [max(pair) for pair in zip(self.told[0], self.told[1], strict=True)]
            self.here.wait(10)
            return highest

        def write(step: int, path: Path) -> str:
            if rank == self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            path.write_text(f"{rank} {step}")
            return files.sha256_of(path)

        return SimpleNamespace(keep=lambda step: None, write=write, agree=agree)


@pytest.mark.parametrize("full", [-1, 0, 1])
def test_a_save_in_peace_that_cannot_be_written_ends_on_all_ranks_alike(full: int, tmp_path: Path) -> None:
    pair, ended = Pair(full), dict[int, str]()

    def save(rank: int) -> None:
        info = RankInfo(rank, "host", 1, f"p{rank}", rank, (f"p{rank}/state",))
        member = Member(pair.of(rank), info, DEADLINES, tmp_path, "again", False, SimpleNamespace())  # type: ignore[arg-type]
        try:
            ended[rank] = str(member._save_now(7))
        except NotDone as exc:
            ended[rank] = f"not done: {exc}"

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if full < 0:
        assert ended[0] == ended[1] == str(layout.checkpoint(tmp_path, 7)) and layout.latest(tmp_path) == 7
    else:
        assert "No space left" in ended[full] and "another rank could not" in ended[1 - full]
        assert layout.latest(tmp_path) is None and not list(tmp_path.iterdir()), "half a checkpoint is left"
