"""An operator's way to a job: find its controllers, ask the one that leads, follow it when another one takes over.

On a host of the job everything is found in the meeting places of this user; from elsewhere an address and an operator's
certificate are needed.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from mindspeed_tft.control import codec, tls
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.candidates import RoleFile, Route, lives
from mindspeed_tft.control.config import ControlRefused
from mindspeed_tft.control.operator import METHOD
from mindspeed_tft.control.uplink import open_channel
from mindspeed_tft.engine.hold import AGAIN

CONNECT = 5.0  # seconds for one controller
TAKEOVER = 60.0  # seconds for another controller to lead, where the one that was asked is gone
_PAUSE = 0.3


class Unreachable(RuntimeError):
    """No controller of the job answers; the text says which were tried, and why they did not."""


class NotAllowed(RuntimeError):
    """The controller does not let this caller in; the text says why."""


@dataclass(frozen=True)
class Job:
    """A job that has controllers on this host."""

    run: str
    key: str  # tells jobs of the same run id apart
    controllers: tuple[RoleFile, ...]

    @property
    def routes(self) -> list[Route]:
        """The leader first."""
        ordered = sorted(self.controllers, key=lambda role: (not role.leader, -role.term, role.index))
        return [Route(role.index, f"unix:{role.unix}") for role in ordered]


@dataclass(frozen=True)
class Reply:
    """The last word."""

    ok: bool
    text: str
    data: dict[str, Any] = field(default_factory=dict)
    late: bool = False


def meeting_places() -> list[Path]:
    """Where jobs of this user on this host meet."""
    bases = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    found = {Path(base) / f"tft-{os.getuid()}" for base in bases if base}
    return sorted(place for place in found if place.is_dir())


def jobs(places: Iterable[Path] | None = None) -> list[Job]:
    """The jobs of this user that have a controller on this host, ordered by their run ids."""
    found: dict[tuple[str, str, int], list[RoleFile]] = {}
    for place in meeting_places() if places is None else places:
        for path in sorted(place.glob("*/controller-*.json")):
            try:
                role = RoleFile(**json.loads(path.read_text()))
            except FileNotFoundError:  # it has just ended
                continue
            if lives(role, path.parent):
                found.setdefault((role.run, role.master, role.restart), []).append(role)
    return [
        Job(run, f"{master}#{restart}" if restart else master, tuple(roles))
        for (run, master, restart), roles in sorted(found.items())
    ]


class Client:
    """Asks the controllers of one job."""

    def __init__(self, find: Callable[[], list[Route]], transport: tls.Transport | None = None) -> None:
        """`find()`: where controllers of the job may be, the best first; asked again when one is lost."""
        self._find, self._transport = find, transport
        self._who = f"{getpass.getuser()}@{socket.gethostname()}"

    def ask(
        self,
        kind: str,
        patience: float,
        progress: Callable[[str, int, int], None] = lambda _text, _done, _of: None,
        **args: str,
    ) -> Reply:
        """One request, to its last word.

        Args:
            patience: seconds after which the controller answers in any case.
            progress: is told how it gets on: text, done, of how many.

        Raises:
            Unreachable, NotAllowed: see there.
            KeyboardInterrupt: the user does not wait any more; the controller has been told.
        """
        request = wire.OperatorAsks(
            protocol=codec.PROTOCOL, id=secrets.token_hex(8), kind=kind, args=args, patience=patience, who=self._who
        )
        return asyncio.run(self._ask(request, progress))

    async def _ask(self, request: wire.OperatorAsks, progress: Callable[[str, int, int], None]) -> Reply:
        end = time.monotonic() + TAKEOVER
        asked = False  # a controller took the request
        while True:
            why: list[str] = []
            routes = self._find()
            waits = asked  # somebody is about to lead
            while routes:
                route = routes.pop(0)
                try:
                    heard = await self._ask_at(route, request, progress)
                except _Lost as lost:
                    hint = self._hint(route)
                    why.append(f"controller at {route.address}: {lost}{hint}")
                    asked = asked or lost.asked
                    waits = asked or (waits and not hint)
                    end = time.monotonic() + TAKEOVER if lost.asked else end
                    continue
                if isinstance(heard, Reply):
                    return heard
                waits = True
                if heard.address:
                    routes = [Route(heard.index, heard.address, heard.host if heard.index else "")]
                else:
                    why.append("no controller leads at this moment")
            if asked:
                request.args[AGAIN] = "1"
            if time.monotonic() > end or not waits:
                raise Unreachable("; ".join(why) or "no controller of this job is left on this host")
            await asyncio.sleep(_PAUSE)

    def _hint(self, route: Route) -> str:
        if self._transport is not None or route.address.startswith("unix:"):
            return ""
        where = f" on host {route.name}" if route.name else ""
        return f"; run this{where}, or give --controller {route.address} --tls-dir DIR"

    async def _ask_at(
        self, route: Route, request: wire.OperatorAsks, progress: Callable[[str, int, int], None]
    ) -> Reply | wire.Candidate:
        """The answer, or who leads instead (without an address: nobody)."""
        taken = False
        data = bytearray()
        try:
            async with open_channel(route, self._transport, CONNECT) as (channel, _):
                call: Any = channel.unary_stream(
                    METHOD,
                    request_serializer=wire.OperatorAsks.SerializeToString,
                    response_deserializer=wire.OperatorHears.FromString,
                )(request)
                await call.initial_metadata()  # comes when the engine has been asked
                taken = call.done() is False
                async for heard in call:
                    data += heard.data
                    if heard.HasField("leader"):
                        elsewhere: wire.Candidate = heard.leader
                        return elsewhere
                    if heard.last:
                        return Reply(heard.ok, heard.text, json.loads(bytes(data) or b"{}"), heard.late)
                    if heard.text:
                        progress(heard.text, heard.done, heard.of)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                raise NotAllowed(error.details() or "not allowed") from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise Unreachable(f"the controller at {route.address} is of an older version") from None
            raise _Lost(tls.explain(error.code(), error.details()), taken) from None
        except asyncio.TimeoutError:
            raise _Lost("it did not answer in time", False) from None
        except OSError as error:  # also `tls.Untrusted`
            raise _Lost(str(error), False) from None
        raise _Lost("it ended the stream", taken)


class _Lost(Exception):
    def __init__(self, text: str, asked: bool) -> None:
        super().__init__(text)
        self.asked = asked


def here(run: str = "") -> list[Job]:
    """The jobs of this host, or those that a user may mean by `run`: a run id, or the key of one of several."""
    every = jobs()
    return [job for job in every if run in (job.run, job.key, f"{job.run}@{job.key}")] if run else every


def client_of(job: Job) -> Client:
    """For a job that was found on this host."""

    def routes() -> list[Route]:
        return next((now.routes for now in jobs() if (now.run, now.key) == (job.run, job.key)), [])

    return Client(routes)


def client_at(address: str, tls_dir: Path | None) -> Client:
    """For a controller on another host.

    Raises:
        ControlRefused: the address or the certificates cannot be used.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ControlRefused(f"--controller {address!r}: expected HOST:PORT, for example node0:29654")
    transport = tls.Transport(tls_dir) if tls_dir is not None else None
    return Client(lambda: [Route(0, address)], transport)
