"""What makes thousands of hosts cheap changes nothing: several orders in one message, a majority that is remembered."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.framing import MAX_FRAME
from mindspeed_tft.control.leadership import Leadership
from mindspeed_tft.control.seats import gather


def queue_of(messages: list[wire.HostOrders]) -> asyncio.Queue[wire.HostOrders]:
    queue: asyncio.Queue[wire.HostOrders] = asyncio.Queue()
    for message in messages:
        queue.put_nowait(message)
    return queue


def test_what_waits_goes_out_in_one_message_and_in_its_order() -> None:
    orders = [wire.HostOrders(order=wire.Order(id=number, rank=number)) for number in range(9)]
    queue = queue_of(orders[1:])
    together = gather(orders[0], queue)
    assert list(together.more) == orders and together.WhichOneof("body") is None
    assert queue.empty() and not orders[0].more  # what a rank is told is its own order and nothing else


def test_a_message_stays_within_the_frame() -> None:
    text = "x" * (MAX_FRAME // 8)
    orders = [wire.HostOrders(refused=wire.Refused(reason=text)) for _ in range(20)]
    queue, found = queue_of(orders), 0
    while not queue.empty():
        together = gather(queue.get_nowait(), queue)
        assert together.ByteSize() < MAX_FRAME
        found += len(together.more)
    assert found == len(orders)


MOVES = st.tuples(st.sampled_from(["came", "heard", "left", "bye", "wait"]), st.integers(0, 59), st.floats(0.0, 1.5))


@settings(max_examples=300)
@given(st.integers(1, 4), st.lists(MOVES, max_size=60))
def test_a_remembered_majority_is_the_counted_one(nnodes: int, happens: list[tuple[str, int, float]]) -> None:
    leadership, now = Leadership(0, nnodes, lost=2.0), 0.0
    for node in range(nnodes):
        leadership.came(node, 0, now)
    for what, number, pause in happens:
        now, node = now + pause, number % nnodes
        if what == "came":
            leadership.came(node, 0, now)
        elif what == "heard":
            leadership.heard(node, now)
        elif what in ("left", "bye"):
            leadership.left(node, ended=what == "bye")
        slack = 1e-9 * (now + 1)  # held() subtracts where majority() adds
        counted = {2 * leadership.held(now - slack) > nnodes, 2 * leadership.held(now + slack) > nnodes}
        assert leadership.majority(now) in counted
