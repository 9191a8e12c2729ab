"""Judges a finished simulation by the true state of its ranks and its disk. Knows no rule of the engine."""

from __future__ import annotations

from mindspeed_tft.engine.incident import EXIT_REBORN
from mindspeed_tft.engine.machine import State

from .disk import FLIPPED, Published
from .layout import DEADLINES, REBOOT_FAULTS, REPAIRABLE_FAULTS, SPOILING_FAULTS, SUSPENDED, TICK
from .simulation import Simulation

_ENDS_WITHIN = DEADLINES.stop + DEADLINES.dump + DEADLINES.exit + 4 * TICK
_REPAIR_ENDS_WITHIN = _ENDS_WITHIN + DEADLINES.stop + DEADLINES.dump  # and then perhaps a dump
_HARMLESS = ("cut",)  # a connection that comes back costs no attempt


def judge(simulation: Simulation) -> list[str]:
    """Everything that is wrong with this run."""
    found = list(simulation.violations)
    found += _ends(simulation)
    for checkpoint in simulation.disk.published:
        found += _one_state(simulation, checkpoint)
    found += _no_step_lost(simulation)
    found += _honest(simulation)
    found += _saved_where_possible(simulation)
    found += _repaired_where_possible(simulation)
    found += _rewound_where_needed(simulation)
    return found


def check(simulation: Simulation) -> None:
    """Raises with everything needed to play the run again."""
    found = judge(simulation)
    assert not found, (
        f"\nseed {simulation.scenario.seed}: {found}\n{simulation.scenario}\nstruck: {simulation.struck}\n"
        f"states: {simulation.timeline}\nclosed: {simulation.closed}\n"
        + "\n".join(f"{at:8.3f} {stage:8} {text}" for at, stage, text in simulation.engine.timeline[-60:])
    )


def _ends(simulation: Simulation) -> list[str]:
    if simulation.stopped_at is None and simulation.scenario.watch and not simulation.struck:
        return [] if simulation.closed else ["training did not end"]
    if simulation.stopped_at is None:
        silenced = simulation.closed or simulation.scenario.weather.loss  # training ended, or no word came through
        return [] if silenced else ["nobody was stopped"]
    words_lost = (simulation.recovered or simulation.takeovers) and simulation.scenario.weather.loss
    if words_lost and simulation.engine.state is State.TRAINING:
        return []  # the goodbye of a rank was among them
    living = [rank for rank in simulation.ranks if rank.alive]
    if simulation.engine.state is State.TRAINING and living and all(rank.hung for rank in living):
        return []  # a job that was suspended as a whole looks the same: it is warned of, and waited for
    slack = simulation.suspensions * SUSPENDED + 4 * TICK * simulation.jumps
    if len(simulation.closed) != 1:
        return [f"closed {len(simulation.closed)} times, state {simulation.engine.state.value}"]
    if simulation.scenario.online:
        waits = sum(state == State.WAITING.value for _, state in simulation.timeline) + len(simulation.reborn)
        allowed = _REPAIR_ENDS_WITHIN + waits * (DEADLINES.stop + DEADLINES.reboot + DEADLINES.dump)
        if simulation.scenario.watch:  # who does not report is looked at, and its end awaited
            allowed += (1 + waits) * 3 * DEADLINES.heartbeat_lost
        allowed += slack
        spent = [end - begin for begin, end in simulation.incidents]
        return [f"took {took:.1f} s" for took in spent if took > allowed]
    took = simulation.closed[0][0] - simulation.stopped_at
    allowed = _ENDS_WITHIN * (1 + simulation.takeovers) + slack  # who takes over begins anew
    return [] if took <= allowed else [f"took {took:.1f} s, allowed {allowed:.1f} s"]


def _one_state(simulation: Simulation, checkpoint: Published) -> list[str]:
    """Every shard of every part, clean and of one step, with the random state of that step."""
    layout, step = simulation.scenario.layout, checkpoint.step
    found = []
    for name, shards in layout.files().items():
        part = checkpoint.parts.get(name)
        for shard in sorted(shards):
            version = part.shards.get(shard) if part is not None else None
            compared = sum(rank.versions.get(shard) == step for rank in simulation.ranks) > 1
            if version == FLIPPED and (simulation.unnoticed or not compared):
                continue  # the others did not come to the update of that step, or have left
            if version != step:
                found.append(f"published step {step} holds {shard} in {name} at {version}")
    for name, part in checkpoint.parts.items():
        # Megatron gives the random state of a part's first rank to all of them: where that one can write, it counts.
        if part is not None and part.rng != _random_state(simulation, name, step):
            found.append(f"published step {step} has random state {part.rng}")
    return found[:5]


def _random_state(simulation: Simulation, part: str, step: int) -> str:
    first = next(rank for rank in simulation.ranks if rank.info.part == part and rank.info.dp_rank == 0)
    return f"{part}@{step}{'-drifted' if first.number == simulation.scenario.drifted else ''}"


def _no_step_lost(simulation: Simulation) -> list[str]:
    """S is not below what any live rank completed that could be heard, nor above what the world committed."""
    step = simulation.engine.step
    if simulation.scenario.online:  # judged at each decision
        return []
    if step < 0 or not simulation.decided_on:
        return []
    ranks = simulation.ranks
    heard = [ranks[number] for number in simulation.decided_on if ranks[number].trusted]
    best = max((rank.completed for rank in heard), default=0)
    committed = max(rank.gradients for rank in ranks)
    if step < best:
        return [f"S = {step}, but a live rank had completed step {best}"]
    return [f"S = {step}, but no rank had gradients beyond {committed}"] if step > committed else []


