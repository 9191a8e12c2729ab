"""The metrics for Prometheus, over HTTP, while this controller leads. A thread of its own serves them: whoever asks,
and however slowly, the controller does not wait for it.

Who may ask is judged by whoever makes the endpoint (`control.watchers`). A port that is taken costs the metrics and
nothing else, and is tried again: the controller before this one may be about to leave it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder, write_to_textfile
from prometheus_client.registry import Collector, CollectorRegistry

from mindspeed_tft.observe import catalogue
from mindspeed_tft.observe.catalogue import Facts
from mindspeed_tft.observe.metrics import BUCKETS, Histogram, Metrics

log = logging.getLogger(__name__)

PATH = "/metrics"
LAST = "metrics.prom"  # in the directory of the incidents
_ASKERS = 8  # connections at a time; more are closed
_PATIENCE = 10.0  # seconds for one connection, of a TLS handshake as of a request
_JOIN = 2.0
_AGAIN = 5.0  # seconds until a port that was taken is tried again
Secure = Callable[[socket.socket], ssl.SSLSocket]

_FAMILIES = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


class Exposition(Collector):
    """The numbers of a job as metric families of Prometheus."""

    def __init__(self, metrics: Metrics, facts: Facts, run: str, clock: Callable[[], float]) -> None:
        self._metrics, self._facts, self._run, self._clock = metrics, facts, run, clock

    def collect(self) -> Iterator[Metric]:
        now = self._clock()
        for metric in catalogue.METRICS:
            family: Any = _FAMILIES[metric.kind](metric.name, metric.help, labels=("run", *metric.labels))
            for labels, value in metric.read(self._metrics, self._facts, now):
                if isinstance(value, Histogram):
                    family.add_metric((self._run, *labels), buckets=_cumulated(value), sum_value=value.sum)
                else:
                    family.add_metric((self._run, *labels), value)
            yield family


def _cumulated(found: Histogram) -> list[tuple[str, float]]:
    total, buckets = 0, list[tuple[str, float]]()
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), found.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


class _Handler(BaseHTTPRequestHandler):
    """One request and the end: Prometheus asks seldom, and a connection that is kept would be one of few."""

    server: _Server
    server_version = "mindspeed_tft"
    sys_version = ""

    timeout = _PATIENCE

    def do_GET(self) -> None:
        if self.path.split("?")[0] != PATH:
            self.send_error(404, f"metrics are at {PATH}")
            return
        encode, content = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encode(self.server.registry)
        except Exception:
            self.server.complain()
            self.send_error(500, "the metrics cannot be shown: see the log of the controller")
            return
        self.send_response(200)
        self.send_header("Content-Type", content)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16
    timeout = 0.1

    def __init__(self, address: tuple[str, int], registry: CollectorRegistry, secure: Secure | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.registry, self._secure = registry, secure
        self._places = threading.BoundedSemaphore(_ASKERS)
        self._failed = False
        super().__init__(address, _Handler)

    def complain(self) -> None:
        """Of a mistake of ours, with its traceback, once: somebody asks every few seconds."""
        if not self._failed:
            self._failed = True
            log.exception("metrics cannot be shown, by a mistake of ours; training goes on")

    def server_bind(self) -> None:
        # That of the parent asks a name server, perhaps for seconds.
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # However little and however slowly somebody sends. A duplicate: TLS takes the socket itself over.
        line = request.dup()
        cut = threading.Timer(_PATIENCE, _hang_up, (line,))
        cut.daemon = True
        cut.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            cut.cancel()
            line.close()
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_PATIENCE)
        if self._secure is None:
            super().finish_request(request, client_address)
            return
        with self._secure(request) as secured:  # the handshake: on this thread
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if isinstance(sys.exc_info()[1], OSError):  # he went away, or showed nothing that will do
            log.debug("%s asked for metrics and was not answered", client_address, exc_info=True)
        else:
            self.complain()


def _hang_up(line: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has gone by itself
        line.shutdown(socket.SHUT_RDWR)


class Endpoint:
    """Serves until it is closed, as soon as the port can be had. Nobody waits for that: names are looked up and files
    are read on its own thread, too."""

    def __init__(
        self, host: str, port: int, exposition: Exposition, prepare: Callable[[], Secure | None] = lambda: None
    ) -> None:
        """
        Args:
            port: 0: any free one.
            prepare: makes what makes a connection safe before a byte of it is read, or None for plain HTTP. What it
                raises ends the endpoint.
        """
        self.port = 0  # while it serves
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(exposition)
        self._address, self._prepare = (host, port), prepare
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tft-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Nobody is answered any more, in a moment; waits for nothing."""
        self._closed.set()

    def close(self) -> None:
        """The port is free when this returns, unless it could not even be bound in two seconds."""
        self.stop()
        self._thread.join(_JOIN)

    def write(self, directory: Path) -> None:
        """The numbers as they are, as a file in Prometheus' text format: it may not ask again before the job has ended.

        Raises:
            OSError: it cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        write_to_textfile(str(directory / LAST), self._registry)

    def _run(self) -> None:
        try:
            secure = self._prepare()
        except Exception as error:
            log.warning("--tft-metrics-port: no metrics: %s; training goes on", error)
            return
        server = self._bind(secure)
        if server is None:
            return
        self.port = server.server_port
        with contextlib.closing(server.socket):
            while not self._closed.is_set():
                server.handle_request()  # or nobody asked within its timeout
        self.port = 0

    def _bind(self, secure: Secure | None) -> _Server | None:
        """Until it can be done, or need not any more."""
        said = ""
        while not self._closed.is_set():
            try:
                server = _Server(self._address, self._registry, secure)
            except (OSError, OverflowError) as error:
                why = getattr(error, "strerror", None) or str(error)
                if why != said:
                    said, where = why, f"{self._address[0]}:{self._address[1]}"
                    log.warning("--tft-metrics-port: %s cannot be used (%s): no metrics until it can; training goes on",
                                where, why)  # fmt: skip
                self._closed.wait(_AGAIN)
                continue
            if said:
                log.warning("--tft-metrics-port: metrics are at port %d now", server.server_port)
            return server
        return None


def tls_context(ca: bytes, certificate: bytes, key: bytes) -> ssl.SSLContext:
    """A server's side of mutual TLS, from PEM bytes. Who has no certificate of this authority gets no answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))  # with comments in any language
    # The interface takes files only. The key may have been decrypted just now: it must not come to any disk.
    file = os.memfd_create("tft-metrics", os.MFD_CLOEXEC)
    try:
        os.write(file, certificate + b"\n" + key)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
