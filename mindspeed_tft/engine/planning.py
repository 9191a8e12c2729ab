"""Who writes which part of the checkpoint of S, and from whose shards; who gives which shard to whom in a repair.
Pure functions of reports and agreement.

A part is written by one rank; every optimizer shard of the part comes from one rank whose report shows the state of S.
Where that is not possible, the answer says which shard is missing, who held it and what became of each holder.
This module sends nothing and does not decide S (`agreement`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mindspeed_tft.engine.agreement import Agreement, Means
from mindspeed_tft.engine.types import RankInfo, RankReport
from mindspeed_tft.engine.words import count, some
from mindspeed_tft.engine.words import ranks as _ranks


@dataclass(frozen=True)
class PartPlan:
    """One checkpoint file: its writer and the source rank of each of its shards."""

    part: str
    writer: int
    sources: Mapping[str, int]


@dataclass(frozen=True)
class DumpPlan:
    """A complete checkpoint of `step`. `finish`: ranks that complete their update before anything is written."""

    step: int
    parts: tuple[PartPlan, ...]
    finish: tuple[int, ...]

    @property
    def writers(self) -> dict[str, int]:
        return {part.part: part.writer for part in self.parts}

    @property
    def publisher(self) -> int:
        return min(part.writer for part in self.parts)

    @property
    def staged(self) -> dict[int, tuple[str, ...]]:
        """Shards that a rank has to lay down for a writer that does not hold them itself."""
        found: dict[int, set[str]] = {}
        for part in self.parts:
            for shard, source in part.sources.items():
                if source != part.writer:
                    found.setdefault(source, set()).add(shard)
        return {rank: tuple(sorted(found[rank])) for rank in sorted(found)}

    @property
    def ranks(self) -> frozenset[int]:
        """Everybody with something to do."""
        return frozenset(rank for part in self.parts for rank in (part.writer, *part.sources.values()))

    def describe(self) -> str:
        shards = sum(len(part.sources) for part in self.parts)
        text = f"{count(len(self.parts), 'part')}, {count(shards, 'shard')}; writers " + some(
            f"{part.part}: rank {part.writer}" for part in self.parts
        )
        if self.staged:
            text += "; shards from " + some(f"rank {rank}" for rank in self.staged)
        if self.finish:
            text += "; to finish their update: " + some(f"rank {rank}" for rank in self.finish)
        return text


@dataclass(frozen=True)
class Transfer:
    """One shard of S, from a rank that has it to one that lost it."""

    shard: str
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.shard}|{self.source}|{self.target}"


@dataclass(frozen=True)
class RepairPlan:
    """All ranks at the state of `step`: `finish` complete their update, then `damaged` get their shards."""

    step: int
    finish: tuple[int, ...]
    damaged: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    @property
    def busy(self) -> tuple[int, ...]:
        """Ranks with something to send or to receive."""
        return tuple(sorted({rank for transfer in self.transfers for rank in (transfer.source, transfer.target)}))

    def describe(self) -> str:
        text = f"{count(len(self.transfers), 'shard')} to move"
        if self.transfers:
            text += f" to {_ranks(self.damaged)} from {_ranks({transfer.source for transfer in self.transfers})}"
        return text + (f"; to finish their update: {_ranks(self.finish)}" if self.finish else "")


@dataclass(frozen=True)
class NoPlan:
    """No complete and proved state of S can be had from these ranks."""

    reason: str
    missing: tuple[str, ...] = ()  # shards without a source


def plan_dump(
    infos: Mapping[int, RankInfo],
    reports: Mapping[int, RankReport],
    agreement: Agreement,
    excluded: Mapping[int, str],
    doubts: Mapping[int, int] | None = None,
) -> DumpPlan | NoPlan:
    """Writers and sources for a dump of the agreed step.

    Args:
        infos: every rank that ever registered, the dead included: they say which shards exist.
        excluded: ranks that take no part, with what became of them.
        doubts: ranks that take part only where nobody with a lower number can, because orders failed there.
    """
    if not agreement.provable:
        return NoPlan(agreement.reason)
    able = {rank for rank in infos if rank not in excluded and agreement.offers.get(rank)}
    if conflict := rng_conflict(infos, reports, agreement, able):
        return NoPlan(conflict)
    apart = rng_apart(infos, reports, agreement, able)
    chooser = _Chooser(infos, reports, agreement, excluded, able, doubts or {}, apart)
    missing = [shard for part in chooser.shards_of.values() for shard in part if not chooser.sources_of(shard)]
    if missing:
        return NoPlan(chooser.explain_shards(missing), tuple(missing))
    unwritten = [part for part in chooser.shards_of if not chooser.writers_of(part)]
    if unwritten:
        return NoPlan(chooser.explain_part(unwritten[0]))
    parts = tuple(chooser.plan_part(part) for part in chooser.shards_of)
    busy = {rank for part in parts for rank in (part.writer, *part.sources.values())}
    finish = sorted(rank for rank in busy if agreement.offers[rank].means is Means.FINISH_UPDATE)
    return DumpPlan(agreement.step, parts, tuple(finish))


def plan_repair(
    infos: Mapping[int, RankInfo], agreement: Agreement, blamed: Collection[int], avoid: Mapping[int, int] | None = None
) -> RepairPlan | NoPlan:
    """Who gives which shard of S to whom, so that every registered rank has all it holds. All of them must be alive.

    The sources of one rank are several where that is possible: they send at the same time.

    Args:
        blamed: ranks with a fault of their own; used as a source where nobody else can be.
        avoid: the same for ranks whose orders failed, the higher the number the later.
    """
    if not agreement.provable:
        return NoPlan(agreement.reason)
    offers = agreement.offers
    if agreement.impossible:
        told = some(f"rank {rank}: {offers[rank].reason}" for rank in agreement.impossible)
        return NoPlan(f"impossible reports ({told})")
    damaged = tuple(rank for rank in sorted(infos) if not offers[rank])
    holders: dict[str, list[int]] = {shard: [] for rank in damaged for shard in infos[rank].holds}
    for rank in sorted(infos):
        for shard in infos[rank].holds:
            if shard in holders and offers[rank]:
                holders[shard].append(rank)
    missing = tuple(sorted(shard for shard, found in holders.items() if not found))
    if missing:
        told = some(
            (f"{shard} ({_damage(shard, damaged, infos, agreement)})" for shard in missing), separator="; "
        )  # fmt: skip
        return NoPlan(f"no healthy holder of shard {told}", missing)
    doubts = {rank: (rank in blamed, (avoid or {}).get(rank, 0)) for found in holders.values() for rank in found}
    load = dict.fromkeys(doubts, 0)
    transfers = []
    for target in damaged:
        host = infos[target].host
        for shard in sorted(infos[target].holds):
            source = min(holders[shard], key=lambda rank: (doubts[rank], load[rank], infos[rank].host == host, rank))
            load[source] += 1
            transfers.append(Transfer(shard, source, target))
    finish = tuple(rank for rank in sorted(infos) if offers[rank].means is Means.FINISH_UPDATE)
    return RepairPlan(agreement.step, finish, damaged, tuple(transfers))


def _damage(shard: str, damaged: Collection[int], infos: Mapping[int, RankInfo], agreement: Agreement) -> str:
    mine = (rank for rank in damaged if shard in infos[rank].holds)
    return some((f"rank {rank}: {agreement.offers[rank].reason}" for rank in mine), limit=8, separator="; ")


def rng_conflict(
    infos: Mapping[int, RankInfo], reports: Mapping[int, RankReport], agreement: Agreement, able: Collection[int]
) -> str:
    """Why the random state of S is not provably one state within some part; "" when it is.

    Megatron saves the random state of a part's first data-parallel rank and gives it to all of them. So where that rank
    can write, its state is the one that counts, whatever the others drew; where it cannot, they must agree among
    themselves.
    """
    firsts = {infos[rank].part for rank in able if infos[rank].dp_rank == 0}
    apart = rng_apart(infos, reports, agreement, able)
    return next((text for part, text in sorted(apart.items()) if part not in firsts), "")


def rng_apart(
    infos: Mapping[int, RankInfo], reports: Mapping[int, RankReport], agreement: Agreement, able: Collection[int]
) -> dict[str, str]:
    """The parts whose ranks do not have the same random state at the end of S, and who has which.

    A digest that a rank does not know yet (before its update is finished) says nothing and is judged later.
    """
    seen: dict[str, dict[str, int]] = {}  # part -> digest -> lowest rank that has it
    for rank in sorted(able):
        report = reports[rank]
        digest = report.rng_start if agreement.offers[rank].means is Means.REWIND else report.rng_end
        if digest:
            seen.setdefault(infos[rank].part, {}).setdefault(digest, rank)
    found = {}
    for part, digests in seen.items():
        if len(digests) > 1:
            apart = some(f"rank {rank}: {digest[:12]}" for digest, rank in digests.items())
            found[part] = (
                f"the random state of part {part} at step {agreement.step} differs between ranks that should agree "
                f"({apart}): not provably one state"
            )
    return found


class _Chooser:
    """The preferences of one plan. Indexed once, so that a plan costs about one look at each rank and shard."""

    def __init__(
        self,
        infos: Mapping[int, RankInfo],
        reports: Mapping[int, RankReport],
        agreement: Agreement,
        excluded: Mapping[int, str],
        able: Collection[int],
        doubts: Mapping[int, int],
        apart: Collection[str],
    ) -> None:
        self._infos, self._reports, self._agreement, self._excluded = infos, reports, agreement, excluded
        self._able, self._doubts, self._apart = able, doubts, apart
        self._members: dict[str, list[int]] = {}
        self._holders: dict[str, list[int]] = {}
        self.shards_of: dict[str, list[str]] = {}  # part -> its shards, both in order
        for rank in sorted(infos):
            self._members.setdefault(infos[rank].part, []).append(rank)
            for shard in infos[rank].holds:
                self._holders.setdefault(shard, []).append(rank)
        for part, members in sorted(self._members.items()):
            self.shards_of[part] = sorted({shard for rank in members for shard in infos[rank].holds})

    def sources_of(self, shard: str) -> list[int]:
        return [rank for rank in self._holders[shard] if rank in self._able]

    def writers_of(self, part: str) -> list[int]:
        return [rank for rank in self._members[part] if rank in self._able]

    def plan_part(self, part: str) -> PartPlan:
        writer = min(self.writers_of(part), key=self._as_writer)
        sources = {
            shard: min(self.sources_of(shard), key=lambda rank: (rank != writer, *self._doubt(rank), rank))
            for shard in self.shards_of[part]
        }
        return PartPlan(part, writer, sources)

    def _doubt(self, rank: int) -> tuple[int, bool]:
        return self._doubts.get(rank, 0), bool(self._reports[rank].fault)

    def _as_writer(self, rank: int) -> tuple[bool, int, bool, int, int, int]:
        info = self._infos[rank]
        second_to_none = info.part in self._apart and info.dp_rank != 0  # see rng_conflict
        return (second_to_none, *self._doubt(rank), -len(info.holds), info.dp_rank, rank)

    def explain_shards(self, missing: list[str]) -> str:
        told = (f"{shard} ({self._became(self._holders[shard])})" for shard in missing)
        return f"no holder left of shard {some(told, separator='; ')}"

    def explain_part(self, part: str) -> str:
        return f"nobody left to write part {part} ({self._became(self._members[part])})"

    def _became(self, ranks: list[int]) -> str:
        return some((f"rank {rank}: {self._fate(rank)}" for rank in ranks), limit=8, separator="; ")

    def _fate(self, rank: int) -> str:
        if rank in self._excluded:
            return self._excluded[rank]
        offer = self._agreement.offers.get(rank)
        return offer.reason if offer is not None else "no report"
