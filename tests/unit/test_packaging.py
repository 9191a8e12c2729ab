"""What is in the repository is what gets installed."""

from __future__ import annotations

import configparser
import importlib
import importlib.resources
import shutil
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Processes


def packages_in_tree(root: Path) -> dict[str, Path]:
    """Every package and its folder, found by the __init__.py files."""
    found = {}
    for top, name in (("mindspeed_tft", ""), ("patches", "mindspeed_tft."), ("configs", "mindspeed_tft.")):
        for init in (root / top).rglob("__init__.py"):
            folder = init.parent
            found[name + ".".join(folder.relative_to(root).parts)] = folder
    return found


def test_setup_cfg_lists_every_package(root: Path) -> None:
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg")
    listed = config["options"]["packages"].split()
    assert sorted(packages_in_tree(root)) == sorted(listed), "setup.cfg, [options] packages, does not fit the tree"


def test_no_module_lies_outside_a_package(root: Path) -> None:
    folders = set(packages_in_tree(root).values())
    for top in ("mindspeed_tft", "patches", "configs"):
        stray = [path for path in (root / top).rglob("*.py") if path.parent not in folders]
        assert not stray, f"without an __init__.py beside them these are not installed: {stray}"


def test_editable_install_maps_patches_and_configs(root: Path) -> None:
    for name in ("patches", "configs"):
        module = importlib.import_module(f"mindspeed_tft.{name}")
        assert module.__file__ is not None and Path(module.__file__).parent == root / name
    presets = [path.name for path in importlib.resources.files("mindspeed_tft.configs").iterdir()]
    assert "dump.yaml" in presets


@pytest.mark.full
def test_wheel_holds_everything_and_works(root: Path, processes: Processes, tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, because the build writes into it
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "shared", "runs")
    shutil.copytree(root, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    # Isolated would be nearer to a user's, but it needs a package index.
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source]
    processes.run(build, timeout=120)
    (wheel,) = tmp_path.glob("mindspeed_tft-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    expected = {"mindspeed_tft/py.typed"}
    for package, folder in packages_in_tree(root).items():
        files = [path for path in folder.iterdir() if path.suffix in {".py", ".yaml", ".pyi", ".proto", ".html"}]
        expected |= {f"{package.replace('.', '/')}/{path.name}" for path in files}
    assert expected <= inside, f"missing in the wheel: {sorted(expected - inside)}"
    outside = {name for name in inside if not name.startswith(("mindspeed_tft/", "mindspeed_tft-"))}
    assert not outside, f"the wheel must install one package, but it has {sorted(outside)}"

    target = tmp_path / "site"
    processes.run([*pip, "install", "--no-deps", "--target", target, wheel])
    code = """
import mindspeed_tft.patches, mindspeed_tft.configs, importlib.resources
assert {mindspeed_tft.patches.__file__, mindspeed_tft.configs.__file__} == {
    f"{SITE}/mindspeed_tft/patches/__init__.py", f"{SITE}/mindspeed_tft/configs/__init__.py"}
assert (importlib.resources.files("mindspeed_tft.configs") / "dump.yaml").is_file()
"""
    code = code.replace("{SITE}", str(target))
    processes.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(target)})
