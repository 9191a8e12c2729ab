"""What the tests of the control plane share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_support import Job


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job of control processes that meet in a directory of their own, with a short path for Unix sockets."""
    base = tempfile.mkdtemp(prefix="tft", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    made = Job(tmp_path)
    try:
        yield made
    finally:
        try:
            made.end()
        finally:
            shutil.rmtree(base)
