"""`python -m mindspeed_tft.mindspore SCRIPT ARGUMENTS`: the script, with the callback in each of its `Model.train`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from mindspeed_tft.mindspore import attach
from mindspeed_tft.settings import Refused

USAGE = "usage: python -m mindspeed_tft.mindspore SCRIPT [ARGUMENTS...]"


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        attach.attach()
    except Refused as exc:
        print(f"[mindspeed_tft] {exc}", file=sys.stderr)
        return 2
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
