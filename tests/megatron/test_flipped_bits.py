"""Real Megatron, one bit of an optimizer shard flips and no device says a word: it never reaches a checkpoint, another
rank, or the end of training.

On dp4 with two replicas ranks 0 and 2 hold the same shard, and ranks 1 and 3. The few that run always let a rank flip
that would be the natural source; marker `full` runs the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_tft.cli.drill import make_plan
from mindspeed_tft.faults import gpt_job, jobs
from mindspeed_tft.faults.plans import PROGRAM, plugin_flags

from .conftest import Drilled

pytestmark = pytest.mark.megatron

FLIPPED = "does not have the hash that it had after the update of step 7"
HALF = ("--save-interval", "4")


def _exact(found: Drilled, strategy: str) -> None:
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert report["strategy"] == strategy
    assert all(compared["different"] == 0 and compared["tensors"] > 30 for compared in report["comparisons"])


def _log(found: Drilled) -> str:
    return (found.directory / "broken.log").read_text()


def _flipped(found: Drilled) -> None:
    """A bit did flip, after its hash was taken."""
    assert re.search(r"bit \d+ of word \d+ of \d+ in tensor \d+ of \d+ flipped; hashes are known", _log(found))


def _told(found: Drilled) -> str:
    return "\n".join(line["text"] for incident in found.incidents for line in incident["engine"]["timeline"])


def test_a_dump_is_made_of_the_other_holders_shard(drill: Callable[..., Drilled]) -> None:
    found = drill("--fault", "flip@0:7", "--fault", "kill@1:8:backward")
    _exact(found, "dump")
    _flipped(found)
    (incident,) = found.incidents
    assert f"rank 0: its shard tp0-pp0/dense/0 {FLIPPED}" in _told(found)
    (part,) = incident["engine"]["attempts"][-1]["parts"]
    assert part["sources"]["tp0-pp0/dense/0"] == 2


@pytest.mark.full
def test_a_flipped_rank_is_repaired_beside_one_that_is_started_again(drill: Callable[..., Drilled]) -> None:
    found = drill("--preset", "recover", "--dtype", "bf16", "--fault", "flip@0:7", "--fault", "kill@1:8:backward")
    _exact(found, "recover")
    _flipped(found)
    assert FLIPPED in _told(found)


@pytest.mark.full
def test_without_hashes_the_flipped_bit_would_be_saved(
    drill: Callable[..., Drilled], spoil: Callable[..., None]
) -> None:
    """The control of the drills above."""
    spoil("megatron_digest", "shards = lambda host: {}")
    found = drill("--fault", "flip@0:7", "--fault", "kill@1:8:backward")
    assert found.report["verdict"] == "inexact", found.output


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp4", "tp2dp2", "pp2dp2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_flipped_rank_gets_its_shard_from_the_other_holder(
    drill: Callable[..., Drilled], layout: str, dtype: str
) -> None:
    faults = ("--fault", "flip@0:7", "--fault", "link@1:8:forward")
    found = drill("--preset", "retry", "--layout", layout, "--dtype", dtype, *faults)
    _exact(found, "retry")
    _flipped(found)
    assert FLIPPED in _told(found)


@pytest.mark.full
def test_a_periodic_checkpoint_is_not_written_from_a_flipped_bit(drill: Callable[..., Drilled]) -> None:
    """Nothing else is wrong: the hash before the save is what stops the job."""
    found = drill("--preset", "retry", "--fault", "flip@1:8:save", *HALF)
    _exact(found, "retry")
    _flipped(found)
    (incident,) = found.incidents
    assert "not the one that it had after its last update" in incident["engine"]["summary"]


@pytest.mark.full
def test_the_last_holder_of_a_shard_is_not_believed_with_another_hash(drill: Callable[..., Drilled]) -> None:
    """Ranks 1 and 3 hold the same shard. Nothing is saved, because nothing right is left."""
    found = drill("--fault", "flip@1:7", "--fault", "kill@3:8:backward")
    assert (found.status, found.report["verdict"]) == (5, "lost"), found.output
    _flipped(found)
    (incident,) = found.incidents
    assert FLIPPED in incident["engine"]["summary"]
    assert "no holder left of shard tp0-pp0/dense/1" in incident["engine"]["summary"]


@pytest.mark.full
def test_where_no_holder_is_right_the_last_checkpoint_is(drill: Callable[..., Drilled]) -> None:
    found = drill("--preset", "retry", "--fault", "flip@1:7", "--fault", "uce@3:8:backward", *HALF)
    _flipped(found)
    assert (found.report["strategy"], found.report["resumed_at"]) == ("rewind", 4), found.output
    (compared,) = found.report["comparisons"]
    assert (compared["what"], compared["different"]) == ("end", 0)
    # For a drill of repairs that is less than was promised, and it says so.
    assert (found.report["verdict"], found.report["steps_lost"]) == ("degraded", 3), found.output


@pytest.mark.full
def test_of_four_holders_the_flipped_one_is_left_out(drill: Callable[..., Drilled]) -> None:
    found = drill("--replicas", "4", "--fault", "flip@0:7", "--fault", "kill@3:8:backward")
    _exact(found, "dump")
    _flipped(found)
    (part,) = found.incidents[0]["engine"]["attempts"][-1]["parts"]
    assert part["writer"] == 1


@pytest.mark.full
def test_of_four_holders_the_majority_is_believed(drill: Callable[..., Drilled]) -> None:
    """The bit flips before the update, so that the rank's own hash is of what came of it."""
    found = drill("--replicas", "4", "--fault", "flip@0:7:clip", "--fault", "kill@3:8:forward")
    _exact(found, "dump")
    assert "it has another hash than the majority" in _told(found)


