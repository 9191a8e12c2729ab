"""Where a controller listens: always on a Unix socket, with several hosts (or a port that was asked for) on TCP too."""

from __future__ import annotations

import errno
import logging
import os
import socket
from typing import Any

import grpc
import grpc.aio

from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.control import peers, tls
from mindspeed_tft.control import wire_pb2 as wire
from mindspeed_tft.control.config import ControlConfig, ControlRefused, ControlUnavailable
from mindspeed_tft.control.uplink import METHOD, OPTIONS

log = logging.getLogger(__name__)

_HANDSHAKE = 5.0  # seconds
_IDLE = 60.0  # seconds without a call
_SERVER_OPTIONS = [
    *OPTIONS,
    ("grpc.so_reuseport", 0),
    # Who connects and says nothing holds a descriptor; gRPC's own limits are two minutes, and for ever.
    ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE)),
    ("grpc.max_connection_idle_ms", int(1000 * _IDLE)),
    ("grpc.max_concurrent_streams", 64),  # on one connection; a relay has one
    ("grpc.max_metadata_size", 8192),
]


def make_server(relay: Any, lead: Any, operator: grpc.GenericRpcHandler) -> grpc.aio.Server:
    """A server that does not listen yet.

    Args:
        relay: serves the stream of a relay.
        lead: answers another candidate that leads.
        operator: the service for operators.
    """
    server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=100_000)
    _, service, relay_name = METHOD.split("/")
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        relay_name: grpc.stream_stream_rpc_method_handler(
            relay,
            request_deserializer=wire.HostSays.FromString,
            response_serializer=wire.HostOrders.SerializeToString,
        ),
        peers.METHOD.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(
            lead,
            request_deserializer=wire.Lead.FromString,
            response_serializer=wire.LeadHeard.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers), operator))
    return server


def bind(
    server: grpc.aio.Server, unix_path: str, config: ControlConfig, index: int, transport: tls.Transport | None
) -> str:
    """Makes the server listen; its TCP address, "" without one.

    The first controller of a job listens where the user said. Another one takes this host's address on the way to the
    first, and the same port if it is free: several hosts of a test may be one machine.

    Raises:
        ControlRefused: a setting has to be corrected.
        ControlUnavailable: there is no way to the first controller's host.
    """
    before = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{unix_path}")
    finally:
        os.umask(before)
    mode = tls.mode(config)
    if mode == "unix" or (index > 0 and config.nnodes == 1):
        return ""
    host, port = config.tcp_host(), config.tcp_port()
    if index > 0:
        host = local_address(host, port)
        address = _try_port(host, port if _is_free(host, port) else 0)
    else:
        address = _try_port(host, port)
    try:
        if transport is not None:
            bound = server.add_secure_port(address, transport.server_credentials())
        else:
            if not is_loopback(host):
                log.warning("--tft-insecure: anybody who reaches %s may command this job", address)
            bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ControlRefused(_port_message(host, port, str(error))) from error
    return f"{address.rpartition(':')[0]}:{bound}"


def local_address(host: str, port: int) -> str:
    """The address of this host from which packets to another one go out; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ControlUnavailable(f"there is no way to {host}, where the first controller is ({error})") from error


def _is_free(host: str, port: int) -> bool:
    try:
        _try_port(host, port)
    except ControlRefused:
        return False
    return True


def _try_port(host: str, port: int) -> str:
    """The address to bind; binds it once ourselves, because gRPC does not say what is wrong with it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as error:
        raise ControlRefused(f"TTP_ADDR: {host} has no address ({error}); name the host of node 0") from error
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRNOTAVAIL:
            raise ControlRefused(
                f"TTP_ADDR: {host} is no address of this host ({reason}); name the host on which rank 0 runs"
            ) from error
        raise ControlRefused(_port_message(host, port, reason)) from error
    return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"


def _port_message(host: str, port: int, reason: str) -> str:
    return (
        f"--tft-controller-port: port {port} on {host} cannot be used ({reason}); stop what listens there or "
        "choose another port"
    )