def _honest(simulation: Simulation) -> list[str]:
    """The last words say what is on the disk, and ranks leave with the code that belongs to it."""
    if len(simulation.closed) != 1:
        return []
    closed = simulation.closed[0][1]
    on_disk = {checkpoint.step for checkpoint in simulation.disk.published} | simulation.disk.periodic.keys()
    found = []
    if closed.outcome in ("dumped", "exists") and closed.step not in on_disk:
        found.append(f"{closed.outcome} step {closed.step}, on disk: {on_disk}")
    codes = {code for rank in simulation.ranks for code in rank.exit_codes} - {EXIT_REBORN}
    if closed.outcome == "finished":
        return [f"finished, but ranks left with {codes}"] if codes else []
    if closed.outcome == "failed" and codes - {76}:
        found.append(f"failed, but ranks left with {codes}")
    if not simulation.scenario.weather.loss and simulation.stopped_at is not None:
        late = simulation.closed[0][0] - TICK  # who registers then is told while nobody looks any more
        left_out = [rank for rank in simulation.ranks if rank.alive and not rank.hung and not rank.told_to_leave]
        left_out = [rank for rank in left_out if rank.known_at < late]
        found += [f"rank {rank.number} was not told to leave" for rank in left_out[:3]]
    return found


def _saved_where_possible(simulation: Simulation) -> list[str]:
    """With an unharmed holder of every shard and no more failing attempts than allowed, the dump has to succeed."""
    if len(simulation.closed) != 1 or simulation.scenario.weather.loss or simulation.scenario.drifted >= 0:
        return []
    holders = simulation.scenario.layout.holders()
    safe = all(any(rank not in simulation.harmed for rank in of_shard) for of_shard in holders.values())
    # a loss shortly before the decision may become known after it
    costly = [f for at, f in simulation.struck if at > simulation.decided_at - 0.6 and f.what not in _HARMLESS]
    nothing = max(rank.gradients for rank in simulation.ranks) == 0 or simulation.engine.step == 0
    over = any(rank.finished for rank in simulation.ranks)
    unknown = simulation.scenario.weather.only == "Registered" and not simulation.trained
    if unknown:  # the fault came before the last registration: there is no job yet that could be saved
        return []
    outcome = simulation.closed[0][1].outcome
    if simulation.spoils or _old_flips(simulation):  # what is wrong is not saved
        return []
    if safe and len(costly) <= 2 and not nothing and not over and outcome not in ("dumped", "exists"):
        return [f"every shard had an unharmed holder, but: {simulation.closed[0][1].summary}"]
    return []


def _rough(simulation: Simulation) -> bool:
    """Tries may be used up by the weather alone. A copy of a fault's words costs one: on a real network the controller
    drops copies by their numbers."""
    weather = simulation.scenario.weather
    return bool(weather.loss or weather.reorder or weather.only == "FaultSeen")


def _old_flips(simulation: Simulation) -> bool:
    """A bit may have flipped before an update: holders differ, and nothing may show which is right."""
    return any(fault.what == "flip" for _, fault in simulation.struck) and simulation.flips_aged


def _repaired_where_possible(simulation: Simulation) -> list[str]:
    """With an unharmed holder of every shard and few faults, all repairable, training goes on to its end."""
    scenario, struck = simulation.scenario, [fault for _, fault in simulation.struck if fault.what not in _HARMLESS]
    if not scenario.online or _rough(simulation) or len(simulation.closed) != 1:
        return []
    reliable = scenario.agent is not None and scenario.agent.reliable
    survived = (*REPAIRABLE_FAULTS, "flip", *(REBOOT_FAULTS if reliable else ()))
    if _old_flips(simulation):
        return []
    if any(fault.what not in survived for fault in struck) or len(struck) > 3:
        return []
    holders = scenario.layout.holders()
    safe = all(any(rank not in simulation.harmed for rank in of_shard) for of_shard in holders.values())
    closed = simulation.closed[0][1]
    over = "finished training" in closed.summary
    if safe and not over and closed.outcome != "finished":
        return [f"every fault could be repaired, but: {closed.summary}"]
    return []


def _rewound_where_needed(simulation: Simulation) -> list[str]:
    """Never while S can be had; always when all ranks have a checkpoint that is surely good, and few faults struck."""
    scenario, struck = simulation.scenario, [fault for _, fault in simulation.struck if fault.what not in _HARMLESS]
    rewound = [done for _, done in simulation.recovered if "Rewound" in done.summary]
    holders = scenario.layout.holders()
    safe = all(any(rank not in simulation.harmed for rank in of_shard) for of_shard in holders.values())
    if safe and rewound and not simulation.spoils and not _old_flips(simulation):
        return [f"rewound although every shard had an unharmed holder: {rewound[0].summary}"]
    if not scenario.online or _rough(simulation) or len(simulation.closed) != 1:
        return []
    if any(fault.what not in (*REPAIRABLE_FAULTS, *SPOILING_FAULTS) for fault in struck) or len(struck) > 3:
        return []
    ranks, closed = simulation.ranks, simulation.closed[0][1]
    if closed.outcome != "failed" or "finished training" in closed.summary:
        return []
    if simulation.takeovers:  # who takes over in the middle of a load cannot know which checkpoint was believed good
        return []
    sources = {rank.info.part for rank in ranks if rank.number not in simulation.harmed}
    common = set.intersection(*(rank.checkpoints for rank in ranks if not rank.newcomer))
    newest = min([simulation.furthest, *simulation.spoils.values()]) - 2  # ranks may be apart by one step
    if sources == {rank.info.part for rank in ranks} and any(step <= newest for step in common):
        return [f"all ranks have the checkpoints {sorted(common)}, but: {closed.summary}"]
    return []
