"""Ports for servers of a test.

A port that is merely free when one looks can be somebody's end of a connection a moment later. These are held: the
kernel gives them to nobody, and a server that sets SO_REUSEADDR, as servers do, may listen there.
"""

from __future__ import annotations

import socket

_held: list[socket.socket] = []  # until this process ends: a test may listen there again and again


def free_port() -> int:
    """A port of this machine for a server of the caller."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])
