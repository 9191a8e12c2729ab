"""Replica arithmetic: who holds what, and what it costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tft.replica.holders import (
    Precision,
    bytes_per_parameter,
    formula,
    holders,
    shard_count,
    shard_of,
)

sizes = st.integers(2, 8).flatmap(lambda n: st.tuples(st.integers(1, 64).map(lambda k: n * k), st.just(n)))


@pytest.mark.parametrize(
    ("d", "n", "expected"),
    [
        (2, 2, [[0, 1]]),
        (2, 1, [[0], [1]]),
        (4, 2, [[0, 2], [1, 3]]),
        (6, 2, [[0, 3], [1, 4], [2, 5]]),
        (6, 3, [[0, 2, 4], [1, 3, 5]]),
        (4, 4, [[0, 1, 2, 3]]),
    ],
)
def test_holders(d: int, n: int, expected: list[list[int]]) -> None:
    assert holders(d, n) == expected


@given(sizes)
def test_every_position_holds_one_shard_and_every_shard_has_n_holders(size: tuple[int, int]) -> None:
    d, n = size
    found = holders(d, n)
    assert len(found) == shard_count(d, n) == d // n
    assert sorted(position for of_shard in found for position in of_shard) == list(range(d))
    assert all(len(of_shard) == n for of_shard in found)
    assert all(shard_of(position, d, n) == shard for shard, of_shard in enumerate(found) for position in of_shard)


@pytest.mark.parametrize(
    ("d", "n", "words"),
    [
        (4, 0, "a shard needs a holder"),
        (4, -2, "a shard needs a holder"),
        (1, 2, "more replicas than the 1 data-parallel"),
        (2, 3, "more replicas"),
        (6, 4, "does not divide the data-parallel size 6; possible values are [2, 3, 6]"),
        (7, 2, "possible values are [7]"),
    ],
)
def test_what_cannot_work_is_refused_with_the_flag_and_a_remedy(d: int, n: int, words: str) -> None:
    for ask in (lambda: holders(d, n), lambda: shard_of(0, d, n), lambda: bytes_per_parameter(Precision.FP32, n, d)):
        with pytest.raises(ValueError, match=r"--optimizer-replica-num") as refused:
            ask()
        assert words in str(refused.value)


@pytest.mark.parametrize("position", [-1, 4])
def test_a_position_outside_the_list_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        shard_of(position, 4, 2)


@pytest.mark.parametrize(
    ("precision", "n", "d", "expected"),
    [
        (Precision.GRADS_16, 2, 8, 4 + 16 * 2 / 8),
        (Precision.GRADS_32, 2, 8, 6 + 12 * 2 / 8),
        (Precision.FP32, 2, 8, 8 + 8 * 2 / 8),
        (Precision.GRADS_16, 2, 2, 20),  # every rank holds everything: no sharding
        (Precision.GRADS_32, 2, 2, 18),
        (Precision.FP32, 2, 2, 16),
    ],
)
def test_bytes_per_parameter(precision: Precision, n: int, d: int, expected: float) -> None:
    assert bytes_per_parameter(precision, n, d) == expected


@given(sizes, st.sampled_from(Precision))
def test_a_replica_more_costs_the_sharded_bytes_once_more(size: tuple[int, int], precision: Precision) -> None:
    d, n = size
    everywhere, sharded = (int(term.rstrip("N/d")) for term in formula(precision).split(" + "))
    assert bytes_per_parameter(precision, n, d) == pytest.approx(everywhere + sharded * n / d)
    assert bytes_per_parameter(precision, d, d) == everywhere + sharded
