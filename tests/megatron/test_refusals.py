"""Every bad input is refused on rank 0 by Megatron's own parser with our patch: flag, reason, remedy, exit status 2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_tft.patches.megatron_unproved import UNPROVED, Unproved

from .refused import REFUSED

pytestmark = pytest.mark.megatron
PROGRAM = Path(__file__).parent / "programs" / "refusals.py"
BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    " --micro-batch-size 2 --train-iters 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127"
    " --transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion"
    " --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-persist-layer-norm"
    " --no-rope-fusion"
).split()
HA = ["--enable-high-availability", "--use-distributed-optimizer", "--ckpt-format", "torch"]


def unproved(save: list[str]) -> tuple[dict[str, Any], list[Unproved]]:
    """One case of `PROGRAM` for all options that no test has proved: Megatron's parser reads them all at once."""
    flags = {attribute: words for row in REFUSED for attribute, words in row.flags.items() if words}
    taken = [words.removeprefix("!") for words in flags.values() if words.startswith("!")]  # are on by default
    options = [word for words in flags.values() if not words.startswith("!") for word in words.split()]
    options = [word for word in [*BASE, *options] if word not in taken]
    table = {option.attribute: option for option in UNPROVED}
    asked = {
        "words": [*BASE, *HA, "--enable-hbmfault-repair", *save],
        "options": options,
        "attributes": list(flags),
        "environ": {},
    }
    return asked, [table[attribute] for attribute in flags]


def case(words: list[str], *expected: str, **environ: str) -> tuple[list[str], tuple[str, ...], dict[str, str]]:
    return words, expected, environ


def cases(tmp_path: Path, port: int) -> dict[str, tuple[list[str], tuple[str, ...], dict[str, str]]]:
    save = ["--save", str(tmp_path / "save"), "--save-interval", "1000"]
    on = [*HA, *save]
    sharded = [*HA[:2], *save, "--ckpt-format", "torch_dist"]
    whole = [word for word in on if word != "--use-distributed-optimizer"]
    experts = ["--num-experts", "4"]
    occupied = tmp_path / "a-file"
    occupied.write_text("no directory")
    preset = tmp_path / "bad.yaml"
    preset.write_text("optimizer-replica-nmu: 2\n")
    return {
        "off": case(["--use-distributed-optimizer"]),  # before those that turn something on
        "repair without the master": case(["--enable-hbmfault-repair"], "--enable-hbmfault-repair", "master switch"),
        "reboot without the master": case(["--enable-worker-reboot"], "--enable-worker-reboot", "master switch"),
        "data-parallel size 1": case(
            [*on, "--tensor-model-parallel-size", "4"], "--enable-high-availability", "data-parallel size is 1"
        ),
        "N does not divide": case(
            [*on, "--optimizer-replica-num", "3"], "--optimizer-replica-num", "use one of 2, 4", "does not divide"
        ),
        "save missing": case(HA, "--save is missing", "add --save DIR"),
        "save not writable": case([*on, "--save", str(occupied / "below")], "--save", "not writable", "Remedy"),
        "unknown YAML key": case([*on, "--tft-config", str(preset)], "--tft-config", "optimizer-replica-num"),
        "unknown word": case(on, "HIGH_AVAILABILITY", "'dmup'", "dump, retry and recover", HIGH_AVAILABILITY="dmup"),
        "port taken": case([*on, "--tft-controller-port", str(port)], "--tft-controller-port", "taken", "free port"),
        "replicas without distributed optimizer": case(
            [*whole, "--optimizer-replica-num", "2"], "--optimizer-replica-num", "4 data-parallel ranks holds all"
        ),
        "no replica without distributed optimizer": case(
            [*whole, "--enable-hbmfault-repair", "--distributed-optimizer-no-replica"],
            "--distributed-optimizer-no-replica: ",
            "or add --use-distributed-optimizer",
        ),
        "format": case([*HA[:2], *save, "--ckpt-format", "torch_dcp"], "--ckpt-format", "use --ckpt-format torch_dist"),
        "a plan of the last save": case(
            [*sharded, "--enable-hbmfault-repair", "--ckpt-assume-constant-structure"],
            "--ckpt-assume-constant-structure",
        ),
        "a plan that no newcomer needs": case([*sharded, "--ckpt-assume-constant-structure"]),
        "non-persistent checkpoints": case(
            [*sharded, "--enable-hbmfault-repair", "--non-persistent-save-interval", "5"],
            "--non-persistent-save-interval",
        ),
        "elastic training": case(
            [*on, "--enable-elastic-training"], "--enable-elastic-training", "not in this version"
        ),
        "no replica, no repair": case(
            [*on, "--distributed-optimizer-no-replica"],
            "--distributed-optimizer-no-replica",
            "add --enable-hbmfault-repair",
        ),
        "contradiction": case(
            [*on, "--num-distributed-optimizer-instances", "4"], "--num-distributed-optimizer-instances", "contradicts"
        ),
        "another backend": case([*on, "--distributed-backend", "nccl"], "--distributed-backend", "nccl", "gloo"),
        "save interval missing": case([*HA, "--save", str(tmp_path / "save")], "--save", "add --save-interval N"),
        "several nodes in the open": case(on, "--tft-tls-dir", "--tft-insecure", GROUP_WORLD_SIZE="2"),
        "experts on one rank each": case(
            [*on, *experts, "--expert-model-parallel-size", "4"], "--optimizer-replica-num", "less --expert-model"
        ),
        "experts on one rank each, without distributed optimizer": case(
            [*whole, *experts, "--expert-model-parallel-size", "4"], "--expert-model-parallel-size", "is on one rank"
        ),
        "experts that are divided otherwise": case(
            [*on, *experts, "--tensor-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"],
            "--expert-tensor-parallel-size",
        ),
        "good, with experts": case([*on, *experts, "--expert-model-parallel-size", "2"]),
        "good, without distributed optimizer": case(whole),
        "good": case(on),
        "good, in Megatron's own default format": case([*HA[:2], *save]),
    }


