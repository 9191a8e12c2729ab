"""Which step is the last completed one (S), and how each rank can show the state of S. Pure functions of the reports.

The commit of a step k is a collective over the whole world, entered only with final gradients and left before any
optimizer tensor is touched. So one trusted rank that passed it proves that every rank had final gradients for k: S is
k, and whoever has not updated yet can still do so alone. Without such a rank nobody touched its optimizer: S is k - 1.

This module does not choose who writes what (`planning`), and it knows nothing of time or of orders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from mindspeed_tft.engine.types import Commit, RankReport, Update
from mindspeed_tft.engine.words import ranks as _ranks
from mindspeed_tft.engine.words import some

Offered = tuple[RankReport, "Offer"]


class Means(str, Enum):
    """How a rank can show the state of S."""

    AS_IS = "as_is"  # its tensors and its small states are those of S
    FINISH_UPDATE = "finish_update"  # it has the gradients of S; the local update is still to do
    REWIND = "rewind"  # its tensors are those of S, its small states come from the snapshot at the start of S + 1
    NONE = "none"


@dataclass(frozen=True)
class Offer:
    """What one rank can offer, and why."""

    means: Means
    reason: str
    impossible: bool = False  # no order of events leads to this report beside the others: somebody is wrong
    corrupt: bool = False  # the hash of a shard says that its memory is not what it was, or cannot be believed

    def __bool__(self) -> bool:
        return self.means is not Means.NONE


@dataclass(frozen=True)
class Agreement:
    """The step to save and what each registered rank can do for it. `step` is -1 when none can be proved."""

    step: int
    reason: str
    offers: Mapping[int, Offer] = field(default_factory=dict)

    @property
    def provable(self) -> bool:
        return self.step >= 0

    @property
    def impossible(self) -> tuple[int, ...]:
        """Ranks whose reports contradict the others, or themselves."""
        return tuple(sorted(rank for rank, offer in self.offers.items() if offer.impossible))

    @property
    def corrupt(self) -> tuple[int, ...]:
        """Ranks whose shards are not what they were, or cannot be proved to be."""
        return tuple(sorted(rank for rank, offer in self.offers.items() if offer.corrupt))


def agree(
    reports: Mapping[int, RankReport],
    registered: Collection[int],
    start: bool = False,
    departed: Collection[RankReport] = (),
) -> Agreement:
    """S and the offers of all registered ranks.

    Where no step is complete yet, S is 0. There is nothing to save then; with `start`, ranks offer the tensors with
    which training began, from which the first step can be computed again.

    Every trusted report counts as evidence, also that of a rank which died after it spoke. What contradicts S is named
    and never a source; when the contradicting reports outnumber the others, no step is called proved.

    Args:
        departed: what processes said of which newcomers have taken the place: evidence, but no offer.
    """
    evidence = {
        rank: reports[rank]
        for rank in sorted(registered)
        if rank in reports and reports[rank].trusted and not contradicts_itself(reports[rank])
    }
    if not evidence:
        reason = f"no trusted report among {len(registered)} ranks ({sum(r in reports for r in registered)} reported)"
        return Agreement(-1, reason, _offers(reports, registered, -1, start))
    gone = [report for report in departed if report.trusted and not contradicts_itself(report)]
    witness = max((*evidence.values(), *gone), key=lambda report: (completed(report), -report.rank))
    step = completed(witness)
    offers = _offers(reports, registered, step, start, gone)
    if step == 0 and not start:
        return Agreement(0, f"none of {len(evidence)} ranks completed a step", offers)
    against = [rank for rank in evidence if offers[rank].impossible]
    if 2 * len(against) > len(evidence):
        reason = (
            f"rank {witness.rank} proves step {step}, but {_ranks(against)} contradict it "
            f"({offers[against[0]].reason}): no step is provable"
        )
        return Agreement(-1, reason, {rank: _withdrawn(offer) for rank, offer in offers.items()})
    return Agreement(step, _why(witness, step, len(evidence)), offers)


def revise(
    agreement: Agreement,
    reports: Mapping[int, RankReport],
    registered: Collection[int],
    start: bool = False,
    departed: Collection[RankReport] = (),
) -> Agreement:
    """The same S with the offers of today: ranks have finished their update, failed in it, or reported late. `start`
    and `departed` as for `agree`."""
    gone = [report for report in departed if report.trusted and not contradicts_itself(report)]
    return replace(agreement, offers=_offers(reports, registered, agreement.step, start, gone))


def digests_of(agreement: Agreement, reports: Mapping[int, RankReport]) -> dict[str, str]:
    """The hashes of the shards at S, by their ids, as far as some rank that can show S knows them. All that know one
    agree on it, or they could not."""
    return {
        shard: digest
        for rank, offer in sorted(agreement.offers.items())
        if offer.means in (Means.AS_IS, Means.REWIND)
        for shard, digest in reports[rank].digests.items()
    }


def completed(report: RankReport) -> int:
    """The last step that this report proves complete for the whole world."""
    return report.step if report.commit is Commit.PASSED else max(0, report.step - 1)


def is_bare(report: RankReport) -> bool:
    """A newcomer's report: it has computed and loaded nothing."""
    return not report.trusted and report.step == 0 and report.commit is Commit.NONE


