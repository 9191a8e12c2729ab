"""A rank of the drill's program that times what the plugin adds to its own steps; `overhead.py --parts` starts it.

    torchrun ... benchmarks/parts_rank.py --with-plugin MEGATRON FLAGS

Each part is one function of the plugin on the path of a step (or, for hashes, on the thread beside it). A part that
runs inside another one is taken from it. `TFT_BENCH_PARTS` is the directory into which each rank writes
`rank<N>.json`: by part the milliseconds of each step, on the wall and of the processor.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_tft.faults import gpt_job

ENV_PARTS = "TFT_BENCH_PARTS"

RECOVERY, PATCHES = "mindspeed_tft.recovery", "mindspeed_tft.patches"
COMMIT, HASH = "commit collective, with the wait for the slowest rank", "hashes of shards, on their own thread"
# (module, class or "", function) by part.
PARTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    COMMIT: ((f"{RECOVERY}.session", "Session", "commit"),),
    HASH: ((f"{RECOVERY}.stamps", "Stamps", "_take"),),
    "state that a broken step is left behind with": (
        (f"{PATCHES}.megatron_rollback", "", "mark_step"),
        (f"{RECOVERY}.session", "Session", "step_begin"),
    ),
    "stamps around the update": (
        (f"{RECOVERY}.session", "Session", "update_begin"),
        (f"{RECOVERY}.session", "Session", "update_end"),
    ),
    "generators at each micro-batch": ((f"{RECOVERY}.replay", "_Generators", "now"),),
    "the end of a step, operators' wishes": (
        (f"{RECOVERY}.session", "Session", "step_end"),
        (f"{RECOVERY}.hold", "Boundary", "reach"),
    ),
}

Spent = dict[str, list[float]]  # by part: seconds on the wall, seconds of the processor


class Parts:
    """Sums of one rank, step by step."""

    def __init__(self) -> None:
        self._now: Spent = defaultdict(lambda: [0.0, 0.0])
        self._steps: list[Spent] = []
        self._inside = threading.local()
        self._lock = threading.Lock()

    def step(self) -> None:
        """A step is over."""
        with self._lock:
            self._steps.append(self._now)
            self._now = defaultdict(lambda: [0.0, 0.0])

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time added to `part` and taken from the part that calls it."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            above, self._inside.seconds = getattr(self._inside, "seconds", None), [0.0, 0.0]
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = (time.perf_counter() - wall, time.thread_time() - cpu)
                below, self._inside.seconds = self._inside.seconds, above
                with self._lock:
                    for clock in range(2):
                        self._now[part][clock] += spent[clock] - below[clock]
                if above is not None:
                    for clock in range(2):
                        above[clock] += spent[clock]

        return run

    def as_json(self) -> dict[str, dict[str, list[float]]]:
        """By part and clock the milliseconds of each step."""
        return {
            part: {
                clock: [round(1000.0 * step[part][number], 4) if part in step else 0.0 for step in self._steps]
                for number, clock in enumerate(("wall", "cpu"))
            }
            for part in PARTS
        }


def _install(parts: Parts) -> None:
    for part, functions in PARTS.items():
        for module, owner, name in functions:
            place: Any = importlib.import_module(module)
            place = getattr(place, owner) if owner else place
            found = place.__dict__[name]
            if isinstance(found, classmethod):
                setattr(place, name, classmethod(parts.timed(part, found.__func__)))
            else:
                setattr(place, name, parts.timed(part, found))


def main() -> None:
    assert sys.argv[1:2] == [gpt_job.WITH_PLUGIN], "only the plugin's parts can be timed"
    sys.argv.pop(1)
    gpt_job.prepare(with_plugin=True)
    parts = Parts()
    _install(parts)
    hold: Any = importlib.import_module(f"{RECOVERY}.hold")
    reach = hold.Boundary.reach

    def last(*args: Any, **kwargs: Any) -> Any:
        found = reach(*args, **kwargs)
        parts.step()
        return found

    hold.Boundary.reach = last
    gpt_job.run()
    file = Path(os.environ[ENV_PARTS]) / f"rank{os.environ['RANK']}.json"
    file.write_text(json.dumps(parts.as_json()))
    gpt_job.leave()


if __name__ == "__main__":
    main()
