"""Every declared target against the sources of each supported Megatron: nothing of a host is imported.

A target that a release lacks has to be outside of the range of versions that its patch is declared for, or be one that
may be missing. Otherwise a job would be refused at start-up, though its Megatron counts as supported.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import checkouts
import pytest

from mindspeed_tft.patches import (  # noqa: F401  (importing declares)
    high_availability,
    megatron_arguments,
    megatron_drill,
    torch_elastic,
)
from mindspeed_tft.patches.groups import MEGATRON, SUPPORTED, supported
from mindspeed_tft.registry import REGISTRY, PatchError, Registry, Row, Sources
from mindspeed_tft.registry.versions import fits, folders_of, version_in

INSTALLED = importlib.metadata.version("megatron-core")
OTHERS = ("0.17.1", "0.18.2")
WHEEL_PYTHON = "3.12"  # what the wheels are published for; they are only read
PATIENCE = 120.0  # seconds for the package index


def sources_of(folder: Path) -> Sources:
    """Megatron from `folder`, all else as it is installed."""
    return Sources(lambda package: [folder] if package == "megatron" else folders_of(package))


def survey(sources: Sources, megatron: str, registry: Registry = REGISTRY) -> tuple[Row, ...]:
    return registry.survey(sources, lambda host: megatron if host == "megatron" else None)


def broken(rows: Iterable[Row], megatron: str) -> list[str]:
    """The patches that promise to fit this release and do not."""
    return [
        f"{row.target} (declared at {row.origin} for {row.versions or 'any version'}): {row.detail}"
        for row in rows
        if (row.state == "missing" and fits(megatron, row.versions))
        or (row.state == "skipped" and row.versions and fits(megatron, row.versions))
    ]


def test_every_target_is_there_in_the_installed_release() -> None:
    rows = survey(Sources(), INSTALLED)
    assert fits(INSTALLED, MEGATRON), "the environment has a Megatron that high availability is not declared for"
    assert broken(rows, INSTALLED) == []
    _assert_supported(rows, INSTALLED)
    here = [row for row in rows if fits(INSTALLED, row.versions) or not row.target.startswith("megatron.")]
    assert {row.state for row in here} <= {"declared", "applied", "waiting"}
    assert all(row.place for row in here if not row.target.startswith("mindspeed."))
    files = {row.place.rpartition(":")[0] for row in rows if row.target.startswith("megatron.") and row.place}
    assert len(files) > 5 and all(Path(file).is_file() for file in files)


@pytest.mark.full
@pytest.mark.parametrize("release", OTHERS)
def test_what_another_release_lacks_is_outside_of_its_range(release: str, root: Path) -> None:
    folder = unpacked(release, root / "build" / "contract")
    version = version_in(folder / "core" / "package_info.py")
    assert version == release
    rows = survey(sources_of(folder), version)
    assert broken(rows, version) == []
    places = [Path(row.place) for row in rows if row.target.startswith("megatron.") and row.place]
    assert places and all(folder in place.parents for place in places), "the wheel's sources, not the installed ones"
    _assert_supported(rows, version)


def _assert_supported(rows: Iterable[Row], version: str) -> None:
    """What is not for this release is skipped, and is no reason to refuse it."""
    assert supported(version)
    outside = [row for row in rows if row.versions and not fits(version, row.versions)]
    assert outside and all(row.state == "skipped" and f"this is {version}" in row.detail for row in outside)


@pytest.mark.parametrize("versions", SUPPORTED)
def test_every_target_is_there_in_the_checkout_that_is_named(versions: str) -> None:
    checkout = checkouts.megatron(versions)
    version = checkouts.release(checkout)
    rows = survey(sources_of(checkout / "megatron"), version)
    assert broken(rows, version) == []
    places = [Path(row.place) for row in rows if row.target.startswith("megatron.") and row.place]
    assert len(places) > 20 and all(checkout in place.parents for place in places)
    _assert_supported(rows, version)


def unpacked(release: str, cache: Path) -> Path:
    """The package `megatron` of a release from the package index; the test is skipped where there is none."""
    folder = cache / release
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            with zipfile.ZipFile(downloaded(release, Path(scratch))) as wheel:
                names = [name for name in wheel.namelist() if name.startswith("megatron/") and name.endswith(".py")]
                wheel.extractall(Path(scratch, "wheel"), names)
            try:
                os.rename(Path(scratch, "wheel"), folder)  # complete, or not there
            except OSError:  # another run was faster
                assert folder.is_dir()
    return folder / "megatron"


def downloaded(release: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet",
               "--only-binary", ":all:", "--python-version", WHEEL_PYTHON,
               "--platform", f"manylinux_2_28_{platform.machine()}", "--dest", str(folder),
               f"megatron-core=={release}"]  # fmt: skip
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"no package index answered within {PATIENCE:g} s")
    if result.returncode != 0:
        pytest.skip(f"megatron-core {release} cannot be downloaded: {result.stderr.strip().splitlines()[-1:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


# ------------------------------------------------------------------------------------------------- control


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("megatron.training.training:train_stepp", "module megatron.training.training has no 'train_stepp'"),
        ("megatron.training.trainin:train_step", "there is no source of a module megatron.training.trainin"),
        ("megatron.core.optimizer.optimizer:ChainedOptimizer.stepp", "ChainedOptimizer has no 'stepp'"),
        ("megatron.core.optimizer.optimizer:ChainedOptimizr.step", "has no 'ChainedOptimizr'"),
        ("megatron.core.optimizer.optimizer:ChainedOptimizer", "is a class: wrap its __init__"),
        ("megatron.training.training:train_step.inner", "is not a class"),
        ("torch.distributed.distributed_c10d:_no_such_helper", "has no '_no_such_helper'"),
    ],
)
def test_control_a_made_up_target_is_found_out(target: str, reason: str) -> None:
    registry = Registry()

    def never(wrapped: object, instance: object, args: object, kwargs: object) -> None: ...

    registry.wrap(target, group="g")(never)
    registry.wrap("megatron.training.training:train_step", group="g")(never)
    rows = survey(Sources(), INSTALLED, registry)
    assert [row.state for row in rows] == ["missing", "declared"] and reason in rows[0].detail
    (found,) = broken(rows, INSTALLED)
    assert target in found and "test_contract.py" in found
    # The sources and the real thing agree on what is there, also where neither has been imported yet.
    if target.startswith("torch."):
        with pytest.raises(PatchError, match=reason):
            registry.activate("g")


def test_control_an_old_release_that_lacks_a_target_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "training.py").write_text("def train(): ...\n")
    rows = survey(sources_of(tmp_path), INSTALLED)
    assert any("train_step (declared at" in line for line in broken(rows, INSTALLED))
    assert not any(row.state == "missing" for row in rows if row.target == "megatron.training.training:train")
    shutil.rmtree(tmp_path / "training")
    nothing = survey(sources_of(tmp_path), INSTALLED)
    assert len(broken(nothing, INSTALLED)) > len(broken(rows, INSTALLED)) > 10
