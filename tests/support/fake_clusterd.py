"""A ClusterD for tests, from the facts of its interface: its side of the negotiation as a pure state machine, which
notes whatever a job does at the wrong time, and a gRPC server around it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import grpc
import grpc.aio

from mindspeed_tft.clusterd import recover_pb2 as wire
from mindspeed_tft.clusterd import words as w
from mindspeed_tft.clusterd.words import Report, Signal

ALL = (w.RETRY, w.IN_PLACE, w.RECOVER, w.DUMP, w.EXIT)
FLUSH = 1.0  # seconds in which more faults may come
_METHOD = {"stop": "ReportStopComplete", "strategies": "ReportRecoverStrategy", "status": "ReportRecoverStatus"}
Later = tuple[float, Signal]  # seconds from now


class Cluster:
    """What one job sees of it. `violations`: what that job did at the wrong time, or wrongly."""

    def __init__(self, strategies: tuple[str, ...] = ALL, flush: float = FLUSH, job: str = "job") -> None:
        self.strategies, self.flush, self.job = strategies, flush, job
        self.state = "idle"  # "stop", "strategies", "status"; "pause", "paused", "continue"
        self.violations: list[str] = []
        self.log: list[str] = []  # what was decided, and what came of it
        self.reports: list[Report] = []
        self.events = 0
        self.faults: dict[int, str] = {}
        self.tried: list[str] = []
        self.offered: tuple[str, ...] = ()
        self.leaving: tuple[int, ...] = ()  # nodes that have to go with the next event
        self.initialised = self.registered = False

    @property
    def uuid(self) -> str:
        return f"event-{self.events}"

    def hello(self, method: str, job: str, role: str) -> int:
        """Init and Register."""
        if job != self.job:
            return 402
        if role != w.ROLE:
            self.violations.append(f"{method} as {role!r}")
        if method == "Register" and not self.initialised:
            self.violations.append("Register before Init")
            return 408
        self.initialised = True
        self.registered = self.registered or method == "Register"
        return w.OK

    def subscribe(self) -> None:
        """It forgets what was under way."""
        if not self.registered:
            self.violations.append("subscribed before Register")
        self.state = "idle"

    # ------------------------------------------------------------------------------------------------ what begins here

    def fault(self, faults: dict[int, str], kind: str = w.STOP) -> list[Later]:
        """A fault that it sees itself."""
        self.faults = dict(faults)
        return self._begin(kind)

    def pause(self) -> list[Later]:
        self.events += 1
        self.state = "pause"
        return [(0.0, Signal(self.uuid, w.STOP, (w.PAUSE_TRAIN,), timeout=20))]

    def go_on(self) -> list[Later]:
        assert self.state == "paused"
        self.state = "continue"
        return [(0.0, Signal(self.uuid, w.CHANGE, ("change_strategy",), strategy=w.CONTINUE))]

    def _begin(self, kind: str = w.STOP) -> list[Later]:
        self.events += 1
        self.tried = []
        self.state = "status" if kind == w.SAVE_AND_EXIT else "stop"
        if kind == w.SAVE_AND_EXIT:
            self.tried = [w.DUMP]
        signals = [(0.0, Signal(self.uuid, kind, ("stop_train",), self._told()))]
        if w.OTHER in self.faults.values() and kind == w.STOP:
            signals.insert(0, (0.0, Signal(f"pre-{self.uuid}", w.PRE_EXIT, ("pre exit process",), self._told())))
        return signals

    def _told(self) -> tuple[tuple[int, str], ...]:
        return tuple(sorted(self.faults.items()))

    @property
    def retryable(self) -> bool:
        return set(self.faults.values()) in ({w.MEMORY}, {w.NETWORK})

    # ------------------------------------------------------------------------------------------------ reports

    def hear(self, report: Report) -> tuple[int, list[Later]]:
        """The code of the answer, and the signals that follow."""
        self.reports.append(report)
        self.violations += [f"{report.method}: no rank in {report.faults}" for rank, _ in report.faults if rank < 0]
        if report.method == "ReportProcessFault":
            return w.OK, self._hear_of_faults(report)
        if self.state in ("pause", "continue", "paused"):
            return w.OK, self._hear_of_pause(report)
        if report.method != _METHOD.get(self.state):
            self.violations.append(f"{report.method} in state {self.state!r}: {report}")
            return 401, []
        if report.method == "ReportStopComplete":
            return w.OK, self._stopped(report)
        if report.method == "ReportRecoverStrategy":
            return w.OK, self._decide(report)
        return w.OK, self._ended(report)

    def _hear_of_faults(self, report: Report) -> list[Later]:
        if not report.faults:
            self.violations.append("ReportProcessFault without one")
        if self.state == "idle":
            self.faults = dict(report.faults)
            return self._begin()
        self.faults |= dict(report.faults)
        return []

    def _hear_of_pause(self, report: Report) -> list[Later]:
        wanted = "ReportStopComplete" if self.state == "pause" else "ReportRecoverStatus"
        if report.method != wanted:
            self.violations.append(f"{report.method} in state {self.state!r}")
        self.log.append(f"{self.state} {report.code}")
        if self.state == "paused":  # it was ended
            self.state = "idle"
        else:
            self.state = "paused" if self.state == "pause" and report.code == w.OK else "idle"
        return [] if report.code != w.CLIENT_FAILED else [(0.0, Signal("kill", w.KILL_MASTER))]

    def _stopped(self, report: Report) -> list[Later]:
        if report.code == w.NOT_READY:
            self.state = "idle"
            self.log.append("not ready")
            return [(0.0, Signal("kill", w.KILL_MASTER))]
        if report.code != w.OK:
            self.violations.append(f"ReportStopComplete {report.code}")
        self.state = "strategies"
        return [(0.0 if self.retryable else self.flush, self._all_faults())]

    def _all_faults(self) -> Signal:
        actions = ("on_global_rank", *((w.FAULT_NODES_EXIT,) if self.leaving else ()))
        return Signal(self.uuid, w.GLOBAL, actions, self._told(), nodes=self.leaving)

    def _decide(self, report: Report) -> list[Later]:
        self.offered = report.strategies
        if not report.strategies or unknown(report.strategies):
            self.violations.append(f"strategies {report.strategies}")
        return self._choose()

    def _choose(self) -> list[Later]:
        after_recover = {w.RECOVER, w.IN_PLACE} & {*self.tried}
        order = (w.DUMP, w.EXIT) if after_recover else (w.RETRY, w.IN_PLACE, w.RECOVER, w.DUMP, w.EXIT)
        for strategy in order:
            reported = w.RECOVER if strategy == w.IN_PLACE else strategy
            right = strategy != w.RETRY or self.retryable
            if strategy in self.strategies and reported in self.offered and right and strategy not in self.tried:
                break
        else:
            strategy = w.EXIT
        self.tried.append(strategy)
        self.log.append(strategy)
        self.state = "idle" if strategy == w.EXIT else "status"
        if strategy == w.IN_PLACE:
            actions = ("change_strategy", w.FAULT_NODES_RESTART)
            return [(0.0, Signal(self.uuid, w.CHANGE, actions, self._told(), w.RECOVER, extra=w.IN_PLACE))]
        return [(0.0, Signal(self.uuid, w.CHANGE, ("change_strategy",), self._told(), strategy, nodes=self.leaving))]

    def _ended(self, report: Report) -> list[Later]:
        last = self.tried[-1]
        if report.strategy != (w.RECOVER if last == w.IN_PLACE else last):
            self.violations.append(f"result of {report.strategy!r}, which was decided: {last}")
        self.log.append(f"{report.strategy} {report.code}")
        if w.succeeded(report.code):
            self.state = "idle"
            self.faults = {}
            return []
        if report.code == w.RETRY_FAILED:
            self.state = "strategies"
            return [(self.flush, self._all_faults())]
        return self._choose()


def unknown(strategies: tuple[str, ...]) -> list[str]:
    return [strategy for strategy in strategies if strategy not in (w.RETRY, w.RECOVER, w.DUMP, w.EXIT)]


class Server:
    """The service on a port of this host, in a thread of its own. `hook(signal)` may say how often a signal is sent."""

    def __init__(self, cluster: Cluster, credentials: grpc.ServerCredentials | None = None) -> None:
        self.cluster = cluster
        self.hook: Callable[[Signal], int] = lambda _: 1
        self.subscriptions = 0
        self.open = 0
        self.port = 0
        self._credentials = credentials
        self._queues: set[asyncio.Queue[Signal | None]] = set()
        self._loop = asyncio.new_event_loop()
        self._up: Future[None] = Future()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)

    def start(self, port: int = 0) -> Server:
        self.port = port
        self._thread.start()
        self._up.result(10)
        return self

    def stop(self) -> None:
        """It is gone, without a word."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(10)

    def vanish(self) -> None:
        """As `stop`, from inside a hook."""
        self._end.set()

    def send(self, later: list[Later]) -> None:
        """Signals of an event that begins in ClusterD."""
        self._loop.call_soon_threadsafe(self._put, later)

    def cut(self) -> None:
        """All subscriptions end."""
        self._loop.call_soon_threadsafe(lambda: [queue.put_nowait(None) for queue in self._queues])

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _serve(self) -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        methods: dict[str, Any] = {
            "Init": (wire.ClientInfo, self._hello("Init")),
            "Register": (wire.ClientInfo, self._hello("Register")),
            "ReportProcessFault": (wire.ProcessFaultRequest, self._hear("ReportProcessFault")),
            "ReportStopComplete": (wire.StopCompleteRequest, self._hear("ReportStopComplete")),
            "ReportRecoverStrategy": (wire.RecoverStrategyRequest, self._hear("ReportRecoverStrategy")),
            "ReportRecoverStatus": (wire.RecoverStatusRequest, self._hear("ReportRecoverStatus")),
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                handle, request_deserializer=kind.FromString, response_serializer=wire.Status.SerializeToString
            )
            for name, (kind, handle) in methods.items()
        }
        handlers["SubscribeProcessManageSignal"] = grpc.unary_stream_rpc_method_handler(
            self._subscribe,
            request_deserializer=wire.ClientInfo.FromString,
            response_serializer=wire.ProcessManageSignal.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Recover", handlers),))
        place = f"127.0.0.1:{self.port}"
        secured = self._credentials
        self.port = server.add_secure_port(place, secured) if secured else server.add_insecure_port(place)
        await server.start()
        self._up.set_result(None)
        await self._end.wait()
        await server.stop(0)

    def _hello(self, method: str) -> Callable[..., Any]:
        async def handle(request: wire.ClientInfo, _: Any) -> wire.Status:
            return wire.Status(code=self.cluster.hello(method, request.jobId, request.role))

        return handle

    def _hear(self, method: str) -> Callable[..., Any]:
        async def handle(request: Any, _: Any) -> wire.Status:
            code, later = self.cluster.hear(from_wire(method, request))
            self._put(later)
            return wire.Status(code=code)

        return handle

    def _put(self, later: list[Later]) -> None:
        for seconds, signal in later:
            for _ in range(self.hook(signal)):
                for queue in self._queues:
                    self._loop.call_later(seconds, queue.put_nowait, signal)

    async def _subscribe(self, request: wire.ClientInfo, _: Any) -> AsyncIterator[wire.ProcessManageSignal]:
        self.cluster.subscribe()
        self.subscriptions += 1
        for old in self._queues:  # a new subscriber replaces the one before
            old.put_nowait(None)
        queue: asyncio.Queue[Signal | None] = asyncio.Queue()
        self._queues.add(queue)
        self.open += 1
        try:
            yield wire.ProcessManageSignal(signalType=w.KEEP_ALIVE, jobId=request.jobId)
            while (signal := await queue.get()) is not None:
                yield to_wire(signal, request.jobId)
        finally:
            self._queues.discard(queue)
            self.open -= 1


def to_wire(signal: Signal, job: str) -> wire.ProcessManageSignal:
    return wire.ProcessManageSignal(
        uuid=signal.uuid,
        jobId=job,
        signalType=signal.kind,
        actions=signal.actions,
        faultRanks=[wire.FaultRank(rankId=str(rank), faultType=kind) for rank, kind in signal.faults],
        changeStrategy=signal.strategy,
        timeout=signal.timeout,
        nodeRankIds=[str(node) for node in signal.nodes],
        extraParams=signal.extra,
    )


def from_wire(method: str, request: Any) -> Report:
    fields = {field.name for field in request.DESCRIPTOR.fields}
    return Report(
        method,
        request.status.code if "status" in fields else 0,
        request.status.info if "status" in fields else "",
        tuple((int(fault.rankId), fault.faultType) for fault in request.faultRanks) if "faultRanks" in fields else (),
        tuple(request.strategies) if "strategies" in fields else (),
        request.strategy if "strategy" in fields else "",
    )
