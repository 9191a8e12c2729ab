"""Build the `.venv` of this checkout: torch for CPU, our package (editable, with the developer's tools), and the
megatron-core release that demo and tests train with.

Run by `make venv`, and by every target that needs the environment. Standard library only, because it runs before
anything is installed. It can be repeated at any time: a stamp in the environment holds a hash of all that decides its
content, and while that hash holds the script ends at once. It is not an installer for users of the plugin, who add
`mindspeed_tft` to an environment of their own.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
INPUTS = (
    REQUIREMENTS / "torch.txt",
    REQUIREMENTS / "megatron-deps.txt",
    REQUIREMENTS / "megatron.txt",
    ROOT / "pyproject.toml",
    ROOT / "setup.cfg",
    Path(__file__).resolve(),
)
OLDEST_PYTHON = (3, 11)  # of the demo; the package itself also runs on 3.10
MEGATRON_WHEEL_PYTHON = "3.12"  # what the megatron-core wheels are published for
PROGRESS_EVERY_S = 15.0


class SetupError(Exception):
    """Set-up cannot go on; the message names the reason and the remedy."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the .venv of this checkout.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where to build it (default: %(default)s)")
    parser.add_argument("--pip-args", default="", help='more arguments for pip, e.g. "--index-url URL"')
    options = parser.parse_args(argv)
    try:
        with one_at_a_time():
            build(options.venv.absolute(), shlex.split(options.pip_args))
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: run `make venv` again, it goes on where it can", file=sys.stderr)
        return 130
    return 0


def build(venv: Path, pip_args: list[str]) -> None:
    check_python()
    stamp, fingerprint = venv / "tft-setup.json", fingerprint_of(pip_args)
    if read_stamp(stamp) == fingerprint:
        print(f"{shown(venv)} is up to date")
        return
    compiler = find_compiler()
    began = time.monotonic()
    log = venv / "tft-setup.log"
    print(f"Setting up {shown(venv)} with Python {platform.python_version()} (details: {shown(log)})", flush=True)
    python = venv / "bin" / "python"

    with step(1, "virtual environment"):
        if python_of(venv) != platform.python_version():
            shutil.rmtree(venv, ignore_errors=True)
            run([sys.executable, "-m", "venv", str(venv)], None)
        stamp.unlink(missing_ok=True)
        log.write_text("")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", *pip_args]
    with step(2, "packages: torch (about 200 MB where a build for CPU is offered), Megatron's needs, this checkout"):
        requirements = ["-r", str(REQUIREMENTS / "torch.txt"), "-r", str(REQUIREMENTS / "megatron-deps.txt")]
        run([*pip, *requirements, "-e", f"{ROOT}[dev]"], log)
    site = site_packages(python)
    with step(3, "megatron-core"):
        if not has_megatron(site):
            run([*pip, *megatron_arguments(site)], log)
    with step(4, "Megatron's C++ dataset helpers"):
        build_helpers(python, site, compiler, log)
    with step(5, "bytecode: saves seconds at every start, also where Python may not write it"):
        # Packages bring templates that are no Python: those fail, and nobody imports them.
        run([str(python), "-m", "compileall", "-q", "-j", "0", str(site)], log, may_fail=True)
    stamp.write_text(json.dumps({"fingerprint": fingerprint}))
    print(f"Ready in {time.monotonic() - began:.0f} s, {size_mb(venv)} MB", flush=True)


def check_python() -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError(
            f"Python {platform.python_version()} is too old for the demo and the tests. "
            f"Install Python 3.11 or newer, or name one: make venv PYTHON=/path/to/python3.11"
        )


