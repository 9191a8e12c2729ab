"""The launcher's end of the warm standby: keep one ready, hand it over, say what it costs."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mindspeed_tft.agent.standby import LOG_FILE, READY_FILE, Order
from mindspeed_tft.agent.supervisor import say, words

ENV_STANDBY = "TFT_WARM_STANDBY"
MODULE = "mindspeed_tft.agent.standby"
MIB = 1 << 20


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether the user wants a warm standby.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    text = environ.get(ENV_STANDBY, "") or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{ENV_STANDBY}={text!r}: a warm standby is wanted (1) or not (0)")
    return text == "1"


class Spare:
    """At most one standby process."""

    def __init__(self, python: str, program: Sequence[str], environ: Mapping[str, str], directory: Path) -> None:
        """`program`: as in `agent.standby`; `environ`: what all workers of the node have in common."""
        self._command = [python, "-u", "-m", MODULE]
        self._program, self._environ = list(program), dict(environ)
        self._ready_file, self._log_file = directory / READY_FILE, directory / LOG_FILE
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1  # its writing end
        self._told = False
        self._off = False

    @property
    def pid(self) -> int:
        """Of the standby that waits or prepares itself, 0 without one."""
        return self._process.pid if self._process is not None else 0

    def look(self, calm: bool) -> None:
        """Start a standby when there is none and the node is calm; see what became of it."""
        if self._process is None:
            if calm and not self._off:
                self._start()
            return
        status = self._process.poll()
        if status is not None:
            self._give_up(f"the standby (pid {self.pid}) ended {words(status)}{self._last_words()}")
        elif not self._told and self._ready_file.exists():
            self._told = True
            facts = json.loads(self._ready_file.read_text())
            say(f"standby (pid {self.pid}) is ready: {facts['rss'] / MIB:.0f} MiB, after {facts['seconds']:.1f} s")

    def take(self, order: Order) -> subprocess.Popen[bytes] | None:
        """Make the standby the worker of this order; None: there is none, start the worker cold.

        One that is still importing is ended: it may yet fail, and would compete with the worker for the CPU.
        """
        process = self._process
        if process is None or process.poll() is not None:
            return None
        if not self._ready_file.exists():
            self.close()
            return None
        message = json.dumps(order).encode() + b"\n"
        try:
            whole = os.write(self._pipe, message) == len(message)
        except (BlockingIOError, BrokenPipeError):  # larger than the pipe; or it died in this moment
            whole = False
        if not whole:
            self.close()
            return None
        os.close(self._pipe)
        self._process, self._pipe = None, -1
        return process

    def close(self) -> None:
        """End the standby. It holds nothing that it would have to save."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._pipe)
        self._process, self._pipe = None, -1

    def _start(self) -> None:
        for path in (self._ready_file, self._log_file):  # of an earlier one
            path.unlink(missing_ok=True)
        self._told = False
        reading, self._pipe = os.pipe()
        try:
            os.set_blocking(self._pipe, False)
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, MIB)  # an environment can be larger than a pipe usually is
            self._process = subprocess.Popen(
                [*self._command, str(reading), *self._program],
                env=self._environ,
                pass_fds=(reading,),
                start_new_session=True,  # as workers are: Ctrl-C is the launcher's
            )
        except OSError as exc:
            os.close(self._pipe)
            self._give_up(f"a standby cannot be started: {exc}")
        finally:
            os.close(reading)

    def _last_words(self) -> str:
        lines = self._log_file.read_text(errors="replace").split("\n") if self._log_file.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f" ({last.strip()})" if last else ""

    def _give_up(self, why: str) -> None:
        if self._process is not None:
            os.close(self._pipe)
        self._process, self._off = None, True
        say(f"{why}; dead workers are started again without one")
