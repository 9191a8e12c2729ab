"""The numbers of a job: from streams that the real engine answered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from metrics_support import BROKEN, DONE, Watched, recorded

from mindspeed_tft.engine import types as t
from mindspeed_tft.observe.incident import EVENTS_FILE, Recorder
from mindspeed_tft.observe.metrics import Metrics
from mindspeed_tft.observe.progress import Effective, Pace
from mindspeed_tft.observe.recoveries import Recovery


def test_a_job_that_trains() -> None:
    job = Watched()
    metrics = job.metrics
    assert metrics.alive() == [0, 1, 2, 3] and metrics.effective.ratio(job.now) is None
    job.train(1, 10)
    assert metrics.protected(job.now)
    assert (metrics.step, metrics.furthest) == (11, 10)
    assert metrics.pace.seconds == dict.fromkeys(range(4), pytest.approx(2.0))
    assert metrics.effective.ratio(job.now) == pytest.approx(1.0)
    assert metrics.effective.productive() == pytest.approx(20.0)
    job.now += 7
    assert metrics.silent(job.now) == 4 and metrics.ages(job.now) == {"h0": 7.0, "h1": 7.0}
    assert metrics.effective.ratio(job.now) == pytest.approx(20 / 27)
    assert metrics.running is None and not metrics.outcomes and not metrics.faults


def test_a_memory_fault_that_is_repaired() -> None:
    job = Watched("retry")
    job.train(1, 6)
    job.now += 1.0
    job.feed(t.FaultSeen(0, 1, "memory", "UCE ECC error", True))
    assert job.metrics.running is not None
    job.now += 0.25
    job.report(7, {**BROKEN, "trusted": True}, 1)
    job.report(7, {**BROKEN, "trusted": False, "fault": "UCE"}, 0, 2, 3)
    shard = "p0/1|3|1"
    job.obey(0.5, repair={"taken": "", f"moved:{shard}": "4096 0.1"})
    (found,) = job.told
    assert (found.outcome, found.strategy, found.step, found.lost) == ("retried", "retry", 6, 0)
    assert found.faults == {"memory": 1}
    assert found.detect == pytest.approx(1.0)
    seconds = found.seconds()
    assert seconds["stop"] == pytest.approx(0.25)
    assert [seconds[stage] for stage in ("regroup", "repair", "rollback", "resume")] == [0.5] * 4
    assert seconds["total"] == pytest.approx(2.25) == sum(end - begin for _, begin, end in found.stages)
    metrics = job.metrics
    assert metrics.repair_bytes == 4096  # told by both ends, counted once
    assert metrics.faults == {("memory", "retry"): 1} and metrics.outcomes == {"retried": 1}
    assert metrics.stages["total", "retry"].counts[5] == 1 and metrics.stages["total", "retry"].sum == 2.25
    assert metrics.steps_lost == 0 and metrics.running is None and metrics.epoch == 1
    # 12 s of six steps were kept, 1 s of the broken one and the 2.25 s after it were not.
    assert metrics.effective.productive() == pytest.approx(12.0)
    assert (metrics.effective.recomputed, metrics.effective.incident) == (pytest.approx(1.0), pytest.approx(2.25))
    job.train(7, 9)
    assert metrics.effective.productive() == pytest.approx(18.0)
    assert metrics.effective.ratio(job.now) == pytest.approx(18 / 21.25)
    assert metrics.pace.seconds[1] == pytest.approx(2.0)  # the pause is the time of no step


def test_a_process_that_dies_and_another_in_its_place() -> None:
    job = Watched("retry", "recover")
    job.train(1, 4)
    assert job.metrics.holding().level == 3  # shard 0 is on ranks 0 and 2, shard 1 on 1 and 3: on both hosts
    job.feed(t.RankLost(0, 3, "killed by signal 9", 1003))
    assert job.metrics.alive() == [0, 1, 2] and job.metrics.holding().ranks == 1 and job.metrics.holding().level == 1
    job.report(5, BROKEN, 3)
    job.now += 3.0
    job.feed(t.Registered(0, job.info(3, 77), bare=True))
    assert job.metrics.alive() == [0, 1, 2, 3] and job.metrics.holding().ranks == 1  # it has nothing yet
    job.feed(t.Reported(0, t.RankReport(3, 0, t.Commit.NONE, t.Update.UNTOUCHED, trusted=False, epoch=1)))
    job.obey()
    (found,) = job.told
    assert (found.outcome, found.strategy, found.faults) == ("rebooted", "recover", {"lost": 1})
    assert found.seconds()["reboot"] == pytest.approx(3.0)
    assert job.metrics.holding().ranks == 2 and job.metrics.protected(job.now)
    job.feed(t.RankLost(0, 3, "the old one, said late", 1003))
    assert job.metrics.running is None and job.metrics.alive() == [0, 1, 2, 3]


def test_a_dump() -> None:
    job = Watched()
    job.train(1, 4)
    job.feed(t.RankLost(0, 3, "killed by signal 9", 1003))
    job.report(5, DONE, 3)  # it passed the commit: step 5 is complete, though no heartbeat said so
    job.obey(1.5, write_part={"files": "2", "bytes": "1000"}, publish={"path": "/ckpt"})
    (found,) = job.told
    assert (found.outcome, found.strategy, found.step, found.lost) == ("dumped", "dump", 5, 0)
    metrics = job.metrics
    assert metrics.dump_bytes == 1000 and metrics.dump_seconds == pytest.approx(4.5)  # stage, write, publish
    assert metrics.faults == {("lost", "dump"): 1}  # that the others leave is none
    assert metrics.closed and not metrics.protected(job.now) and metrics.running is None
    ended = metrics.effective.ratio(job.now)
    assert metrics.effective.ratio(job.now + 100) == ended  # the job is over


def test_numbers_that_went_wrong_cost_the_steps_since_the_checkpoint() -> None:
    job = Watched("retry")
    job.train(1, 9)
    job.feed(t.FaultSeen(0, 0, "precision", "loss is nan", True))
    job.report(10, {**BROKEN, "checkpoints": (3, 6)})
    job.obey()
    (found,) = job.told
    assert (found.outcome, found.strategy, found.step, found.lost) == ("rewound", "rewind", 6, 3)
    assert job.metrics.steps_lost == 3 and job.metrics.furthest == 6
    assert job.metrics.effective.productive() == pytest.approx(12.0)
    assert job.metrics.effective.recomputed == pytest.approx(6.0)
    begun = job.now
    job.train(7, 9)
    assert job.metrics.effective.productive() == pytest.approx(18.0)
    assert job.metrics.effective.ratio(job.now) == pytest.approx(18 / (18 + begun - 100 + 6 - 18))


def test_a_broken_link_has_no_rank() -> None:
    job = Watched("retry")
    job.train(1, 3)
    job.feed(t.FaultSeen(0, 0, "peer", "connection reset", False), t.FaultSeen(0, 2, "peer", "connection reset", False))
    job.report(4, BROKEN)
    job.obey()
    assert job.metrics.faults == {("link", "retry"): 1}


def test_a_scheduler_that_ends_the_job_is_one_fault() -> None:
    job = Watched()
    job.train(1, 3)
    job.feed(*(t.FaultSeen(0, rank, "terminated", f"rank {rank} received SIGTERM", True) for rank in range(4)))
    job.report(4, BROKEN)
    job.obey()
    assert job.metrics.faults == {("terminated", "dump"): 1}


def test_a_hang_is_no_loss() -> None:
    metrics = Metrics(2, 5.0)
    for rank in range(2):
        metrics.event(t.Registered(1.0, t.RankInfo(rank, "h", 10 + rank, "p", rank, (f"p/{rank}",))))
    metrics.action(t.Kill(1, 11), 2.0)
    metrics.action(t.Stop(1, (0, 1), "rank 1 hangs"), 2.0)
    metrics.event(t.RankLost(2.5, 1, "killed by signal 9", 11))
    metrics.action(t.Closed("failed", -1, "no holder"), 4.0)
    assert metrics.faults == {("hang", "none"): 1} and metrics.outcomes == {"failed": 1}
    assert metrics.stages["total", "none"].sum == 2.0 and metrics.steps_lost == 0
    assert metrics.holding().level == 0  # the shard of rank 1 has no holder


def test_a_level_is_what_may_be_lost() -> None:
    for hosts, level in {1: 2, 2: 3}.items():
        holding = Watched(hosts=hosts).metrics.holding()
        assert (holding.ranks, holding.hosts, holding.level) == (2, hosts, level)
    alone = Watched(ranks=2)  # nobody else holds what they hold
    assert alone.metrics.holding().level == 1


def test_wrong_hashes_are_counted() -> None:
    job = Watched("retry")
    job.train(1, 3)
    job.feed(
        t.FaultSeen(0, 1, "memory", "ShardChanged: shard p0/1 has hash 12, and not the one that it had, 34", own=True)
    )
    assert job.metrics.wrong_hashes == 1
    digests = {0: {"p0/0": "a:3"}, 2: {"p0/0": "a:3"}, 3: {"p0/1": "c:3"}}
    stamps = {3: {"p0/1": "d:3"}}
    epoch = 1
    for rank in (0, 2, 3):
        report = t.RankReport(
            rank, 4, t.Commit.NONE, t.Update.UNTOUCHED, epoch=epoch, digests=digests[rank], stamps=stamps.get(rank, {})
        )
        job.feed(t.Reported(0, report))
    job.feed(t.Reported(0, t.RankReport(1, 4, t.Commit.NONE, t.Update.UNTOUCHED, trusted=False, epoch=epoch)))
    assert job.metrics.wrong_hashes == 2  # the engine found rank 3 out by its stamp


def test_finished_is_no_incident() -> None:
    job = Watched()
    job.train(1, 3)
    job.feed(*(t.RankFinished(0, rank) for rank in range(4)))
    assert not job.told and not job.metrics.outcomes and job.metrics.closed and not job.metrics.protected(job.now)
    assert job.metrics.effective.ratio(job.now + 50) == pytest.approx(1.0)


def test_the_same_stream_gives_the_same_numbers() -> None:
    job = Watched("retry")
    job.train(1, 6)
    job.feed(t.FaultSeen(0, 1, "memory", "UCE", True))
    job.report(7, BROKEN)
    job.obey()
    again = Metrics(4, 5.0)
    for item in job.stream:
        if isinstance(item, tuple):
            again.action(item[1], item[0])
        else:
            again.event(item)
    assert (again.faults, again.outcomes, again.stages, again.epoch) == (
        job.metrics.faults, job.metrics.outcomes, job.metrics.stages, job.metrics.epoch,
    )  # fmt: skip
    assert again.effective.ratio(job.now) == job.metrics.effective.ratio(job.now)


def test_pace_averages_over_heartbeats() -> None:
    """Steps of 0.3 s, heartbeats of 1 s: single differences would say 0.25 to 0.33."""
    pace = Pace()
    for beat in range(60):
        pace.heard(0, int(beat / 0.3) + 1, float(beat))
    assert pace.seconds[0] == pytest.approx(0.3, rel=0.03)
    for beat in range(60, 400):
        pace.heard(0, 201 + (beat - 60) // 30, float(beat))
    assert pace.seconds[0] == pytest.approx(30.0)


def test_effective_time_thins_out_and_still_knows_what_a_step_took() -> None:
    found = Effective()
    found.begin(0, 0.0)
    for step in range(1, 20_001):
        found.completed(step, step * 0.5)
    found.broken(10_000.25)
    found.over(12_345, 10_000.25, 10_010.25, trains=True)
    assert found.productive() == pytest.approx(12_345 * 0.5)
    assert found.recomputed == pytest.approx(10_000.25 - 12_345 * 0.5) and found.incident == pytest.approx(10.0)
    assert len(found._steps) <= 4096


def test_a_pause_is_the_time_of_no_step() -> None:
    metrics = Metrics(2, 5.0)

    def beat(step: int, at: float) -> None:
        for rank in range(2):
            metrics.event(t.Heartbeat(at, rank, step, "forward-backward"))

    for rank in range(2):
        metrics.event(t.Registered(0.0, t.RankInfo(rank, "h", 10 + rank, "p", rank, ("p/0",))))
    for step in range(1, 6):
        beat(step, 2.0 * step)
    metrics.event(t.Held(12.0, 0, 1, 5))
    assert not metrics.paused() and metrics.furthest == 5
    metrics.event(t.Held(12.1, 1, 1, 5))
    assert metrics.paused()
    metrics.event(t.Released(100.0, 0, 1))
    metrics.event(t.Released(100.0, 1, 1))
    assert not metrics.held
    beat(6, 100.0)
    beat(7, 102.0)
    assert metrics.effective.productive() == pytest.approx(12.0) and metrics.effective.paused == pytest.approx(88.0)
    assert metrics.effective.ratio(102.0) == pytest.approx(12 / 100)
    assert metrics.pace.seconds[0] == pytest.approx(2.0)
    for rank in range(2):
        metrics.event(t.Held(103.0, rank, 2, 7))
    metrics.event(t.RankLost(110.0, 1, "killed by signal 9", 11))
    metrics.action(t.Stop(1, (0,), "rank 1 lost"), 110.0)
    assert not metrics.held and metrics.effective.paused == pytest.approx(95.0)
    metrics.action(t.Closed("dumped", 7, "saved"), 112.0)
    assert metrics.effective.recomputed == 0 and metrics.effective.incident == pytest.approx(2.0)


def test_protected_are_those_that_this_controller_hears() -> None:
    """It knows of all of them from the one before; a host that never comes to it gets nothing of its decisions."""
    metrics = Metrics(4, 5.0)
    for rank in range(4):
        metrics.event(t.Registered(0.0, t.RankInfo(rank, f"h{rank // 2}", 10 + rank, "p", rank, ("p/0",))))
    assert not metrics.protected(0.0)
    for rank in (0, 1):
        metrics.event(t.Heartbeat(1.0, rank, 5, "forward"))
    assert not metrics.protected(1.0)
    for rank in (2, 3):
        metrics.event(t.Heartbeat(2.0, rank, 5, "forward"))
    assert metrics.protected(2.0)
    for rank in (0, 1):
        metrics.event(t.Heartbeat(8.0, rank, 6, "forward"))
    assert metrics.silent(8.0) == 2 and not metrics.protected(8.0)  # the other host is cut off
    metrics.event(t.RankLost(9.0, 2, "its host is gone", 12))
    metrics.event(t.RankFinished(9.0, 3))
    assert metrics.protected(9.0)  # who is gone is not missed


def test_a_pause_that_began_before_this_controller_led() -> None:
    metrics = Metrics(2, 5.0)
    for rank in range(2):
        info = t.RankInfo(rank, "h", 10 + rank, "p", rank, ("p/0",))
        metrics.event(t.Registered(0.0, info, held=3, held_at=5))
    assert metrics.paused()
    for at in (1.0, 50.0):
        for rank in range(2):
            metrics.event(t.Heartbeat(at, rank, 6, "held"))
    for rank in range(2):
        metrics.event(t.Released(101.0, rank, 3))
    for step in (6, 7, 8):
        for rank in range(2):
            metrics.event(t.Heartbeat(101.0 + 2 * (step - 6), rank, step, "forward"))
    assert metrics.effective.paused == pytest.approx(100.0)
    assert metrics.effective.productive() == pytest.approx(4.0)  # two steps of two seconds
    assert metrics.effective.ratio(105.0) == pytest.approx(4 / 104)


def test_a_log_of_events_gives_the_numbers_of_its_incidents(tmp_path: Path) -> None:
    """It has no heartbeats, so nothing of the pace of steps, nor when a rank was heard last."""
    job = Watched("retry")
    job.train(1, 9)
    job.feed(t.FaultSeen(0, 1, "memory", "UCE ECC error", True))
    job.report(10, {**BROKEN, "checkpoints": (3, 6), "trusted": False}, 0, 2, 3)
    job.report(10, {**BROKEN, "checkpoints": (3, 6)}, 1)
    job.obey(0.5, repair={"taken": "", "moved:p0/1|3|1": "4096 0.1"})
    job.train(10, 12)
    job.feed(t.FaultSeen(0, 0, "precision", "loss is nan", True))
    job.report(13, {**BROKEN, "checkpoints": (3, 6)})
    job.obey()
    recorder = Recorder(tmp_path, "run1")
    for item in job.stream:
        if isinstance(item, tuple):
            recorder.action(item[1], item[0])
            if isinstance(item[1], t.Recovered):
                recorder.recovered(item[1], item[0], {})
        else:
            recorder.event(item)
    assert recorder.flush()
    told: list[Recovery] = []
    again = Metrics(4, 5.0, told.append)
    for item in recorded(tmp_path / EVENTS_FILE):
        if isinstance(item, tuple):
            again.action(item[1], item[0])
        else:
            again.event(item)
    assert (again.faults, again.outcomes) == (job.metrics.faults, job.metrics.outcomes)
    assert again.outcomes == {"retried": 1, "rewound": 1}
    assert (again.steps_lost, again.repair_bytes, again.epoch) == (6, 4096, 2)
    assert [replace(one, detect=None) for one in job.told] == told
    assert set(job.metrics.stages) - set(again.stages) == {("detect", "retry"), ("detect", "rewind")}
    assert again.holding() == job.metrics.holding() and again.alive() == job.metrics.alive()
