"""Beside real MindSpeed: drills in all import orders, what is refused, and that each of its options is judged.

Needs checkouts of Megatron-LM and MindSpeed that fit each other, in TFT_MEGATRON_PATH and TFT_MINDSPEED_PATH; torch_npu
is the stand-in over CPU tensors in `tests/support/npu`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkouts
import pytest

from mindspeed_tft import arguments
from mindspeed_tft.faults.spec import parse_fault
from mindspeed_tft.patches import megatron_unproved, mindspeed, mindspeed_unproved
from mindspeed_tft.settings import STRATEGIES

from .conftest import Drilled
from .mindspeed_features import APART, COMPANIONS, DRILLED, DRILLS, RELEASES, WORDS, Drill
from .test_refusals import BASE, HA

pytestmark = pytest.mark.megatron
ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
STAND_INS = ROOT / "tests" / "support" / "npu"
REFUSED = {option.flag: option for option in mindspeed_unproved.UNPROVED}


@pytest.fixture
def beside_mindspeed(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkout of Megatron, with MindSpeed and the stand-ins on PYTHONPATH."""
    mindspeed_checkout = os.environ.get("TFT_MINDSPEED_PATH")
    if not mindspeed_checkout:
        pytest.skip("TFT_MINDSPEED_PATH names no checkout of MindSpeed (one for Megatron core_v0.12.1 is wanted)")
    megatron = checkouts.megatron("==0.12.*")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_INS), mindspeed_checkout]))
    return megatron


