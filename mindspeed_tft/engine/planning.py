"""Who writes which part of the checkpoint of S, and from whose shards; who gives what to whom in a repair or a rewind.
Pure functions of reports and agreement.

A part is written by one rank; every optimizer shard of the part comes from one rank whose report shows the state of S.
Where that is not possible, the answer says which shard is missing, who held it and what became of each holder.
This module sends nothing and does not decide S (`agreement`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_tft.engine.agreement import Agreement, Means, Offer
from mindspeed_tft.engine.types import RankInfo, RankReport, Update
from mindspeed_tft.engine.words import count, some
from mindspeed_tft.engine.words import ranks as _ranks

# In the place of a checkpoint's step: whichever is the newest. Of ranks that do not know which there are; no checkpoint
# is of this step.
NEWEST = 0


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
    """One shard of S, or what else a rank needs of it, from a rank that has it to one that has not."""

    shard: str
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.shard}|{self.source}|{self.target}"


@dataclass(frozen=True)
class RepairPlan:
    """All ranks at the state of `step`: `finish` complete their update, then `damaged` get their shards."""

    step: int  # S
    finish: tuple[int, ...]
    damaged: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    @property
    def last(self) -> int:
        """The last completed step, S."""
        return self.step

    @property
    def busy(self) -> tuple[int, ...]:
        """Ranks with something to send or to receive."""
        return _busy(self.transfers)

    def without(self, rank: int) -> RepairPlan:
        """The same for everybody but this rank, which needs nothing."""
        damaged = tuple(one for one in self.damaged if one != rank)
        return replace(self, damaged=damaged, transfers=tuple(t for t in self.transfers if t.target != rank))

    def describe(self) -> str:
        shards = sum(not transfer.shard.endswith("/small") for transfer in self.transfers)
        text = f"{count(shards, 'shard')} to move"
        if self.transfers:
            text += f" to {_ranks(self.damaged)} from {_ranks({transfer.source for transfer in self.transfers})}"
        return text + (f"; to finish their update: {_ranks(self.finish)}" if self.finish else "")


@dataclass(frozen=True)
class RewindPlan:
    """All ranks at the checkpoint of `step`: `damaged` get the tensors that no checkpoint holds, then all load it."""

    step: int  # of the checkpoint; NEWEST: the one that ranks find, and tell
    last: int  # the last completed step, S
    safe: int  # up to this step, no checkpoint can hold wrong numbers that an update spread
    spoiled: bool  # wrong numbers may have been spread: checkpoints after `step` must not be used any more
    why: str
    damaged: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    @property
    def finish(self) -> tuple[int, ...]:
        """Nobody: what the broken step left behind is overwritten."""
        return ()

    @property
    def lost(self) -> int:
        """Completed steps that have to be computed again."""
        return self.last - self.step

    @property
    def busy(self) -> tuple[int, ...]:
        """Ranks with something to send or to receive."""
        return _busy(self.transfers)

    def describe(self) -> str:
        which = f"checkpoint of step {self.step}" if self.step != NEWEST else "newest checkpoint that they find"
        text = f"all ranks load the {which}, because {self.why}"
        if self.step != NEWEST:
            text += f"; {count(self.lost, 'completed step')} lost"
        if self.transfers:
            sources = {transfer.source for transfer in self.transfers}
            text += f"; tensors that no checkpoint holds go to {_ranks(self.damaged)} from {_ranks(sources)}"
        return text


def _busy(transfers: Iterable[Transfer]) -> tuple[int, ...]:
    return tuple(sorted({rank for transfer in transfers for rank in (transfer.source, transfer.target)}))


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
    wanted = dict.fromkeys(shard for part in chooser.shards_of.values() for shard in part)  # some by several parts
    missing = [shard for shard in wanted if not chooser.sources_of(shard)]
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
    infos: Mapping[int, RankInfo],
    agreement: Agreement,
    blamed: Collection[int],
    avoid: Mapping[int, int] | None = None,
    newcomers: Collection[int] = (),
) -> RepairPlan | NoPlan:
    """Who gives which shard of S to whom, so that every registered rank has all it holds. All of them must be alive.

    The sources of one rank are several where that is possible: they send at the same time.

    Args:
        blamed: ranks with a fault of their own; used as a source where nobody else can be.
        avoid: the same for ranks whose orders failed, the higher the number the later.
        newcomers: ranks that are another process now; where they have no state yet, they get the small state, too.
    """
    if not agreement.provable:
        return NoPlan(agreement.reason)
    offers = agreement.offers
    if why := contradiction(agreement):
        return NoPlan(why)
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
    wanted = [(shard, target) for target in damaged for shard in sorted(infos[target].holds)]
    transfers = _share(infos, wanted, holders, blamed, avoid or {})
    bare = [rank for rank in damaged if rank in newcomers]
    smalls = _plan_smalls(infos, offers, bare, blamed, avoid or {})
    if isinstance(smalls, NoPlan):
        return smalls
    transfers += smalls
    finish = tuple(rank for rank in sorted(infos) if offers[rank].means is Means.FINISH_UPDATE)
    return RepairPlan(agreement.step, finish, damaged, transfers)


def _plan_smalls(
    infos: Mapping[int, RankInfo],
    offers: Mapping[int, Offer],
    bare: Sequence[int],
    blamed: Collection[int],
    avoid: Mapping[int, int],
) -> tuple[Transfer, ...] | NoPlan:
    """Who gives these newcomers the small state of S: a rank of their part that can show S."""
    able: dict[str, list[int]] = {small(infos[rank].part): [] for rank in bare}
    for rank in sorted(infos):
        if offers[rank] and small(infos[rank].part) in able:
            able[small(infos[rank].part)].append(rank)
    if bereft := sorted({infos[rank].part for rank in bare if not able[small(infos[rank].part)]}):
        return NoPlan(f"no rank of part {some(bereft)} is left that has the random states and counters of that step")
    return _share(infos, [(small(infos[rank].part), rank) for rank in bare], able, blamed, avoid)


def plan_unowned(
    infos: Mapping[int, RankInfo],
    damaged: Collection[int],
    blamed: Collection[int],
    avoid: Mapping[int, int] | None = None,
) -> tuple[Transfer, ...] | NoPlan:
    """Who gives a damaged rank the tensors that no optimizer owns and no checkpoint holds: a healthy rank of its part.

    `blamed` and `avoid` as in `plan_repair`. NoPlan where a part has a damaged rank and no healthy one.
    """
    healthy: dict[str, list[int]] = {unowned(infos[rank].part): [] for rank in damaged}
    for rank in sorted(infos):
        if rank not in damaged and unowned(infos[rank].part) in healthy:
            healthy[unowned(infos[rank].part)].append(rank)
    bereft = sorted({infos[rank].part for rank in damaged if not healthy[unowned(infos[rank].part)]})
    if bereft:
        return NoPlan(
            f"no rank of part {some(bereft)} is left whose memory is undamaged, and no checkpoint holds all its tensors"
        )
    wanted = [(unowned(infos[rank].part), rank) for rank in sorted(damaged)]
    return _share(infos, wanted, healthy, blamed, avoid or {})


def unowned(part: str) -> str:
    """The name under which the tensors of a part that no optimizer owns are moved before a checkpoint is loaded."""
    return f"{part}/unowned"


def small(part: str) -> str:
    """The name under which the small state (random states, counters, scheduler, scalers) is given to a newcomer."""
    return f"{part}/small"


def _share(
    infos: Mapping[int, RankInfo],
    wanted: Sequence[tuple[str, int]],
    holders: Mapping[str, Sequence[int]],
    blamed: Collection[int],
    avoid: Mapping[int, int],
) -> tuple[Transfer, ...]:
    """A source for each (shard, target), never empty-handed; the work is spread over all that are equally good."""
    load = {rank: 0 for found in holders.values() for rank in found}
    transfers = []
    for shard, target in wanted:
        host = infos[target].host
        source = min(
            holders[shard],
            key=lambda rank: (rank in blamed, avoid.get(rank, 0), load[rank], infos[rank].host == host, rank),
        )
        load[source] += 1
        transfers.append(Transfer(shard, source, target))
    return tuple(transfers)


def contradiction(agreement: Agreement) -> str:
    """Which reports cannot be true beside the others; "" when all can."""
    if not agreement.impossible:
        return ""
    told = some(f"rank {rank}: {agreement.offers[rank].reason}" for rank in agreement.impossible)
    return f"impossible reports ({told})"


def loadable(reports: Collection[RankReport], most: int) -> tuple[int, ...]:
    """Steps up to `most` whose checkpoint every one of these ranks could load online, ascending. Not those at which
    holders of the same shard had different hashes of it: what was saved then is the state of one of them."""
    lists = [set(report.checkpoints) for report in reports]
    if not lists:
        return ()
    apart = apart_when_saved(reports)
    return tuple(sorted(step for step in set.intersection(*lists) if step <= most and step not in apart))


def apart_when_saved(reports: Collection[RankReport]) -> set[int]:
    """Steps of checkpoints at which holders of the same shard had different hashes of it."""
    seen: dict[str, str] = {}
    apart = set()
    for report in reports:
        for key, digest in report.saved.items():
            if seen.setdefault(key, digest) != digest:
                apart.add(int(key.partition("|")[0]))
    return apart


def unspoiled(reports: Iterable[RankReport], last: int) -> int:
    """The newest step whose checkpoint cannot hold wrong numbers, when the last update spread some.

    Of S such a checkpoint can. It counts which update was the last where the fault was seen: a rank that has not begun
    the update of S yet, though others passed its commit, may have spread wrong numbers with the one before.
    """
    begun = (report.step - (report.update is Update.UNTOUCHED) for report in reports)
    return min((last, *begun)) - 1


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
            wanted = {shard for rank in members for shard in infos[rank].needs or infos[rank].holds}
            self.shards_of[part] = sorted(wanted)

    def sources_of(self, shard: str) -> list[int]:
        return [rank for rank in self._holders.get(shard, ()) if rank in self._able]

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

    def _as_writer(self, rank: int) -> tuple[bool, int, bool, bool, int, int, int]:
        info = self._infos[rank]
        second_to_none = info.part in self._apart and info.dp_rank != 0  # see rng_conflict
        # Where each rank holds all of its part, one that is done spares the others an update that they may fail in.
        alone = set(self.shards_of[info.part]) <= set(info.holds)
        unfinished = alone and self._agreement.offers[rank].means is Means.FINISH_UPDATE
        return (second_to_none, *self._doubt(rank), unfinished, -len(info.holds), info.dp_rank, rank)

    def explain_shards(self, missing: list[str]) -> str:
        told = (
            f"{shard} ({self._became(self._holders.get(shard, [])) or 'no rank that holds it has registered'})"
            for shard in missing
        )
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
