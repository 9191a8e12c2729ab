"""ClusterD's client of one job: the connection, and what the negotiation wants of both sides. Lives in the event loop
of the controller that leads, for as long as it leads. Decides nothing: see `negotiation`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from mindspeed_tft.clusterd import recover_pb2 as wire
from mindspeed_tft.clusterd import words as w
from mindspeed_tft.clusterd.address import Address, taskd_at
from mindspeed_tft.clusterd.negotiation import WHO, Negotiation, Nodes, Output, Place, Reconnect, Say
from mindspeed_tft.control import codec, tasks, tls
from mindspeed_tft.control.config import ControlConfig, ControlRefused
from mindspeed_tft.engine import types as t

log = logging.getLogger(__name__)

PAUSE = 1.0  # seconds between two attempts to connect
SHORT = 5.0  # a subscription that lasts shorter makes the next pause twice as long
LONGEST = 30.0
PASSIVE = 60.0  # the same, where it does not want this job, or a TaskD does its work
ANSWER = 10.0  # seconds for one answer
TRIES = 4  # of a report
LAST = 5.0  # seconds for reports at the end of the job
_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # its own are 5 s: more of them than a server likes end the connection
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 8 << 20),
    ("grpc.enable_http_proxy", 0),  # what goes over this line ends jobs: no proxy that some variable names hears it
    ("grpc.use_local_subchannel_pool", 1),  # a connection that failed is not remembered for the next attempt
)
_REQUESTS: dict[str, Any] = {
    "Init": wire.ClientInfo,
    "Register": wire.ClientInfo,
    "ReportStopComplete": wire.StopCompleteRequest,
    "ReportRecoverStrategy": wire.RecoverStrategyRequest,
    "ReportRecoverStatus": wire.RecoverStatusRequest,
    "ReportProcessFault": wire.ProcessFaultRequest,
}


class Rejected(Exception):
    """ClusterD does not take us, for a reason of its own."""

    def __init__(self, method: str, code: int, info: str) -> None:
        super().__init__(f"it answers {method} with {w.code_words(code)}{f': {info}' if info else ''}")
        self.code = code


class Client:
    """Speaks for one job: `run` until the job is over, then `drain`, then cancel `run`."""

    def __init__(self, config: ControlConfig, feed: Callable[[t.Event], None], nodes: Callable[[], Nodes]) -> None:
        """
        Args:
            feed: takes events for the engine.
            nodes: the ranks of each node, as they are connected.
        """
        self._config, self._feed, self._nodes = config, feed, nodes
        self._address = Address.parse(config.clusterd)
        self._job = config.clusterd_job
        self._machine = Negotiation(config.world_size)
        self._outputs: collections.deque[Output] = collections.deque()
        self._busy = self._broken = False
        self._reports: asyncio.Queue[tuple[w.Report, int]] = asyncio.Queue()  # each with its subscription
        self._subscriptions = 0
        self._channel: grpc.aio.Channel | None = None
        self._again = asyncio.Event()  # subscribe anew
        self._transport: tls.Transport | None = None
        self._complained = False

    # ---------------------------------------------------------------------------------- the controller's side

    def event(self, event: t.Event) -> None:
        """Something that the engine hears, too."""
        if not self._broken:
            try:
                self._do(self._machine.event(event))
            except Exception:
                self._give_up()

    def action(self, action: t.Action) -> None:
        """Something that the engine wants."""
        if not self._broken:
            try:
                self._do(self._machine.action(action))
            except Exception:
                self._give_up()

    def status(self) -> dict[str, str]:
        """For an operator."""
        place = "given up" if self._broken else self._machine.place.value
        return {"name": f"ClusterD at {self._address}", "job": self._job, "place": place}

    def _give_up(self) -> None:
        log.exception("ClusterD is not asked any more, by a mistake of ours; our own rules hold")
        self._broken = True
        self._again.set()
        self._feed(t.Steered(time.monotonic(), False, WHO, "a mistake of its client"))

    async def run(self) -> None:
        """Connects, again and again."""
        try:
            await self._run()
        except Exception:
            self._give_up()

    async def _run(self) -> None:
        sender = asyncio.ensure_future(self._send_all())
        try:
            pause = PAUSE
            while not self._broken:
                if self._machine.may_connect:
                    begun = time.monotonic()
                    pause = max(await self._visit(), min(2 * pause, LONGEST))
                    if time.monotonic() - begun >= SHORT:
                        pause = PAUSE
                    await asyncio.sleep(pause)
                else:
                    await asyncio.sleep(PAUSE / 5)
        finally:
            await tasks.end([sender])

    async def drain(self) -> None:
        """What was to be reported is, or it takes too long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._reports.join(), LAST)

    # ---------------------------------------------------------------------------------- what the negotiation wants

    def _do(self, outputs: Iterable[Output]) -> None:
        """In order. What follows from one of them comes after the others."""
        self._outputs.extend(outputs)
        if self._busy:
            return
        self._busy = True
        try:
            while self._outputs:
                output = self._outputs.popleft()
                if isinstance(output, w.Report):
                    self._reports.put_nowait((output, self._subscriptions))
                elif isinstance(output, t.Event):
                    self._feed(replace(output, at=time.monotonic()))
                elif isinstance(output, Say):
                    log.warning("%s", codec.line(output.text, 1000))
                elif isinstance(output, Reconnect):
                    log.warning("ClusterD: subscribing anew: %s", codec.line(output.why, 1000))
                    self._again.set()
        finally:
            self._busy = False

    # ---------------------------------------------------------------------------------- the connection

    async def _visit(self) -> float:
        """One subscription, from its begin to its end. Seconds until the next attempt."""
        if why := await taskd_at(self._config.clusterd_taskd):
            self._complain(f"{why}; this job has a client of ClusterD already, so ours does not connect")
            return PASSIVE
        self._again.clear()
        try:
            async with self._open() as channel:
                await self._introduce(channel)
                await self._subscribe(channel)
            why = "it ended the subscription"
        except Rejected as error:
            why = str(error)
            if error.code == w.SWITCHED_OFF:
                self._complain(f"{why}; set the label process-recover-enable=on of the job. Our own rules hold")
                return PASSIVE
        except grpc.aio.AioRpcError as error:
            why = tls.explain(error.code(), error.details())
        except (OSError, asyncio.TimeoutError, ControlRefused) as error:
            why = str(error) or "no answer in time"
        finally:
            self._channel = None
        if self._machine.place is not Place.AWAY:
            self._complained = True  # the engine says it
        self._do(self._machine.lost(codec.line(why, 500)))
        self._complain(f"ClusterD at {self._address}: {why}; our own rules hold until it is back")
        return PAUSE

    def _complain(self, text: str) -> None:
        """Once, until it is there again."""
        if not self._complained:
            self._complained = True
            log.warning("%s", codec.line(text, 1000))

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[grpc.aio.Channel]:
        address = self._address
        if not address.tls:
            async with grpc.aio.insecure_channel(address.target, options=_OPTIONS) as channel:
                yield channel
            return
        if self._transport is None:
            assert self._config.tls_dir is not None  # refused at start-up
            directory = tls.directory_of(self._config.tls_dir, self._config.host)
            self._transport = tls.Transport(directory, tls.access(self._config))
        self._transport.watch()
        server = await self._transport.look_at(address.target, "", ANSWER)
        credentials = self._transport.channel_credentials(server)
        async with grpc.aio.secure_channel(address.target, credentials, options=_OPTIONS) as channel:
            yield channel

    async def _introduce(self, channel: grpc.aio.Channel) -> None:
        who = wire.ClientInfo(jobId=self._job, role=w.ROLE)
        for method in ("Init", "Register"):
            status = await self._call(channel, method, who)
            if not w.succeeded(status.code):
                raise Rejected(method, status.code, status.info)

    async def _subscribe(self, channel: grpc.aio.Channel) -> None:
        call = channel.unary_stream(
            "/Recover/SubscribeProcessManageSignal",
            request_serializer=wire.ClientInfo.SerializeToString,
            response_deserializer=wire.ProcessManageSignal.FromString,
        )(wire.ClientInfo(jobId=self._job, role=w.ROLE))
        self._channel, self._complained = channel, False
        self._subscriptions += 1
        log.warning("ClusterD at %s decides how faults of job %s are answered", self._address, self._job)
        self._do(self._machine.connected())
        again = asyncio.ensure_future(self._again.wait())
        try:
            while True:
                reading = asyncio.ensure_future(call.read())
                await asyncio.wait([reading, again], return_when=asyncio.FIRST_COMPLETED)
                if again.done():
                    reading.cancel()
                    call.cancel()
                    return
                message = reading.result()
                if not isinstance(message, wire.ProcessManageSignal):  # the end
                    code = await call.code()
                    if code is not grpc.StatusCode.OK:
                        raise OSError(tls.explain(code, await call.details()))
                    return
                self._hear(message)
        finally:
            again.cancel()

    def _hear(self, message: wire.ProcessManageSignal) -> None:
        if message.jobId and message.jobId != self._job:
            log.warning("ClusterD sent a signal of job %s to %s: ignored", codec.line(message.jobId, 80), self._job)
            return
        try:
            signal = from_wire(message)
        except ValueError as error:
            log.warning("ClusterD sent a %s that makes no sense: %s", codec.line(message.signalType, 40), error)
            return
        if signal.kind != w.KEEP_ALIVE:
            log.info("ClusterD: %s", signal)
        self._do(self._machine.signal(signal, self._nodes()))

    # ---------------------------------------------------------------------------------- reports

    async def _send_all(self) -> None:
        while True:
            report, subscription = await self._reports.get()
            try:
                await self._send(report, subscription)
            except Exception:
                self._give_up()
            finally:
                self._reports.task_done()

    async def _send(self, report: w.Report, subscription: int) -> None:
        """Answers that say so, and lost ones, are tried again: it takes a report twice."""
        code, info = 0, ""
        for number in range(TRIES):
            if number:
                await asyncio.sleep(PAUSE)
            channel = self._channel
            if channel is None or subscription != self._subscriptions:
                return  # it forgot the event with the subscription, and would take this for a word about the next one
            call = asyncio.ensure_future(self._call(channel, report.method, to_wire(report, self._job)))
            await asyncio.wait([call])
            if call.cancelled() or call.exception() is not None:  # the channel was closed, or nobody answers
                code, info = w.CLIENT_FAILED, "no answer"
                continue
            status = call.result()
            code, info = status.code, status.info
            if code < 500:
                break
        self._do(self._machine.answered(report, code, info))

    async def _call(self, channel: grpc.aio.Channel, method: str, request: Any) -> wire.Status:
        call = channel.unary_unary(
            f"/Recover/{method}",
            request_serializer=_REQUESTS[method].SerializeToString,
            response_deserializer=wire.Status.FromString,
        )
        found: wire.Status = await call(request, timeout=ANSWER)
        return found


