"""What is kept of a parameter has its bytes, whatever its dtype; what ranks agree on has all its bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mindspore_jobs import PROGRAMS, PYTHON, Jobs

if TYPE_CHECKING:
    from tests.conftest import Processes


def test_every_dtype_survives(processes: Processes, tmp_path: Path) -> None:
    output = processes.run([PYTHON, PROGRAMS / "formats.py", tmp_path / "one.ckpt"], timeout=120)
    assert "as it should be: there is no copy of step 7 in host memory, but of [8, 9]" in output


def test_ranks_agree_on_numbers_of_any_size(jobs: Jobs) -> None:
    job = jobs.start(program="agree.py")
    assert job.end() == 0, job.told()
    assert [rank for rank in (0, 1) if "agreed" not in job.log(rank)] == []