def run(program: str, megatron: Path, *words: str, given: str = "", **environ: str) -> str:
    path = os.pathsep.join([str(megatron), os.environ["PYTHONPATH"]])
    ended = subprocess.run(
        [sys.executable, str(PROGRAMS / program), *words],
        input=given,
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


# ------------------------------------------------------------------------------------------------------ drills


@pytest.mark.full
@pytest.mark.parametrize("row", DRILLS, ids=lambda row: row.name)
def test_a_job_with_mindspeed_ends_exact(beside_mindspeed: Path, drill: Callable[..., Drilled], row: Drill) -> None:
    found = drill("--megatron", str(beside_mindspeed), *row.arguments())
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert report["faults_fired"] == [row.fault] and report["steps_lost"] == 0
    assert [each["strategy"] for each in report["recoveries"]] == [row.preset]
    dies = row.preset == "recover"
    assert report["processes_restarted"] == ([parse_fault(row.fault).rank] if dies else report["processes_restarted"])
    assert all(entry["tensors"] > 30 and entry["different"] == 0 for entry in report["comparisons"])
    log = (found.directory / "broken.log").read_text()
    assert "start to patch features in megatron adaptor" in log  # of MindSpeed
    assert re.search(row.seen, log), row.seen


# --------------------------------------------------------------------------------------------------- import orders

# Targets of ours that MindSpeed has patched too: both are called, ours outside.
SHARED = {
    "megatron.training.arguments:parse_args",
    "megatron.training.arguments:validate_args",
    "megatron.core.optimizer.optimizer:ChainedOptimizer.step",
}


@pytest.mark.parametrize(
    "order", ["mindspeed ours", "ours mindspeed", "mindspeed ours repatch", "ours mindspeed repatch"]
)
def test_all_patches_are_in_place_in_every_order(beside_mindspeed: Path, order: str) -> None:
    printed = run("mindspeed_order.py", beside_mindspeed, *order.split())
    found = [json.loads(line.partition(" ")[2]) for line in printed.splitlines() if line.startswith("FOUND ")]
    assert len(found) == 2
    for each in found:
        assert len(each["applied"]) >= 20 and set(each["applied"]) >= SHARED, each
        # What other releases of Megatron have, and nothing else.
        assert [text for text in each["others"] if "made for megatron " not in text] == [], each
        assert set(each["shared"]) >= SHARED, each


# ---------------------------------------------------------------------------------------------------- refusals


def test_all_that_is_refused_is_refused_by_real_parsers(beside_mindspeed: Path, tmp_path: Path) -> None:
    """MindSpeed's options, Megatron's and ours on one command line; each unproved one ends it, with flag and reason."""
    known = json.loads(run("mindspeed_options.py", beside_mindspeed).partition("OPTIONS ")[2])
    attributes = {each["attribute"] for each in known.values()} | {"reset_attention_mask"}
    refused = [option for option in mindspeed_unproved.UNPROVED if option.attribute in attributes]
    assert len(refused) > 40
    save = ["--save", str(tmp_path), "--save-interval", "1000"]
    words = [*BASE, *HA, "--enable-hbmfault-repair", "--optimizer-replica-num", "2", *save]
    options = [word for option in refused for word in WORDS.get(option.attribute, option.flag).split()]
    names = [option.attribute for option in refused]
    cases: list[dict[str, Any]] = [
        {"words": [*words, "--optimization-level", str(level)], "environ": {}} for level in (0, 1, 2)
    ]
    cases.append({"words": words, "options": [*BASE, *options], "attributes": names, "environ": {}})
    adaptor = "mindspeed.megatron_adaptor"
    printed = run("refusals.py", beside_mindspeed, given=json.dumps(cases), IMPORTED_BEFORE=adaptor)
    found = [json.loads(line.partition(" ")[2]) for line in printed.splitlines() if line.startswith("CASE ")]
    assert [each["code"] for each in found[:3]] == [0, 0, 0], found[:3]
    for option, each in zip(refused, found[3:], strict=True):
        assert each["code"] == 2, (option, each)
        assert f"error: {option.flag}: {option.reason}. Remedy: {option.remedy}." in each["err"], (option, each)


# ------------------------------------------------------------------------------------------- every option is judged


def judged() -> dict[str, str]:
    """Flag to verdict."""
    of_megatron = {option.flag for option in megatron_unproved.UNPROVED}
    found = {**dict.fromkeys(of_megatron, "refused"), **dict.fromkeys(REFUSED, "refused")}
    found |= dict.fromkeys(DRILLED, "drilled")
    found |= {flag: "apart" for row in APART for flag in row.flags.split()}
    return found | {flag: f"with {main}" for main, flags in COMPANIONS.items() for flag in flags.split()}


def test_every_option_of_a_real_mindspeed_is_judged(beside_mindspeed: Path) -> None:
    known = json.loads(run("mindspeed_options.py", beside_mindspeed).partition("OPTIONS ")[2])
    assert len(known) > 130
    assert sorted(set(known) - set(judged())) == []


def test_the_judgements_do_not_contradict_each_other() -> None:
    refused, companions = set(REFUSED), [flag for flags in COMPANIONS.values() for flag in flags.split()]
    apart = [flag for row in APART for flag in row.flags.split()]
    assert len(refused) == len(mindspeed_unproved.UNPROVED)
    every = [*refused, *DRILLED, *apart, *companions]
    assert sorted(flag for flag in set(every) if every.count(flag) > 1) == []
    assert set(COMPANIONS) - set(judged()) == set()
    rows = {row.name: row for row in DRILLS}
    assert len(rows) == len(DRILLS)
    assert all(release in RELEASES for row in DRILLS for release in row.passed)
    for flag, name in DRILLED.items():
        assert flag in rows[name].flags.split(), (flag, name)


def test_the_page_is_what_the_generator_prints() -> None:
    script = ROOT / "scripts" / "mindspeed_page.py"
    made = subprocess.run([sys.executable, str(script), "--print"], capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    assert (ROOT / "docs" / "mindspeed.md").read_text() == made.stdout, "run scripts/mindspeed_page.py"


# ------------------------------------------------------------------------------------------------ MindSpeed-LLM


def test_mindspeed_llm_has_the_flags_and_the_places_that_are_looked_for() -> None:
    """By its sources, which are not imported: they need what only an NPU has."""
    place = os.environ.get("TFT_MINDSPEED_LLM_PATH")
    if not place:
        pytest.skip("needs a checkout of MindSpeed-LLM: set TFT_MINDSPEED_LLM_PATH")
    root = Path(place)
    feature = root / "mindspeed_llm" / "features_manager" / "high_availability" / "high_availability.py"
    calls = [node for node in ast.walk(ast.parse(feature.read_text())) if isinstance(node, ast.Call)]
    theirs = {call.args[0].value for call in calls if ast.unparse(call.func).endswith(".add_argument")}  # type: ignore[attr-defined]
    assert theirs == {flag for flag, options in arguments.FLAGS if flag.startswith(("--enable-", "--distributed-"))}
    assert "class HighAvailabilityFeature" in feature.read_text()
    for module in (mindspeed._LLM_FEATURE, mindspeed._LLM_RUNTIME, mindspeed._LLM_LOOP):
        found = root.joinpath(*module.split("."))
        assert found.is_dir() or found.with_suffix(".py").is_file(), module
    helper = root / "mindspeed_llm" / "tasks" / "high_availability" / "high_availability_helper.py"
    words = re.findall(r"'(dump|re\w+|elastic-\w+)'", helper.read_text())
    assert set(words) == set(STRATEGIES)
    # Its loop acts on the flag by itself, whatever its list of features says: why the plugin stays off.
    loop = root.joinpath(*mindspeed._LLM_LOOP.split(".")).with_suffix(".py")
    assert "args.enable_high_availability" in loop.read_text()
