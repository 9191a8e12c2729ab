"""Data-parallel lists before any group exists, and what one host can take away from them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_tft.arguments import conflicts
from mindspeed_tft.replica import hosts
from mindspeed_tft.replica.holders import holders
from mindspeed_tft.replica.layout import Sizes, data_parallel_lists, instances
from mindspeed_tft.settings import build

axis = st.sampled_from([1, 2, 3, 4])
layouts = st.builds(
    lambda tensor, pipeline, context, copies, last: Sizes(
        tensor * pipeline * context * copies, tensor, pipeline, context, data_last=last
    ),
    axis, axis, st.sampled_from([1, 2]), axis, st.booleans(),
)  # fmt: skip


def nodes(*ranks: int) -> list[str]:
    """The host of each rank: so many on each node."""
    return [f"node {number}" for number, count in enumerate(ranks) for _ in range(count)]


@settings(deadline=None)
@given(layouts)
def test_every_rank_is_in_one_list_and_all_lists_have_one_size(sizes: Sizes) -> None:
    lists = data_parallel_lists(sizes)
    assert sorted(rank for ranks in lists.values() for rank in ranks) == list(range(sizes.world))
    assert len(lists) == sizes.tensor * sizes.pipeline
    assert {len(ranks) for ranks in lists.values()} == {sizes.world // (sizes.tensor * sizes.pipeline)}
    assert all(list(ranks) == sorted(ranks) for ranks in lists.values())


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (Sizes(4), {"tp0-pp0/dense": (0, 1, 2, 3)}),
        (Sizes(4, tensor=2), {"tp0-pp0/dense": (0, 2), "tp1-pp0/dense": (1, 3)}),
        (Sizes(4, pipeline=2), {"tp0-pp0/dense": (0, 1), "tp0-pp1/dense": (2, 3)}),
        (Sizes(4, pipeline=2, data_last=True), {"tp0-pp0/dense": (0, 2), "tp0-pp1/dense": (1, 3)}),
        (Sizes(4, context=2), {"tp0-pp0/dense": (0, 1, 2, 3)}),
        (
            Sizes(4, experts=2),
            {"tp0-pp0/dense": (0, 1, 2, 3), "tp0-pp0-ep0/expert": (0, 2), "tp0-pp0-ep1/expert": (1, 3)},
        ),
        (Sizes(2, experts=1), {"tp0-pp0/dense": (0, 1), "tp0-pp0/expert": (0, 1)}),
    ],
)
def test_lists(sizes: Sizes, expected: dict[str, tuple[int, ...]]) -> None:
    assert data_parallel_lists(sizes) == expected


@pytest.mark.parametrize(
    ("sizes", "number", "expected"),
    [
        (Sizes(4), 2, ((0, 1), (2, 3))),
        (Sizes(4, tensor=2), 2, ((0, 1), (2, 3))),
        (Sizes(4, pipeline=2), 2, ((0, 2), (1, 3))),
        (Sizes(8, tensor=2, pipeline=2, data_last=True), 2, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (Sizes(8, experts=2), 4, ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_instances_are_parts_of_all_lists(sizes: Sizes, number: int, expected: tuple[tuple[int, ...], ...]) -> None:
    found = instances(sizes, number)
    assert found == expected
    assert sorted(rank for ranks in found for rank in ranks) == list(range(sizes.world))


def test_instances_that_do_not_divide_a_list_are_refused() -> None:
    with pytest.raises(ValueError, match="3 instances do not divide the 4 ranks of tp0-pp0/dense"):
        instances(Sizes(4), 3)


def test_a_world_that_is_no_multiple_of_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks are no multiple of the 4"):
        data_parallel_lists(Sizes(6, tensor=2, pipeline=2))


@settings(deadline=None)
@given(layouts, st.integers(1, 8), st.data())
def test_a_shard_is_lost_with_a_host_when_no_holder_is_elsewhere(
    sizes: Sizes, per_host: int, data: st.DataObject
) -> None:
    """Against the definition: take the host away, and look who is left."""
    lists = data_parallel_lists(sizes)
    size = len(next(iter(lists.values())))
    n = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    where = [f"h{rank // per_host}" for rank in range(sizes.world)]
    lost = hosts.lost_with_host(lists, n, where)
    for host in set(where):
        left = {rank for rank in range(sizes.world) if where[rank] != host}
        gone = {
            f"{name}/{shard}"
            for name, ranks in lists.items()
            for shard, positions in enumerate(holders(size, n))
            if not left & {ranks[position] for position in positions}
        }
        assert gone == set(lost.get(host, []))


def test_holders_on_different_hosts_are_no_finding() -> None:
    assert hosts.judge(Sizes(4), 2, nodes(2, 2)) is None
    assert hosts.judge(Sizes(4, tensor=2), 2, nodes(2, 2)) is None
    assert hosts.judge(Sizes(8, experts=2), 2, nodes(4, 4)) is None
    assert hosts.judge(Sizes(4), None, nodes(2, 2)) is None


def test_one_host_is_one_short_finding() -> None:
    found = hosts.judge(Sizes(4), 2, ["a"] * 4)
    assert found is not None and found.alone
    assert found.reason == "all 4 ranks run on one host (a), whose loss takes all holders of every shard along"
    assert found.remedy == "use two or more hosts"


def test_a_stage_on_one_host_is_cured_by_the_other_order() -> None:
    sizes, where = Sizes(16, pipeline=2), nodes(8, 8)
    found = hosts.judge(sizes, 2, where)
    assert found is not None and not found.alone
    assert found.reason == (
        "with host node 0 all holders of 4 shards would be lost (tp0-pp0/dense/0, tp0-pp0/dense/1, tp0-pp0/dense/2"
        " and 1 more), and 1 more host would take shards along as well"
    )
    assert found.remedy == "add --use-tp-pp-dp-mapping"
    assert hosts.judge(Sizes(16, pipeline=2, data_last=True), 2, where) is None
    without = hosts.judge(sizes, None, where)  # all ranks of a list hold its shard, and all are on one host
    assert without is not None and without.remedy == "add --use-tp-pp-dp-mapping"


def test_order_and_number_are_named_together_where_neither_is_enough() -> None:
    where = ["a", "b"] * 4
    found = hosts.judge(Sizes(8, pipeline=2, data_last=True), 2, where)
    assert found is not None
    assert found.remedy == "leave out --use-tp-pp-dp-mapping and set --optimizer-replica-num to 4"
    assert hosts.judge(Sizes(8, pipeline=2), 4, where) is None


@pytest.mark.parametrize("sizes", [Sizes(8, context=2, pipeline=2), Sizes(8, pipeline=2, experts=2)])
def test_an_order_that_megatron_refuses_is_not_offered(sizes: Sizes) -> None:
    found = hosts.judge(sizes, 2, nodes(4, 4))
    assert found is not None and found.remedy.startswith("spread the data-parallel ranks")
    assert sizes.exchanged() is None


def test_more_replicas_are_named_with_their_number() -> None:
    """Nodes of different sizes: shard 2 is on positions 2 and 6, and both are on the larger node."""
    found = hosts.judge(Sizes(8), 2, nodes(2, 6))
    assert found is not None
    assert found.reason == "with host node 1 all holders of 2 shards would be lost (tp0-pp0/dense/2, tp0-pp0/dense/3)"
    assert found.remedy == "set --optimizer-replica-num to 4"
    assert hosts.judge(Sizes(8), 4, nodes(2, 6)) is None


def test_where_no_setting_helps_the_ranks_are_named() -> None:
    found = hosts.judge(Sizes(6, tensor=3), 2, ["a", "a", "b", "a", "b", "b"])
    assert found is not None
    assert found.remedy == (
        "spread the data-parallel ranks of every part over more than one host: those of tp0-pp0/dense are the ranks"
        " 0, 3, all on host a"
    )


def test_where_lists_have_no_common_size_the_holders_are_named() -> None:
    """Dense lists of 8 and expert lists of 2: the experts allow two replicas only, which is too few for the dense."""
    found = hosts.judge(Sizes(8, experts=4), 2, ["a", "b", "b", "a", "a", "a", "a", "b"])
    assert found is not None
    assert found.remedy.startswith("spread")


@settings(deadline=None)
@given(layouts, st.integers(2, 8))
def test_every_remedy_with_a_number_works(sizes: Sizes, per_host: int) -> None:
    lists = data_parallel_lists(sizes)
    where = [f"h{rank // per_host}" for rank in range(sizes.world)]
    size = len(next(iter(lists.values())))
    fitting = hosts.fitting(lists, where)
    assert all(size % n == 0 and not hosts.lost_with_host(lists, n, where) for n in fitting)
    assert all(2 * n in fitting for n in fitting if size % (2 * n) == 0)  # more holders are never worse


def test_pretended_hosts_are_those_of_the_launcher() -> None:
    launched = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    assert hosts.pretended(launched) == ["node 0", "node 0", "node 1", "node 1"]
    assert hosts.pretended({**launched, "WORLD_SIZE": "5"}) == []  # nodes of different sizes
    assert hosts.pretended({"WORLD_SIZE": "4"}) == []  # another launcher
    assert hosts.pretended({**launched, "LOCAL_WORLD_SIZE": "x"}) == []


def test_two_hosts_for_one_holder_cannot_be() -> None:
    wanted = {"enable_high_availability": True, "enable_hbmfault_repair": True, "tft_require_separate_hosts": True}
    chosen, origin = build([("flag", {**wanted, "distributed_optimizer_no_replica": True})])
    (refusal,) = conflicts(chosen, origin)
    assert (refusal.flag, "one holder" in refusal.reason) == ("--tft-require-separate-hosts", True)
    chosen, origin = build([("flag", wanted)])
    assert list(conflicts(chosen, origin)) == []
