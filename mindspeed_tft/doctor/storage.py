"""Directories that a job writes to, and the room that a dump needs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mindspeed_tft.doctor.findings import Finding, green, red, yellow
from mindspeed_tft.doctor.job import Job
from mindspeed_tft.doctor.system import gib
from mindspeed_tft.settings import Refused

MARK = ".tft-doctor-"
BYTES_16_BIT = 14  # a parameter in a checkpoint: itself 2, fp32 main parameter 4, two fp32 moments 8
FAST_STORAGE = 10e9  # bytes a second; a parallel file system of a large cluster has more, a small one does not
BYTES_FP32 = 16  # itself 4, main parameter 4, two moments 8


def directories(job: Job) -> dict[str, str]:
    """What a job writes to on every host, by the name of the flag."""
    wanted = {"--save": job.save, "--tft-incident-dir": job.incidents}
    return {flag: path for flag, path in wanted.items() if path}


def check_writable(job: Job) -> Iterator[Finding]:
    """A file can be made, synced and removed, where a job would. A directory that does not exist yet is not made."""
    if job.on and not job.save:
        yield red("directories", "--save: there is no place for a dump", "add --save DIR after `--`")
    for flag, path in directories(job).items():
        try:
            place = existing(Path(path))
            with tempfile.NamedTemporaryFile(dir=place, prefix=MARK) as file:
                file.write(b"probe")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            yield red(
                "directories",
                f"{flag} {path} is not writable ({error.strerror or error})",
                "give a directory that every rank may write to",
            )
        else:
            yield green("directories", f"{flag} {path} is writable" + ("" if place == Path(path) else " (to be made)"))


def existing(path: Path) -> Path:
    """The directory itself, or the nearest one above it that is there."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def parameters(job: Job) -> int | None:
    """Parameters of a GPT with these flags of Megatron, without biases and norms; None where the flags do not say it.

    Embedding V h, twice where it is untied; in each layer attention 2 h (q + k) with q = heads * channels and k =
    query groups * channels, and a feed-forward part of 2 h f, 3 h f where it is gated (SwiGLU), once for each expert.
    V: vocabulary, h: hidden size, f: size of the feed-forward part.
    """
    layers, hidden = job.number("--num-layers", 0), job.number("--hidden-size", 0)
    if not layers or not hidden:
        return None
    words = set(job.words)
    heads = job.number("--num-attention-heads", 1)
    groups = job.number("--num-query-groups", heads) if "--group-query-attention" in words else heads
    queries = heads * job.number("--kv-channels", hidden // heads)
    attention = 2 * hidden * (queries + queries * groups // heads)
    gated = "--swiglu" in words
    # Megatron's own default: 4 h, or 8 / 3 h rounded to 64 where it is gated.
    default = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    forward = (3 if gated else 2) * hidden * job.number("--ffn-hidden-size", default)
    experts = max(1, job.number("--num-experts", 1))
    vocabulary = job.number("--padded-vocab-size", job.number("--vocab-size", 0))
    untied = "--untie-embeddings-and-output-weights" in words
    return layers * (attention + forward * experts) + vocabulary * hidden * (2 if untied else 1)


def dump_bytes(job: Job) -> int | None:
    """Bytes of one dump: it is written beside the older checkpoints, and renamed, so it needs them once."""
    count = parameters(job)
    if count is None:
        return None
    return count * (BYTES_16_BIT if {"--bf16", "--fp16"} & set(job.words) else BYTES_FP32)


def check_space(job: Job) -> Iterator[Finding]:
    """Room for one dump where --save is."""
    if not job.save:
        return
    size = dump_bytes(job)
    try:
        free = shutil.disk_usage(existing(Path(job.save))).free
    except OSError as error:
        yield red("disk space", f"--save {job.save} cannot be looked at ({error.strerror})", "give another directory")
        return
    if size is None:
        yield yellow(
            "disk space",
            f"--save {job.save} has {gib(free)} free; what a dump needs is not known",
            "give --num-layers, --hidden-size and the like after `--`",
        )
        return
    count = parameters(job) or 0
    text = f"a dump takes about {gib(size)} ({count / 1e9:.3g} billion parameters of {size // count} bytes),"
    text += f" and {gib(free)} are free in --save {job.save}"
    if free < size:
        yield red("disk space", text, "make room, or --save elsewhere: a full disk loses the dump, not what is there")
    elif free < 2 * size:
        yield yellow("disk space", text, "make room for a second one: periodic checkpoints need it, too")
    else:
        yield green("disk space", text)


def check_deadline(job: Job) -> Iterator[Finding]:
    """What a dump has to write a second to be there in time, twice, because a second attempt has to fit in."""
    size = dump_bytes(job)
    if size is None or not job.on:
        return
    try:
        seconds = job.settings.deadlines().order
    except Refused:
        return  # said with the flags
    needed = size / seconds
    if needed > FAST_STORAGE:
        yield yellow(
            "dump time",
            f"{gib(size)} within {seconds:g} s (half of what --tft-deadline leaves, so that a second"
            f" attempt fits in) are {needed / 1e9:.0f} GB/s of storage",
            "raise --tft-deadline, unless yours is that fast",
        )
    else:
        yield green("dump time", f"needs {needed / 1e9:.2g} GB/s of storage for an attempt within {seconds:g} s")


def mark(path: str, name: str) -> None:
    """Leave an empty file for other hosts to see; name as `MARK` and letters.

    Raises:
        OSError: it cannot be written.
        ValueError: that is not a name for it.
    """
    _marked(path, name).touch()


def sees(path: str, name: str) -> bool:
    """Whether the file of another host is there. Lists the directory: a client of NFS may remember that it was not."""
    file = _marked(path, name)
    try:
        return file.name in os.listdir(file.parent)
    except OSError:
        return False


def unmark(path: str, name: str) -> None:
    _marked(path, name).unlink(missing_ok=True)


def _marked(path: str, name: str) -> Path:
    if not name.startswith(MARK) or not name[len(MARK) :].isalnum():
        raise ValueError(f"{name!r} is no mark")
    return existing(Path(path)) / name
