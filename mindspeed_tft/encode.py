"""Values as bytes for another process, without pickle: JSON, in which what JSON does not know is tagged.

tensor   {"tensor": dtype, "shape": [...], "data": base64}      array  {"array": dtype, ...}
tuple    {"tuple": [...]}      bytes  {"bytes": base64}         dict   {"dict": [[key, value], ...]}
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import torch


class EncodeError(ValueError):
    """A value that has no encoding, or bytes that are none."""


def dumps(value: Any) -> bytes:
    """A value as UTF-8 JSON. Floats keep every bit.

    Raises:
        EncodeError: it holds something else than numbers, texts, tensors, arrays, tuples, lists and dicts of them.
    """
    return json.dumps(_plain(value)).encode()


def loads(data: bytes) -> Any:
    """The value that `dumps` was given; tensors on the host.

    Raises:
        EncodeError: not such bytes.
    """
    try:
        return _value(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as exc:
        raise EncodeError(f"{len(data)} bytes are no encoded value: {exc}") from exc


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if torch.is_tensor(value):
        data = value.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return {"tensor": str(data.dtype).removeprefix("torch."), "shape": list(data.shape), "data": _text(raw)}
    if isinstance(value, np.ndarray):
        return {"array": value.dtype.str, "shape": list(value.shape), "data": _text(value.tobytes())}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": _text(bytes(value))}
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    raise EncodeError(f"a {type(value).__name__} has no encoding")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "dict" in plain:
        return {_value(key): _value(item) for key, item in plain["dict"]}
    if "tuple" in plain:
        return tuple(_value(item) for item in plain["tuple"])
    if "bytes" in plain:
        return base64.b64decode(plain["bytes"], validate=True)
    raw = bytearray(base64.b64decode(plain["data"], validate=True))
    if "array" in plain:
        return np.frombuffer(raw, dtype=np.dtype(plain["array"])).reshape(plain["shape"]).copy()
    dtype = getattr(torch, plain["tensor"])
    if not isinstance(dtype, torch.dtype):
        raise EncodeError(f"{plain['tensor']!r} is no dtype")
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(plain["shape"]).clone()


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
