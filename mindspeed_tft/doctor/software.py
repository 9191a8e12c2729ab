"""Versions, flags, environment and launcher of this host: everything that is installed or said."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from mindspeed_tft.agent import reboot
from mindspeed_tft.doctor.findings import Finding, green, red, yellow
from mindspeed_tft.doctor.job import Job
from mindspeed_tft.patches import groups
from mindspeed_tft.recovery import launcher
from mindspeed_tft.registry import version_of
from mindspeed_tft.settings import Refused

_MEGATRON = version_of("megatron", file="core/package_info.py", distribution="megatron-core")
_TORCH = version_of("torch", file="version.py", distribution="torch")
_OLDEST = (3, 10)
_OFF = ("", "0", "n", "no", "off", "false")


def versions() -> dict[str, str]:
    """What has to be the same on all hosts: the name of each package and its version, "" where it is missing."""
    return {
        "python": platform.python_version(),
        "mindspeed_tft": _installed("mindspeed_tft"),
        "torch": _TORCH() or "",
        "megatron-core": _MEGATRON() or "",
        "torch_npu": _installed("torch_npu"),
        "mindspeed": _installed("mindspeed"),
    }


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_versions() -> Iterator[Finding]:
    found = versions()
    wanted = ".".join(map(str, _OLDEST))
    if tuple(map(int, platform.python_version_tuple()[:2])) < _OLDEST:
        yield red("python", f"Python {found['python']} is older than {wanted}", f"use Python {wanted} or newer")
    else:
        yield green("python", f"Python {found['python']}")
    if found["torch"]:
        yield green("torch", f"torch {found['torch']}")
    else:
        yield red("torch", "torch is not installed for this Python", "start the doctor with the Python of the training")
    megatron = found["megatron-core"]
    if not megatron:
        yield red(
            "megatron",
            "no Megatron is installed or on PYTHONPATH",
            "install megatron-core, or set PYTHONPATH to your checkout as the training does",
        )
    elif groups.supported(megatron):
        yield green("megatron", f"megatron-core {megatron}, one of those that are proved ({groups.RELEASES})")
    else:
        yield red(
            "megatron",
            f"megatron-core {megatron} is not among those that are proved ({groups.RELEASES}), so"
            " --enable-high-availability refuses it",
            f"install one of {groups.RELEASES}; `tftctl patches --megatron DIR` says what another one lacks",
        )


def check_flags(job: Job) -> Iterator[Finding]:
    """The plugin's own flags, as `tftctl config` judges them; what Megatron's flags add is seen when a job starts."""
    for refusal in job.refusals:
        yield red("flags", f"{refusal.flag}: {refusal.reason}", refusal.remedy)
    if job.refusals:
        return
    if not job.on and not job.words:
        yield green("flags", "none were given, so nothing is refused (those of the job follow after `--`)")
        return
    if not job.on:
        yield yellow(
            "flags",
            "the master switch is off, so a job with these flags is not protected",
            "add --enable-high-availability, or set HIGH_AVAILABILITY; flags of the job follow after `--`",
        )
        return
    yield green("flags", f"accepted: on a fault {', then '.join(job.settings.strategies())}")
    if job.nodes > 1 and not job.tls_dir and not job.insecure and not job.bind:
        yield red(
            "flags",
            f"--tft-tls-dir: {job.nodes} nodes would talk to the controller without authentication",
            "give a directory with ca.crt, node.crt and node.key, or say --tft-insecure",
        )
    backend = job.option("--distributed-backend")
    from mindspeed_tft import platforms  # with torch, which `tftctl` of a MindSpore job does without

    if backend and (why := platforms.select().why_no_abort(backend)):
        yield red("flags", f"--distributed-backend {backend}: {why[0]}", why[1])


def check_environment(job: Job) -> Iterator[Finding]:
    """Variables that contradict each other or the flags. Their words are judged with the flags."""
    environ, found = job.environ, False
    caching = environ.get("PYTORCH_NO_NPU_MEMORY_CACHING", "")
    if caching.lower() not in _OFF and job.settings.enable_hbmfault_repair:
        found = True
        yield red(
            "environment",
            f"PYTORCH_NO_NPU_MEMORY_CACHING={caching} switches the caching allocator off, which"
            " --enable-hbmfault-repair needs to tell what a damaged address belongs to",
            "unset it",
        )
    address, master = environ.get("TTP_ADDR"), environ.get("MASTER_ADDR")
    if address and master and address != master:
        found = True
        yield yellow(
            "environment",
            f"TTP_ADDR={address} is not MASTER_ADDR={master}: the first controller listens where"
            " rank 0 runs, and has to have that address",
            "leave TTP_ADDR out, or check that it is another address of the same host",
        )
    if job.on and job.origin.get("enable_high_availability", "").startswith("environment"):
        found = True
        yield green("environment", f"HIGH_AVAILABILITY={environ['HIGH_AVAILABILITY']} switches protection on")
    if not found:
        yield green("environment", "no variable contradicts another")


def check_launcher(job: Job) -> Iterator[Finding]:
    """Whether this host can start a dead worker again, and whether the launcher above us does."""
    ours = [
        point for point in importlib.metadata.entry_points(group="torchrun.logs_specs") if point.name == launcher.OURS
    ]
    if not ours:
        yield red(
            "launcher",
            "torchrun does not find --logs-specs mindspeed_tft: the installation has no entry points",
            "install the package (pip install .) instead of setting PYTHONPATH",
        )
        return
    words = launcher.words()
    reason = reboot.why_not(job.environ) if words and job.settings.enable_worker_reboot else ""
    if reason:
        yield red(
            "launcher",
            f"--enable-worker-reboot: {reason.partition(';')[0]}",
            "start with tftrun, or add --logs-specs mindspeed_tft to torchrun",
        )
        return
    patience = launcher.patience(words)
    try:
        job.settings.deadlines(patience, job.origin)
    except Refused as refusal:
        if job.on and not job.refusals:  # else it is said with the flags
            yield red("launcher", f"{refusal.flag}: {refusal.reason}", refusal.remedy)
            return
    if patience is not None and patience < job.settings.tft_deadline:
        yield yellow(
            "launcher",
            f"this torchrun kills the survivors of a fault after {patience:g} s, less than"
            f" --tft-deadline {job.settings.tft_deadline:g}, so all timeouts shrink",
            "start with tftrun, or add --logs-specs mindspeed_tft --shutdown-timeout N to torchrun",
        )
        return
    beside = Path(sys.executable).with_name("tftrun")
    where = shutil.which("tftrun") or (str(beside) if beside.exists() else None)
    if where is None:
        yield yellow(
            "launcher",
            "tftrun is not on PATH",
            "add the environment's bin folder to PATH, or use `python -m mindspeed_tft.agent.tftrun`",
        )
        return
    yield green("launcher", f"tftrun is {where}, and torchrun knows --logs-specs mindspeed_tft")
