"""Scenarios drawn from a seed: every kind of fault, at every point of a step and of a dump."""

from __future__ import annotations

import random
from dataclasses import replace

from .layout import (
    DUMP_POINTS,
    FIRST_FAULTS,
    HANGING_POINTS,
    HANGS,
    LATER_FAULTS,
    RECOVERY_POINTS,
    REPAIR_POINTS,
    REPAIRABLE_FAULTS,
    REWIND_POINTS,
    SPOILING_FAULTS,
    STEP_POINTS,
    Agent,
    Fault,
    Layout,
    Request,
    Scenario,
    Weather,
)

LAYOUTS = (
    Layout(1, 2, 2, 1),
    Layout(1, 4, 2, 2),
    Layout(2, 2, 2, 2),
    Layout(2, 4, 2, 2, common=True),
    Layout(2, 6, 3, 4),
    Layout(3, 4, 4, 3),
    Layout(4, 8, 2, 8, common=True),
)
CALM = Weather()
WILD = Weather(duplicate=0.3, reorder=True, delay=0.1)
LOSSY = Weather(duplicate=0.1, reorder=True, loss=0.03, delay=0.1)


def draw(seed: int, weather: Weather = CALM, layout: Layout | None = None, later: int = 3) -> Scenario:
    """A first fault somewhere in the first steps, and up to `later` more while the job is being saved."""
    rng = random.Random(seed * 7919 + 1)
    layout = layout or rng.choice(LAYOUTS)
    faults = [_first(rng, layout)]
    if rng.random() < 0.25:  # two at about the same time, one of them perhaps a hang
        faults.append(_first(rng, layout, (*FIRST_FAULTS, "hang", "hang")))
    faults += [_later(rng, layout) for _ in range(rng.choice((0, 0, 1, 1, 2, later)))]
    first_step = rng.choice((1, 1, 41))
    return Scenario(
        seed,
        layout,
        tuple(faults),
        weather,
        first_step=first_step,
        last_step=first_step + rng.choice((1, 2, 5, 5)),
        reborn=rng.random() < 0.2,
        early_rng=rng.random() < 0.5,
    )


def _first(rng: random.Random, layout: Layout, kinds: tuple[str, ...] = FIRST_FAULTS) -> Fault:
    point = f"{rng.choice(STEP_POINTS)}@{rng.choice((1, 2, 2, 3))}"
    delay = rng.choice((0.0, rng.random() * 0.05))
    return Fault(rng.choice(kinds), point, rng.randint(1, layout.world_size), delay)


def _later(rng: random.Random, layout: Layout) -> Fault:
    what = rng.choice(LATER_FAULTS)
    points = DUMP_POINTS if what in ("fail", "slow") else (*RECOVERY_POINTS, "renamed")
    point = rng.choice(points)
    most = layout.world_size if point in ("stopping", "reported") else 3
    return Fault(what, point, rng.randint(1, most), rng.choice((0.0, 0.0, rng.random() * 0.3)))


