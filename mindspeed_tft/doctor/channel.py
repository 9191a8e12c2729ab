"""What the one who asks and a host that answers say to each other: JSON, a line for each message, over one connection.

No pickle, no message of more than some megabytes, no wait without an end.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from types import TracebackType
from typing import Any

PROTOCOL = 1
LONGEST = 8 << 20  # bytes of a message; the largest are the findings and the ways of one host
_PIECE = 1 << 16

Message = dict[str, Any]


class ChannelError(Exception):
    """The other side is gone, is late, or says what nobody understands."""


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        """
        Args:
            name: of the other side, for messages about it.
        """
        self._socket, self.name = connection, name
        self._read = bytearray()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def send(self, message: Message, timeout: float) -> None:
        """
        Raises:
            ChannelError: it could not be sent within `timeout` seconds.
        """
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelError(f"{self.name} cannot be told anything: {_words(error)}") from None

    def receive(self, timeout: float) -> Message:
        """
        Raises:
            ChannelError: nothing came within `timeout` seconds, or no message.
        """
        end = time.monotonic() + timeout
        while (line := self._line()) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise ChannelError(f"{self.name} says nothing for {timeout:g} s")
            try:
                self._socket.settimeout(left)
                piece = self._socket.recv(_PIECE)
            except TimeoutError:
                continue
            except OSError as error:
                raise ChannelError(f"the connection to {self.name} broke: {_words(error)}") from None
            if not piece:
                raise ChannelError(f"{self.name} ended the connection")
            self._read += piece
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ChannelError(f"{self.name} says what is no message: {line[:80]!r}")
        return message

    def _line(self) -> bytes | None:
        line, newline, rest = self._read.partition(b"\n")
        if len(line) > LONGEST:
            raise ChannelError(f"{self.name} says more than {LONGEST} bytes at once")
        if not newline:
            return None
        self._read = bytearray(rest)
        return bytes(line)


def _words(error: OSError) -> str:
    return str(error.strerror or error).lower()
