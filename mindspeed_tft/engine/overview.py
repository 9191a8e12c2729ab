"""A job as an operator wants to see it: its ranks, who holds what, how well it is protected, what a fault means."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict

from mindspeed_tft.engine.outlook import Situation, outlook, protection
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.states import State
from mindspeed_tft.engine.types import Heartbeat


def overview(
    state: State,
    step: int,
    strategies: Collection[str],
    roster: Roster,
    beats: Mapping[int, Heartbeat],
    held: Mapping[int, int],
    now: float,
) -> dict[str, object]:
    """Plain values. `step`: the last one that is complete; `beats`: the last heartbeat of each rank; `held`: who is
    held, and after which step, which is known before a heartbeat tells it; `now`: seconds, in the roster's time."""
    alive = {rank: roster.infos[rank] for rank in sorted(roster.alive)}
    checkpoints = [beats[rank].checkpoint if rank in beats else 0 for rank in alive]
    one_way = any(beats[rank].one_way for rank in alive if rank in beats)
    situation = Situation(strategies, step, min(checkpoints, default=0), alive, one_way)
    return {
        "world_size": roster.world_size,
        "protection": protection(state.value, len(roster.missing()), situation, roster.lost),
        "outlook": [asdict(prospect) for prospect in outlook(situation)] if alive else [],
        "checkpoint": situation.checkpoint,
        "ranks": [_rank(rank, roster, beats.get(rank), held.get(rank), now) for rank in range(roster.world_size)],
        "shards": {
            shard: {"ranks": sorted(holding), "hosts": sorted({alive[rank].host for rank in holding})}
            for shard, holding in sorted(situation.holders.items())
        },
        "newcomers": [_newcomer(rank, roster) for rank in sorted(roster.newcomers)],
    }


def _rank(rank: int, roster: Roster, beat: Heartbeat | None, held: int | None, now: float) -> dict[str, object]:
    info, heard = roster.infos.get(rank), roster.last_heard(rank)
    words = {"lost": roster.lost.get(rank), "finished": rank in roster.finished, "alive": rank in roster.alive}
    return {
        "rank": rank,
        "state": next((word for word, true in words.items() if true), "unknown"),
        "why": roster.lost.get(rank, ""),
        "host": info.host if info else "",
        "pid": info.pid if info else 0,
        "part": info.part if info else "",
        "holds": list(info.holds) if info else [],
        "step": held if held is not None else beat.step if beat else 0,
        "phase": "held" if held is not None else beat.phase if beat else "",
        "waiting": bool(beat and beat.waiting),
        "heard_seconds_ago": round(now - heard, 1) if heard is not None else None,
    }


def _newcomer(rank: int, roster: Roster) -> dict[str, object]:
    info = roster.newcomers[rank]
    return {"rank": rank, "host": info.host, "pid": info.pid}
