"""The warm standby: a process that has imported what a worker needs, and waits to become one.

    python -u -m mindspeed_tft.agent.standby FD PROGRAM...

PROGRAM is what would follow `python -u` in a worker's command line: `script.py ARGS` or `-m module ARGS`. FD is the
reading end of a pipe: one line of JSON (`Order`) tells the standby to become a worker, end of file to go away. So it
never outlives its launcher.

It is started with the environment that all workers have in common, because threading libraries read theirs when they
are loaded. It must not touch the device: the memory of a context is missing elsewhere, and which device is not known
yet. It leaves the generators of random numbers as the imports leave them, which is how a cold start finds them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import psutil

from mindspeed_tft.agent.reboot import ENV_DIRECTORY, write_whole

ENV_IMPORTS = "TFT_STANDBY_IMPORTS"
# The adaptor first, as in the program of the user: it prepares Megatron's modules before they are imported.
DEFAULT_IMPORTS = "mindspeed_tft.adaptor,megatron.core,megatron.training"
ALWAYS = ("torch", "numpy")
READY_FILE = "standby-ready"  # {pid, rss, seconds}
LOG_FILE = "standby-log"  # what it printed before it became a worker
# torch.cuda.is_available() asks NVML then, and does not initialise the driver.
_ENV_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class Order(TypedDict):
    """Become this worker."""

    env: dict[str, str]  # all of it
    argv: list[str]  # PROGRAM
    cwd: str
    stdout: str  # file to append to; "": as inherited
    stderr: str


def main(argv: Sequence[str]) -> None:
    began = time.monotonic()
    fd, program = int(argv[0]), list(argv[1:])
    directory = Path(os.environ[ENV_DIRECTORY])
    streams = Streams(directory / LOG_FILE)
    pretend(program)
    before = dict(os.environ)
    preload(os.environ.get(ENV_IMPORTS, DEFAULT_IMPORTS))
    facts = {"pid": os.getpid(), "rss": psutil.Process().memory_info().rss, "seconds": time.monotonic() - began}
    write_whole(directory / READY_FILE, json.dumps(facts))
    order = receive(fd)
    if order is not None:
        become(environment_of(order["env"], before, os.environ), order["cwd"])
        streams.become(order["stdout"], order["stderr"])
        run(order["argv"])


class Streams:
    """stdout and stderr. What imports print is for the log of the worker, and which that is is not known yet."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._inherited = (os.dup(1), os.dup(2))
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def become(self, stdout: str, stderr: str) -> None:
        """Go on as the worker's streams: files to append to, or "" for what this process was started with."""
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, path, inherited in zip((1, 2), (stdout, stderr), self._inherited, strict=True):
            if path:
                with open(path, "a") as file:
                    os.dup2(file.fileno(), fd)
            else:
                os.dup2(inherited, fd)
            os.close(inherited)
        sys.stderr.write(self._log.read_text(errors="replace"))
        self._log.unlink()


def pretend(program: Sequence[str]) -> None:
    """Set `sys.argv` and the first entry of `sys.path` as Python does for this program: imports read both."""
    sys.argv = arguments(program)
    if not getattr(sys.flags, "safe_path", False):  # otherwise Python has put there the directory of this module
        sys.path[0] = os.getcwd() if program[0] == "-m" else str(Path(program[0]).resolve().parent)


def arguments(program: Sequence[str]) -> list[str]:
    """`sys.argv` of the program, as it is before a module is found."""
    return ["-m", *program[2:]] if program[0] == "-m" else list(program)


def preload(names: str) -> None:
    """Import torch, numpy and what of `names` (a comma list) is installed.

    Raises:
        RuntimeError: a module uses the device when it is imported.
    """
    missing = _ENV_NVML not in os.environ
    os.environ.setdefault(_ENV_NVML, "1")
    import torch

    initialised = torch.cuda.is_initialized  # on a plain CPU the name means something else after the adaptor
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in (*ALWAYS, *wanted):
        if installed(name):
            importlib.import_module(name)
    if initialised():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            f"a module of {ENV_IMPORTS}={names} initialises CUDA when it is imported: name others, or none"
        )
    if missing:
        del os.environ[_ENV_NVML]


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def receive(fd: int) -> Order | None:
    """Wait for the order; the launcher's end, or its wish, is the end of the wait."""
    with os.fdopen(fd, "rb") as pipe:
        line = pipe.readline()
    if not line.endswith(b"\n"):
        return None
    order: Order = json.loads(line)
    return order


def environment_of(worker: Mapping[str, str], before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """The environment in which the imports of a worker that starts cold would leave it. Megatron asks for variables
    that modules set when they are imported, and others change what is computed.

    worker: what its launcher gives it
    before: of this process, before its imports; after: after them
    """
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    # Where the worker is given something else than we were, it is not known what the imports would have done with it.
    return {**worker, **{name: value for name, value in changed.items() if worker.get(name) == before.get(name)}}


def become(environ: Mapping[str, str], cwd: str) -> None:
    """Take over the environment and the directory of the worker."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)


def run(program: Sequence[str]) -> None:
    """Run the program in this process, as `__main__`.

    One difference stays: `sys.argv[0]` of a script is absolute, because runpy takes both it and `__file__` from the
    path that it is given, and `__file__` has to be.
    """
    sys.argv = arguments(program)
    if program[0] == "-m":
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(program[0]), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
