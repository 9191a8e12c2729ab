"""A simulated job that ClusterD steers: the negotiation of the product between its engine and a ClusterD for tests,
with messages that are late, lost or doubled, and subscriptions that break."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fake_clusterd import ALL, Cluster, Later

from mindspeed_tft.clusterd.negotiation import Negotiation, Output, Reconnect, Say
from mindspeed_tft.clusterd.words import Report, Signal
from mindspeed_tft.engine.machine import Engine
from mindspeed_tft.engine.types import Action, Advised, Consult, Event, Steered, Unadvised

from .layout import Scenario
from .simulation import Simulation

CONSULT = 6.0  # seconds


@dataclass(frozen=True)
class Line:
    """What befalls messages between a job and ClusterD."""

    delay: float = 0.2
    duplicate: float = 0.0
    loss: float = 0.0  # of signals
    late: float = 0.0  # a signal that comes long after its time
    cut: float = 0.0  # a subscription that breaks, at a signal or a report
    strategies: tuple[str, ...] = ALL


class SteeredSimulation(Simulation):
    def __init__(self, scenario: Scenario, line: Line) -> None:
        super().__init__(scenario)
        self.line = line
        self.deadlines = replace(self.deadlines, consult=CONSULT)
        self.engine = Engine(self.deadlines, scenario.layout.world_size, strategies=scenario.strategies)
        self.cluster = Cluster(line.strategies, flush=0.5)
        self.machine = Negotiation(scenario.layout.world_size)
        self.said: list[str] = []
        self.consults = self.unadvised = self.cuts = 0
        self._subscription = 0
        self._connect()

    def _connect(self) -> None:
        if self.machine.may_connect:
            assert self.cluster.hello("Init", "job", "taskd") == self.cluster.hello("Register", "job", "taskd") == 0
            self.cluster.subscribe()
            self._subscription += 1
            self._carry_out(self.machine.connected())
        self.after(1.0, self._connect)

    def lose(self) -> None:
        """The subscription breaks."""
        self.cuts += 1
        self._subscription += 1
        self._carry_out(self.machine.lost("the line was cut"))

    def _feed(self, event: Event) -> None:
        if not isinstance(event, (Steered, Advised)):
            self._carry_out(self.machine.event(event))
        super()._feed(event)

    def _do(self, action: Action) -> None:
        super()._do(action)
        self.consults += isinstance(action, Consult)
        self.unadvised += isinstance(action, Unadvised)
        self._carry_out(self.machine.action(action))

    def _carry_out(self, outputs: Iterable[Output]) -> None:
        for output in list(outputs):
            if isinstance(output, Report):
                self._send(output)
            elif isinstance(output, Say):
                self.said.append(output.text)
            elif isinstance(output, Reconnect):
                self._subscription += 1
            else:
                self.after(0.0, self._feeding(output))

    def _feeding(self, event: Event) -> Callable[[], None]:
        return lambda: self._feed(event)

    def _send(self, report: Report) -> None:
        number = self._subscription

        def arrives() -> None:
            if number == self._subscription and not self._is_cut():
                code, later = self.cluster.hear(report)
                self._carry_out(self.machine.answered(report, code, ""))
                self._put(later)

        self.after(self.line.delay / 2, arrives)  # reports of one job come in order

    def _put(self, later: list[Later]) -> None:
        for seconds, signal in later:
            copies = 0 if self.coin(self.line.loss) else 2 if self.coin(self.line.duplicate) else 1
            for _ in range(copies):
                long = CONSULT * 2 if self.coin(self.line.late) else 0.0
                self.after(seconds + long + self.jitter(self.line.delay), self._arriving(signal, self._subscription))

    def _arriving(self, signal: Signal, number: int) -> Callable[[], None]:
        def arrives() -> None:
            if number == self._subscription and not self._is_cut():
                self._carry_out(self.machine.signal(signal, {}))

        return arrives

    def _is_cut(self) -> bool:
        if self.coin(self.line.cut):
            self.lose()
            return True
        return False
