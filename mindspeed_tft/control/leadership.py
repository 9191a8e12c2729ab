"""Who leads: the rules, without sockets, files or a clock. One `Leadership` per candidate; relays are the voters.

A relay holds one stream at a time and never accepts a lower term than it did before, so a strict majority of relays at
one candidate is proof that nobody else has one. Without a strict majority a lease in shared storage may decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

CANDIDATES = 3  # at most, one on each of the first nodes; one host has two
_STEP = 4  # terms of one candidate are this far apart: no two candidates ever have the same
STALE = 3.0  # times `heartbeat_lost` without a sign of life, after which a lease is free


class Role(Enum):
    FOLLOWER = "follower"  # another candidate leads, and is heard
    CANDIDATE = "candidate"
    LEADER = "leader"


class Verdict(Enum):
    """What a candidate may do now."""

    WAIT = "wait"
    LEAD = "lead"
    CLAIM = "claim"  # lead if the claim of the next term can be made in shared storage


def count(nnodes: int) -> int:
    """Number of candidates of a job."""
    return 2 if nnodes == 1 else min(CANDIDATES, nnodes)


def next_term(heard: int, index: int) -> int:
    """The term of candidate `index` in the generation after that of `heard`; 0: nothing was heard yet."""
    return index + 1 if heard == 0 else (generation(heard) + 1) * _STEP + index + 1


def generation(term: int) -> int:
    """Terms of the same generation compete: only one of them may be claimed by lease."""
    return term // _STEP


@dataclass
class _Host:
    term: int  # the highest that its relay had accepted when it came
    heard: float
    ended: bool = False  # in the ordinary way: it cannot be anywhere else


@dataclass
class _Lease:
    """What this candidate saw of the leader's lease, in the storage as it is seen from here."""

    term: int = -1
    counter: int = -1
    moved: float = 0.0  # when the counter was seen to change
    looked: float = 0.0  # the last look that succeeded


