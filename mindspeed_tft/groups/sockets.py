"""Find and shut the TCP sockets that one process group opened.

gloo has no abort: a rank blocked in one of its collectives is freed only by its peers or by the timeout. Shutting the
sockets below frees it in milliseconds, and guarantees that a peer of an abandoned epoch cannot write into our buffers
any more. gloo does not tell which sockets are its own, so they are found by difference around the group's creation;
only TCP counts, because the control plane of this package talks over Unix sockets inside a rank.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple


class SocketRef(NamedTuple):
    """An open socket: its descriptor, and the inode that tells whether the descriptor still means the same socket."""

    fd: int
    inode: str


def tcp_sockets() -> frozenset[SocketRef]:
    """Every TCP socket that this process holds open now. Linux only (reads the process's descriptor table)."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        inode = _inode(fd)
        if inode is not None and _is_tcp(fd):
            found.add(SocketRef(fd, inode))
    return frozenset(found)


def shut(refs: frozenset[SocketRef]) -> int:
    """Shut both directions of these sockets; returns how many were still connected.

    A listening socket is left alone: gloo ends the process when its accept() fails.
    """
    count = 0
    for ref in refs:
        if _inode(ref.fd) != ref.inode:
            continue  # closed since, or the number was given to another file
        try:
            sock = socket.socket(fileno=os.dup(ref.fd))
        except OSError:
            continue  # closed between the two looks
        try:
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError:
            pass  # not connected any more: what we wanted
        finally:
            sock.close()
    return count


def ends(refs: frozenset[SocketRef]) -> list[tuple[str, str]]:
    """Local and remote address of each of these sockets that is connected."""
    found = []
    for ref in refs:
        if _inode(ref.fd) != ref.inode:
            continue
        try:
            sock = socket.socket(fileno=os.dup(ref.fd))
        except OSError:
            continue  # closed between the two looks
        try:
            found.append((str(sock.getsockname()[0]), str(sock.getpeername()[0])))
        except OSError:
            pass  # it listens, or is not connected any more
        finally:
            sock.close()
    return found


def _inode(fd: int) -> str | None:
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None
    return target if target.startswith("socket:") else None


def _is_tcp(fd: int) -> bool:
    try:
        sock = socket.socket(fileno=os.dup(fd))
    except OSError:
        return False
    try:
        return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    finally:
        sock.close()
