"""What the kernel of this host allows: open files, shared memory, looking at other processes."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mindspeed_tft.control import pids
from mindspeed_tft.doctor.findings import Finding, green, red, yellow

FEW_FILES = 1024  # less than this breaks jobs without us, too
MANY_FILES = 4096  # enough for gloo on some hundred ranks: each group keeps a connection to each of its members
SHARED_MEMORY = 1 << 30  # bytes; containers come with 64 MiB, and data loaders pass batches there
_LONGEST = 5.0  # seconds for a small program to start or end


def check_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files a process (ulimit -n; at most {hard})"
    why = "each gloo group keeps a connection to each of its members"
    if soft < FEW_FILES:
        yield red("open files", f"{text}: {why}", f"raise it to {MANY_FILES} or more before training starts")
    elif soft < MANY_FILES:
        yield yellow("open files", f"{text}, which large jobs use up: {why}", f"raise it to {MANY_FILES} or more")
    else:
        yield green("open files", text)


def check_shared_memory(path: Path = Path("/dev/shm")) -> Iterator[Finding]:
    try:
        total, _, free = shutil.disk_usage(path)
    except OSError as error:
        yield yellow("shared memory", f"{path} cannot be looked at ({error.strerror})", "mount a tmpfs there")
        return
    text = f"{path} has {gib(free)} free of {gib(total)}"
    if free < SHARED_MEMORY:
        yield yellow(
            "shared memory",
            f"{text}: the workers of data loaders pass batches there, and end by SIGBUS when it is full",
            "give containers more (docker run --shm-size 16g; Kubernetes: an emptyDir of medium"
            " Memory), or use --num-workers 0",
        )
    else:
        yield green("shared memory", text)


def check_processes() -> Iterator[Finding]:
    """A relay watches the ranks of its host by pidfd, and reads the stacks of a stuck one through /proc."""
    program = shutil.which("cat")
    if program is None:
        yield yellow("processes", "it cannot be tried here: there is no `cat`", "install coreutils")
        return
    child = subprocess.Popen([program], stdin=subprocess.PIPE)
    try:
        yield from _look_at(child.pid)
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait(_LONGEST)


def _look_at(pid: int) -> Iterator[Finding]:
    fd = pids.open_pidfd(pid)
    if fd < 0:
        yield yellow(
            "processes",
            "there are no pidfds here (Linux 5.3), so a dead rank is known by /proc and its socket only",
            "use a newer kernel, or a sandbox that passes pidfd_open on",
        )
    else:
        os.close(fd)
    try:
        with open(f"/proc/{pid}/fd/0", "rb"):
            pass
    except OSError as error:
        yield yellow(
            "processes",
            f"another process of this user cannot be looked into ({error.strerror}), so the stacks"
            " of a stuck rank are not kept",
            "mount /proc without hidepid, and start containers with SYS_PTRACE",
        )
        return
    if fd >= 0:
        yield green("processes", "dead ranks are seen at once (pidfd), stacks of stuck ones can be read (/proc)")


def gib(size: float) -> str:
    """A number of bytes for a person."""
    return f"{size / 2**30:.3g} GiB" if size < 10 * 2**40 else f"{size / 2**40:.3g} TiB"