def test_bad_input_is_refused_with_flag_reason_and_remedy(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        wanted = cases(tmp_path, listener.getsockname()[1])
        each, options = unproved(["--save", str(tmp_path / "save"), "--save-interval", "1000"])
        asked = [{"words": BASE + words, "environ": environ} for words, _, environ in wanted.values()]
        stdin = json.dumps([*asked, each])
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("TFT_", "TTP_", "HIGH_AVAILABILITY"))}
        done = subprocess.run(
            [sys.executable, str(PROGRAM)], input=stdin, capture_output=True, text=True, timeout=300, env=clean
        )
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    assert [json.loads(data) for word, _, data in lines if word == "CLEAN"] == [[]], done.stderr
    found: list[dict[str, Any]] = [json.loads(data) for word, _, data in lines if word == "CASE"]
    wanted.update({f"unproved {option.attribute}": case([], *option[2:4], option.flag) for option in options})
    assert len(found) == len(wanted), done.stdout + done.stderr
    for (name, (_, expected, _)), got in zip(wanted.items(), found, strict=True):
        assert got["seconds"] < 5, (name, got)
        if expected:
            assert got["code"] == 2, (name, got)
            assert got["err"].startswith("mindspeed_tft: error: ") and got["err"].count("\n") == 1, (name, got)
            assert "Remedy" in got["err"], (name, got)
            for text in expected:
                assert text in got["err"], (name, got)
        else:
            assert got["code"] == 0, (name, got)
        if name == "off":  # nothing but the parser: no other patch, no thread, none of the rooms behind it
            assert got["state"]["groups"] == ["parser"], got
            assert got["state"]["threads"] == 1, got
            rooms = ("control", "engine.machine", "recovery.session", "runtime", "patches.megatron_training")
            assert not [n for n in got["state"]["ours"] if n.startswith(tuple(f"mindspeed_tft.{r}" for r in rooms))], (
                got
            )
        if name == "good":
            assert "high-availability" in got["state"]["groups"], got
