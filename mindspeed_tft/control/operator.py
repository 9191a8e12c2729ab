"""The operator's door at a controller: who may come in, what is asked, and the answers on their way back.

Nothing is decided here. `status` is read from whoever leads; everything else is an event for the engine, and what the
engine answers is passed on to the one who asked.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio
from cryptography import x509

from mindspeed_tft.control import certificates, codec, tls
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.engine import types as t

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[wire.OperatorAsks, wire.OperatorHears]

log = logging.getLogger(__name__)

SERVICE = "mindspeed_tft.Operator"
METHOD = f"/{SERVICE}/Ask"
PIECE = 1 << 20  # bytes of data in one message
MOST = 32  # requests that wait at the same time
_REST = 10.0  # times what a status cost, until it is taken anew
_MAX_ARGS = 16
_MAX_ARG = 1000  # characters

Word = t.Progress | t.Answer


class Operators:
    """Those who wait for an answer of the engine."""

    def __init__(self, feed: Callable[[t.Event], None]) -> None:
        self._feed = feed
        self._waiting: dict[str, asyncio.Queue[Word]] = {}

    def ask(self, event: t.Asked) -> asyncio.Queue[Word] | None:
        """Where the words of the engine will come; None where this request waits already, or too many do."""
        if event.id in self._waiting or len(self._waiting) >= MOST:
            return None
        queue: asyncio.Queue[Word] = asyncio.Queue()
        self._waiting[event.id] = queue
        self._feed(event)
        return queue

    def hear(self, word: Word) -> None:
        """The engine says something to one who asked, if he is still there."""
        queue = self._waiting.get(word.id)
        if queue is not None:
            queue.put_nowait(word)

    def leave(self, name: str, at: float | None = None) -> None:
        """Nobody waits for this answer any more; `at`: when he went away without it."""
        if self._waiting.pop(name, None) is not None and at is not None:
            self._feed(t.Withdrawn(at, name))

    def end(self, why: str) -> None:
        """Nothing will be answered here any more."""
        for name, queue in self._waiting.items():
            queue.put_nowait(t.Answer(name, False, why, lost=True))


class Leading(Protocol):
    """A controller that leads."""

    operators: Operators

    def status(self) -> dict[str, object]: ...


class Service:
    """The gRPC service of one controller process, whether it leads or not."""

    def __init__(
        self,
        config: ControlConfig,
        transport: tls.Transport | None,
        clock: Callable[[], float],
        leading: Callable[[], Leading | None],
        elsewhere: Callable[[], wire.Candidate | None],
        about: Callable[[], dict[str, object]],
        admit: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            clock: the one of the engine's events.
            leading: the controller, if this process leads.
            elsewhere: who leads, as far as is known, if it is another one.
            about: what this process adds to a status.
            admit: takes the name of a peer that was let in.
        """
        self._config, self._transport, self._clock = config, transport, clock
        self._leading, self._elsewhere, self._about, self._admit = leading, elsewhere, about, admit
        self._told: tuple[Leading, list[wire.OperatorHears]] | None = None  # the last status, and who gave it
        self._fresh_until = 0.0

    def handler(self) -> grpc.GenericRpcHandler:
        ask: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
            self._ask,
            request_deserializer=wire.OperatorAsks.FromString,
            response_serializer=wire.OperatorHears.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {METHOD.rpartition("/")[2]: ask})

    async def _ask(self, request: wire.OperatorAsks, context: Context) -> AsyncIterator[wire.OperatorHears]:
        if why := self._refusal(request, context):
            log.warning("refused an operator's %s from %s: %s", codec.line(request.kind, 40), context.peer(), why)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        self._admit(context.peer())
        controller = self._leading()
        if controller is None:
            yield wire.OperatorHears(last=True, leader=self._elsewhere() or wire.Candidate())
        elif request.kind == "status":
            for message in self._status(controller):
                yield message
        else:
            async for message in self._wait(controller.operators, request, context):
                yield message

    def _status(self, controller: Leading) -> list[wire.OperatorHears]:
        """Of thousands of ranks it takes half a second, in which the controller does nothing else. However many
        operators watch, that is a tenth of its time at most."""
        begun = self._clock()
        if self._told is None or begun >= self._fresh_until or self._told[0] is not controller:
            self._told = controller, pieces({**controller.status(), **self._about()})
            cost = self._clock() - begun
            self._fresh_until = begun + _REST * cost
        return self._told[1]

    async def _wait(
        self, operators: Operators, request: wire.OperatorAsks, context: Context
    ) -> AsyncIterator[wire.OperatorHears]:
        event = asked(request, self._clock(), tls.peer_certificate(context))
        where = context.peer() if not context.peer().startswith("unix:") else f"host {self._config.host}"
        log.warning("operator %s at %s asks: %s %s", event.who, where, event.kind, codec.line(str(event.args)))
        queue = operators.ask(event)
        if queue is None:
            yield wire.OperatorHears(last=True, text="this request waits already, or too many do; try again later")
            return
        gone: float | None = 0.0
        try:
            await context.send_initial_metadata(())  # it is taken
            while True:
                word = await queue.get()
                if isinstance(word, t.Answer):
                    gone = None
                    break
                yield wire.OperatorHears(text=codec.clean(word.text), done=word.done, of=word.of)
        finally:
            operators.leave(event.id, None if gone is None else self._clock())
        log.warning("operator %s: %s: %s", event.who, event.kind, codec.line(word.text, 1000))
        if word.lost:
            await context.abort(grpc.StatusCode.UNAVAILABLE, word.text)
        data = json.dumps(word.data).encode()
        yield wire.OperatorHears(last=True, text=codec.clean(word.text), ok=word.ok, late=word.late, data=data)

    def _refusal(self, request: wire.OperatorAsks, context: Context) -> str:
        if request.protocol != codec.PROTOCOL:
            return f"it speaks protocol {request.protocol}, this side speaks {codec.PROTOCOL}; install one version"
        if len(request.args) > _MAX_ARGS or any(len(k) + len(v) > _MAX_ARG for k, v in request.args.items()):
            return "too many or too long arguments"
        return self._stranger(context)

    def _stranger(self, context: Context) -> str:
        """Why this caller may not operate the job. The Unix socket is its user's alone: its directory is private."""
        if context.peer().startswith("unix:"):
            return ""
        if self._transport is None:
            if self._config.insecure:
                return ""
            return "this port asks for no certificate; without --controller, on that host, its socket is used"
        if not tls.is_operator(context):
            return (
                "the certificate is a host's, not an operator's; make one with `tftctl certs operator NAME`, and give "
                "its directory with --tls-dir"
            )
        return self._transport.barred(context)


def asked(request: wire.OperatorAsks, at: float, certificate: x509.Certificate | None = None) -> t.Asked:
    """The event that a request means. Who asks is who his certificate says he is, before what he says himself."""
    args = {codec.line(key, _MAX_ARG): codec.line(value, _MAX_ARG) for key, value in request.args.items()}
    patience = min(request.patience, 10 * 86400.0) if request.patience > 0 else 0.0  # also of no number
    name, kind, who = (codec.line(text, 80) for text in (request.id, request.kind, request.who))
    if certificate is not None:
        who = f"{codec.line(certificates.common_name(certificate), 80)} ({who})"
    return t.Asked(at, name, kind, args, patience, who)


def pieces(data: dict[str, object]) -> list[wire.OperatorHears]:
    """A status of thousands of ranks is more than one message may be."""
    text = json.dumps(data).encode()
    cut = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    found = [wire.OperatorHears(data=piece) for piece in cut]
    return [*found, wire.OperatorHears(last=True, ok=True)]
