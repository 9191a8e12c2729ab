"""Seconds from a fault to the end of the first step after it: repaired online, against killed and launched again.

    python benchmarks/recovery.py --repeats 5 --json recovery.json

Both break the same job on this machine in turn. Online: `tftctl drill --preset retry` with a destroyed rank. Against
it: a killed rank, a dump of the last completed step, and the job launched again. That is kinder than recovery without
us, which also computes the steps since the last periodic checkpoint once more. Prints the stages and the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("detect", "stop", "decide", "regroup", "repair", "rollback", "first_step", "total")


def drill(preset: str, fault: str, work: Path, extra: list[str]) -> dict[str, Any]:
    """One drill's report.

    Raises:
        RuntimeError: it was not exact, so its time means nothing.
    """
    report = work / f"{preset}.json"
    command = [sys.executable, "-m", "mindspeed_tft.cli.main", "drill", "--preset", preset, "--fault", fault]
    command += ["--json", str(report), "--keep", str(work), *extra]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    if ended.returncode != 0:
        raise RuntimeError(f"{preset} drill with {fault} ended with {ended.returncode}:\n{ended.stdout[-3000:]}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layout", default="dp4")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    extra = ["--layout", given.layout, "--dtype", given.dtype]
    online: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tft-recovery-") as folder:
        for number in range(given.repeats):
            work = Path(folder) / str(number)
            work.mkdir()
            online.append(drill("retry", "uce@1:7:backward", work, extra)["seconds"])
            again.append(drill("dump", "kill@1:7:backward", work, extra)["seconds"])
            print(
                f"{number + 1}: online {online[-1]['total']:.2f} s, launched again {again[-1]['total']:.2f} s",
                flush=True,
            )
    for stage in STAGES:
        values = [float(seconds[stage]) for seconds in online if seconds.get(stage) is not None]
        print(f"  {stage:12s} {spread(values)} s" if values else f"  {stage:12s} -")
    totals = [float(seconds["total"]) for seconds in online], [float(seconds["total"]) for seconds in again]
    ratios = [slow / fast for fast, slow in zip(*totals, strict=True)]
    print(f"online {spread(totals[0])} s, dump and launch again {spread(totals[1])} s, ratio {spread(ratios)}")
    if given.json:
        given.json.write_text(json.dumps({"online": online, "again": again, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
