"""Every metric under the name that Prometheus knows it by: type, unit, labels, meaning, and where its value is.

Counters begin at zero with each controller that leads, as they do with each process: Prometheus takes that for the
reset that it is. Every metric has the label `run`, the name of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mindspeed_tft.observe.metrics import Histogram, Metrics
from mindspeed_tft.observe.progress import middle_and_most

# Each is told from the start, as zero: to Prometheus a counter that appears with its first count has not grown.
OUTCOMES = ("retried", "rebooted", "rewound", "dumped", "exists", "failed")
MAX_RANKS = 256  # in a larger job nothing is told of single ranks, only of hosts and of all
Value = float | Histogram
Samples = Iterable[tuple[tuple[str, ...], Value]]  # values of the labels, value


@dataclass(frozen=True)
class Facts:
    """What no event tells: who leads, and who is connected."""

    term: int
    index: int
    host: str
    versions: dict[str, str]
    live: Callable[[], tuple[int, int]] = lambda: (0, 0)  # hosts that are connected, processes that are parked


@dataclass(frozen=True)
class Metric:
    """One metric. `read` gets the numbers, the facts and the time on the events' clock."""

    name: str
    kind: str  # "gauge", "counter" or "histogram"
    unit: str  # "": a plain number
    help: str
    read: Callable[[Metrics, Facts, float], Samples]
    labels: tuple[str, ...] = ()


def _one(value: float | None) -> Samples:
    return [] if value is None else [((), float(value))]


def _pace(metrics: Metrics, most: bool) -> Samples:
    found = middle_and_most(dict(metrics.pace.seconds))
    return _one(None if found is None else found[most])


def _by_rank(metrics: Metrics) -> Samples:
    if metrics.world_size <= MAX_RANKS:
        yield from (((str(rank),), seconds) for rank, seconds in sorted(dict(metrics.pace.seconds).items()))


def _build(facts: Facts) -> Samples:
    names = ("mindspeed_tft", "python", "torch", "megatron-core")
    return [(tuple(facts.versions.get(name, "") for name in names), 1.0)]


