"""Replicas as an adaptor states them, in the words of our engine, and the engine's plans in the words of its callbacks.

An adaptor says, for each optimizer, a list of n ranks and a number r of replicas: the list is cut into r chunks of n/r
ranks, each chunk holds the whole state, and its rank at position i holds slice i. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_tft.engine.types import RankInfo
from mindspeed_tft.facade.words import FacadeError, NotServed, OptimizerType, RepairType
from mindspeed_tft.recovery.transfers import SMALL_STATE

_NAME = "tft_set_optimizer_replica"
UNOWNED = "/unowned"  # end of the name of what no optimizer owns: a checkpoint of the adaptor has it, or nobody
KINDS = {OptimizerType.ATTENTION: "dense", OptimizerType.MOE: "expert"}
_TYPES = {word: kind.value for kind, word in KINDS.items()}


@dataclass(frozen=True)
class Replicas:
    """One optimizer's ranks: `position` of this rank among `ranks`, in `count` replicas of `slices` shards each."""

    kind: OptimizerType
    ranks: tuple[int, ...]
    count: int
    position: int

    @property
    def slices(self) -> int:
        return len(self.ranks) // self.count

    @property
    def list_name(self) -> str:
        return f"ranks{self.ranks[0]}/{KINDS[self.kind]}"

    @property
    def holds(self) -> str:
        return f"{self.list_name}/{self.position % self.slices}"

    @property
    def all_shards(self) -> tuple[str, ...]:
        return tuple(f"{self.list_name}/{number}" for number in range(self.slices))


def read(rank: int, entries: Sequence[Mapping[str, Any]]) -> tuple[Replicas, ...]:
    """What `tft_set_optimizer_replica` was given: dense first, then experts.

    Raises:
        FacadeError: not such entries, or a count that does not divide its ranks.
        NotServed: shifted replicas.
    """
    if not 1 <= len(entries) <= len(KINDS):
        raise FacadeError(f"{_NAME}: {len(entries)} entries; give one for the dense optimizer, and one for experts")
    return tuple(_read(rank, kind, entry) for kind, entry in zip(KINDS, entries, strict=False))


def _read(rank: int, kind: OptimizerType, entry: Mapping[str, Any]) -> Replicas:
    where = f"{_NAME}, entry {kind.value}"
    if missing := {"rank_list", "replica_cnt", "replica_shift"} - entry.keys():
        raise FacadeError(f"{where}: no {', '.join(sorted(missing))}")
    ranks, count = [int(one) for one in entry["rank_list"]], int(entry["replica_cnt"])
    if rank not in ranks or len(set(ranks)) != len(ranks) or ranks != sorted(ranks):
        raise FacadeError(f"{where}: {ranks} is no ascending list of different ranks with rank {rank} in it")
    if not 1 <= count <= len(ranks) or len(ranks) % count:
        raise FacadeError(f"{where}: {count} replicas do not divide {len(ranks)} ranks")
    if int(entry["replica_shift"]):
        reason = f"a shift of {entry['replica_shift']} places replicas in a way that is not proved"
        raise NotServed(_NAME, reason, "give replica_shift 0")
    return Replicas(kind, tuple(ranks), count, ranks.index(rank))


def info(rank: int, host: str, pid: int, replicas: Sequence[Replicas]) -> RankInfo:
    """How this rank registers: its part is named by the first rank of its dense list."""
    dense = replicas[0]
    return RankInfo(
        rank=rank,
        host=host,
        pid=pid,
        part=f"ranks{dense.ranks[0]}",
        dp_rank=dense.position,
        holds=tuple(one.holds for one in replicas),
        needs=tuple(shard for one in replicas for shard in one.all_shards),
    )


def save_info(groups: Sequence[str]) -> list[dict[str, Any]]:
    """What a save callback is given, of the `groups` of an order (see `engine.joint`): type and ranks of each."""
    found = []
    for group in groups:
        name, _, ranks = group.partition("|")
        found.append({"type": _type_of(name), "ranks": [int(rank) for rank in ranks.split(",")]})
    return sorted(found, key=lambda one: int(str(one["type"])))


def _type_of(name: str) -> int:
    return _TYPES[name.split("/")[1]]


def load_info(replicas: int, rebuild: bool) -> dict[str, Any]:
    """`repair_info` where every rank loads its newest checkpoint: nobody gives, nobody takes."""
    kind = RepairType.RT_LOAD_REBUILD if rebuild else RepairType.RT_LOAD_CKPT
    return {"type": list(range(replicas)), "repair_type": kind.value, "src": [], "dst": [], "rank_list": []}


@dataclass(frozen=True)
class RepairCall:
    """The arguments of this rank's repair callback, but for `train_args` and `ctx`."""

    error_ranks: list[int]
    info: dict[str, Any]
    taken: tuple[str, ...]  # shards that this rank gets


def repair_call(rank: int, transfers: Sequence[str], receives_as: RepairType) -> RepairCall:
    """Of the transfers of an order ("shard|source|target"), this rank's part; it has one, or it was not asked.

    Small states travel with the shards here: the adaptor sends them itself.

    Raises:
        FacadeError: the rank would have to give and to take.
    """
    moves = [(shard, int(source), int(target)) for shard, source, target in (one.split("|") for one in transfers)]
    moves = [move for move in moves if not move[0].endswith((SMALL_STATE, UNOWNED))]
    units = sorted((_type_of(shard), target, source, shard) for shard, source, target in moves)
    mine = [unit for unit in units if rank in unit[1:3]]
    gives, takes = (any(unit[place] == rank for unit in mine) for place in (2, 1))
    if gives and takes:
        raise FacadeError(f"rank {rank} would give and take in one repair, which one callback cannot do")
    told = {
        "type": [unit[0] for unit in mine],
        "repair_type": (receives_as if takes else RepairType.RT_SEND).value,
        "src": [unit[2] for unit in mine],
        "dst": [unit[1] for unit in mine],
        "rank_list": sorted({rank for unit in units for rank in unit[1:3]}),
    }
    taken = tuple(unit[3] for unit in mine) if takes else ()
    return RepairCall(sorted({unit[1] for unit in units}), told, taken)
