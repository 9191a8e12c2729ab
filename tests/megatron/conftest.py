"""What the tests on real Megatron share: drills, and the unbroken runs that they are compared with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

KEPT_REFERENCES = 60


@dataclass(frozen=True)
class Drilled:
    """What a drill left."""

    status: int
    report: dict[str, Any]
    output: str
    directory: Path

    @property
    def incidents(self) -> list[dict[str, Any]]:
        reports = (self.directory / "dump" / "tft_incidents").glob("incident-*.json")
        return [json.loads(path.read_text()) for path in reports]


class Quiet:
    """A listener of a rehearsal that says nothing."""

    def stage(self, name: str, text: str, first: int, last: int) -> None: ...
    def step(self, number: int) -> None: ...
    def done(self, text: str) -> None: ...


@pytest.fixture(scope="session")
def references(request: pytest.FixtureRequest) -> Path:
    """Unbroken runs, kept between test runs: their key holds all that may change a byte of them."""
    assert request.config.cache is not None
    directory = Path(request.config.cache.mkdir("tft_references"))
    entries = sorted(directory.glob("*/entry.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for outdated in entries[KEPT_REFERENCES:]:
        shutil.rmtree(outdated.parent)
    return directory


@pytest.fixture
def drill(references: Path, tmp_path: Path) -> Callable[..., Drilled]:
    """`drill(*arguments)`: run `tftctl drill` with these arguments, sharing the unbroken runs."""

    def run(*arguments: str) -> Drilled:
        file = tmp_path / "report.json"
        command = [sys.executable, "-m", "mindspeed_tft.cli.main", "drill", "--timeout", "150"]
        command += ["--json", str(file), "--keep", str(tmp_path / "kept"), *arguments]
        environ = {**os.environ, "TFT_DRILL_CACHE": str(references), "COLUMNS": "160"}
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
        output = ended.stdout + ended.stderr
        assert file.exists(), output
        (directory,) = (tmp_path / "kept").glob("drill-*")
        return Drilled(ended.returncode, json.loads(file.read_text()), output, directory)

    return run


@pytest.fixture
def spoil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`spoil(module, assignment)`: in all jobs, one function of `mindspeed_tft.patches` does not do its work."""

    def write(module: str, assignment: str) -> None:
        name, _, value = assignment.partition(" = ")
        lines = (
            "import wrapt",
            f"def spoil(module): module.{name} = {value}",
            f"wrapt.register_post_import_hook(spoil, 'mindspeed_tft.patches.{module}')",
        )
        place = tmp_path / "spoiled"
        place.mkdir()
        (place / "sitecustomize.py").write_text("\n".join(lines))
        before = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), *([before] if before else [])]))

    return write
