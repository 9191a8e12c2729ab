"""The hash of a shard: no flipped bit passes, wherever it is, and all holders come to the same one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_tft.replica import digest as digest_module
from mindspeed_tft.replica.digest import FACTOR, GROUP, LANES, Reader, Shard, digest

FLIPS = 10_000


def shard(seed: int, *sizes: int, dtype: torch.dtype = torch.float32) -> Shard:
    generator = torch.Generator().manual_seed(seed)
    return Shard([torch.randn(size, generator=generator).to(dtype) for size in sizes])


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    words = tensor.view(-1).view(torch.uint8)
    words[byte] = int(words[byte]) ^ (1 << bit)


def missed(found: Callable[[Shard], object], flips: int, seed: int = 0) -> int:
    """How many of so many single flipped bits, one after the other, `found` does not notice."""
    chance = random.Random(seed)
    count = 0
    for number in range(flips // 100):
        sizes = [chance.randrange(1, 400) for _ in range(chance.randrange(1, 5))]
        dtype = chance.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.uint8])
        broken = shard(number, *sizes, dtype=dtype)
        whole = found(broken)
        for _ in range(100):
            tensor = chance.choice(broken.tensors)
            byte, bit = chance.randrange(tensor.numel() * tensor.element_size()), chance.randrange(8)
            flip(tensor, byte, bit)
            count += found(broken) == whole
            flip(tensor, byte, bit)
        assert found(broken) == whole
    return count


def test_ten_thousand_flipped_bits_are_all_noticed() -> None:
    assert missed(digest, FLIPS) == 0


def test_a_hash_that_looks_at_half_of_the_words_is_found_out() -> None:
    """The control of the test above."""
    misses = missed(lambda found: [tensor.view(torch.uint8)[::2].sum().item() for tensor in found.tensors], 1000)
    assert 300 < misses < 700


def test_a_flip_in_a_row_behind_many_others_is_noticed() -> None:
    """Weights of words are products of an odd factor: none of them, over all rows, takes a bit away."""
    found = shard(1, 3 * LANES + 17, 5, LANES, 2)
    before, chance = digest(found), random.Random(2)
    for _ in range(200):
        tensor = chance.choice(found.tensors)
        byte, bit = chance.randrange(4 * tensor.numel()), chance.randrange(8)
        flip(tensor, byte, bit)
        assert digest(found) != before
        flip(tensor, byte, bit)
    assert digest(found) == before


def test_the_factor_keeps_all_rows_apart() -> None:
    weights, value = set(), 1
    for _ in range(100_000):
        assert value % 2 == 1
        weights.add(value)
        value = value * FACTOR % 2**32
    assert len(weights) == 100_000


def test_the_place_of_a_word_counts() -> None:
    found = shard(3, 2 * LANES)
    before = digest(found)
    (words,) = found.tensors
    for one, other in ((0, 1), (5, LANES + 5), (LANES - 1, 2 * LANES - 1)):
        swapped = words.clone()
        swapped[one], swapped[other] = words[other], words[one]
        assert digest(Shard([swapped])) != before


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 90_000), max_size=6), st.integers(0, 2**32))
def test_words_count_and_not_how_they_are_cut_into_tensors(sizes: list[int], seed: int) -> None:
    """Copies of a shard lie otherwise than the shard: in one buffer, at any offset."""
    found = shard(seed, *sizes)
    buffer = torch.cat([torch.zeros(3), *found.tensors])
    assert digest(Shard([buffer[3:]])) == digest(found)


@pytest.mark.parametrize("sizes", [(7,), (LANES,), (LANES * GROUP,), (LANES * (GROUP + 3) + 11, 5, LANES)])
def test_a_device_that_takes_many_rows_at_once_comes_to_the_same_hash(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    found = shard(4, *sizes)
    at_once = Reader(found)
    at_once._group = GROUP
    at_once._rows = digest_module._cut([digest_module._words(tensor) for tensor in found.tensors], LANES * GROUP)
    assert len(at_once._rows) < 4
    assert at_once.digest() == digest(found)


def test_lengths_and_counts_of_updates_belong_to_it() -> None:
    nothing, zero = Shard([]), Shard([torch.zeros(1)])
    assert len({digest(nothing), digest(zero), digest(Shard([torch.zeros(2)]))}) == 3
    ones = torch.ones(4)
    counted = digest(Shard([ones], lambda: [torch.tensor(7.0), 7, torch.tensor(7.0)]))
    assert counted == digest(Shard([ones])) + "7"
    assert digest(Shard([ones], lambda: [7, torch.tensor(6.0)])) == digest(Shard([ones])) + "6+7"
    assert digest(Shard([ones], lambda: [1_234_567])).endswith(":1234567")


def test_updates_are_counted_when_the_hash_is_taken() -> None:
    group = {"step": 1}
    reader = Reader(Shard([torch.ones(4)], lambda: [group["step"]]))
    assert str(reader.digest()).endswith(":1")
    group["step"] = 2
    assert str(reader.digest()).endswith(":2")


def test_what_is_not_wanted_to_the_end_is_no_hash() -> None:
    found = shard(5, 4 * LANES)
    asked = iter([True, True, False, False, False, False])
    assert Reader(found).digest(lambda: next(asked)) is None


def test_a_tensor_that_cannot_be_read_in_place_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        Reader(Shard([torch.zeros(4, 4).t()]))


def test_a_reader_knows_when_another_tensor_took_the_place() -> None:
    found = shard(6, 10, 20)
    reader = Reader(found)
    assert reader.like(Reader(found))
    assert not reader.like(Reader(Shard([found.tensors[0], found.tensors[1].clone()])))
    assert not reader.like(Reader(Shard([found.tensors[0]])))
