"""`tftctl config --check --megatron`: the flags of the llama2-70B example, as each Megatron takes them, without 128
processes. What Megatron or MindSpeed refuses is seen, and said."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import checkouts
import pytest
from typer.testing import CliRunner

from mindspeed_tft.cli.dry_run import INSTALLED
from mindspeed_tft.cli.main import app
from mindspeed_tft.patches import megatron_dry_run
from mindspeed_tft.patches.mindspeed_flags import MINDSPEED

RANKS = 128
MINE = {"--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb"}  # of MindSpeed, in the example
TODAY = {"--distributed-backend"}  # what the plugin itself refuses on NPUs, as the example says


@pytest.fixture(scope="module")
def words(root: Path) -> list[str]:
    """The flags of the example, as its script makes them."""
    spec = importlib.util.spec_from_file_location("check_examples", root / "scripts" / "check_examples.py")
    assert spec is not None and spec.loader is not None
    checker: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = checker
    spec.loader.exec_module(checker)
    example = next(one for one in checker.RUNS if one.path == "llama2_70b_npu.sh" and one.protected)
    found: list[str] = checker.training_words(checker.record(example)[-1])
    assert sum(word.startswith("--") for word in found) >= 60
    return found


def ask(words: Sequence[str], *options: str, path: str = "") -> tuple[int, str, str]:
    """Status, output and errors of the command."""
    command = [Path(sys.executable).with_name("tftctl"), "config", "--check", *options, "--", *words]
    env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def refused(errors: str) -> dict[str, str]:
    """Flag -> reason and remedy."""
    head = "tftctl config: error: "
    lines = [line.removeprefix(head) for line in errors.splitlines() if line.startswith(head)]
    return {flag: text for flag, _, text in (line.partition(": ") for line in lines)}


def judge(words: Sequence[str], megatron: str) -> None:
    """Everything but MindSpeed's flags is parsed, and everything is valid for 128 ranks."""
    code, said, errors = ask(words, "--megatron", megatron, "--world-size", str(RANKS))
    found = refused(errors)
    assert found.keys() - TODAY == MINE, errors
    assert all("it is a flag of MindSpeed" in found[flag] and "give --mindspeed" in found[flag] for flag in MINE)
    flags = sum(word.startswith("--") for word in words)
    assert code == 2 and f": {flags - len(MINE)} flags parsed for {RANKS} ranks" in said


def test_the_installed_megatron(words: list[str]) -> None:
    judge(words, INSTALLED)


def test_a_checkout(words: list[str]) -> None:
    judge(words, str(checkouts.megatron(">=0.6")))


def test_a_checkout_with_mindspeed(words: list[str], root: Path) -> None:
    megatron = checkouts.megatron(">=0.6")
    mindspeed = os.environ.get("TFT_MINDSPEED_PATH")
    if not mindspeed:
        pytest.skip("needs a checkout of MindSpeed: set TFT_MINDSPEED_PATH")
    fake = root / "tests" / "support" / "npu"
    options = ("--megatron", str(megatron), "--mindspeed", mindspeed, "--world-size", str(RANKS))
    code, said, errors = ask(words, *options, path=str(fake))
    flags = sum(word.startswith("--") for word in words)
    assert refused(errors).keys() <= TODAY, errors
    assert " with MindSpeed" in said and f": {flags} flags parsed for {RANKS} ranks" in said, said + errors
    assert code == (2 if refused(errors) else 0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "flag", "why"),
    [
        (["--no-such-flag"], "--no-such-flag", "neither Megatron nor the plugin"),
        (["--num-layers", "many"], "--num-layers", "invalid int value"),
        (["--tensor-model-parallel-size", "3"], "validate_args", "AssertionError"),
        (["--tft-dedline", "600"], "--tft-dedline", "did you mean --tft-deadline"),
    ],
)
def test_what_is_wrong_is_seen(words: list[str], more: list[str], flag: str, why: str) -> None:
    """The control of the tests above."""
    code, _, errors = ask([*words, *more], "--megatron", INSTALLED, "--world-size", str(RANKS))
    assert code == 2 and why in refused(errors)[flag], errors


def test_who_cannot_be_asked(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["config", "--check", "--megatron", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path} has no megatron/training/arguments.py; give a checkout" in result.stderr
    result = CliRunner().invoke(app, ["config", "--check", "--world-size", "4"])
    assert result.exit_code == 2 and "add" in result.stderr and "--megatron" in result.stderr


def test_mindspeed_without_its_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    found = megatron_dry_run.look([], None, {}, with_mindspeed=True)
    assert "torch_npu, which is not installed" in json.dumps(found["refused"])


def test_the_list_of_mindspeeds_flags_has_those_of_a_checkout() -> None:
    mindspeed = os.environ.get("TFT_MINDSPEED_PATH")
    if not mindspeed:
        pytest.skip("needs a checkout of MindSpeed: set TFT_MINDSPEED_PATH")
    found = set()
    for path in (Path(mindspeed) / "mindspeed").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                found |= {word.value for word in node.args if isinstance(word, ast.Constant)
                          and isinstance(word.value, str) and word.value.startswith("--")}  # fmt: skip
    assert len(found) > 100 and found <= MINDSPEED, sorted(found - MINDSPEED)
