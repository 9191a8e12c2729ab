"""Random states of their own: who knows whose, without a replica and over real process groups."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from mindspeed_tft.patches import megatron_random, megatron_releases
from mindspeed_tft.patches.megatron_random import Partners
from mindspeed_tft.recovery import files

PROGRAM = Path(__file__).parent / "programs" / "partners_rank.py"
WORLD = 4
PATIENCE = 120.0  # seconds; nothing takes a tenth of it on an idle machine


def _states() -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }


class Mpu:
    """Of a job without replicas: two data-parallel ranks, and this one is the second."""

    def get_data_parallel_rank(self) -> int:
        return 1

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_inter_distributed_optimizer_instance_group(self, check_initialized: bool = True) -> None:
        return None


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Partners:
    monkeypatch.setattr(megatron_random, "_mpu", Mpu)
    monkeypatch.setattr(megatron_releases, "_mpu", Mpu)
    return Partners(_states, sharded=True)


def test_states_are_given_before_the_first_step_and_with_each_commit(alone: Partners) -> None:
    alone.step_begins(1, evaluated=False)
    at_start = random.getstate()
    random.random()
    alone.give(1)
    assert alone.mine(0)["random_rng_state"] == at_start
    assert alone.mine(1)["random_rng_state"] == random.getstate() != at_start


def test_after_an_evaluation_they_are_given_again(alone: Partners) -> None:
    alone.give(4)
    random.random()  # the evaluation
    alone.step_begins(5, evaluated=True)
    assert alone.mine(4)["random_rng_state"] == random.getstate()


def test_what_was_drawn_unseen_makes_them_unknown(alone: Partners, caplog: pytest.LogCaptureFixture) -> None:
    alone.give(4)
    alone.step_begins(5, evaluated=False)
    assert alone.mine(4)["random_rng_state"] == random.getstate()  # the control: nothing was drawn
    np.random.rand()
    alone.step_begins(5, evaluated=False)
    with pytest.raises(files.DumpError, match="no partner of data-parallel rank 1 knows its random states of step 4"):
        alone.mine(4)
    assert "--data-parallel-random-init" in caplog.text


def test_a_checkpoint_needs_the_states_of_all(alone: Partners, monkeypatch: pytest.MonkeyPatch) -> None:
    alone.give(4)
    mine = _states()
    with pytest.raises(files.DumpError, match="data-parallel rank 0 at the end of step 4 are known to nobody"):
        alone.of_all(4, mine, [])
    random.random()
    monkeypatch.setattr(Mpu, "get_data_parallel_rank", lambda _self: 0)
    other = Partners(_states, sharded=True)
    other.give(4)
    theirs = _states()
    monkeypatch.setattr(Mpu, "get_data_parallel_rank", lambda _self: 1)
    found = alone.of_all(4, mine, [{"0/0/0/param": torch.ones(1), **other.to_tensors()}])
    expected = [theirs["random_rng_state"], mine["random_rng_state"]]
    assert [states["random_rng_state"] for states in found] == expected
    with pytest.raises(files.DumpError, match="two ranks know different random states of data-parallel rank 1"):
        alone.of_all(4, theirs, [other.to_tensors()])


# ------------------------------------------------------------------------------------------- real process groups


def _start(rank: int, port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(rank), str(WORLD), str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture
def ranks() -> Iterator[list[dict[str, Any]]]:
    """What the four ranks of partners_rank.py say, of which rank 2 forgets everything and is told again."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [_start(rank, store.port) for rank in range(WORLD)]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * WORLD, said
    yield [json.loads(text.strip().splitlines()[-1]) for text in said]


def test_holders_of_a_shard_know_each_others_states(ranks: list[dict[str, Any]]) -> None:
    """Four data-parallel ranks, two replicas: 0 and 2 hold one shard, 1 and 3 the other."""
    drawn = [found["next"] for found in ranks]
    assert len(set(drawn)) == WORLD
    for rank, found in enumerate(ranks):
        partner = (rank + 2) % WORLD
        assert found["knows"] == {str(rank): drawn[rank], str(partner): drawn[partner]}
    assert ranks[2]["told"] == ranks[2]["knows"]
    assert ranks[0]["whole"] == drawn