def from_wire(message: wire.ProcessManageSignal) -> w.Signal:
    """
    Raises:
        ValueError: a rank is no number.
    """
    return w.Signal(
        codec.line(message.uuid, 100),
        codec.line(message.signalType, 40),
        tuple(codec.line(action, 40) for action in message.actions),
        tuple((int(fault.rankId), codec.line(fault.faultType, 8)) for fault in message.faultRanks),
        codec.line(message.changeStrategy, 40),
        message.timeout,
        tuple(int(node) for node in message.nodeRankIds),
        codec.line(message.extraParams, 1000),
    )


def to_wire(report: w.Report, job: str) -> Any:
    """The request of a report."""
    faults = [wire.FaultRank(rankId=str(rank), faultType=kind) for rank, kind in report.faults]
    status = wire.Status(code=report.code, info=report.info[:1000])
    if report.method == "ReportProcessFault":
        return wire.ProcessFaultRequest(jobId=job, faultRanks=faults)
    if report.method == "ReportStopComplete":
        return wire.StopCompleteRequest(jobId=job, status=status, faultRanks=faults)
    if report.method == "ReportRecoverStrategy":
        return wire.RecoverStrategyRequest(jobId=job, faultRanks=faults, strategies=report.strategies)
    return wire.RecoverStatusRequest(jobId=job, status=status, strategy=report.strategy)
