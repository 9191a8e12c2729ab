"""Modules that a drill's jobs import beside the adaptor: how a job learns of them, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_tft.cli.drill import make_plan
from mindspeed_tft.faults import imports
from mindspeed_tft.faults.imports import Imports
from mindspeed_tft.faults.spec import SpecError


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`drilled_one` (a package) and `drilled_two` (a module), which write down that they were imported."""
    (tmp_path / "drilled_one").mkdir()
    (tmp_path / "drilled_one" / "__init__.py").write_text("")
    (tmp_path / "drilled_one" / "adaptor.py").write_text("patched = True")
    (tmp_path / "drilled_two.py").write_text("patched = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("drilled_")]:
        del sys.modules[name]


def test_a_job_imports_what_its_drill_was_told_to(packages: Path) -> None:
    wanted = Imports(before=("drilled_one.adaptor",), after=("drilled_two",))
    told = imports.wanted(wanted.environment())
    assert told == wanted and "drilled_one" not in sys.modules
    imports.load(told.before)
    assert "drilled_one.adaptor" in sys.modules and "drilled_two" not in sys.modules
    imports.load(told.after)
    assert "drilled_two" in sys.modules


def test_without_any_a_job_is_told_nothing() -> None:
    assert imports.NONE.environment() == {} and imports.wanted({}) == imports.NONE
    assert imports.NONE.roots() == ()


def test_the_sources_are_those_of_the_packages(packages: Path) -> None:
    found = Imports(("drilled_one.adaptor", "drilled_one"), ("drilled_two",)).roots()
    assert found == (packages / "drilled_one", packages / "drilled_two.py")


def test_a_module_that_is_not_there_is_refused_before_the_drill() -> None:
    with pytest.raises(SpecError, match=r"--import no_such_module.*put its checkout on PYTHONPATH"):
        make_plan(imports=Imports(before=("no_such_module.adaptor",)))
