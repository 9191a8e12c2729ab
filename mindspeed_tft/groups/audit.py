"""Did all ranks start the same communications? Asked once, after the first step on rebuilt groups.

A rank that comes back may issue one collective more, or two in another order, than those that stayed (a lazily cached
all-reduce is enough). Backends match operations by their order and move bytes, so the usual end is a hang, and the
worst is a wrong number that nobody notices. While an audit is armed every operation is noted as it starts; `check`
then compares what was noted with one counterpart of each group, through the job's store.

Nothing here talks to a process group: an audit that communicated over what it doubts would prove nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from mindspeed_tft.groups import waiting

log = logging.getLogger(__name__)

COLLECTIVES = ""  # the stream of everything that is not point to point
LAST = 4  # operations in words, for the message
PAUSES = (0.002, 0.1)  # seconds between two looks at the store: at first, and at most

# Position of the argument that is the same on all members by the meaning of the operation. The other one may differ:
# the root of a gather alone has outputs, an uneven reduce-scatter has another output on each rank.
SAME = {
    **dict.fromkeys("allreduce allreduce_coalesced reduce".split(), 0),
    **dict.fromkeys("allgather _allgather_base all_gather_single allgather_coalesced".split(), 0),
    **dict.fromkeys("all_gather_single_coalesced allgather_into_tensor_coalesced".split(), 0),
    **dict.fromkeys("reduce_scatter _reduce_scatter_base reduce_scatter_single".split(), 1),
    **dict.fromkeys("reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced".split(), 1),
    "gather": 1,
}
# One side has the data, the other a buffer for them, which may be flat: only the number of elements has to agree.
MOVED = {"broadcast": 0, "scatter": 0, "send": 0, "recv": 0}
# Each pair of ranks may exchange another number of elements (tokens to experts): only the dtype has to agree.
UNEVEN = {"alltoall": 1, "alltoall_base": 1, "all_to_all_single": 1}


class LockstepBroken(RuntimeError):
    """Two ranks of a group started different communications; what was computed since the groups were rebuilt is
    in doubt on all of them."""


class Member(NamedTuple):
    """This rank's place in a group."""

    name: str  # the group's, equal on all its members
    rank: int  # in the group
    ranks: tuple[int, ...]  # global rank of each member, for messages


class Store(Protocol):
    """What `check` needs of torch's stores."""

    def multi_set(self, keys: list[str], values: list[str]) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass
class Stream:
    """Operations whose order must be equal on those who compare: number, digest, and the latest in words."""

    count: int = 0
    digest: str = ""
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST))

    def add(self, operation: str) -> None:
        self.digest = hashlib.blake2b(f"{self.digest} {operation}".encode(), digest_size=16).hexdigest()
        self.count += 1
        self.last.append(operation)

    def words(self) -> str:
        return f"{self.count} operations, last: {'; '.join(self.last) or 'none'}"


Streams = dict[str, Stream]  # of one group on one rank


class Audit:
    """Notes from a regroup until `check`. Operations start on several threads (autograd has its own), hence a lock."""

    def __init__(self, epoch: int, serial: int) -> None:
        """`serial`: how often this epoch was built, so that a second try reads nothing of the first."""
        self._where = f"{epoch}/{serial}"
        self._lock = threading.Lock()
        self._groups: dict[str, Streams] = {}

    def note(self, group: str, rank: int, operation: str, args: Sequence[Any]) -> None:
        """An operation starts on `group`, of which this is member `rank`; `args` as torch passes them."""
        stream, words = _stream_of(rank, operation, args), describe(operation, args)
        with self._lock:
            self._groups.setdefault(group, {}).setdefault(stream, Stream()).add(words)

    def check(
        self, connect: Callable[[], Store], members: Sequence[Member], timeout: timedelta, stop: waiting.Abort
    ) -> int:
        """Publish what was noted and compare with the first member of each group and with each peer. All ranks call
        it, once, at the same point of the program. Returns the number of streams compared. `connect` opens the store.

        A counterpart that does not answer in time, or a store that is gone, is a warning and no error: it says nothing
        against the numbers, a rank that is really gone is told by the control plane, and an aid must not end a job
        that runs well.

        The keys stay: who deletes cannot know that the others have read without meeting once more. They are small
        beside the addresses that each group leaves in the same store when it is built.

        Raises:
            LockstepBroken: a counterpart started something else.
            waiting.Interrupted: a stop came meanwhile.
        """
        members = [member for member in members if len(member.ranks) > 1]
        with self._lock:
            noted, self._groups = self._groups, {}  # what a thread starts from now on counts for nobody
        mine = {member: noted.get(member.name, {}) for member in members}
        try:
            store = connect()
            store.multi_set([self._key(m, m.rank) for m in members], [_encode(mine[m]) for m in members])
            theirs = self._answers(store, mine, timeout, stop)
        except RuntimeError as exc:
            log.warning("lockstep not audited, the store does not answer: %s", str(exc).partition("\n")[0])
            return 0
        found = [_differences(member, mine[member], rank, other) for (member, rank), other in theirs.items()]
        broken = [text for _, texts in found for text in texts]
        if broken:
            raise LockstepBroken("not in lockstep since the groups were rebuilt: " + " | ".join(broken))
        return sum(compared for compared, _ in found)

    def _key(self, member: Member, rank: int) -> str:
        return f"{self._where}/{member.name}/{rank}"

    def _answers(
        self, store: Store, mine: dict[Member, Streams], timeout: timedelta, stop: waiting.Abort
    ) -> dict[tuple[Member, int], Streams]:
        """The streams of each counterpart (group and its rank there) that has answered by the end of `timeout`."""
        wanted = {
            self._key(member, rank): (member, rank)
            for member, streams in mine.items()
            for rank in sorted(_counterparts(member, streams))
        }
        keys = list(wanted)
        if keys and not _wait(store, keys, timeout, stop):
            keys = [key for key in keys if store.check([key])]
            silent = sorted({member.ranks[rank] for key, (member, rank) in wanted.items() if key not in keys})
            log.warning("lockstep audit: no answer from ranks %s within %s s", silent, timeout.total_seconds())
        answers = store.multi_get(keys) if keys else []
        return {wanted[key]: _decode(answer) for key, answer in zip(keys, answers, strict=True)}