METRICS: tuple[Metric, ...] = (
    Metric("tft_step", "gauge", "", "step that the ranks compute, the highest",
           lambda m, f, now: _one(m.step or None)),
    Metric("tft_completed_step", "gauge", "", "last step that is known to be complete on all ranks",
           lambda m, f, now: _one(m.furthest if m.step else None)),
    Metric("tft_step_seconds", "gauge", "seconds", "time of a step, the median over all ranks, from their heartbeats",
           lambda m, f, now: _pace(m, False)),
    Metric("tft_step_seconds_max", "gauge", "seconds", "time of a step, of the rank that takes longest",
           lambda m, f, now: _pace(m, True)),
    Metric("tft_rank_step_seconds", "gauge", "seconds", f"time of a step by rank, in jobs of at most {MAX_RANKS} ranks",
           lambda m, f, now: _by_rank(m), ("rank",)),
    Metric("tft_ranks_expected", "gauge", "ranks", "ranks of the job",
           lambda m, f, now: _one(m.world_size)),
    Metric("tft_ranks_known", "gauge", "ranks", "ranks that came to this controller at some time",
           lambda m, f, now: _one(len(m.infos))),
    Metric("tft_ranks_alive", "gauge", "ranks", "ranks whose process lives, and has not finished training",
           lambda m, f, now: _one(len(m.alive()))),
    Metric("tft_ranks_silent", "gauge", "ranks",
           "living ranks without a heartbeat for as long as makes a rank doubtful (docs/flags.md: heartbeat_lost)",
           lambda m, f, now: _one(m.silent(now))),
    Metric("tft_ranks_parked", "gauge", "processes", "processes that wait as spares for a rank's place",
           lambda m, f, now: _one(f.live()[1])),
    Metric("tft_ranks_held", "gauge", "ranks", "ranks that wait between two steps, because operators want it",
           lambda m, f, now: _one(len(m.held))),
    Metric("tft_paused", "gauge", "", "1: operators have all living ranks wait",
           lambda m, f, now: _one(m.paused())),
    Metric("tft_hosts_connected", "gauge", "hosts", "hosts whose relay is connected to this controller",
           lambda m, f, now: _one(f.live()[0])),
    Metric("tft_heartbeat_age_seconds_max", "gauge", "seconds",
           "since that living rank was heard that was heard longest ago",
           lambda m, f, now: _one(max((now - at for at in dict(m.heard).values()), default=None))),
    Metric("tft_heartbeat_age_seconds", "gauge", "seconds", "the same by host",
           lambda m, f, now: [((host,), age) for host, age in sorted(m.ages(now).items())], ("host",)),
    Metric("tft_protected", "gauge", "",
           "1: all ranks are known, this controller hears those that live, and decides what a fault leads to",
           lambda m, f, now: _one(m.protected(now))),
    Metric("tft_protection_level", "gauge", "",
           "what may be lost without losing a completed step: 3 any one host, 2 any one rank, 1 no rank,"
           " 0 nothing (not protected, or a shard has no holder)",
           lambda m, f, now: _one(m.holding().level if m.protected(now) else 0)),
    Metric("tft_shard_holders_min", "gauge", "ranks", "living holders of the optimizer shard that has fewest",
           lambda m, f, now: _one(m.holding().ranks)),
    Metric("tft_shard_hosts_min", "gauge", "hosts", "hosts of the living holders of the shard that has fewest",
           lambda m, f, now: _one(m.holding().hosts)),
    Metric("tft_controller_term", "gauge", "", "term of the leading controller",
           lambda m, f, now: _one(f.term)),
    Metric("tft_controller_leader", "gauge", "", "1, with index and host of the leading controller",
           lambda m, f, now: [((str(f.index), f.host), 1.0)], ("index", "host")),
    Metric("tft_epoch", "gauge", "", "of the process groups: grows with every stop",
           lambda m, f, now: _one(m.epoch)),
    Metric("tft_faults_total", "counter", "ranks",
           "ranks that a fault befell, by its kind and by what the incident came to (none: nothing was saved);"
           " counted at the end of the incident",
           lambda m, f, now: [(key, float(n)) for key, n in sorted(dict(m.faults).items())], ("kind", "strategy")),
    Metric("tft_incidents_total", "counter", "incidents",
           f"incidents by outcome: {', '.join(OUTCOMES)}",
           lambda m, f, now: [((key,), float(m.outcomes[key])) for key in OUTCOMES], ("outcome",)),
    Metric("tft_recoveries_in_progress", "gauge", "", "1 from the first sign of a fault until the incident is over",
           lambda m, f, now: _one(m.running is not None and not m.closed)),
    Metric("tft_recovery_seconds", "histogram", "seconds",
           "of an incident, by stage and strategy; stage total: from the first sign of a fault until training goes on,"
           " or the job ends; detect: at most so long before that sign the rank broke",
           lambda m, f, now: list(dict(m.stages).items()), ("stage", "strategy")),
    Metric("tft_steps_lost_total", "counter", "steps",
           "completed steps that had to be computed again, or will have to be",
           lambda m, f, now: _one(m.steps_lost)),
    Metric("tft_repair_bytes_total", "counter", "bytes", "moved between ranks by repairs",
           lambda m, f, now: _one(m.repair_bytes)),
    Metric("tft_dump_bytes_total", "counter", "bytes", "written by dumps",
           lambda m, f, now: _one(m.dump_bytes)),
    Metric("tft_dump_seconds", "gauge", "seconds", "of the last dump, from the decision to the published checkpoint",
           lambda m, f, now: _one(m.dump_seconds)),
    Metric("tft_shard_hash_mismatches_total", "counter", "",
           "times that the hash of a shard was found wrong: before a save, after a transfer, or between holders",
           lambda m, f, now: _one(m.wrong_hashes)),
    Metric("tft_effective_training_time_ratio", "gauge", "ratio",
           "time of steps that were kept, divided by the time since this controller saw training begin",
           lambda m, f, now: _one(m.effective.ratio(now))),
    Metric("tft_productive_seconds", "gauge", "seconds", "time of steps that were kept: the ratio's numerator",
           lambda m, f, now: _one(m.effective.productive())),
    Metric("tft_training_seconds", "gauge", "seconds", "since this controller saw training begin: the denominator",
           lambda m, f, now: _one(m.effective.wall(now))),
    Metric("tft_unproductive_seconds_total", "counter", "seconds",
           "lost: in an incident (reason incident), in steps that were computed for nothing (recomputed), or while"
           " operators had training wait (paused); counted when it is over",
           lambda m, f, now: [(("incident",), m.effective.incident), (("recomputed",), m.effective.recomputed),
                              (("paused",), m.effective.paused)],
           ("reason",)),
    Metric("tft_build_info", "gauge", "", "1, with the versions of what runs",
           lambda m, f, now: _build(f), ("version", "python", "torch", "megatron")),
)  # fmt: skip


def table() -> str:
    """The table of docs/metrics.md."""
    lines = ["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
