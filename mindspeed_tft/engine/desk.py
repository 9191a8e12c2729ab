"""The desk at which the engine works: what time it is, what is going out, and which orders are open.

There are two times. `at` is the caller's, of the current event: what is told is told with it. `now` is the engine's
own, by which it waits: it goes on with the caller's, but a gap between two events counts for `longest` seconds at most.
While nobody handed over events (the controller was stopped, its host suspended, its clock set), nobody could be heard,
so that nobody is late because of it.

Shared by all flows of the engine (the life of the job, a repair, a dump). It keeps books and decides nothing.
"""

from __future__ import annotations

import math

from mindspeed_tft.engine.incident import Incident
from mindspeed_tft.engine.types import Action, LinkState, Note, Order, OrderDone, OrderKind, Stop

Payload = dict[str, str | int | list[str] | dict[str, str]]


class Desk:
    """Outgoing actions and the order book."""

    def __init__(self, epoch: int = 0, issued: int = 0, longest: float = math.inf) -> None:
        """`epoch`, `issued`: the last epoch and the last order id that were used before."""
        self.at = self.now = 0.0
        self._longest = longest
        self._begun = False
        self.incident = Incident()
        self.stage = ""
        self.epoch = epoch
        self.doubt = ""  # why the numbers of all ranks may be wrong, as long as they may be
        self.link = LinkState()  # of all collectives
        self._out: list[Action] = []
        self._issued = issued
        self._orders: dict[int, Order] = {}
        self._answered: set[int] = set()

    def advance(self, at: float) -> float:
        """The time of the next event. Returns the seconds that count for nothing, or below 0: the clock went back."""
        gap = at - self.at if self._begun else 0.0
        if -self._longest <= gap < 0:  # it waited for its turn
            return 0.0
        self._begun, self.at = True, at
        self.now = self.now + min(max(gap, 0.0), self._longest)
        return gap if gap < 0 else max(0.0, gap - self._longest)

    def put(self, action: Action) -> None:
        self._out.append(action)

    def drain(self) -> list[Action]:
        out, self._out = self._out, []
        return out

    def enter(self, stage: str) -> None:
        """A stage begins; what is noted from now on belongs to it."""
        self.stage = stage
        self.incident.enter(stage, self.at)

    def note(self, text: str, warn: bool = False) -> None:
        """A decision and its reason, for the log and for the incident."""
        self.incident.line(self.at, self.stage, text)
        self.put(Note(self.stage, text, warn))

    def stop(self, ranks: tuple[int, ...], reason: str) -> None:
        """Stop these ranks under the current epoch; a rank that knows the epoch already ignores it."""
        if ranks:
            self.put(Stop(self.epoch, ranks, reason, self.doubt))

    def issue(self, rank: int, kind: OrderKind, payload: Payload) -> Order:
        self._issued += 1
        order = Order(self._issued, rank, kind, payload)
        self._orders[order.id] = order
        self.put(order)
        return order

    def link_payload(self) -> Payload:
        """What ranks have to know of the link; nothing where the job was never moved."""
        link = self.link
        told = {"name": link.name, "before": link.before, "since": link.since, "epoch": str(link.epoch)}
        return {"link": told} if link.epoch else {}

    def void(self) -> None:
        """Whatever was ordered so far counts no more, and answers to it say nothing."""
        self._orders.clear()
        self._answered.clear()

    def open(self, order: Order) -> bool:
        return order.id not in self._answered

    def take(self, event: OrderDone) -> Order | None:
        """The order that this event answers; None when nobody asked that rank, or the answer came before."""
        order = self._orders.get(event.order)
        if order is None or order.rank != event.rank or event.order in self._answered:
            return None
        self._answered.add(event.order)
        return order
