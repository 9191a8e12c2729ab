"""Runs `programs/mindio_adaptor.py` on four real processes, and reads what its callbacks were given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ports import free_port

PROGRAM = Path(__file__).parent / "programs" / "mindio_adaptor.py"
WORLD = 4
PATIENCE = 120.0  # seconds


@dataclass
class Run:
    """One job: exit status and output of each rank, and what the callbacks told, in the order of time."""

    codes: list[int]
    outputs: list[str]
    events: list[dict[str, Any]]
    final: Path
    save: Path
    incidents: Path
    states: dict[int, bytes] = field(default_factory=dict)

    def of(self, what: str, rank: int | None = None) -> list[dict[str, Any]]:
        return [one for one in self.events if one["what"] == what and rank in (None, one["rank"])]

    def order(self, rank: int) -> list[str]:
        """What happened on a rank."""
        return [one["what"] for one in self.events if one["rank"] == rank]

    def outcome(self) -> dict[str, Any]:
        """The last incident, as it was written."""
        (found,) = sorted(self.incidents.rglob("*.json"))[-1:]
        read: dict[str, Any] = json.loads(found.read_text())
        return read


@dataclass
class Job:
    """A job that runs."""

    place: Path
    environ: dict[str, str]  # of whoever wants to find it
    processes: list[subprocess.Popen[str]]

    def told(self) -> list[dict[str, Any]]:
        """What callbacks have told so far, in the order of time."""
        log = self.place / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        return sorted((json.loads(line) for line in lines), key=lambda one: float(one["at"]))

    def wait_for(self, what: str, ranks: int = WORLD) -> None:
        """Until so many ranks have told it."""
        end = time.monotonic() + PATIENCE
        while len({one["rank"] for one in self.told() if one["what"] == what}) < ranks:
            assert time.monotonic() < end and all(one.poll() is None for one in self.processes), f"no {what!r}"
            time.sleep(0.05)

    def finish(self, codes: set[int] | None = None) -> Run:
        """To its end. `codes`: exit statuses that are fine, of each process that was started here."""
        try:
            outputs = [process.communicate(timeout=PATIENCE)[0] for process in self.processes]
        finally:
            self.kill()
        found = [process.returncode for process in self.processes]
        told = "\n".join(outputs)
        assert codes is None or set(found) <= codes, f"exit statuses {found}\n{told[-8000:]}"
        final = self.place / "final"
        states = {r: path.read_bytes() for r in range(WORLD) if (path := final / f"rank{r}.pt").exists()}
        return Run(found, outputs, self.told(), final, self.place / "save", self.place / "incidents", states)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        shutil.rmtree(self.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


def run(place: Path, *, launcher: tuple[str, ...] = (), codes: set[int] | None = None, **words: Any) -> Run:
    """A whole job. `words`: see the program. `launcher`: its words; () starts the ranks by hand. `codes`: see
    `Job.finish`."""
    return start(place, launcher=launcher, **words).finish(codes)


def start(place: Path, *, launcher: tuple[str, ...] = (), **words: Any) -> Job:
    """See `run`."""
    place.mkdir(parents=True, exist_ok=True)
    final = place / "final"
    final.mkdir(exist_ok=True)
    words = {"steps": 9, "log": str(place / "log"), "save": str(place / "save"), "final": str(final), **words}
    words["store"] = tempfile.mktemp(dir=place)  # of this run alone
    config = place / "facade.yaml"
    config.write_text(f"tft-incident-dir: {place / 'incidents'}\ntft-deadline: 40\n")
    (place / "log").unlink(missing_ok=True)
    command = [sys.executable, str(PROGRAM), json.dumps(words)]
    meeting = tempfile.mkdtemp(prefix="tft-")  # short, and of this job alone
    common = {**os.environ, "OMP_NUM_THREADS": "1", "TFT_FACADE_CONFIG": str(config), "XDG_RUNTIME_DIR": meeting}
    port = str(free_port())
    if launcher:
        binaries = str(Path(sys.executable).parent)
        common["PATH"] = f"{binaries}{os.pathsep}{os.environ['PATH']}"
        starts = [([*launcher, "--master-port", port, *command[1:]], common)]
    else:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD)}
        where["LOCAL_WORLD_SIZE"] = str(WORLD)
        starts = [(command, {**common, **where, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(WORLD)]
    started = [
        subprocess.Popen(words_, env=env, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for words_, env in starts
    ]
    return Job(place, common, started)
