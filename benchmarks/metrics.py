"""Processor seconds that metrics cost the controller of a job of many ranks.

    python benchmarks/metrics.py [--ranks 16384] [--per-host 8] [--repeats 5]

A fault is played through the engine as in benchmarks/controller.py (one rank is lost, another process takes its place),
and what passed is handed to the metrics alone: the numbers are theirs, to be compared with a repair of the whole
controller there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from controller import STEPS_APART, Shape, engine_alone, make_engine, newcomer, report
from prometheus_client import CollectorRegistry, generate_latest

from mindspeed_tft.engine import types as t
from mindspeed_tft.engine.repair import MOVED
from mindspeed_tft.observe.catalogue import Facts
from mindspeed_tft.observe.endpoint import Exposition
from mindspeed_tft.observe.metrics import Metrics

Passed = list[tuple[t.Event, list[t.Action]]]
_VICTIM = 5


@dataclass
class Stream:
    """What passes a controller: all that came before the fault, heartbeats of one period, and a repair."""

    start: Passed = field(default_factory=list)
    heartbeats: Passed = field(default_factory=list)
    repair: Passed = field(default_factory=list)


def play(shape: Shape) -> Stream:
    engine, infos, found = make_engine(shape), {info.rank: info for info in shape.infos()}, Stream()

    def feed(into: Passed, event: t.Event) -> list[t.Action]:
        actions = engine.handle(event)
        into.append((event, actions))
        return actions

    for info in infos.values():
        feed(found.start, t.Registered(0.0, info))
    for into, at in ((found.start, 1.0), (found.heartbeats, 2.0)):
        for rank in infos:
            feed(into, t.Heartbeat(at, rank, int(at) * STEPS_APART, "forward-backward"))
    old, infos[_VICTIM] = infos[_VICTIM], newcomer(infos[_VICTIM])
    events: deque[t.Event] = deque([t.RankLost(3.0, _VICTIM, "killed", old.pid)])
    events.append(t.Registered(3.0, infos[_VICTIM], bare=True))
    stopped: dict[int, int] = {}
    while events:
        for action in feed(found.repair, events.popleft()):
            if isinstance(action, t.Stop):
                stopped.update(dict.fromkeys(action.ranks, action.epoch))
            elif isinstance(action, t.Order):
                moves = action.kind is t.OrderKind.REPAIR
                result = {"taken": "", f"{MOVED}{action.rank}|{action.rank}|0": "1 1"} if moves else {"rng_end": ""}
                events.append(t.OrderDone(3.0, action.rank, action.id, True, "", result))
        if not events and len(stopped) == shape.ranks:
            step = 2 * STEPS_APART
            events += [t.Reported(3.0, report(rank, step, stopped[rank], rank == _VICTIM)) for rank in stopped]
            stopped = {}
    return found


def spend(metrics: Metrics, passed: Passed) -> float:
    """Processor seconds."""
    begin = time.process_time()
    for event, actions in passed:
        metrics.event(event)
        for action in actions:
            metrics.action(action, event.at)
    return time.process_time() - begin


def scrape(metrics: Metrics) -> tuple[float, int]:
    """Processor seconds and bytes of one answer to Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exposition(metrics, Facts(1, 0, "host0", {}), "benchmark", lambda: 4.0))
    begin = time.process_time()
    text = generate_latest(registry)
    return time.process_time() - begin, len(text)


def show(what: str, seconds: Iterable[float], count: int) -> None:
    middle = statistics.median(seconds)
    print(f"{what:<42} {middle * 1000:8.1f} ms {middle / count * 1e6:8.2f} us each of {count}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    stream = play(Shape(given.ranks, given.per_host, 1.0))
    beats, repairs, scrapes = list[float](), list[float](), list[float]()
    size = 0
    for _ in range(given.repeats):
        metrics = Metrics(given.ranks, 10.0)
        spend(metrics, stream.start)
        beats.append(spend(metrics, stream.heartbeats))
        repairs.append(spend(metrics, stream.repair))
        if metrics.outcomes != {"rebooted": 1}:
            raise SystemExit(f"the repair did not end: {dict(metrics.outcomes)}")
        seconds, size = scrape(metrics)
        scrapes.append(seconds)
    engine = statistics.median(engine_alone(Shape(given.ranks, given.per_host, 1.0), given.repeats))
    print(f"{given.ranks} ranks on {given.ranks // given.per_host} hosts; processor time, median of {given.repeats}")
    show("heartbeats of one period, a new step", beats, len(stream.heartbeats))
    show("a repair", repairs, sum(1 + len(actions) for _, actions in stream.repair))
    share = statistics.median(repairs) / engine
    print(
        f"  that is {share:.1%} of what the engine takes alone; a controller takes some 25 times what its engine does"
    )
    show(f"an answer to Prometheus, {size / 1000:.0f} kB", scrapes, 1)


if __name__ == "__main__":
    main()