def describe(operation: str, args: Sequence[Any]) -> str:
    """The operation in words that are equal on all who take part in it, for example `allreduce float32[3,4] SUM`."""
    if operation in SAME:
        parts = [f"{_dtype(t)}[{','.join(map(str, t.shape))}]" for t in _tensors(args[SAME[operation] :][:1])]
    elif operation in MOVED:
        parts = [f"{_dtype(t)} x{t.numel()}" for t in _tensors(args[MOVED[operation] :][:1])]
    elif operation in UNEVEN:
        parts = sorted({_dtype(t) for t in _tensors(args[UNEVEN[operation] :][:1])})
    else:
        parts = []
    options = args[-1] if args else None
    if (reduction := getattr(options, "reduceOp", None)) is not None:
        parts.append(str(reduction.op).rpartition(".")[2])
    if (root := getattr(options, "rootRank", None)) is not None:
        parts.append(f"root {root}")
    # Both ends of a transfer have to use the same words.
    return " ".join(["transfer" if operation in ("send", "recv") else operation, *parts])


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _tensors(nested: Any) -> Iterator[Any]:
    """Tensors among arguments: themselves, or what lists of lists hold."""
    if isinstance(nested, list | tuple):
        for part in nested:
            yield from _tensors(part)
    elif hasattr(nested, "dtype"):
        yield nested


def _stream_of(rank: int, operation: str, args: Sequence[Any]) -> str:
    """Point to point: `sender>receiver#tag`, in which order counts. From anyone: `*>receiver`, which cannot be compared
    because its sender is not known when it starts."""
    if operation == "send":
        return f"{rank}>{args[1]}#{args[2]}"
    if operation == "recv":
        return f"{args[1]}>{rank}#{args[2]}"
    if operation == "recv_anysource":
        return f"*>{rank}"
    return COLLECTIVES


def _ends(stream: str) -> tuple[str, str]:
    """Sender and receiver of a point-to-point stream, as ranks of the group or `*`."""
    sender, _, rest = stream.partition(">")
    return sender, rest.partition("#")[0]


def _counterparts(member: Member, streams: Streams) -> set[int]:
    """Ranks in the group whose notes are to be compared: the first member's, and those of point-to-point peers."""
    ends = {end for stream in streams if stream != COLLECTIVES for end in _ends(stream)}
    return ({0} | {int(end) for end in ends if end != "*"}) - {member.rank}


def _differences(member: Member, mine: Streams, rank: int, theirs: Streams) -> tuple[int, list[str]]:
    """Number of streams compared with member `rank` of the group, and a sentence for each that differs."""
    between = {str(member.rank), str(rank)}
    # What the other end alone knows of counts too: it sent, and we never received.
    streams = {s for s in (*mine, *theirs) if s != COLLECTIVES and set(_ends(s)) == between}
    streams = {s for s in streams if not any(f"*>{_ends(s)[1]}" in side for side in (mine, theirs))}
    if rank == 0:
        streams.add(COLLECTIVES)
    texts = []
    for stream in sorted(streams):
        ours, other = mine.get(stream, Stream()), theirs.get(stream, Stream())
        if (ours.count, ours.digest) != (other.count, other.digest):
            here, there = member.ranks[member.rank], member.ranks[rank]
            texts.append(
                f"group {member.name}, {_in_words(member, stream)}: rank {here} started {ours.words()}, "
                f"rank {there} started {other.words()}"
            )
    return len(streams), texts


def _in_words(member: Member, stream: str) -> str:
    if stream == COLLECTIVES:
        return "collectives"
    sender, receiver = (member.ranks[int(end)] for end in _ends(stream))
    return f"transfers from {sender} to {receiver}"


def _wait(store: Store, keys: list[str], timeout: timedelta, stop: waiting.Abort) -> bool:
    """Until all keys are there. Looks again and again, because a store's own wait cannot be ended by a stop."""
    deadline, pause, stopped = time.monotonic() + timeout.total_seconds(), PAUSES[0], threading.Event()
    stop.add(stopped)
    try:
        while not store.check(keys):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if stopped.wait(min(pause, left)):
                raise waiting.Interrupted(stop.reason)
            pause = min(2 * pause, PAUSES[1])
        return True
    finally:
        stop.remove(stopped)


def _encode(streams: Streams) -> str:
    return json.dumps({name: [s.count, s.digest, list(s.last)] for name, s in streams.items()})


def _decode(text: bytes) -> Streams:
    return {name: Stream(count, digest, deque(last)) for name, (count, digest, last) in json.loads(text).items()}