@dataclass
class Leadership:
    """The state of one candidate. Times are seconds on one monotonic clock, given by the caller.

    `lost` is `Deadlines.heartbeat_lost`: who was not heard for that long is not counted on.
    """

    index: int
    nnodes: int
    lost: float
    term: int = 0  # the highest known; ours while we lead
    role: Role = Role.CANDIDATE
    leader: int = -1  # index of who leads `term`, as far as known
    _told: float = float("-inf")  # when the leader was heard
    _hosts: dict[int, _Host] = field(default_factory=dict)
    _welcomed: set[int] = field(default_factory=set)  # nodes, by us, in the term that we hold
    _confirmed: set[int] = field(default_factory=set)  # candidates that see our lease
    _mine: bool = False  # the storage that this candidate reads is the one that leaders write to
    _shared: bool = False  # so it is for all candidates
    _passed: int = 0  # terms up to this one belong to others
    _lease: _Lease = field(default_factory=_Lease)
    _alone_since: float | None = None  # leading without a strict majority
    _acts_from: float = 0.0  # an older leader may act until then
    _clear: float = float("-inf")  # until when the storage is known to hold no later claim than ours
    _sure: float = float("-inf")  # until when the hosts that are here are a strict majority, whoever speaks or not

    # ---------------------------------------------------------------------------------- relays

    def came(self, node: int, term: int, now: float) -> bool:
        """A relay said hello. False: it has accepted a later term than ours, or one that we do not know of; who leads
        does so no more."""
        if self.role is Role.LEADER and term >= self.term and not (term == self.term and node in self._welcomed):
            self._step_down(term)
            return False
        self._hosts[node] = _Host(term, now)
        self._sure = float("-inf")
        if self.role is Role.LEADER:
            self._judge_waiting(now)
        return True

    def welcomed(self, node: int) -> None:
        """The relay was told that we lead."""
        self._welcomed.add(node)

    def heard(self, node: int, now: float) -> None:
        """A relay that is here said something."""
        if node in self._hosts:
            self._hosts[node].heard = now

    def left(self, node: int, ended: bool) -> None:
        """The stream of a relay ended; `ended`: because the job has ended on its host, and the relay with it. After any
        other end another relay may come for this node, and obey somebody else."""
        self._sure = float("-inf")
        if ended and node in self._hosts:
            self._hosts[node].ended = True
        else:
            self._hosts.pop(node, None)

    def held(self, now: float) -> int:
        """Number of hosts whose relay is here, and was heard."""
        return sum(host.ended or now - host.heard <= self.lost for host in self._hosts.values())

    def majority(self, now: float) -> bool:
        """Whether a strict majority of all hosts is here. Asked before each decision: it looks at all hosts only when
        one that it counted on may have become silent."""
        if now <= self._sure:
            return True
        enough = self.nnodes // 2 + 1
        latest = sorted((float("inf") if host.ended else host.heard for host in self._hosts.values()), reverse=True)
        if len(latest) < enough:
            return False
        self._sure = latest[enough - 1] + self.lost  # hosts speak, but are never heard less than they were
        return now <= self._sure

    # ---------------------------------------------------------------------------------- other candidates

    def told(self, term: int, leader: int, now: float, shared: bool = False) -> bool:
        """Another candidate says that it leads `term`, and whether all see its lease; False when that is over."""
        if term < self.term or (term == self.term and self.role is Role.LEADER):
            return False
        self._step_down(term)
        self.role, self.leader, self._told = Role.FOLLOWER, leader, now
        self._shared = self._shared or shared
        return True

    def overruled(self, term: int) -> None:
        """A candidate or the storage knows of a later term than ours."""
        if term > self.term:
            self._step_down(term)

    def heard_since(self, at: float) -> bool:
        """Whether another leader was heard after `at`: a relay that came then is better off there."""
        return self.role is Role.FOLLOWER and self._told > at

    # ---------------------------------------------------------------------------------- the lease

    def saw_lease(self, term: int, counter: int, now: float) -> None:
        """The storage was read: the lease of the latest claim in it, and how far it has counted."""
        lease = self._lease
        if (term, counter) != (lease.term, lease.counter):
            self._lease = _Lease(term, counter, now, now)
        else:
            lease.looked = now
        self._mine = self._mine or (self.sees_lease and self.role is Role.FOLLOWER)  # our own lease proves nothing
        if self.role is Role.LEADER:
            if term > self.term:
                self._step_down(term)
            elif term == self.term:
                self._clear = now + self.lost

    def new_lease(self) -> None:
        """The lease is another one from now on: nothing is known of where it is kept."""
        self._lease, self._mine, self._shared, self._confirmed = _Lease(), False, False, set()

    def confirmed(self, index: int) -> None:
        """Another candidate sees the lease of our term."""
        self._confirmed.add(index)
        if len(self._confirmed) == count(self.nnodes) - 1:
            self._mine = self._shared = True

    @property
    def sees_lease(self) -> bool:
        """The lease of the very term that we know of is the latest that was seen from here."""
        return self._lease.term == self.term > 0

    @property
    def shared(self) -> bool:
        """All candidates see the lease, so that none of them can lead without the others' seeing it."""
        return self._mine and self._shared

    def _stale(self) -> bool:
        """The latest lease stood still over looks that succeeded."""
        return self._mine and self._lease.looked - self._lease.moved >= STALE * self.lost

    # ---------------------------------------------------------------------------------- verdicts

    def judge(self, now: float) -> Verdict:
        """What a candidate that does not lead may do."""
        if self.role is Role.LEADER:
            return Verdict.WAIT
        if self.majority(now):  # then whoever leads has none, whatever was heard of it
            return Verdict.LEAD
        if now - self._told <= self.lost or not self.held(now):
            return Verdict.WAIT
        self.role = Role.CANDIDATE
        alone = self._shared or 2 * self.held(now) >= self.nnodes  # nobody else can have a strict majority unseen
        return Verdict.CLAIM if alone and self._stale() else Verdict.WAIT

    def upcoming(self) -> int:
        """The term that we would lead."""
        return next_term(max([self.term, self._passed, *(host.term for host in self._hosts.values())]), self.index)

    def passed(self, term: int) -> None:
        """The generation of this term is claimed by another candidate."""
        self._passed = max(self._passed, term)

    def lead(self, term: int, now: float) -> None:
        """We lead from now on. Who led before may act for a while where its relays are not here."""
        first = max([self.term, *(host.term for host in self._hosts.values())]) == 0
        self.term, self.role, self.leader = term, Role.LEADER, self.index
        self._alone_since, self._welcomed, self._confirmed = None, set(), set()
        self._acts_from = now if first else now + self.lost
        self._clear = now + self.lost
        self._judge_waiting(now)

    def must_step_down(self, now: float) -> str:
        """Why we may lead no more; "" when we may. To be asked often."""
        if self.role is not Role.LEADER or self.majority(now) or now <= self._acts_from or self.nnodes == 1:
            self._alone_since = None  # one host: its relay went to another controller, which tells, or will be back
            return ""
        self._alone_since = now if self._alone_since is None else self._alone_since
        if now - self._alone_since <= self.lost or self._may_act_alone(now):
            return ""
        held = self.held(now)
        why = f"only {held} of {self.nnodes} hosts are heard"
        return f"{why}, and the lease in the shared directory could not be confirmed" if self.shared else why

    def step_down(self) -> None:
        """Leads no more; relays have to come anew."""
        self._step_down(self.term)

    def may_act(self, now: float) -> bool:
        """Whether decisions may be made and orders given at this moment."""
        if self.role is not Role.LEADER or now < self._acts_from:
            return False
        return self.majority(now) or self._may_act_alone(now)

    def _may_act_alone(self, now: float) -> bool:
        """Without a strict majority: nobody else can have one, or the storage says that nobody else leads."""
        if not self.held(now):
            return False
        if self.shared:
            return now <= self._clear
        return 2 * self.held(now) >= self.nnodes

    def _judge_waiting(self, now: float) -> None:
        if self.held(now) == self.nnodes:  # nobody is left who could obey another leader
            self._acts_from = min(self._acts_from, now)

    def _step_down(self, term: int) -> None:
        self.term = max(self.term, term)
        if self.role is Role.LEADER:
            self._hosts, self._sure = {}, float("-inf")
            self.leader = -1
        self.role = Role.CANDIDATE