def contradicts_itself(report: RankReport) -> bool:
    """No optimizer tensor is touched before the commit is passed."""
    return report.commit is not Commit.PASSED and report.update is not Update.UNTOUCHED


def offer_of(report: RankReport, step: int) -> Offer:
    """What a rank with this report can do for `step`. What is not plainly possible is no offer."""
    if is_bare(report):
        return Offer(Means.NONE, "its state is gone with its process")
    if not report.trusted:
        return Offer(Means.NONE, "its memory may be damaged" + (f" ({report.fault})" if report.fault else ""))
    where = f"step {report.step}, commit {report.commit.value}, update {report.update.value}"
    if contradicts_itself(report):
        return Offer(Means.NONE, f"contradicts itself: {where}", impossible=True)
    if changed := changed_shard(report):
        return Offer(Means.NONE, changed, corrupt=True)
    if report.step == step:
        return _offer_at(report, where)
    if report.step == step + 1 and report.commit is not Commit.PASSED:
        return Offer(Means.REWIND, f"{where}: its tensors are those of step {step}")
    if report.step < step:
        return Offer(Means.NONE, f"cannot be behind a passed commit of step {step}: {where}", impossible=True)
    return Offer(Means.NONE, f"is past step {step}: {where}", impossible=True)


def _offer_at(report: RankReport, where: str) -> Offer:
    if report.commit is Commit.NONE:
        return Offer(Means.NONE, f"never entered the commit that another rank passed: {where}", impossible=True)
    if report.update is Update.DONE:
        return Offer(Means.AS_IS, where)
    if report.update is Update.UNTOUCHED:
        return Offer(Means.FINISH_UPDATE, f"{where}: its gradients are final")
    return Offer(Means.NONE, f"its update of step {report.step} began and did not end")


def changed_shard(report: RankReport) -> str:
    """Which shard of this rank has another hash than it had after its last change; "" when none has."""
    for shard, stamp in sorted(report.stamps.items()):
        if report.digests.get(shard, stamp) != stamp:
            step = report.step if report.update is Update.DONE else report.step - 1
            return (
                f"its shard {shard} does not have the hash that it had after the update of step {step} "
                f"({_short(report.digests[shard])} instead of {_short(stamp)}): a bit of its memory flipped"
            )
    return ""


def _compared(offers: dict[int, Offer], reports: Mapping[int, RankReport], gone: Collection[Offered]) -> None:
    """Holders of a shard that are at the same step must have the same hash of it. Takes the offers of those back that
    have another one than most; of all of them, where there is no majority: nothing shows which is right.

    Args:
        gone: what processes offered that were replaced. They have a voice, and no place in `offers`.
    """
    here = [(rank, reports[rank], offer) for rank, offer in offers.items() if offer]
    said: dict[tuple[str, bool], dict[str, list[int]]] = {}  # (shard, before its update) -> hash -> who says so
    for rank, report, offer in (*here, *((report.rank, report, offer) for report, offer in gone)):
        for shard, digest in report.digests.items():
            before = offer.means is Means.FINISH_UPDATE
            said.setdefault((shard, before), {}).setdefault(digest, []).append(rank)
    for rank, report, offer in here:
        for shard, digest in sorted(report.digests.items()):
            before = offer.means is Means.FINISH_UPDATE
            if why := _outvoted(digest, said[shard, before]):
                what = f"shard {shard}{' before its update' if before else ''}"
                offers[rank] = Offer(Means.NONE, f"{why} of {what}", corrupt=True)


def _outvoted(digest: str, said: Mapping[str, list[int]]) -> str:
    """Why a shard with this hash is not believed, beside what is said of it; "" when it is."""
    most = max(said, key=lambda other: (len(said[other]), other))
    majority = 2 * len(said[most]) > sum(map(len, said.values()))
    if majority and digest == most:
        return ""
    told = some(f"{_short(other)}: {_ranks(who)}" for other, who in sorted(said.items()))
    if majority:
        return f"it has another hash than the majority ({told})"
    return f"nothing shows whose hash is right ({told})"


def _short(digest: str) -> str:
    head, _, updates = digest.partition(":")
    return head[:12] + (f" after {updates} updates" if updates else "")


def _offers(
    reports: Mapping[int, RankReport],
    registered: Collection[int],
    step: int,
    start: bool = False,
    gone: Collection[RankReport] = (),
) -> dict[int, Offer]:
    silent = Offer(Means.NONE, "no report")
    if step < 0 or (step == 0 and not start):  # nothing proved, or nothing completed: there is no state to offer
        nothing = Offer(Means.NONE, "no completed step is proved")
        return {rank: nothing if rank in reports else silent for rank in registered}
    offers = {rank: offer_of(reports[rank], step) if rank in reports else silent for rank in registered}
    left = [(report, offer) for report in gone if (offer := offer_of(report, step))]
    _compared(offers, reports, left)
    return offers


def _withdrawn(offer: Offer) -> Offer:
    return Offer(Means.NONE, "no step is provable") if offer else offer


def _why(witness: RankReport, step: int, count: int) -> str:
    if witness.commit is Commit.PASSED:
        return f"rank {witness.rank} passed the commit of step {step}: every rank had its final gradients"
    return f"none of {count} ranks passed the commit of step {step + 1}: no optimizer was touched after step {step}"
