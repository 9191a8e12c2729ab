"""Each feature of Megatron is proved exact or refused: the drills behind `docs/compatibility.md`, and that it is true.

Without marker `full` only the cheapest drills run; the page and its references are always checked.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_tft.faults.spec import parse_fault
from mindspeed_tft.patches.megatron_unproved import UNPROVED, Unproved, first

from .compatibility import ELSEWHERE, NOT_RUN, PROVED, RELEASES, STATES, Proved
from .conftest import Drilled
from .refused import REFUSED

pytestmark = pytest.mark.megatron
ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.parametrize("row", PROVED, ids=lambda row: row.name)
def test_a_job_with_these_features_ends_exact(drill: Callable[..., Drilled], row: Proved) -> None:
    found = drill(*row.arguments())
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    faults = row.fault.split()
    assert sorted(report["faults_fired"]) == sorted(faults)
    strategies = row.strategies.split() or [row.preset] * len(faults)
    assert [each["strategy"] for each in report["recoveries"]] == strategies
    assert "rewind" in strategies or report["steps_lost"] == 0
    if row.preset != "dump":
        assert report["processes_restarted"] == sorted(
            {parse_fault(f).rank for f in faults if parse_fault(f).ends_process}
        )
    assert {entry["what"] for entry in report["comparisons"]} == ({"dump", "end"} if row.preset == "dump" else {"end"})
    assert all(entry["tensors"] > 30 and entry["different"] == 0 for entry in report["comparisons"])
    assert report["processes_left_behind"] == []
    # The drill proves nothing of a feature that was not at work.
    assert re.search(row.seen, (found.directory / "broken.log").read_text()), row.seen


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "module", "assignment"),
    [
        pytest.param(
            "frozen",
            "megatron_shards",
            "unowned = lambda *of_rank: []",
            id="tensors-that-no-optimizer-owns-stay-behind",
        ),
        pytest.param(
            "frozen-most",
            "megatron_shards",
            "count_updates = lambda *of_rank: None",
            id="a-writer-with-an-empty-shard-counts-no-updates",
        ),
        pytest.param(
            "batch-ramp-up",
            "megatron_rewind",
            "_begin = (lambda begin: lambda iterator, loader, consumed, kind:"
            " begin(iterator, loader, module._args().iteration * 16, kind))(module._begin)",
            id="samples-counted-as-if-each-step-had-as-many",
        ),
    ],
)
def test_control_a_rule_that_is_missing_is_seen(
    drill: Callable[..., Drilled], spoil: Callable[..., None], name: str, module: str, assignment: str
) -> None:
    (row,) = (row for row in PROVED if row.name == name)
    spoil(module, assignment)
    found = drill(*row.arguments())
    assert found.report["verdict"] != "exact", found.output


def test_the_page_is_what_the_generator_prints() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "compatibility.py"), "--print"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert made.returncode == 0, made.stderr
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert page == made.stdout, "run scripts/compatibility.py"


def test_all_that_is_refused_is_on_the_page_and_nothing_else() -> None:
    listed = [attribute for row in REFUSED for attribute in row.flags]
    assert sorted(listed) == sorted(option.attribute for option in UNPROVED)
    assert len(set(listed)) == len(listed)


def test_every_proof_on_the_page_exists() -> None:
    tests = (
        {test for row in (*ELSEWHERE, *RELEASES) for test in row.tests}
        | set(NOT_RUN)
        | {test for state in STATES for test in state.tests if "::" in test}
    )
    missing = [test for test in sorted(tests) if not _defines(test)]
    assert missing == []
    rows = {row.name for row in PROVED}
    assert [test for state in STATES for test in state.tests if "::" not in test and test not in rows] == []


def _defines(test: str) -> bool:
    file, _, function = test.partition("::")
    return f"\ndef {function}(" in (ROOT / file).read_text()


def test_every_rule_on_the_page_exists() -> None:
    refused = {option.attribute for option in UNPROVED}
    for name in {name for state in STATES for name in state.by} - refused:
        module, _, attribute = name.rpartition(".")
        source = importlib.util.find_spec(f"mindspeed_tft.{module}")
        assert source is not None and source.origin is not None, name
        text = Path(source.origin).read_text()
        assert re.search(rf"^( *def |class |){re.escape(attribute)}\b", text, re.MULTILINE), name


class _Space:
    """Arguments of a Megatron that has one of the options only."""

    context_parallel_size = 2


def test_an_option_that_this_megatron_does_not_have_is_not_looked_at() -> None:
    table = (Unproved("no_such_option", bool, "-"), Unproved("context_parallel_size", lambda value: value > 1, "-"))
    assert first(_Space(), table) is table[1]
    assert first(_Space(), table[:1]) is None


class _Profiled:
    profile = True


def test_what_is_in_the_way_of_a_repair_alone_is_not_refused_to_a_job_that_only_dumps() -> None:
    refused = first(_Profiled())
    assert refused is not None and refused.flag == "--profile"
    assert first(_Profiled(), online=False) is None
    assert first(_Space(), online=False) is not None
    assert {option.attribute for option in UNPROVED if option.online} >= {"profile", "log_straggler"}
