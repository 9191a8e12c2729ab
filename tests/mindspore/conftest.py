"""Real jobs of MindSpore under msrun, in an environment of their own (`make test-mindspore`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mindspore_jobs import PYTHON, Final, Jobs

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not PYTHON:
        skip = pytest.mark.skip(reason="needs MindSpore: run `make test-mindspore`, or set TFT_MINDSPORE_PYTHON")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Final]:
    """The final bytes of both ranks of the same job without the plugin and without a fault."""
    jobs = Jobs(tmp_path_factory.mktemp("unbroken"))
    job = jobs.start()
    assert job.end() == 0, job.told()
    yield {rank: job.final(rank) for rank in (0, 1)}
    jobs.end()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    found = Jobs(tmp_path)
    yield found
    found.end()