@pytest.mark.full
def test_two_holders_that_differ_are_rewound(drill: Callable[..., Drilled]) -> None:
    """A bit flips before an update, long before the next stop: which of the two holders is right cannot be told."""
    found = drill("--preset", "retry", "--fault", "flip@1:6:clip", "--fault", "link@2:8:forward", *HALF)
    assert (found.report["strategy"], found.report["resumed_at"]) == ("rewind", 4), found.output
    assert "nothing shows whose hash is right" in _told(found)
    (compared,) = found.report["comparisons"]
    assert compared["different"] == 0


@pytest.mark.full
def test_a_checkpoint_at_which_holders_differed_is_passed_over(drill: Callable[..., Drilled]) -> None:
    """The bit flips before the save of step 6, which finds nothing wrong on any rank. Step 3 is what is loaded."""
    faults = ("--fault", "flip@1:5:clip", "--fault", "link@2:8:forward", "--save-interval", "3")
    found = drill("--preset", "retry", *faults)
    assert (found.report["strategy"], found.report["resumed_at"]) == ("rewind", 3), found.output
    (compared,) = found.report["comparisons"]
    assert compared["different"] == 0


@pytest.mark.full
def test_a_dump_with_a_changed_file_is_not_loaded(drill: Callable[..., Drilled]) -> None:
    """By a protected job: stock Megatron loads what it is given."""
    found = drill("--fault", "kill@1:7:update")
    _exact(found, "dump")
    assert _loads(found.directory / "dump") == ""
    (path,) = (found.directory / "dump").glob("iter_0000007/mp_rank_00/distrib_optim.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1 << 4
    path.write_bytes(content)
    words = _loads(found.directory / "dump")
    assert f"{path} is not what the dump wrote: it has sha256" in words
    assert "Remedy: load an older checkpoint" in words


def _loads(dump: Path) -> str:
    """How a protected job that goes on from this dump is refused; "" when it trains to its end."""
    plan = make_plan(faults=["kill@1:7:update"])
    places = ("--load", str(dump), "--save", str(dump.parent / "again"), "--save-interval", "100")
    arguments = (gpt_job.WITH_PLUGIN, *plugin_flags(plan), *places)
    command = jobs.torchrun(jobs.Size(plan.layout.world_size), PROGRAM, arguments)
    log = dump.parent / "again.log"
    ended = jobs.run(jobs.Job("again", command, log, 150.0, {gpt_job.ENV_STEPS: str(dump.parent / "again-steps")}))
    if ended.returncode == 0:
        return ""
    return log.read_text()
