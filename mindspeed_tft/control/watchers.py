"""Who is told of all that passes a leading controller, beside the incidents: metrics and traces, where they are wanted.

They may fail, and nothing of the job may: what goes wrong here is said once, and nothing is told to them any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.control import tls
from mindspeed_tft.control.config import ControlConfig, ControlRefused
from mindspeed_tft.engine import types as t
from mindspeed_tft.observe import report, tracing
from mindspeed_tft.observe.catalogue import Facts
from mindspeed_tft.observe.metrics import Metrics
from mindspeed_tft.observe.recoveries import Recovery

if TYPE_CHECKING:
    from mindspeed_tft.observe.endpoint import Endpoint

log = logging.getLogger(__name__)

_LAST = 1.0  # seconds for what is left: the job's port is wanted by whoever starts it again

Live = Callable[[], tuple[int, int]]  # hosts that are connected, processes that are parked


class Watchers:
    """Metrics and traces of one reign. Where neither is wanted, nothing here does anything."""

    def __init__(self, config: ControlConfig, term: int, index: int, transport: tls.Transport | None = None) -> None:
        self._config, self._term, self._index, self._transport = config, term, index, transport
        self._events: dict[type, Callable[[Any], None]] = {}  # of the metrics, whose calls cost at thousands of ranks
        self._actions: dict[type, Callable[[Any, float], None]] = {}
        self._tracer: tracing.Tracer | None = None
        self.endpoint: Endpoint | None = None
        self._live: Live = lambda: (0, 0)
        self._gave_up = False
        self._beginning: threading.Thread | None = None
        if config.metrics_port is not None or config.otel_endpoint:
            metrics = Metrics(config.world_size, config.deadlines.heartbeat_lost, self._tell)
            self._events, self._actions = metrics.events, metrics.actions
            # Imports and name look-ups take seconds on a slow file system, and relays wait to be welcomed.
            self._beginning = threading.Thread(target=self._begin, args=(metrics,), name="tft-beginning", daemon=True)
            self._beginning.start()

    def event(self, event: t.Event) -> None:
        """Something happened."""
        handler = self._events.get(type(event))
        if handler is not None:
            try:
                handler(event)
            except Exception:
                self._give_up()

    def action(self, action: t.Action, at: float) -> None:
        """The engine answered."""
        handler = self._actions.get(type(action))
        if handler is not None:
            try:
                handler(action, at)
            except Exception:
                self._give_up()

    def watch(self, live: Live) -> None:
        """What no event tells can be asked for here."""
        self._live = live

    async def end(self) -> None:
        """The port is free, and traces are sent, when this returns; or it took too long. What hangs is left behind."""
        if self._beginning is not None:
            closing = (self._close_endpoint, self._keep_last, self._close_tracer)
            await asyncio.gather(*(_wait_for(close) for close in closing))

    # ---------------------------------------------------------------------------------- beginning

    def _begin(self, metrics: Metrics) -> None:
        try:
            self._offer(metrics)
        except Exception as error:  # a package that is missing or broken
            log.warning("no metrics of this controller, or no traces: %r; training goes on", error)

    def _offer(self, metrics: Metrics) -> None:
        """A fault that is over before this is done has no trace."""
        config, versions = self._config, report.versions()
        facts = Facts(self._term, self._index, config.host, versions, lambda: self._live())
        if config.otel_endpoint:
            try:
                exporting = tracing.exporting(config.otel_endpoint)
                self._tracer = tracing.Tracer(
                    exporting, config.run_name, config.host, versions.get("mindspeed_tft", "")
                )
            except Exception as error:
                log.warning("--tft-otel-endpoint: no traces: %r; training goes on", error)
        if config.metrics_port is not None:
            from mindspeed_tft.observe import endpoint

            exposition = endpoint.Exposition(metrics, facts, config.run_name, time.monotonic)
            self.endpoint = endpoint.Endpoint(
                config.metrics_host, config.metrics_port, exposition, lambda: secured(config, self._transport)
            )
            if self._gave_up:  # looked at after the endpoint is there to be stopped, as `_give_up` does
                self.endpoint.stop()
            self.endpoint.start()

    def _begun(self) -> None:
        """What has been begun is there to be ended."""
        if self._beginning is not None:
            self._beginning.join()

    def _close_endpoint(self) -> None:
        self._begun()
        if self.endpoint is not None:
            self.endpoint.close()

    def _close_tracer(self) -> None:
        self._begun()
        if self._tracer is not None:
            self._tracer.close()

    def _keep_last(self) -> None:
        self._begun()
        if self.endpoint is None or self._gave_up:
            return
        try:
            self.endpoint.write(Path(self._config.incident_dir))
        except OSError as error:
            log.warning("the last metrics are not in %s: %s", self._config.incident_dir, error)

    def _tell(self, found: Recovery) -> None:
        if self._tracer is not None:
            self._tracer.tell(found)

    def _give_up(self) -> None:
        log.exception("metrics and traces end here, by a mistake of ours; training goes on")
        self._events, self._actions = {}, {}
        self._gave_up = True
        if self.endpoint is not None:  # numbers that stand still would look like a job that does
            self.endpoint.stop()


async def _wait_for(work: Callable[[], None]) -> None:
    """On a thread that nobody joins: those of the event loop's executor hold up the end of the process."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="tft-closing", daemon=True).start()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(done.wait(), _LAST)


