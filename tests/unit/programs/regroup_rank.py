"""One rank of test_regroup_processes.py: does what the lines on its standard input say, and answers with JSON lines.

Commands go to the main thread, which communicates, but for `abort`, `watch` and `stop`: as in a real rank those come on
another.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _coalescing_manager

from mindspeed_tft.groups import CommunicationAborted, LockstepBroken, sockets
from mindspeed_tft.patches import torch_distributed
from mindspeed_tft.patches.groups import HIGH_AVAILABILITY
from mindspeed_tft.registry import REGISTRY

RANK, WORLD, PORT, IDENTITY, LIMIT = (int(word) for word in sys.argv[1:6])  # LIMIT: seconds, of each operation
NEWCOMER = IDENTITY != RANK  # in the place of a rank that is gone
WAITS = ("wait_in_slices", "wait_on_helper")  # functions of groups/waiting.py that a blocked rank is in
MAIN = threading.main_thread().ident
speaking = threading.Lock()


def answer(event: str, **data: Any) -> None:
    line = json.dumps({"event": event, "rank": RANK, "identity": IDENTITY, **data})
    with speaking:
        print(line, flush=True)


# ------------------------------------------------------------------------------------------------ orders from outside

orders: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
stop = threading.Event()
aborted_at = 0.0


def blocked() -> bool:
    """Whether the main thread waits for a communication, now."""
    frame = sys._current_frames().get(MAIN or 0)
    while frame is not None:
        if frame.f_code.co_name in WAITS:
            return True
        frame = frame.f_back
    return False


def blocks_within(seconds: float) -> bool:
    """Whether the main thread comes to wait without a break of 50 ms: a wait that ends by itself does not count."""
    end, since = time.monotonic() + seconds, time.monotonic()
    while time.monotonic() - since < 0.05:
        if not blocked():
            since = time.monotonic()
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def listen() -> None:
    global aborted_at  # of the last abort, for `do_block`
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "abort":
            aborted_at = time.monotonic()
            answer("shut", connections=torch_distributed.table().abort("told to", int(rest[0])))
        elif word == "watch":
            answer("blocked" if blocks_within(20) else "error")
        elif word == "stop":
            stop.set()
        else:
            orders.put([word, *rest])
    os._exit(0)  # whoever gave the orders is gone


# ------------------------------------------------------------------------------------------------ communication


def connect() -> list[dist.ProcessGroup]:
    """The job's store and groups. A newcomer makes the same group objects, with nothing below until it regroups."""
    REGISTRY.activate(HIGH_AVAILABILITY)
    build = torch_distributed.build_gloo
    if NEWCOMER:
        torch_distributed.build_gloo = lambda *_: None  # type: ignore[assignment]
    store = dist.TCPStore("127.0.0.1", PORT, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    own = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD, store=store, timeout=own)
    made: list[Any] = [
        dist.new_group(list(range(WORLD)), backend="gloo", timeout=own),
        dist.new_group([0, 2], timeout=own),
        dist.new_group([1, 2], timeout=own),
    ]
    dist.destroy_process_group(dist.new_group(list(range(WORLD)), backend="gloo"))
    torch_distributed.build_gloo = build
    return made


def wrong_in_round(number: int, identities: list[int], mine: int = IDENTITY) -> int:
    """One round of every kind of operation; returns how many results are not what the members' numbers say."""
    everyone, *pairs = groups
    values = [identity * 1_000_003 + number for identity in identities]
    own = mine * 1_000_003 + number
    wrong = 0

    def expect(found: torch.Tensor, expected: list[int]) -> None:
        nonlocal wrong
        wrong += found.tolist() != expected

    total = torch.full((257,), own)
    works = [dist.all_reduce(total, async_op=True)]
    gathered = torch.zeros(WORLD * 5, dtype=torch.int64)
    works.append(dist.all_gather_into_tensor(gathered, torch.full((5,), own), group=everyone, async_op=True))
    received = torch.zeros(33, dtype=torch.int64)
    works += dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((33,), own), (RANK + 1) % WORLD, group=everyone),
        dist.P2POp(dist.irecv, received, (RANK - 1) % WORLD, group=everyone),
    ])  # fmt: skip
    for work in works:
        work.wait()
    expect(total, [sum(values)] * 257)
    expect(gathered, [value for value in values for _ in range(5)])
    expect(received, [values[(RANK - 1) % WORLD]] * 33)
    scattered = torch.zeros(3, dtype=torch.int64)
    dist.reduce_scatter_tensor(scattered, torch.full((3 * WORLD,), own), group=everyone)
    expect(scattered, [sum(values)] * 3)
    for pair, members in zip(pairs, ([0, 2], [1, 2]), strict=True):
        if RANK in members:
            shared = torch.full((9,), own)
            dist.all_reduce(shared, group=pair)
            expect(shared, [sum(values[member] for member in members)] * 9)
    return wrong


