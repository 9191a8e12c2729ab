"""Mutual TLS between hosts: three files in one directory, and clear words when they do not serve."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.control.config import ControlConfig, ControlRefused

FILES = ("ca.crt", "node.crt", "node.key")


def read(tls_dir: str) -> tuple[bytes, bytes, bytes]:
    """Authority, certificate and key.

    Raises:
        ControlRefused: a file is missing or unreadable, or they do not belong together.
    """
    found: list[bytes] = []
    for name in FILES:
        path = Path(tls_dir) / name
        try:
            found.append(path.read_bytes())
        except OSError as error:
            raise ControlRefused(
                f"--tft-tls-dir: {path} cannot be read ({error.strerror}); the directory needs {', '.join(FILES)} on "
                "every host (`tftctl certs` makes them)"
            ) from None
    try:  # gRPC would only say that the port cannot be used
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(Path(tls_dir) / FILES[0])
        context.load_cert_chain(Path(tls_dir) / FILES[1], Path(tls_dir) / FILES[2], password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ControlRefused(
            f"--tft-tls-dir: {', '.join(FILES)} in {tls_dir} are no certificates that belong together ({error}); make "
            "them again (`tftctl certs`)"
        ) from None
    return found[0], found[1], found[2]


def _no_password() -> str:
    raise ValueError("node.key is encrypted, which a job without a terminal cannot open")


def mode(config: ControlConfig) -> str:
    """ "unix", "tls" or "plain"; what is not safe and was not asked for is refused."""
    if not config.tcp():
        return "unix"
    if config.tls_dir:
        return "tls"
    if config.insecure or is_loopback(config.tcp_host()):
        return "plain"
    raise ControlRefused(
        f"--tft-tls-dir: the controller at {config.tcp_host()} would take orders from anybody who reaches its "
        "port; give a directory with ca.crt, node.crt and node.key, or --tft-insecure on a network that you trust"
    )


def channel_credentials(config: ControlConfig) -> grpc.ChannelCredentials | None:
    if mode(config) != "tls" or config.tls_dir is None:
        return None
    ca, certificate, key = read(config.tls_dir)
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)


def server_credentials(config: ControlConfig) -> grpc.ServerCredentials | None:
    if mode(config) != "tls" or config.tls_dir is None:
        return None
    ca, certificate, key = read(config.tls_dir)
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=True)


def explain(code: grpc.StatusCode | None, details: str | None) -> str:
    """Why a stream to a controller ended, in words that follow its name."""
    name = "unknown" if code is None else code.name
    return f"cannot be reached or left ({name}: {details or 'no details'})"