def secured(config: ControlConfig, transport: tls.Transport | None = None) -> Secure | None:
    """How whoever asks for metrics has to show who he is; None: not at all.

    Args:
        transport: of this process, if it has one: the key is opened once.

    Raises:
        ControlRefused: there is no way that is safe, or the files for it do not serve.
    """
    host, port = config.metrics_host, config.metrics_port
    if is_loopback(host):
        return None
    if config.tls_dir:
        return Secure(config, transport)
    if not config.insecure:
        raise ControlRefused(
            f"--tft-metrics-host: anybody who reaches {host} could read the metrics of this job; give --tft-tls-dir, "
            "or --tft-insecure on a network that you trust"
        )
    log.warning("*** --tft-insecure: anybody who reaches %s:%s may read the metrics of this job ***", host, port)
    return None


class Secure:
    """The server's side of mutual TLS for whoever asks for metrics: any certificate of the job's authority will do that
    was not revoked. Files that changed are read again."""

    def __init__(self, config: ControlConfig, transport: tls.Transport | None = None) -> None:
        """
        Raises:
            ControlRefused: the files do not serve.
        """
        assert config.tls_dir is not None
        if transport is None:  # a single host without a port
            transport = tls.Transport(tls.directory_of(config.tls_dir, config.host), tls.access(config))
        self._transport = transport
        self._take(self._transport.identity)

    def _take(self, identity: tls.Identity) -> None:
        """
        Raises:
            ControlRefused: TLS does not take them.
        """
        from mindspeed_tft.observe import endpoint

        self._identity = identity
        try:
            self._context = endpoint.tls_context(identity.ca, identity.certificate, identity.key)
        except (OSError, ValueError) as error:
            raise ControlRefused(
                f"--tft-tls-dir: these files do not serve for metrics ({error}); make them again (`tftctl certs node`)"
            ) from error

    def __call__(self, line: socket.socket) -> ssl.SSLSocket:
        """
        Raises:
            OSError: who is there has no certificate that will do.
        """
        from cryptography import x509

        self._transport.read_again()
        identity = self._transport.identity
        if identity is not self._identity:
            try:
                self._take(identity)
            except ControlRefused as error:
                log.warning("metrics go on with the certificate that was read before: %s", error)
        secured = self._context.wrap_socket(line, server_side=True)
        shown = secured.getpeercert(binary_form=True)
        assert shown is not None  # it was required
        if why := self._transport.barred_certificate(x509.load_der_x509_certificate(shown)):
            log.warning("somebody asked for metrics and is refused: %s", why)
            secured.close()
            raise PermissionError(why)
        return secured
