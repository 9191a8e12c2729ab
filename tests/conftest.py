"""Fixtures for all tests: free ports, and processes that do not outlive their test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ports import free_port

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """`free_ports(n)`: n different TCP ports for servers of the test."""
    return lambda count: [free_port() for _ in range(count)]


@dataclass
class Processes:
    """Starts programs of this environment, each in a process group of its own."""

    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, command: Sequence[str | Path], *, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start `command`; `env` is added to the environment. Output of both kinds is piped together."""
        binaries = str(Path(sys.executable).parent)
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=cwd,
            env={**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float = 60,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> str:
        """Run `command` to its end and return its output; any exit status but 0 fails the test with that output."""
        process = self.start(command, cwd=cwd, env=env)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill(process)
            output, _ = process.communicate()
            pytest.fail(f"still running after {timeout:g} s: {command}\n{output[-5000:]}")
        if process.returncode != 0:
            pytest.fail(f"exit status {process.returncode}: {command}\n{output[-5000:]}")
        return output

    def python(self, code: str, *, timeout: float = 60, env: dict[str, str] | None = None) -> str:
        """Run Python code in a process of its own, whose torch nobody has changed."""
        return self.run([sys.executable, "-c", code], timeout=timeout, env=env)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """End the process and all that it started, unless they left its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Processes that are killed when the test ends, with their children."""
    found = Processes()
    yield found
    for process in found.started:
        found.kill(process)
        if process.stdout is not None:
            process.stdout.close()
