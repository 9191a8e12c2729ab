"""One rank of a toy framework whose collectives never end when a rank is lost, as those of MindSpore.

The argument is JSON: rank, config, port (of the hub), save, parts (by rank; []: all hold everything), copies (that are
kept), fault {rank, step, where: "compute" or "update"}, lazy: steps are only begun where they are called, as on a
device: the first wait for their gradients is that of the copy. Its state at the end of a step is the text "PART STEP".
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_tft.control import launch
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.control.processor import Processor
from mindspeed_tft.engine.types import RankInfo
from mindspeed_tft.mindspore.framework import Link
from mindspeed_tft.mindspore.member import Member
from mindspeed_tft.recovery import files

WORDS = json.loads(sys.argv[1])
RANK, PARTS, SAVE = WORDS["rank"], WORDS["parts"], Path(WORDS["save"])
PART = PARTS[RANK] if PARTS else "whole"
FAULT = WORDS["fault"]
HUB = socket.create_connection(("127.0.0.1", WORDS["port"]))
ANSWERS = HUB.makefile("rb")


class Toy:
    def __init__(self) -> None:
        self.kept: dict[int, str] = {}

    def keep(self, step: int) -> None:
        if WORDS["lazy"] and step:
            self.agree([step])  # gradients
        self.kept[step] = f"{PART} {step}"
        for old in sorted(self.kept)[: -WORDS["copies"]]:
            del self.kept[old]

    def write(self, step: int, path: Path) -> str:
        if step not in self.kept:
            raise files.DumpError(f"there is no copy of step {step}")
        path.write_text(self.kept[step])
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def agree(self, numbers: Sequence[int]) -> list[int]:
        HUB.sendall(json.dumps(list(numbers)).encode() + b"\n")
        highest: list[int] = json.loads(ANSWERS.readline())
        return highest


def meet_fault(step: int, where: str) -> None:
    if (RANK, step, where) == (FAULT["rank"], FAULT["step"], FAULT["where"]):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    config = ControlConfig.from_json(WORDS["config"])
    world = config.world_size
    toy = Toy()
    info = RankInfo(RANK, config.host, os.getpid(), PART, RANK, (f"{PART}/state",))
    link_host = Link(world, toy.agree, None, lambda: "a toy has no links")
    member = Member(toy, info, config.deadlines, SAVE, "again", not PARTS, link_host)
    path = launch.ensure_host(config, RANK, RANK)
    link = Processor(path, config.deadlines, on_stop=member.stopped)
    member.connect(link)
    assert link.start(info, 10.0)
    member.begin(0)
    for step in range(1, WORDS["steps"] + 1):
        member.step_begin(step)
        meet_fault(step, "compute")
        if not WORDS["lazy"]:
            toy.agree([step])  # gradients
        meet_fault(step, "update")
        member.step_end(step, step == WORDS["steps"])
    link.goodbye()
    link.close()


main()
