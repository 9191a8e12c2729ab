"""`torchrun ... -m mindspeed_tft.doctor -- TRAINING FLAGS`: the doctor by the launcher of the job, on all of its hosts.

One worker of each host looks; the others end at once. The hosts meet where the first controller will listen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.cli import doctor
from mindspeed_tft.doctor.job import Job

_OPTIONS = {"--wait": 60.0, "--timeout": 3.0}


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit status, as that of `tftctl doctor`."""
    if "GROUP_RANK" not in environ:
        print("mindspeed_tft.doctor: no torchrun has started this; use tftctl doctor", file=sys.stderr)
        return doctor.USAGE
    if environ.get("LOCAL_RANK", "0") != "0":
        return 0
    try:
        options, flags = _split(list(words))
        job, wanted = _plan(options, flags, environ)
    except ValueError as error:
        print(f"mindspeed_tft.doctor: error: {error}", file=sys.stderr)
        return doctor.USAGE
    return doctor.run(job, wanted)


def _split(words: list[str]) -> tuple[dict[str, float | bool], list[str]]:
    """Our own options, which come before `--`, and the flags of the training.

    Raises:
        ValueError: there is no such option.
    """
    own, flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else ([], words)
    options: dict[str, float | bool] = {"--json": False, "--strict": False, **_OPTIONS}
    while own:
        name = own.pop(0)
        if name in _OPTIONS and own:
            options[name] = float(own.pop(0))
        elif name in options and name not in _OPTIONS:
            options[name] = True
        else:
            raise ValueError(f"{name}: expected --json, --strict, --wait SECONDS or --timeout SECONDS before `--`")
    return options, flags


def _plan(
    options: Mapping[str, float | bool], flags: list[str], environ: Mapping[str, str]
) -> tuple[Job, doctor.Wanted]:
    nodes, master = int(environ.get("GROUP_WORLD_SIZE", "1")), environ.get("MASTER_ADDR", "127.0.0.1")
    address = environ.get("TTP_ADDR") or master
    job = doctor.job_of(
        flags, nodes, timeout=float(options["--timeout"]), several=nodes > 1 and not is_loopback(address)
    )
    point = (address, job.controller_port) if nodes > 1 else None
    wanted = doctor.Wanted(
        point=point,
        node=int(environ["GROUP_RANK"]),
        wait=float(options["--wait"]),
        strict=bool(options["--strict"]),
        as_json=bool(options["--json"]),
        under_torchrun=True,
    )
    return job, wanted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
