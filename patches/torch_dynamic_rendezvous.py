"""torch.distributed.elastic's c10d rendezvous: a node joins a job that trains without a new round.

torch lets a node that comes later restart all workers of the job. Here it takes the place of a participant that is
gone, and while nobody is gone it waits, in torch's own list of nodes that are not needed. The state stays torch's, so
that launchers with and without these patches understand each other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from mindspeed_tft.agent import places
from mindspeed_tft.agent.supervisor import say
from mindspeed_tft.engine.types import Deadlines
from mindspeed_tft.groups import sockets
from mindspeed_tft.patches import torch_store
from mindspeed_tft.patches.torch_elastic_names import DYNAMIC, ELASTIC, Args, Call, Kwargs
from mindspeed_tft.registry import REGISTRY

TRIES = 5  # to write the state of the rendezvous against other launchers that do the same
LOOK = 0.1  # seconds between two looks at it


@dataclass
class Seat:
    """What a launcher has got in a round that was completed."""

    round: int
    rank: int
    members: set[Any]  # descriptions of all that have been seen in it
    told: set[Any] = field(default_factory=set)  # who waits to join, and was named

    def of(self, state: Any) -> bool:
        """Whether this is the round of the seat, and not one that has its number only."""
        return bool(state.complete and state.round == self.round and self.members & set(state.participants))


@dataclass
class Join:
    """A launcher that joins a round now, in the main thread."""

    handler: Any
    spare: int | None = None  # the round that has begun to train without it
    until: float | None = None  # monotonic seconds: how long it waits, in a store that knows nothing, for others


class _JoinAnew(Exception):
    """The job for which a spare has waited will not come back."""


_deadlines: Deadlines | None = None  # of the job whose launcher runs in this process; None: torch as it is
_joining: Join | None = None
_seats: dict[Any, Seat] = {}  # by description of the node


def enable(deadlines: Deadlines | None) -> None:
    """From now on nodes join a job that trains without a new round; None: as under plain torch."""
    global _deadlines
    _deadlines = deadlines
    _seats.clear()


def seat_of(handler: Any) -> Seat | None:
    return _seats.get(getattr(handler, "_this_node", None))


def leave_seat(handler: Any) -> None:
    """Join the next time as one who has not been there."""
    _seats.pop(getattr(handler, "_this_node", None), None)


# ----------------------------------------------------------------------------------------------------- joining


@REGISTRY.wrap(f"{DYNAMIC}:DynamicRendezvousHandler.next_rendezvous", group=ELASTIC)
def next_rendezvous(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around the join of a round, which a spare launcher may wait in as long as the job lasts."""
    global _joining
    store = torch_store.root(instance._store)
    if _deadlines is None or store is None:
        return wrapped(*args, **kwargs)
    torch_store.limit_silence(sockets.tcp_sockets(), store.port, _deadlines.heartbeat_lost)
    if hasattr(instance, "_bootstrap_store_info"):
        # torch remembers who served the round before, and then does not tell: who joins this round later asks for it.
        instance._bootstrap_store_info = None
    _joining = Join(instance)
    try:
        info = _join(_joining, lambda: wrapped(*args, **kwargs))
    finally:
        _joining = None
    state = instance._state_holder.state
    rank = state.participants[instance._this_node]
    _seats[instance._this_node] = Seat(state.round, rank, set(state.participants))
    return info


def _join(join: Join, attempt: Callable[[], Any]) -> Any:
    from torch.distributed.elastic.rendezvous import api

    lost = False
    while True:
        try:
            if lost:
                _reach_again(join)
                lost = False
            return attempt()
        except _JoinAnew:
            say("nobody of the job that this launcher waited for has come back: it joins as in a first start")
            join.spare = join.until = None
        except api.RendezvousClosedError as exc:
            if join.spare is None:
                raise
            raise api.RendezvousGracefulExitError("the job is over") from exc
        except api.RendezvousConnectionError as exc:
            if join.spare is None:
                raise
            if join.handler._state_holder.state.closed:
                raise api.RendezvousGracefulExitError("the job is over") from exc
            lost = True


