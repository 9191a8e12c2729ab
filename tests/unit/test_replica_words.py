"""What is said at start-up about replicas."""

from __future__ import annotations

from mindspeed_tft.replica import words
from mindspeed_tft.replica.holders import Precision
from mindspeed_tft.replica.hosts import judge
from mindspeed_tft.replica.layout import Sizes


def test_holders_and_bytes() -> None:
    assert list(words.replicas({"dense": 4}, 2, Precision.GRADS_16)) == [
        "N = 2 replicas over 4 data-parallel ranks: shard 0 on positions [0, 2]; shard 1 on positions [1, 3]",
        "memory: 4 + 16N/d = 12 bytes a parameter (16-bit parameters and gradients); without replicas 8",
    ]


def test_experts_have_a_map_of_their_own() -> None:
    said = list(words.replicas({"dense": 4, "expert": 2}, 2, Precision.GRADS_32))
    assert said[2:] == [
        "N = 2 replicas of experts over 2 data-parallel ranks: shard 0 on positions [0, 1]",
        "memory of experts: 6 + 12N/d = 18 bytes a parameter (16-bit parameters, fp32 gradients); without replicas 12",
    ]


def test_one_holder() -> None:
    assert list(words.replicas({"dense": 4}, 1, Precision.FP32)) == [
        "no replicas (--distributed-optimizer-no-replica): a destroyed shard is read from the last periodic checkpoint,"
        " online",
        "memory: 8 + 8N/d = 10 bytes a parameter (fp32 parameters and gradients)",
    ]


def test_without_shards_all_hold_everything() -> None:
    assert list(words.replicas({"dense": 4}, None, Precision.FP32)) == [
        "N = 4 replicas over 4 data-parallel ranks: without --use-distributed-optimizer each holds everything",
        "memory: 8 + 8N/d = 16 bytes a parameter (fp32 parameters and gradients); without replicas 10",
    ]


def test_large_lists_are_a_rule_and_not_a_list() -> None:
    assert next(words.replicas({"dense": 1024}, 2, Precision.FP32)).endswith("positions i, i + d/N, i + 2d/N, ...")


def test_bytes_measured_stand_beside_the_formula_for_what_this_rank_has() -> None:
    """600 dense parameters at 4 + 16 * 2/8 bytes, 400 of experts at 4 + 16 * 2/2."""
    said = words.measured(12_900, {"dense": 600, "expert": 400}, {"dense": 8, "expert": 2}, 2, Precision.GRADS_16)
    assert said == (
        "memory measured on rank 0: 12900 bytes for 1000 parameters = 12.900 bytes a parameter (formula 12.8; buckets"
        " are padded)"
    )
    whole = words.measured(20_000, {"dense": 1000}, {"dense": 4}, None, Precision.GRADS_16)
    assert "(formula 20;" in whole


def test_hosts() -> None:
    assert words.hosts(judge(Sizes(4), 2, ["a", "a", "b", "b"])) == "hosts: no host holds all replicas of a shard"
    assert words.hosts(judge(Sizes(4), 2, ["a"] * 4)) == (
        "hosts: all 4 ranks run on one host (a), whose loss takes all holders of every shard along; to survive that,"
        " use two or more hosts"
    )
    said = words.hosts(judge(Sizes(4, pipeline=2), 2, ["a", "a", "b", "b"]))
    assert said.startswith(
        "*** hosts: with host a all holders of 1 shard would be lost (tp0-pp0/dense/0), and 1 more host"
    )
    assert "Remedy: add --use-tp-pp-dp-mapping. --tft-require-separate-hosts makes this an error." in said
