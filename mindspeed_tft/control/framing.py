"""Length-prefixed protobuf on a stream socket: four bytes of length, then the message. Not for the network."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from google.protobuf.message import Message

MAX_FRAME = 4 * 1024 * 1024
_LENGTH = struct.Struct("!I")


class FrameError(ValueError):
    """What came does not follow the protocol: the connection cannot be read any further."""


def pack(message: Message, limit: int = MAX_FRAME) -> bytes:
    """The message as one frame."""
    body: bytes = message.SerializeToString()
    if len(body) > limit:
        raise FrameError(f"message {type(message).__name__} of {len(body)} bytes is over the limit of {limit}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Collects bytes as they come and gives whole frames back."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every frame that is complete with these bytes. The length is judged before any memory is taken for it."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > self._limit:
                raise FrameError(f"frame of {length} bytes is over the limit of {self._limit}")
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            frame = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield frame