def find_compiler() -> list[str]:
    """The C++ compiler, and a check that it will find Python's headers: better now than after the downloads."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            break
    else:
        missing = f"CXX={wanted} is not a program" if wanted else "no C++ compiler (c++, g++ or clang++) found"
        raise SetupError(f"{missing}. Megatron's dataset helpers must be compiled: install g++, or set CXX.")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        raise SetupError(
            f"{headers}/Python.h is missing: install the development files of this Python (python3.x-dev)."
        )
    return command


def megatron_arguments(site: Path) -> list[str]:
    """Arguments for pip to unpack the megatron-core wheel, whichever Python the environment has.

    The wheel asks for a newer Python than the code needs, and its one compiled file is built again in the next step;
    so pip is told to take the wheel of that newer Python and to put it straight into our site-packages.
    """
    machine = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}.get(
        platform.machine().lower()
    )
    if sys.platform != "linux" or machine is None:
        raise SetupError(
            f"megatron-core publishes no wheel for {sys.platform} on {platform.machine()}: "
            "the demo and the tests need Linux on x86_64 or aarch64."
        )
    return [
        "--no-deps",
        "--ignore-requires-python",
        "--only-binary=:all:",
        *("--platform", f"manylinux_2_28_{machine}", "--python-version", MEGATRON_WHEEL_PYTHON),
        *("--target", str(site), "--upgrade"),
        *("-r", str(REQUIREMENTS / "megatron.txt")),
    ]


def has_megatron(site: Path) -> bool:
    """Whether the wanted release is unpacked already: pip's --target would replace it, compiled helpers included."""
    pins = [line for line in (REQUIREMENTS / "megatron.txt").read_text().split() if "==" in line]
    return all((site / f"{pin.replace('-', '_').replace('==', '-')}.dist-info" / "RECORD").is_file() for pin in pins)


def build_helpers(python: Path, site: Path, compiler: list[str], log: Path) -> None:
    """Compile helpers.cpp to where `megatron.core.datasets.helpers_cpp` is imported from.

    Megatron would run make for it at the start of every job, but its wheel ships no Makefile.
    """
    source = site / "megatron" / "core" / "datasets" / "helpers.cpp"
    target = source.with_name("helpers_cpp" + str(sysconfig.get_config_var("EXT_SUFFIX")))
    if target.is_file():
        return  # this Python is the one that the wheel was built for
    includes = shlex.split(run([str(python), "-m", "pybind11", "--includes"], log))
    flags = ["-O3", "-Wall", "-shared", "-std=c++17", "-fPIC"]
    unfinished = target.with_suffix(".tmp")
    run([*compiler, *flags, *includes, str(source), "-o", str(unfinished)], log)
    unfinished.replace(target)


def run(command: list[str], log: Path | None, may_fail: bool = False) -> str:
    """Run a command to its end and return what it printed; say every while that it still runs."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=PROGRESS_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                print(f"      ... {time.monotonic() - began:.0f} s", flush=True)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if log is not None:
        with log.open("a") as file:
            file.write(f"$ {shlex.join(command)}\n{output}\n")
    if process.returncode != 0 and not may_fail:
        tail = "\n".join(output.splitlines()[-15:])
        raise SetupError(f"this command failed (exit {process.returncode}):\n  {shlex.join(command)}\n{tail}")
    return output


@contextmanager
def step(number: int, what: str) -> Iterator[None]:
    print(f"[{number}/5] {what}", flush=True)
    began = time.monotonic()
    yield
    print(f"      done in {time.monotonic() - began:.1f} s", flush=True)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let two `make` in one checkout take turns. The lock is on this file: it leaves nothing behind."""
    with open(__file__) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up of this checkout is running: waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fingerprint_of(pip_args: list[str]) -> str:
    digest = hashlib.sha256()
    # The root is part of it: an environment that was moved or copied points back to the old place.
    for fact in (sys.version, platform.machine(), str(ROOT), *pip_args):
        digest.update(fact.encode() + b"\0")
    for path in INPUTS:
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def read_stamp(stamp: Path) -> str | None:
    try:
        return str(json.loads(stamp.read_text())["fingerprint"])
    except (OSError, ValueError, KeyError):
        return None  # no stamp, or not one of ours: set up again


def python_of(venv: Path) -> str | None:
    """Version of the environment's Python; None when there is no environment that works."""
    try:
        command = [str(venv / "bin" / "python"), "-c", "import platform, pip; print(platform.python_version())"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['platlib'])"
    return Path(run([str(python), "-c", code], None).strip())


def size_mb(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir()) // 2**20


def shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
