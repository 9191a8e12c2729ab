"""One rank of test_node_*.py: torch.distributed over the real patches, without Megatron.

  node_rank.py FOLDER [flags for the launcher]

A first life meets the others, lays its journal down, declares itself rebootable and then serves orders. A newcomer
starts alone. Orders are files, one line of JSON each:
  FOLDER/order-<n>    {"do": "regroup", "epoch": e, "seconds": s}, {"do": "end", "status": s} for all, or
                      {"do": "die", "rank": r, "status": s} for one of them; n counts from 0
answers, written whole:
  FOLDER/life-<rank>-<life>.json     facts, once it is ready
  FOLDER/done-<n>-<rank>-<pid>.json  {"sum": ...} of an all-reduce over the new groups, or {"error": ...}
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_tft.agent import places, reboot
from mindspeed_tft.patches import torch_distributed, torch_store  # noqa: F401  (declare)
from mindspeed_tft.patches.groups import HIGH_AVAILABILITY
from mindspeed_tft.registry import REGISTRY

LONGEST = 120.0  # seconds; a rank that nobody ends must not stay
TIMEOUT = timedelta(seconds=20)


def serve(folder: Path, rank: int, order: dict[str, Any]) -> dict[str, Any]:
    if order["do"] == "regroup":
        try:
            torch_distributed.regroup(order["epoch"], timedelta(seconds=order["seconds"]))
        except RuntimeError as exc:
            return {"error": f"{type(exc).__name__}: {exc}"}
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        group = dist.new_group(list(range(dist.get_world_size())), timeout=TIMEOUT)
        dist.all_reduce(total, group=group)
        return {"sum": int(total)}
    raise AssertionError(order)


def main() -> int:
    folder, rank, life = Path(sys.argv[1]), int(os.environ["RANK"]), reboot.lives(os.environ)
    REGISTRY.activate(HIGH_AVAILABILITY)
    if life:
        torch_distributed.start_alone()
    else:
        torch_distributed.keep_journal()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    # What only the first life can know: the journal has to bring it to a newcomer.
    seen = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(seen, torch.tensor([100 + rank]))
    if not life:
        torch_distributed.store_journal()
    reboot.mark_rebootable(os.environ)
    number = len(list(folder.glob("order-*")))  # what was ordered before is not for this life
    facts = {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "seen": [int(each) for each in seen],
        "agent_dir": os.environ[reboot.ENV_DIRECTORY],
        "store": os.environ.get(places.ENV_STORE, ""),
        "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"],
        "node": os.environ["GROUP_RANK"],
        "host": os.uname().nodename,
    }
    reboot.write_whole(folder / f"life-{rank}-{life}.json", json.dumps(facts))
    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        path = folder / f"order-{number}"
        if not path.exists():
            time.sleep(0.02)
            continue
        order = json.loads(path.read_text())
        if order["do"] == "end":
            sys.stdout.flush()
            os._exit(order["status"])
        if order["do"] == "die":
            if rank == order["rank"]:
                os._exit(order["status"])
        else:
            done = serve(folder, rank, order)
            reboot.write_whole(folder / f"done-{number}-{rank}-{os.getpid()}.json", json.dumps(done))
        number += 1
    return 99


if __name__ == "__main__":
    sys.exit(main())
