"""A worker without torch: declares itself rebootable, says that it lives, and does what files tell it.

  toy_worker.py FOLDER [--unmarked-in-first-attempt]

writes  FOLDER/life-<rank>-<n>.json   facts of its n-th life (0 is the first), once it has marked itself
reads   FOLDER/exit-<rank>            the status to end with, once; the file is removed
        FOLDER/always-<rank>          the status to end with, in every life
        FOLDER/stop                   end with status 0
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from mindspeed_tft.agent import reboot

LONGEST = 90.0  # seconds; a worker that nobody ends must not stay


def main() -> int:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    life = reboot.lives(os.environ)
    if "--unmarked-in-first-attempt" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == "1":
        return 5
    print(f"rank {rank} life {life}", flush=True)
    print(f"rank {rank} life {life} warns", file=sys.stderr, flush=True)
    why = reboot.why_not(os.environ)
    if not why:
        reboot.mark_rebootable(os.environ)
    facts = {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "why_not": why,
        "argv": sys.argv[1:],
        "name": __name__,
        "file": __file__,
        "path": sys.path[0],
        "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"],
        "env": {name: value for name, value in os.environ.items() if name not in ("TFT_REBORN", "_")},
        "modules": sorted(sys.modules),
        "agent_dir": os.environ.get(reboot.ENV_DIRECTORY, ""),
    }
    reboot.write_whole(folder / f"life-{rank}-{life}.json", json.dumps(facts))
    end = time.monotonic() + LONGEST
    while not (folder / "stop").exists():
        if time.monotonic() > end:
            return 99
        if (folder / f"always-{rank}").exists():
            return int((folder / f"always-{rank}").read_text())
        if (folder / f"exit-{rank}").exists():
            status = int((folder / f"exit-{rank}").read_text())
            (folder / f"exit-{rank}").unlink()
            return status
        time.sleep(0.02)
    return 0


if __name__ == "__main__":
    sys.exit(main())