def _reach_again(join: Join) -> None:
    """A spare has lost the rendezvous: it is needed all the more if its host is to be replaced."""
    from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

    assert _deadlines is not None
    handler = join.handler
    old = torch_store.root(handler._store)
    assert old is not None
    seconds = _patience()
    say(f"the rendezvous at {old.host}:{old.port} is gone: this spare launcher looks for it for {seconds:g} s")
    try:
        store = torch_store.connect(old.host, old.port, seconds, patience=_deadlines.heartbeat_lost)
    except torch_store.StoreUnreachable as exc:
        raise RendezvousGracefulExitError(f"the job is over: {exc}") from exc
    backend = handler._state_holder._backend
    use(handler, store)
    backend._call_store("compare_set", backend._key, "", backend._NULL_SENTINEL)


def _patience() -> float:
    """Seconds that a spare waits for a rendezvous that is gone, or for those who trained to come back to it."""
    assert _deadlines is not None
    return _deadlines.reboot + _deadlines.heartbeat_lost


def use(handler: Any, store: Any) -> None:
    """Give the rendezvous a connection that lives."""
    handler._store = handler._state_holder._backend._store = store


@REGISTRY.wrap(f"{DYNAMIC}:_RendezvousJoinOp.__call__", group=ELASTIC)
def join_op(wrapped: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The next move of a node that wants to join."""
    action = None if _joining is None else _move(_joining, args[0])
    return wrapped(*args, **kwargs) if action is None else action


def _move(join: Join, context: Any) -> Any:
    """The move of a node that comes while the job trains; None: it does not, or the node is in it."""
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as dynamic

    state, node = context.state, context.node
    if state.closed:
        # The host of the store waits for this before it leaves: who does not know that it is over looks for it.
        return dynamic._Action.REMOVE_FROM_REDUNDANCY_LIST if node in state.redundancy_list else None
    if node in state.participants:
        return None
    if join.spare is not None and _forgotten(join.spare, state):
        return _wait_for_survivors(join)
    join.until = None
    return _take_a_place(join, context) if state.complete else None


def _forgotten(spare: int, state: Any) -> bool:
    """Whether nobody who has trained in round `spare` has written this state.

    A spare opens no round: it can find an empty store before those who train do, or all of them were silent for long.
    """
    if state.complete:
        return bool(state.round < spare)
    return state.round <= spare or not state.participants


def _wait_for_survivors(join: Join) -> Any:
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as dynamic

    if join.until is None:
        join.until = time.monotonic() + _patience()
    if time.monotonic() > join.until:
        raise _JoinAnew
    return dynamic._Action.SYNC


def _take_a_place(join: Join, context: Any) -> Any:
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as dynamic

    state, node = context.state, context.node
    seat = _seats.get(node)
    if seat is not None and seat.round == state.round:
        return None  # all its workers have to start anew, and so have those of the others
    nodes = training_nodes(join.handler, state.round)
    if nodes is None:
        return None
    place = places.vacant(list(state.participants.values()), nodes)
    state.wait_list.discard(node)
    if place is not None:
        state.redundancy_list.discard(node)
        state.participants[node] = place
        return dynamic._Action.KEEP_ALIVE
    if node not in state.redundancy_list:
        if join.spare != state.round:
            say(f"training has begun, and all {nodes} nodes are there: this launcher waits for the place of one")
        join.spare = state.round
        return dynamic._Action.ADD_TO_REDUNDANCY_LIST
    join.spare = state.round
    return dynamic._Action.KEEP_ALIVE if dynamic._should_keep_alive(context) else dynamic._Action.SYNC


def training_nodes(handler: Any, number: int) -> int | None:
    """How many nodes the job has that trains in this round; None: it does not train yet.

    Raises:
        RendezvousConnectionError: the store is gone.
    """
    backend = handler._state_holder._backend
    key = places.Keys(handler.get_run_id()).begun(number)
    return int(backend._call_store("get", key)) if backend._call_store("check", [key]) else None


@REGISTRY.wrap(f"{DYNAMIC}:DynamicRendezvousHandler._get_world", group=ELASTIC)
def get_world(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of several lost nodes one may come back first: the job is as large as it was."""
    rank, size = wrapped(*args, **kwargs)
    if _joining is None or torch_store.root(instance._store) is None:
        return rank, size
    return rank, training_nodes(instance, instance._state_holder.state.round) or size


@REGISTRY.wrap(f"{DYNAMIC}:DynamicRendezvousHandler.shutdown", group=ELASTIC)
def shutdown(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The job is over. Spare launchers have to see it, and the store may end with this process."""
    done = wrapped(*args, **kwargs)
    if done and _deadlines is not None and torch_store.root(instance._store) is not None:
        _see_spares_off(instance, _deadlines.heartbeat_lost)
    return done


def _see_spares_off(handler: Any, seconds: float) -> None:
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    holder, end = handler._state_holder, time.monotonic() + seconds
    with contextlib.suppress(RendezvousError):  # the store has ended with another launcher, which has seen them off
        while holder.state.redundancy_list and time.monotonic() < end:
            time.sleep(LOOK)
            holder._last_sync_time = -1  # not what is remembered, but what is there
            holder.sync()


# --------------------------------------------------------------------------------------------- while it trains


def waiting(handler: Any) -> int:
    """How many nodes torch is to restart all workers for while the job trains: those whose own workers start anew.

    Others are named, once, by the launcher of the lowest rank. Asks no store: what the last keep-alive brought will do.
    """
    seat, state = seat_of(handler), handler._state_holder.state
    if seat is None:
        return 0
    if seat.of(state):
        seat.members.update(state.participants)
    if state.participants and seat.rank == min(state.participants.values()):
        for node in sorted((state.wait_list | state.redundancy_list) - seat.members - seat.told):
            seat.told.add(node)
            say(
                f"{node.addr} (launcher {node.pid}) waits to join: training goes on without it, until it can take the"
                " place of a node that is lost"
            )
    return len(state.wait_list & seat.members)


@REGISTRY.wrap(f"{DYNAMIC}:_RendezvousKeepAliveOp.__call__", group=ELASTIC)
def keep_alive_op(wrapped: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """A launcher that was cut off for a while is taken to be dead by the others, and torch leaves it at that."""
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as dynamic

    context = args[0]
    seat = _seats.get(context.node)
    if seat is not None and _take_back(context.state, context.node, seat):
        return dynamic._Action.KEEP_ALIVE
    return wrapped(*args, **kwargs)


def _take_back(state: Any, node: Any, seat: Seat) -> bool:
    if node in state.participants or state.closed:
        return False
    if not state.complete and not state.participants and state.round == seat.round + 1:
        state.complete, state.round = True, seat.round  # all were silent, as the store was
    if not state.complete or state.round != seat.round or seat.rank in state.participants.values():
        return False
    state.participants[node] = seat.rank
    return True


def refill(handler: Any, store: Any, seconds: float) -> None:
    """Use a store that knows nothing, and write what we know of the round. `seconds`: for torch's other threads.

    Launchers that were started meanwhile may have begun a round of their own there: they learn that it is not ours.
    Nobody had a chance to show that he lives, so all count as alive now; the dead will not show it.

    Raises:
        StoreUnreachable: the store is gone again, or others write all the time.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    if not handler._heartbeat_lock.acquire(timeout=seconds):
        raise torch_store.StoreUnreachable(f"torch's own keep-alive holds the rendezvous for {seconds:g} s")
    try:
        # Not before nobody else reads: what we know is still that of the old store.
        use(handler, store)
        _refill(handler)
    except RendezvousError as exc:
        raise torch_store.StoreUnreachable(f"the rendezvous is gone: {exc}") from exc
    finally:
        handler._heartbeat_lock.release()


def _refill(handler: Any) -> None:
    seat, holder, node = seat_of(handler), handler._state_holder, handler._this_node
    assert seat is not None
    backend, ours = holder._backend, holder.state
    backend._call_store("compare_set", backend._key, "", backend._NULL_SENTINEL)
    for _ in range(TRIES):
        holder._last_sync_time = -1  # not what is remembered, but what is there
        holder.sync()
        if seat.of(holder.state):
            return
        now = datetime.now(timezone.utc)
        ours.complete, ours.round, ours.closed, ours.deadline = True, seat.round, False, None
        if seat.rank not in ours.participants.values():
            ours.participants[node] = seat.rank
        ours.wait_list.clear()
        ours.last_heartbeats.update(dict.fromkeys((*ours.participants, *ours.redundancy_list), now))
        holder._state = ours
        holder.mark_dirty()
        if holder.sync():
            return
        time.sleep(LOOK)
    holder._state = ours  # for the next time
    raise torch_store.StoreUnreachable("the state of the rendezvous is changed by others all the time")
