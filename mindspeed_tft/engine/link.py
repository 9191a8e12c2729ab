"""Another network link for all collectives, while all ranks are held: what is ordered, and what follows a failure.

    CHECK --all can use it--> MOVE --all moved--> TEST --all groups work--> KEEP --> done
      |                         |                  |
      +--> nothing happened     +----- any failure +--> MOVE_BACK --> TEST_BACK --> failed, on the link before
                                                            |             |
                                                            +-------------+--> broken: everybody is stopped

Each move has an epoch of its own, as a regroup after a stop has: a rank that did not hear of it meets nobody. A stage
waits for all its ranks, also when one has failed, because some are busy until their own limit ends. Which link a rank
goes back to, and which one a regroup uses, is the one that was kept last: so a stop in the middle of all this needs no
other care than that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from mindspeed_tft.engine.desk import Desk, Payload
from mindspeed_tft.engine.hold import AGAIN, Data, Holds, Outcome, Refusal
from mindspeed_tft.engine.roster import Roster
from mindspeed_tft.engine.types import Asked, Deadlines, LinkState, Order, OrderDone, OrderKind
from mindspeed_tft.engine.words import count, ranks, some

# Of an interface, as the kernel allows it: at most 15 bytes, no slash, no blank. A colon would name an alias, which has
# no state.
NAME = re.compile(r"[^\s/:,]{1,15}")
DEFAULT = "default"  # what operators call the link that the backend chooses by itself at the start
BUILD_AT_MOST = 10.0  # seconds for one group


class Stage(str, Enum):
    """What is ordered. The values are the acts that orders name; a rank does not ask why."""

    CHECK = "check"
    MOVE = "move"
    TEST = "test"
    KEEP = "keep"
    MOVE_BACK = "move back"
    TEST_BACK = "test back"


_ACTS = {Stage.MOVE_BACK: Stage.MOVE.value, Stage.TEST_BACK: Stage.TEST.value}


def named(link: str) -> str:
    """A link for an operator."""
    return link or DEFAULT


def wanted(state: LinkState, args: Mapping[str, str], back: bool) -> str:
    """The link that a request asks for.

    Raises:
        Refusal: there is none to go back to, or nobody knows whether it was done already; none is named, no interface
            can have that name, or the job uses it already.
    """
    if back and args.get(AGAIN):  # said twice, it would undo what was done
        raise Refusal(
            f"another controller leads now, and collectives use link {named(state.name)}, and used"
            f" {named(state.before)} before; ask again if they are to go back"
        )
    if back and not state.epoch:
        raise Refusal("the job was never moved to another link: there is none to go back to")
    link = state.before if back else args.get("link", "").strip()
    if not back and not link:
        raise Refusal("no link is named; give the name of a network interface, such as eth1")
    if bad := [part for part in link.split(",") if link and not NAME.fullmatch(part)]:
        raise Refusal(f"{bad[0]!r} cannot be the name of a network interface")
    link = "" if link == DEFAULT else link
    if link == state.name and not args.get(AGAIN):
        raise Refusal(f"collectives use link {named(link)} already")
    return link


def offer(holds: Holds, desk: Desk, roster: Roster, deadlines: Deadlines) -> None:
    """Let operators ask for another link."""

    def make(back: bool) -> Callable[[Asked], Switch]:
        return lambda event: Switch(desk, roster, deadlines, wanted(desk.link, event.args, back))

    limit = len(Stage) * deadlines.order + deadlines.stop  # it ends before, whatever happens
    holds.offer("switch-link", make(back=False), limit)
    holds.offer("switch-back", make(back=True), limit)


@dataclass
class _Answers:
    """Of one stage, by rank."""

    results: dict[int, dict[str, str]]
    failures: dict[int, str]


class Switch:
    """One request to change the link. `outcome`: None while it goes on; `broken`: why nothing but a stop helps."""

    def __init__(self, desk: Desk, roster: Roster, deadlines: Deadlines, link: str) -> None:
        self.broken = ""
        self.stage: Stage | None = None  # None: not all ranks are held yet
        self._desk, self._roster, self._deadlines = desk, roster, deadlines
        self._to = link
        self._members: tuple[int, ...] = ()
        self._pending: dict[int, Order] = {}
        self._answers = _Answers({}, {})
        self._end = self._begun = 0.0
        self._step = 0  # after which ranks are held
        self._epoch = 0  # of the groups that are being built
        self._failure = ""
        self._tested: Data = {}
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    @property
    def doing(self) -> str:
        """For the operator who waits."""
        link = self._desk.link.name if self.stage in (Stage.MOVE_BACK, Stage.TEST_BACK) else self._to
        return f"{self.stage.value} link {named(link)}" if self.stage is not None else ""

    # ------------------------------------------------------------------------------------------------ going on

    def begin(self, members: tuple[int, ...], step: int) -> None:
        """All ranks are held after `step`."""
        self._members, self._step, self._begun = members, step, self._desk.now
        if self._to == self._desk.link.name:  # done for an engine before this one
            told: Data = {"link": named(self._to), "before": named(self._desk.link.before), "step": step}
            self._outcome = Outcome(True, f"collectives use link {named(self._to)} now", told)
            return
        self._desk.note(f"link {named(self._desk.link.name)} -> {named(self._to)}, after step {step}")
        self._run(Stage.CHECK, {"link": self._to})

    def _run(self, stage: Stage, payload: Payload) -> None:
        self.stage, self._answers = stage, _Answers({}, {})
        self._end = self._desk.now + self._deadlines.order
        self._desk.note(f"link: {stage.value} on {count(len(self._members), 'rank')}")
        act = _ACTS.get(stage, stage.value)
        for rank in self._members:
            self._pending[rank] = self._desk.issue(rank, OrderKind.LINK, {"act": act, **payload})

    def _move(self, stage: Stage, link: str) -> None:
        """A failing rank may be busy for five times the limit of a group (measured on gloo), and others for once more
        until they miss it: both fit into the time of an order, and into that of a stop, which may come meanwhile."""
        self._desk.epoch += 1
        self._epoch = self._desk.epoch
        seconds = min(BUILD_AT_MOST, self._deadlines.order / 8, self._deadlines.stop / 6)
        self._run(stage, {"link": link, "epoch": self._epoch, "seconds": f"{seconds:g}"})

    def _test(self, stage: Stage) -> None:
        self._run(stage, {"seconds": f"{min(2 * BUILD_AT_MOST, self._deadlines.order / 2):g}"})

    def _advance(self) -> None:
        """All orders of the stage are answered, or their time is over."""
        stage, failures = self.stage, self._answers.failures
        if stage is Stage.CHECK:
            why = _words(failures) or self._contradiction()
            if why:
                self._fail(f"nothing was changed: {why}")
            else:
                self._move(Stage.MOVE, self._to)
        elif stage in (Stage.MOVE, Stage.TEST) and failures:
            doing = "build the groups" if stage is Stage.MOVE else "test the groups"
            self._failure = f"could not {doing} on link {named(self._to)}: {_words(failures)}"
            self._desk.note(self._failure, warn=True)
            self._move(Stage.MOVE_BACK, self._desk.link.name)
        elif stage is Stage.MOVE:
            self._test(Stage.TEST)
        elif stage is Stage.TEST:
            self._keep()
        elif stage is Stage.KEEP:
            self._done()
        elif failures:
            self.broken = (
                f"no link works: {self._failure}; then link {named(self._desk.link.name)} could not be put back:"
                f" {_words(failures)}"
            )
        elif stage is Stage.MOVE_BACK:
            self._test(Stage.TEST_BACK)
        else:
            self._fail(f"{self._failure}. Link {named(self._desk.link.name)} is put back, and tested")

    def _contradiction(self) -> str:
        """Why a link that each host can use does not join them."""
        hosts: dict[str, set[str]] = {}  # by the address, those that have it
        for rank, result in self._answers.results.items():
            for address in filter(None, result.get("addresses", "").split(",")):
                hosts.setdefault(address, set()).add(self._roster.infos[rank].host)
        shared = {address: names for address, names in hosts.items() if len(names) > 1}
        if not shared:
            return ""
        address, names = min(shared.items())
        told = some(sorted(names))
        return f"the hosts {told} have the same address on it, {address}: it cannot join them (such as lo, or a bridge)"

    def _keep(self) -> None:
        """From here on this is the link of the job, whatever happens."""
        results = self._answers.results
        first = results[min(results)]
        self._tested = {name: int(first[name]) for name in ("groups", "bytes") if name in first}
        state = self._desk.link
        # The time is told by a rank: the engine has no clock that a person reads.
        self._desk.link = LinkState(self._to, state.name, first.get("at", ""), self._epoch)
        self._run(Stage.KEEP, self._desk.link_payload())

    def _done(self) -> None:
        state, seconds = self._desk.link, self._desk.now - self._begun
        text = (
            f"collectives of {count(len(self._members), 'rank')} use link {named(state.name)} now, and not"
            f" {named(state.before)}: {count(int(self._tested.get('groups', 0)), 'group')} of the first rank tested"
        )
        self._desk.note(text)
        told: Data = {"link": named(state.name), "before": named(state.before), "since": state.since}
        self._outcome = Outcome(True, text, {**told, **self._tested, "step": self._step, "seconds": round(seconds, 3)})

    def _fail(self, why: str) -> None:
        self._desk.note(f"link {named(self._to)}: {why}", warn=True)
        data: Data = {"link": named(self._desk.link.name), "wanted": named(self._to), "step": self._step}
        self._outcome = Outcome(False, why, data)

    # ------------------------------------------------------------------------------------------------ what happens

    def done(self, order: Order, event: OrderDone) -> None:
        if self._pending.get(order.rank) is not order:
            return
        del self._pending[order.rank]
        if event.ok:
            self._answers.results[order.rank] = event.result
        else:
            self._answers.failures[order.rank] = event.message or "no reason"
        if not self._pending:
            self._advance()

    def repeat(self, rank: int) -> None:
        if rank in self._pending:
            self._desk.put(self._pending[rank])

    def tick(self) -> None:
        if self.stage is None or self._outcome is not None or self.broken or self._desk.now < self._end:
            return
        late = dict.fromkeys(self._pending, f"no answer within {self._deadlines.order:g} s")
        self._pending = {}
        if self.stage is Stage.KEEP:  # all was tested: whoever is silent now is a matter for the watch
            self._desk.note(f"link: no answer of {ranks(late)}, which is told again by the next regroup", warn=True)
        else:
            self._answers.failures.update(late)
        self._advance()


class Heard:
    """What ranks say of the link when they register: what an engine before this one left behind."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._unsettled = 0

    def take(self, told: LinkState) -> None:
        """The latest move counts, because it was kept only when all groups had been tested on all ranks."""
        if told.epoch > self._desk.link.epoch:
            self._desk.link = replace(told, unsettled=0)
        self._unsettled = max(self._unsettled, told.unsettled)

    def as_dict(self) -> dict[str, str]:
        """For `tftctl status`: nothing where the job was never moved."""
        link = self._desk.link
        return {"before": named(link.before), "since": link.since} if link.epoch else {}

    def settled(self) -> None:
        """All groups were built anew: whatever was begun before is over."""
        self._unsettled = 0

    def doubt(self, ours: bool) -> str:
        """Why the groups have to be built anew; "" where they need not. `ours`: a move is this engine's own."""
        begun, self._unsettled = self._unsettled, 0
        if ours or begun <= self._desk.link.epoch:
            return ""
        return "the controller was lost while collectives moved to another link: nobody knows on which they are"


def _words(failures: dict[int, str]) -> str:
    """The same reason on many ranks is said once."""
    by_reason: dict[str, list[int]] = {}
    for rank, why in sorted(failures.items()):
        by_reason.setdefault(why, []).append(rank)
    return some((f"{ranks(members)}: {why}" for why, members in by_reason.items()), separator="; ", limit=3)