def everybody_was_told(told: bool) -> bool:
    flag = torch.tensor([int(told)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


ABSENT = WORLD - 1  # takes no part in these operations


def block(kind: str) -> None:
    """An operation that cannot end because rank `ABSENT` does not take part."""
    everyone = groups[0]
    big = torch.ones(300_000)
    if kind == "allreduce":
        dist.all_reduce(big)
    elif kind == "allgather":
        dist.all_gather_into_tensor(torch.empty(WORLD * 1000), torch.ones(1000))
    elif kind == "reduce_scatter":
        dist.reduce_scatter_tensor(torch.empty(1000), torch.ones(1000 * WORLD))
    elif kind == "broadcast":
        dist.broadcast(big, ABSENT)
    elif kind == "reduce":
        dist.reduce(big, RANK)  # each is a root of its own: nobody sends
    elif kind == "barrier":
        dist.barrier(group=everyone)
    elif kind == "alltoall":
        dist.all_to_all_single(torch.empty(WORLD), torch.ones(WORLD))
    elif kind == "coalesced":
        with _coalescing_manager(everyone):
            for _ in range(2):
                dist.all_gather_into_tensor(torch.empty(1000 * WORLD), torch.ones(1000), group=everyone)
    elif kind == "send":
        dist.send(big, ABSENT)
    elif kind == "recv":
        dist.recv(big, ABSENT)
    elif kind == "two_handles":
        works = [dist.irecv(big, ABSENT), dist.all_reduce(big.clone(), async_op=True)]
        works[1].wait()


# ------------------------------------------------------------------------------------------------ orders


def do_turn(identities: str, at_least: str) -> None:
    """Rounds until all are told to stop and have made so many."""
    members, wrong, number = [int(word) for word in identities.split(",")], 0, 0
    try:
        while True:
            wrong += wrong_in_round(number, members)
            number += 1
            if number == 20:
                answer("turning")
            if everybody_was_told(stop.is_set() and number >= int(at_least)):
                break
    except CommunicationAborted as exc:
        answer("aborted", text=str(exc), rounds=number, wrong=wrong, at=time.monotonic())
        return
    stop.clear()
    answer("turned", rounds=number, wrong=wrong)


def do_poison(identities: str) -> None:
    """The control: a round in which the last rank gives another number than it should."""
    members = [int(word) for word in identities.split(",")]
    answer("poisoned", wrong=wrong_in_round(0, members, IDENTITY + (RANK == WORLD - 1)))


def do_block(kind: str) -> None:
    try:
        block(kind)
        answer("error", text=f"{kind} ended without its peer")
    except CommunicationAborted as exc:
        answer("free", kind=kind, seconds=time.monotonic() - aborted_at, text=str(exc))


def do_regroup(epoch: str, seconds: str) -> None:
    begin = time.monotonic()
    try:
        answer("regrouped", groups=torch_distributed.regroup(int(epoch), timedelta(seconds=float(seconds))))
    except RuntimeError as exc:
        answer("failed", seconds=time.monotonic() - begin, kind=type(exc).__name__, text=str(exc)[:300])


def do_meddle(epoch: str) -> None:
    """What a rank may do that was asleep while its epoch was abandoned. Answers how each try ended."""
    tries: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: dist.all_reduce(torch.full((257,), -1)),
        "send": lambda: dist.send(torch.full((33,), -1), 0, group=groups[0]),
        "recv": lambda: dist.recv(torch.zeros(33, dtype=torch.int64), 0, group=groups[0]),
        "pair": lambda: dist.all_reduce(torch.full((9,), -1), group=groups[1]),
        "regroup": lambda: torch_distributed.regroup(int(epoch), timedelta(seconds=1)),
        "after": lambda: dist.all_reduce(torch.full((257,), -1)),
    }
    ends: dict[str, Any] = {"sockets taking data": sum(takes_data(copy) for copy in copies), "sockets": len(copies)}
    for name, attempt in tries.items():
        begin = time.monotonic()
        try:
            attempt()
            ends[name] = ["done", 0.0]
        except RuntimeError as exc:
            ends[name] = [type(exc).__name__, time.monotonic() - begin]
    answer("meddled", ends=ends)


def do_copy() -> None:
    """Keep the groups' connections under numbers of our own, so that nothing below can close them."""
    for group in torch_distributed.table().groups():
        for ref in group._sockets:
            copy = socket.socket(fileno=os.dup(ref.fd))
            if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copies.append(copy)
    answer("copied", connections=len(copies))


def takes_data(connection: socket.socket) -> bool:
    """Whether bytes that are written to it do not come back as an error; the first write after a close may pass."""
    connection.settimeout(1)
    try:
        for _ in range(3):
            connection.send(b"\xff" * 64)
            time.sleep(0.01)
    except OSError:
        return False
    return True


def do_step(kind: str) -> None:
    """A step of overlapping operations on all groups, then the audit. `kind` says what rank 1 does differently."""
    odd = kind if RANK == 1 else ""
    everyone, first, second = groups
    floats, ints = torch.ones(64), torch.ones(64, dtype=torch.int32)
    works = [
        dist.all_reduce(floats.clone(), async_op=True),
        dist.all_reduce(ints.clone(), group=everyone, async_op=True),
    ]
    for group, members in ((first, [0, 2]), (second, [1, 2])):
        if RANK in members:
            works.append(dist.all_reduce(floats.clone(), group=group, async_op=True))
    order = [floats, ints] if odd != "order" else [ints, floats]
    for tensor in order:  # equal sizes: the backend cannot tell
        works.append(dist.all_gather_into_tensor(tensor.repeat(WORLD), tensor, group=everyone, async_op=True))
    works.append(dist.all_reduce((ints if odd == "dtype" else floats).clone(), async_op=True))
    works.append(dist.broadcast(floats.clone(), 0, async_op=True))
    if RANK == 0:
        works += [dist.isend(floats, 1), dist.isend(floats, 2)]
    else:
        works.append(dist.irecv(ints.clone() if odd == "transfer" else floats.clone(), 0))
    for work in works:
        work.wait()
    try:
        answer("audited", streams=torch_distributed.audit_lockstep(timedelta(seconds=20)), text="")
    except LockstepBroken as exc:
        answer("audited", streams=0, text=str(exc))
    answer("again", streams=torch_distributed.audit_lockstep(timedelta(seconds=20)))


def do_keep() -> None:
    """Hold on to the backends as they are now: what a leak would look like."""
    kept.extend(group._inner for group in torch_distributed.table().groups())
    answer("kept")


def do_let_go() -> None:
    kept.clear()
    answer("let_go")


def do_count() -> None:
    gc.collect()
    descriptors = os.listdir("/proc/self/fd")
    tasks = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:
            tasks.append(comm.read().strip())
    answer(
        "count",
        threads=len(tasks), descriptors=len(descriptors), sockets=len(sockets.tcp_sockets()), names=sorted(tasks),
    )  # fmt: skip


ORDERS: dict[str, Callable[..., None]] = {
    "turn": do_turn, "poison": do_poison, "block": do_block, "regroup": do_regroup,
    "copy": do_copy, "meddle": do_meddle, "step": do_step, "count": do_count, "keep": do_keep, "let_go": do_let_go,
}  # fmt: skip
copies: list[socket.socket] = []
kept: list[Any] = []
threading.Thread(target=listen, name="orders", daemon=True).start()
groups = connect()
answer("ready")
while True:
    word, *rest = orders.get()
    ORDERS[word](*rest)