def draw_retry(seed: int, weather: Weather = CALM, layout: Layout | None = None) -> Scenario:
    """A job that may repair: repairable faults in several steps and in repairs, and sometimes something worse."""
    rng = random.Random(seed * 104_729 + 3)
    layout = layout or rng.choice(LAYOUTS)
    worse = rng.random() < 0.4
    faults = [_repairable(rng, layout) for _ in range(rng.choice((1, 1, 2, 3, 5)))]
    faults += [_in_repair(rng, layout, worse) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    if worse:
        faults.append(rng.choice((_first, _later))(rng, layout))
    first_step = rng.choice((1, 1, 41))
    return Scenario(
        seed,
        layout,
        tuple(faults),
        weather,
        first_step=first_step,
        last_step=first_step + rng.choice((2, 4, 6)),
        reborn=rng.random() < 0.2,
        early_rng=rng.random() < 0.5,
        retry=True,
    )


def _repairable(rng: random.Random, layout: Layout) -> Fault:
    point = f"{rng.choice(STEP_POINTS)}@{rng.choice((1, 2, 2, 3, 4))}"
    delay = rng.choice((0.0, rng.random() * 0.05))
    return Fault(rng.choice(REPAIRABLE_FAULTS), point, rng.randint(1, rng.choice((1, 1, 2)) * layout.world_size), delay)


def _in_repair(rng: random.Random, layout: Layout, worse: bool) -> Fault:
    what = rng.choice(("memory", "link", "cut", "fail", "slow", *(LATER_FAULTS if worse else ())))
    points = REPAIR_POINTS if what in ("fail", "slow") else ("stopping", "reported", *REPAIR_POINTS)
    return Fault(what, rng.choice(points), rng.randint(1, layout.world_size), rng.choice((0.0, rng.random() * 0.3)))


UNREPLICATED = (Layout(1, 2, 1, 1), Layout(1, 4, 1, 2), Layout(2, 2, 1, 2), Layout(2, 4, 1, 2, common=True))


def draw_rewind(seed: int, weather: Weather = CALM) -> Scenario:
    """A job that saves from time to time, with wrong numbers or without replicas, and further faults on top."""
    rng = random.Random(seed * 15_485_863 + 5)
    layout = rng.choice((*UNREPLICATED, *UNREPLICATED, *LAYOUTS))
    kinds = (*SPOILING_FAULTS, "memory", "memory") if layout.n == 1 else (*SPOILING_FAULTS, "memory")
    worse = rng.random() < 0.3
    faults = [_anywhere(rng, layout, kinds) for _ in range(rng.choice((1, 1, 2, 3)))]
    faults += [_in_rewind(rng, layout, worse) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    if worse:
        faults.append(rng.choice((_first, _later))(rng, layout))
    first_step = rng.choice((1, 1, 41))
    return Scenario(
        seed,
        layout,
        tuple(faults),
        weather,
        first_step=first_step,
        last_step=first_step + rng.choice((4, 6, 9)),
        reborn=rng.random() < 0.2,
        early_rng=rng.random() < 0.5,
        retry=True,
        save_every=rng.choice((1, 2, 3)),
    )


def _anywhere(rng: random.Random, layout: Layout, kinds: tuple[str, ...]) -> Fault:
    point = f"{rng.choice((*STEP_POINTS, 'save', 'saved'))}@{rng.choice((1, 2, 3, 4, 5, 6))}"
    delay = rng.choice((0.0, rng.random() * 0.05))
    count = rng.randint(1, rng.choice((1, 1, 2)) * layout.world_size)  # beyond the world size: after a rewind
    return Fault(rng.choice(kinds), point, count, delay)


def _in_rewind(rng: random.Random, layout: Layout, worse: bool) -> Fault:
    what = rng.choice(("memory", "link", "cut", "fail", "slow", *SPOILING_FAULTS, *(LATER_FAULTS if worse else ())))
    points = REWIND_POINTS if what in ("fail", "slow") else ("stopping", "reported", *REWIND_POINTS)
    return Fault(what, rng.choice(points), rng.randint(1, layout.world_size), rng.choice((0.0, rng.random() * 0.3)))


def draw_recover(seed: int, weather: Weather = CALM) -> Scenario:
    """A job whose dead processes are started again, more or less reliably, with faults at every point and often."""
    rng = random.Random(seed * 32_452_843 + 7)
    layout = rng.choice((*LAYOUTS, *LAYOUTS, *UNREPLICATED))
    reliable = rng.random() < 0.5
    worse = rng.random() < 0.3
    kinds = ("kill", "kill", "raise", "kill_host", *REPAIRABLE_FAULTS, *(SPOILING_FAULTS if worse else ()))
    faults = [_anywhere(rng, layout, kinds) for _ in range(rng.choice((1, 1, 2, 3)))]
    faults += [_in_reboot(rng, layout, worse) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    first_step = rng.choice((1, 1, 41))
    return Scenario(
        seed,
        layout,
        tuple(faults),
        weather,
        first_step=first_step,
        last_step=first_step + rng.choice((4, 6)),
        early_rng=rng.random() < 0.5,
        retry=rng.random() < 0.5,
        agent=Agent() if reliable else Agent(never=0.1, late=0.1, dies=0.2),
        save_every=rng.choice((0, 1, 2, 3)),
    )


def _in_reboot(rng: random.Random, layout: Layout, worse: bool) -> Fault:
    more = ("hang", "terminate", *LATER_FAULTS, *SPOILING_FAULTS) if worse else ()
    what = rng.choice(("kill", "kill", "raise", "memory", "link", "cut", "fail", "slow", *more))
    points = REPAIR_POINTS if what in ("fail", "slow") else ("stopping", "reported", *REPAIR_POINTS, *REWIND_POINTS)
    return Fault(what, rng.choice(points), rng.randint(1, layout.world_size), rng.choice((0.0, rng.random() * 3)))


def draw_hang(seed: int, weather: Weather = CALM) -> Scenario:
    """A rank hangs once the job has found its pace; a job that may reboot suffers more while it is repaired."""
    rng = random.Random(seed * 49_979_687 + 11)
    layout = rng.choice(LAYOUTS)
    reboots = rng.random() < 0.6
    point = f"{rng.choice(HANGING_POINTS)}@{rng.randint(12, 20)}"
    faults = [Fault(rng.choice(HANGS), point, rng.randint(1, layout.world_size), rng.random() * 0.02)]
    if reboots:
        more = [_in_reboot(rng, layout, False) for _ in range(rng.choice((0, 0, 1, 2)))]
        faults += [replace(fault, what=rng.choice((fault.what, *HANGS))) for fault in more]
    return Scenario(
        seed,
        layout,
        tuple(faults),
        weather,
        last_step=23,
        early_rng=rng.random() < 0.5,
        agent=Agent() if reboots else None,
        watch=True,
        uneven=rng.random() < 0.5,
    )


_STORIES = (
    ("pause", "resume"),
    ("pause", "dump", "resume"),
    ("pause", "dump", "dump", "pause", "resume"),
    ("pause", "withdraw", "pause"),
    ("dump", "withdraw"),
    ("dump", "pause"),
    ("resume", "pause", "resume", "pause"),
)


def draw_operated(seed: int, weather: Weather = CALM) -> Scenario:
    """A job with operators who pause it, let it go on and have it saved, also in the middle of faults."""
    rng = random.Random(seed * 32_452_843 + 11)
    base = rng.choice((draw_retry, draw_recover, draw_retry))(seed, weather)
    requests: list[Request] = []
    at = 0.3
    for _ in range(rng.choice((1, 1, 2, 3))):
        for kind in rng.choice(_STORIES):
            args = {"limit": f"{rng.choice((0.5, 3.0, 5.0))}"} if kind == "pause" else {}
            if kind == "pause" and rng.random() < 0.3:
                args["step"] = str(base.first_step + rng.randint(0, 5))
            requests.append(Request(at, kind, args))
            at += rng.choice((0.0, rng.random() * 0.3, 0.4 + rng.random(), 0.4 + rng.random()))
    faults = base.faults if rng.random() < 0.7 else ()
    what = rng.choice(("memory", "link", "kill", "cut", "cut"))
    held = Fault(what, "held", rng.randint(1, base.layout.world_size), rng.choice((0.0, 0.02, 0.3, 1.0)))
    faults += (held,) if rng.random() < 0.7 else ()
    takeover = Fault("takeover", f"{rng.choice(STEP_POINTS)}@{rng.randint(1, 4)}", rng.randint(1, 3))
    faults += (takeover,) if rng.random() < 0.3 else ()
    return replace(base, requests=tuple(requests), faults=faults, last_step=base.first_step + rng.choice((6, 12)))
