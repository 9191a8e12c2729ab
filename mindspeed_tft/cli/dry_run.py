"""`tftctl config --check --megatron`: the flags of a job, as Megatron itself takes them, without a job.

Asks in a process of its own, in which Megatron (and MindSpeed) may change what they like.

    python -m mindspeed_tft.cli.dry_run REQUEST ANSWER     the other side: reads one file of JSON, writes the other
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_tft.settings import Refused

INSTALLED = "installed"  # as a checkout: the Megatron of this environment
UNKNOWN = "unknown"  # as `patches.megatron_dry_run` says it, which imports torch
PATIENCE = 180.0  # seconds; the first import of torch from a cold disk takes most of it
_TAIL = 15  # lines of what a process said that could not answer


@dataclass(frozen=True)
class Verdict:
    """What was said to the flags."""

    megatron: str  # its version
    mindspeed: str  # its version; "" without
    parsed: int  # flags that were understood
    world_size: int
    refusals: tuple[Refused, ...]

    def __str__(self) -> str:
        if not self.megatron:
            return "Megatron was not asked"
        version = "" if self.mindspeed == UNKNOWN else f" {self.mindspeed}"  # a checkout does not tell
        beside = f" with MindSpeed{version}" if self.mindspeed else ""
        wrong = f"{len(self.refusals)} refused" if self.refusals else "valid"
        return f"Megatron {self.megatron}{beside}: {self.parsed} flags parsed for {self.world_size} ranks, {wrong}"


class CannotAsk(RuntimeError):
    """Megatron, or MindSpeed, could not be asked: why."""


def ask(
    words: Sequence[str],
    megatron: str,
    mindspeed: str | None,
    world_size: int | None,
    environ: Mapping[str, str] = os.environ,
) -> Verdict:
    """Ask Megatron in `megatron` (a checkout, or `INSTALLED`), and MindSpeed in a checkout, about these flags.

    Raises:
        CannotAsk: a checkout is none, or its import fails.
    """
    folders = []
    for name, folder, inside in (("--mindspeed", mindspeed, "mindspeed/megatron_adaptor.py"),
                                 ("--megatron", megatron, "megatron/training/arguments.py")):  # fmt: skip
        if folder in (None, INSTALLED):
            continue
        if not (Path(str(folder)) / inside).is_file():
            raise CannotAsk(f"{name}: {folder} has no {inside}; give a checkout")
        folders.append(str(Path(str(folder)).resolve()))
    env = dict(environ)
    env["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [env.get("PYTHONPATH")])])
    env.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size or 1)})
    request = {"words": list(words), "world_size": world_size, "with_mindspeed": mindspeed is not None}
    with tempfile.TemporaryDirectory(prefix="tft-dry-run-") as place:
        asked, answer = Path(place) / "request", Path(place) / "answer"
        asked.write_text(json.dumps(request))
        command = [sys.executable, "-m", "mindspeed_tft.cli.dry_run", str(asked), str(answer)]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
        except subprocess.TimeoutExpired:
            raise CannotAsk(f"no answer within {PATIENCE:g} s") from None
        if not answer.is_file():
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_TAIL:])
            raise CannotAsk(f"its process ended with {done.returncode}:\n{tail}")
        found: dict[str, Any] = json.loads(answer.read_text())
    refusals = tuple(Refused(*refusal) for refusal in found.pop("refused"))
    return Verdict(refusals=refusals, **found)


def main(asked: str, answer: str) -> int:
    from mindspeed_tft.patches import megatron_dry_run

    request = json.loads(Path(asked).read_text())
    Path(answer).write_text(json.dumps(megatron_dry_run.look(**request, environ=os.environ)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
