"""Which step S is, and what each rank can do for it: tables, and properties over all cuts through a step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tft.engine.agreement import Means, agree, completed, offer_of, revise
from mindspeed_tft.engine.types import Commit, RankReport, Update

N, E, P = Commit.NONE, Commit.ENTERED, Commit.PASSED
U, X, D = Update.UNTOUCHED, Update.DIRTY, Update.DONE
AS_IS, FINISH, REWIND, NONE = Means.AS_IS, Means.FINISH_UPDATE, Means.REWIND, Means.NONE
State = tuple[int, Commit, Update]


def reports(*states: State, untrusted: tuple[int, ...] = ()) -> dict[int, RankReport]:
    return {rank: RankReport(rank, *state, trusted=rank not in untrusted) for rank, state in enumerate(states)}


TABLE: list[tuple[str, list[State], int, list[Means]]] = [
    ("all in the forward pass", [(7, N, U), (7, N, U)], 6, [REWIND, REWIND]),
    ("some had entered", [(7, E, U), (7, N, U)], 6, [REWIND, REWIND]),
    ("all had entered, none passed", [(7, E, U), (7, E, U)], 6, [REWIND, REWIND]),
    ("one passed", [(7, E, U), (7, P, U)], 7, [FINISH, FINISH]),
    ("one failed inside its update", [(7, P, X), (7, E, U), (7, P, D)], 7, [NONE, FINISH, AS_IS]),
    ("all in the gather", [(7, P, D), (7, P, D)], 7, [AS_IS, AS_IS]),
    ("one in the next step", [(8, N, U), (7, P, D)], 7, [REWIND, AS_IS]),
    ("one in the next step, one still in its update", [(8, N, U), (7, E, U), (7, P, X)], 7, [REWIND, FINISH, NONE]),
    ("one entered the next commit", [(8, E, U), (7, P, D)], 7, [REWIND, AS_IS]),
    ("the next commit passed", [(8, P, U), (8, E, U)], 8, [FINISH, FINISH]),
    ("a rank behind a passed commit", [(7, P, D), (7, P, D), (6, P, D)], 7, [AS_IS, AS_IS, NONE]),
    ("a rank two steps behind", [(8, N, U), (8, N, U), (6, N, U)], 7, [REWIND, REWIND, NONE]),
    ("never entered what another passed", [(7, P, D), (7, N, U)], 7, [AS_IS, NONE]),
    ("updated without a commit", [(7, N, D), (7, E, U)], 6, [NONE, REWIND]),
    ("dirty without a commit", [(7, E, X), (7, E, U)], 6, [NONE, REWIND]),
]


@pytest.mark.parametrize(("states", "step", "means"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_table(states: list[State], step: int, means: list[Means]) -> None:
    found = agree(reports(*states), range(len(states)))
    assert found.step == step
    assert [found.offers[rank].means for rank in range(len(states))] == means
    assert found.provable
    assert found.reason
    assert all(offer.reason for offer in found.offers.values())


@pytest.mark.parametrize(
    "name", [row[0] for row in TABLE if row[0].startswith(("a rank", "never", "updated", "dirty"))]
)
def test_impossible_reports_are_named(name: str) -> None:
    states = next(row[1] for row in TABLE if row[0] == name)
    found = agree(reports(*states), range(len(states)))
    assert len(found.impossible) == 1
    assert found.offers[found.impossible[0]].means is NONE


def test_a_self_contradicting_report_is_no_evidence() -> None:
    found = agree(reports((9, N, D), (7, E, U), (7, E, U)), range(3))
    assert found.step == 6
    assert found.impossible == (0,)


def test_untrusted_reports_are_neither_evidence_nor_sources() -> None:
    found = agree(reports((7, P, D), (7, E, U), untrusted=(0,)), range(2))
    assert found.step == 6
    assert found.offers[0].means is NONE
    assert "damaged" in found.offers[0].reason
    assert not found.impossible  # a damaged counter accuses nobody


def test_silent_ranks_offer_nothing_and_strangers_are_not_counted() -> None:
    found = agree(reports((7, E, U), (9, P, D)), [0, 5])
    assert found.step == 6
    assert found.offers.keys() == {0, 5}
    assert found.offers[5].reason == "no report"


def test_without_a_trusted_report_nothing_is_proved() -> None:
    for given_reports in ({}, reports((7, P, D), untrusted=(0,)), reports((7, N, D))):
        found = agree(given_reports, [0, 1])
        assert not found.provable
        assert found.step == -1
        assert not any(found.offers.values())


def test_one_wild_counter_does_not_overrule_the_others() -> None:
    found = agree(reports((1000, N, U), (10, E, U), (10, E, U), (10, N, U)), range(4))
    assert not found.provable
    assert "rank 0" in found.reason and "contradict" in found.reason
    assert not any(found.offers.values())


@pytest.mark.parametrize("state", [(1, N, U), (1, E, U), (0, N, U), (0, P, D)])
def test_before_the_first_step_is_complete_there_is_nothing_to_offer(state: State) -> None:
    found = agree(reports(state, (1, N, U)), range(2))
    assert found.step == 0
    assert "completed a step" in found.reason
    assert not any(found.offers.values())


def test_revise_keeps_s_and_renews_the_offers() -> None:
    said = reports((7, P, D), (7, E, U), (7, E, U))
    first = agree(said, range(3))
    said[1] = RankReport(1, 7, P, D)
    said[2] = RankReport(2, 7, P, X)
    second = revise(first, said, range(3))
    assert (first.step, second.step) == (7, 7)
    assert [second.offers[rank].means for rank in range(3)] == [AS_IS, AS_IS, NONE]


def test_a_late_report_from_beyond_s_is_no_source() -> None:
    """It says untouched, but after a passed commit some of its optimizers may be updated."""
    assert offer_of(RankReport(0, 8, P, U), 7).means is NONE
    assert offer_of(RankReport(0, 9, N, U), 7).means is NONE


# ------------------------------------------------------------------------------------------------ properties

# Where a rank can be while no rank has passed a commit later than k: (state, has it passed k).
AROUND: list[State] = [(5, E, U), (5, P, U), (5, P, X), (5, P, D), (6, N, U), (6, E, U)]
BEFORE: list[State] = [(4, E, U), (4, P, U), (4, P, X), (4, P, D), (5, N, U), (5, E, U)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_possible_cut(size: int) -> None:
    """All worlds in which the commit of step 5 was passed by some and by others not, and all just before it."""
    for cut in itertools.product(AROUND, repeat=size):
        found = agree(reports(*cut), range(size))
        proof = any(state[1] is P or state[0] == 6 for state in cut)
        assert found.step == (5 if proof else 4)
        assert not found.impossible
        for rank, state in enumerate(cut):
            assert bool(found.offers[rank]) is (state[2] is not X)
    for cut in itertools.product(BEFORE, repeat=size):
        found = agree(reports(*cut), range(size))
        best = max(completed(report) for report in reports(*cut).values())
        assert found.step == best
        assert not found.impossible


states = st.tuples(st.integers(0, 5), st.sampled_from(Commit), st.sampled_from(Update))
worlds = st.dictionaries(st.integers(0, 9), st.tuples(states, st.booleans()), max_size=8)


@given(worlds, st.sets(st.integers(0, 9)))
def test_whatever_is_said(world: dict[int, tuple[State, bool]], registered: set[int]) -> None:
    said = {rank: RankReport(rank, *state, trusted=trusted) for rank, (state, trusted) in world.items()}
    found = agree(said, registered)
    assert found.offers.keys() == registered
    assert found == agree(said, registered)
    for rank, offer in found.offers.items():
        if not offer:
            continue
        report = said[rank]
        assert found.step > 0 and report.trusted and report.update is not X
        held = report.step if report.update is D else report.step - 1  # the state of this step is in its tensors
        assert held == found.step or (offer.means is FINISH and held == found.step - 1 and report.commit is not N)
    sound = [
        r
        for rank, r in said.items()
        if rank in registered and r.trusted and not (r.commit is not P and r.update is not U)
    ]
    if found.provable:
        assert found.step == max(completed(report) for report in sound)


def test_the_start_can_be_offered_to_go_back_to() -> None:
    first = reports((1, N, U), (1, E, U), (0, P, D), (1, N, U), untrusted=(3,))
    found = agree(first, range(5), start=True)
    assert found.step == 0 and found.provable
    assert [found.offers[rank].means for rank in range(5)] == [REWIND, REWIND, AS_IS, NONE, NONE]
    assert not any(agree(first, range(5)).offers.values())  # there is nothing to save


def test_no_start_is_offered_where_nothing_is_proved() -> None:
    found = agree(reports((1, N, U), untrusted=(0,)), range(1), start=True)
    assert not found.provable and not found.offers[0]
