"""What `tftctl status` prints: of a small job everything, of a large one what matters, and no word as markup."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console
from test_hold import Operated

from mindspeed_tft.cli import status
from mindspeed_tft.engine.types import Heartbeat, RankLost

CONTROLLERS = {
    "run": "llama2",
    "controller": {"index": 0, "host": "node0", "pid": 4711},
    "term": 3,
    "standbys": [{"index": 1, "host": "node1"}],
    "incident_dir": "/ckpt/tft_incidents",
    "transport": "tls",
    "hosts": [{"host": "node0", "node_rank": 0, "ranks": [0, 1, 3]}],
    "parked": [{"rank": 2, "host": "spare", "pid": 99}],
}


def printed(job: Operated, everything: bool = False) -> str:
    told: dict[str, Any] = json.loads(json.dumps({**job.engine.status(), **CONTROLLERS}))
    out = Console(file=io.StringIO(), width=180)
    out.print(status.page(told, everything))
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue() + status.line(told)


def test_a_small_job() -> None:
    job = Operated()
    text = printed(job)
    for word in (
        "Job llama2", "6 complete", "none of this run yet", "full: dump; each shard has at least two holders",
        "not paused", "node0 (0-1, 3)", "pid 4711, term 3", "process 99 on spare for rank 2", "forward-backward",
        "p0/1", "1, 3",
        "llama2: training, step 6, 4 of 4 ranks, protection full, not paused",
    ):  # fmt: skip
        assert word in text, text
    job.paused(limit="90")
    assert "paused after step 8, for 0 s, goes on in 90 s" in printed(job)


def test_words_of_a_fault_are_printed_as_they_are() -> None:
    job = Operated()
    job.feed(RankLost(0, 1, "said [red]boo[/] and [/nothing]"))
    text = printed(job)
    assert "lost: said [red]boo[/] and [/nothing]" in text
    assert "busy: an incident is being handled: stopping" in text


def test_of_a_large_job_only_what_differs_is_shown() -> None:
    job = Operated(200)
    job.feed(*(Heartbeat(0, rank, 7, "held" if rank == 150 else "commit") for rank in range(200)))
    few, every = printed(job), printed(job, everything=True)
    assert "alive, commit" in few and "199" in few
    assert few.count("│ commit") == 0 and "│ 150" in few
    assert every.count("│ commit") == 199


def test_a_shard_that_one_rank_alone_holds_is_a_warning() -> None:
    job = Operated(2)
    text = printed(job)
    assert "degraded: dump; shards p0/0, p0/1 are on one rank only" in text
    assert "no newer checkpoint" in text and "this run has none yet" in text


def test_ranges() -> None:
    assert status._few([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert status._few(list(range(0, 64, 2)), limit=3) == "0, 2, 4 and 29 more"
