from __future__ import annotations

from typing import Any


def register_asd_hook(*_: Any, **__: Any) -> None: ...
