"""Random states of other ranks: the form on the way, and the book of who is known to have had which."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tft import encode
from mindspeed_tft.recovery import random_states
from mindspeed_tft.recovery.random_states import Book


def _now() -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }


def _put(states: dict[str, Any]) -> None:
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])


def _draw() -> tuple[float, ...]:
    """Also what comes in pairs, of which a generator keeps the second one."""
    found = (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.randn(3).sum().item())
    return tuple(map(float, found))


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_states_come_back_whole_and_always_take_the_same_room(seed: int, draws: int) -> None:
    _seed(1)
    room = len(random_states.to_bytes(_now()))
    _seed(seed)
    for _ in range(draws):
        _draw()
    data = random_states.to_bytes(_now())
    assert len(data) == room
    expected = [_draw() for _ in range(3)]
    states = random_states.from_bytes(data)
    _put(states)
    assert [_draw() for _ in range(3)] == expected
    # Also the types are those of the generators: a checkpoint that holds them equals one that was never on the way.
    assert type(states["np_rng_state"]) is tuple
    assert [type(value) for value in states["np_rng_state"]] == [type(value) for value in np.random.get_state()]
    assert all(type(word) is int for word in states["random_rng_state"][1])


def test_control_without_the_kept_gaussian_number_the_next_draws_differ() -> None:
    _seed(3)
    _draw()
    states = random_states.from_bytes(random_states.to_bytes(_now()))
    expected = _draw()
    version, words, gauss = states["random_rng_state"]
    assert gauss is not None
    _put({**states, "random_rng_state": (version, words, None)})
    assert _draw() != expected


@pytest.mark.parametrize("data", [b"", b"[]", encode.dumps({"random_rng_state": 1}), encode.dumps(7)])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(encode.EncodeError):
        random_states.from_bytes(data)


def test_another_generator_of_numpy_is_refused() -> None:
    """Its state comes as a dict."""
    with pytest.raises(encode.EncodeError, match="MT19937"):
        random_states.to_bytes({**_now(), "np_rng_state": np.random.get_state(legacy=False)})


def test_a_book_knows_two_steps() -> None:
    """After a fault the step that was being committed may be completed, or not."""
    book = Book()
    for step in (4, 5, 6):
        book.keep(step, {0: b"%d" % step, 2: b"-"})
    assert [book.at(step) for step in (4, 5, 6)] == [{}, {0: b"5", 2: b"-"}, {0: b"6", 2: b"-"}]
    book.keep(6, {0: b"again"})  # step 6 was not completed, and came once more
    assert (book.at(5), book.at(6)) == ({0: b"5", 2: b"-"}, {0: b"again"})
    book.keep(3, {0: b"3"})  # back to a checkpoint
    assert [book.at(step) for step in (2, 3, 5, 6)] == [{}, {0: b"3"}, {}, {}]
    book.forget(3)
    assert book.at(3) == {}


def test_a_newcomer_knows_what_its_partner_knows() -> None:
    book, newcomer = Book(), Book()
    book.keep(5, {1: b"mine", 3: b"yours"})
    book.keep(6, {1: b"mine too", 3: b"yours too"})
    newcomer.keep(0, {3: b"of its start-up"})
    newcomer.take(book.to_bytes())
    assert (newcomer.at(5), newcomer.at(6), newcomer.at(0)) == (book.at(5), book.at(6), {})
    with pytest.raises(encode.EncodeError):
        newcomer.take(encode.dumps([1, 2]))


def test_a_book_lies_beside_a_shard() -> None:
    book = Book()
    book.keep(11, {1: b"a", 3: b"b"})
    book.keep(12, {1: b"c", 13: b"\x00\xff"})
    tensors = {"0/0/0/param": torch.ones(2), **book.to_tensors()}
    assert random_states.in_tensors(tensors, 11) == {1: b"a", 3: b"b"}
    assert random_states.in_tensors(tensors, 12) == {1: b"c", 13: b"\x00\xff"}
    assert random_states.in_tensors(tensors, 1) == {}


def test_accounts_of_several_ranks_must_not_differ() -> None:
    assert random_states.merge({0: b"a", 1: b"b"}, {1: b"b", 2: b"c"}, {}) == {0: b"a", 1: b"b", 2: b"c"}
    with pytest.raises(ValueError, match="data-parallel rank 1"):
        random_states.merge({0: b"a", 1: b"b"}, {1: b"x"})
