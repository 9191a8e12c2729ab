"""Every name of torch_npu that the platform calls, against real releases: by the committed facts always, and by the
wheels themselves where a folder of them is named."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mindspeed_tft.platforms import torch_npu_names as facts
from mindspeed_tft.platforms.npu import _ELSEWHERE, _REINIT_ALL, CANN, METHODS, NAMES
from tests.unit.fake_torch_npu import FakeTorchNpu

WHEELS = "TFT_TORCH_NPU_WHEELS"  # a folder with wheels of torch_npu, as `pip download --no-deps` leaves them
METHOD_NAMES = {f"{owner}.{method}" for owner, methods in METHODS.items() for method in methods}
OLDEST, NEWEST = "2.1.0.post8", "2.14.0"


@pytest.fixture(scope="module")
def script(root: Path) -> ModuleType:
    file = root / "scripts" / "torch_npu_names.py"
    spec = importlib.util.spec_from_file_location("torch_npu_names_script", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def lacking(release: str) -> set[str]:
    """The names that a release does not have as they are called, by the facts."""
    known = facts.PYTHON[release]
    absent = {name for name, parameters in NAMES.items() if not set(parameters) <= set(known.get(name, ()))}
    return {name for name in absent if name not in known or NAMES[name]} | (METHOD_NAMES - known.keys())


def test_the_facts_are_of_the_releases_that_matter() -> None:
    releases = list(facts.PYTHON)
    assert {OLDEST, "2.6.0", "2.7.1", NEWEST} <= set(releases)
    assert list(facts.BINARY) == releases
    assert all(set(known) <= {*NAMES, *METHOD_NAMES} for known in facts.PYTHON.values())


@pytest.mark.parametrize("release", facts.PYTHON)
def test_what_a_repair_calls_is_in_every_release(release: str) -> None:
    assert not lacking(release) - set(_ELSEWHERE) - METHOD_NAMES
    assert set(CANN["libascendcl.so"]) <= set(facts.BINARY[release])
    assert {"_npu_stopDevice", "_npu_restart_device", "_npu_check_uce_in_memory"} <= set(facts.BINARY[release])


@pytest.mark.parametrize("release", ["2.7.1", NEWEST])
def test_the_newer_releases_have_everything(release: str) -> None:
    assert lacking(release) == set()
    assert release not in facts.WHOLE_WORLD


def test_what_the_oldest_release_lacks() -> None:
    """Control, and what the start-up says of it."""
    assert lacking(OLDEST) == {
        "torch_npu.npu._comm_switch_nic",
        "torch_npu.npu.stress_detect",
        "torch_npu.npu.Event.recorded_time",
    }
    assert facts.WHOLE_WORLD == (OLDEST,)


def test_who_has_a_name() -> None:
    assert facts.having({"torch_npu.npu.stress_detect": ()}) == list(facts.PYTHON)
    assert "2.6.0" not in facts.having({"torch_npu.npu.stress_detect": ("detect_type",)})
    assert facts.having({"torch_npu.npu.no_such_name": ()}) == []


def test_the_fake_takes_what_the_real_one_takes() -> None:
    module = FakeTorchNpu().module
    for name in NAMES:
        found = module
        for part in name.split(".")[1:]:
            found = getattr(found, part)
        assert set(inspect.signature(found).parameters) <= set(facts.PYTHON["2.7.1"][name]), name


# ------------------------------------------------------------------------------------------------ the reader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small torch_npu that has all names of the table, by every way of importing that the real one knows."""
    package = tmp_path / "torch_npu"
    for name in ("npu", "distributed"):
        (package / name).mkdir(parents=True)
    (package / "__init__.py").write_text("import torch_npu.npu\n")
    text = {
        name.rpartition(".")[2]: f"def {name.rpartition('.')[2]}({', '.join(parameters)}): pass\n"
        for name, parameters in NAMES.items()
    }
    methods = "".join(f"    def {name}(self): pass\n" for name in METHODS["torch_npu.npu.Event"])
    text["Event"] = f"class Event:\n    def __new__(cls, enable_timing=False): pass\n{methods}"
    safe, reinit = text.pop("update_npu_tensor_to_safe"), text.pop("reinit_process_group")
    stop, stream = text.pop("stop_device"), text.pop("set_stream")
    (package / "npu" / "_recovery.py").write_text(safe + stop)
    (package / "npu" / "utils.py").write_text("from . import *\n" + stream)  # a circle, as in the real one
    text["from"] = "from ._recovery import stop_device\nfrom .utils import *\n"
    (package / "npu" / "__init__.py").write_text("".join(text.values()))
    (package / "distributed" / "__init__.py").write_text("from torch_npu.distributed.c10d import reinit as "
                                                         "reinit_process_group\n")  # fmt: skip
    (package / "distributed" / "c10d.py").write_text(reinit.replace("reinit_process_group", "reinit"))
    return tmp_path


def departures(script: ModuleType, folder: Path) -> list[str]:
    sources = script.Sources.of_folder(folder)
    found = []
    for name in script.wanted():
        parameters = sources.parameters(name)
        if parameters is None:
            found.append(name)
        else:
            found += [f"{name}({each})" for each in NAMES.get(name, ()) if each not in parameters]
    return found


def test_the_reader_finds_what_is_there_and_what_is_not(script: ModuleType, folder: Path) -> None:
    assert departures(script, folder) == []
    assert script.Sources.of_folder(folder).find(_REINIT_ALL) is None
    recovery, package = folder / "torch_npu" / "npu" / "_recovery.py", folder / "torch_npu" / "npu" / "__init__.py"
    recovery.write_text(recovery.read_text().replace("tensor_obj", "other").replace("def stop_device", "def stop"))
    package.write_text(package.read_text().replace("def recorded_time", "def another_time"))
    assert departures(script, folder) == [
        "torch_npu.npu.stop_device",
        "torch_npu.npu._recovery.update_npu_tensor_to_safe(tensor_obj)",
        "torch_npu.npu.Event.recorded_time",
    ]


def test_words_of_a_binary_are_whole(script: ModuleType) -> None:
    assert script._has_word(b"\0aclrtMemUceRepair\0", "aclrtMemUceRepair")
    assert not script._has_word(b"\0aclrtMemUceRepairFace\0", "aclrtMemUceRepair")
    assert script._has_word(b"aclrtMemUceRepairFace aclrtMemUceRepair:%d", "aclrtMemUceRepair")


def test_the_order_of_releases(script: ModuleType) -> None:
    releases = ["2.14.0", "2.1.0.post17", "2.6.0", "2.1.0", "2.1.0.post8"]
    assert sorted(releases, key=script.release_key) == ["2.1.0", "2.1.0.post8", "2.1.0.post17", "2.6.0", "2.14.0"]


@pytest.mark.skipif(not os.environ.get(WHEELS), reason=f"{WHEELS} names no folder with wheels of torch_npu")
def test_the_facts_are_what_the_wheels_say(script: ModuleType) -> None:
    wheels = sorted(Path(os.environ[WHEELS]).glob("torch_npu-*.whl"))
    assert wheels, f"{WHEELS}={os.environ[WHEELS]} holds no wheel of torch_npu"
    for path in wheels:
        release = script.read_wheel(path)
        assert release.version in facts.PYTHON, f"{path.name}: run scripts/torch_npu_names.py"
        assert release.parameters == facts.PYTHON[release.version]
        assert release.binary == facts.BINARY[release.version]
        assert release.whole_world == (release.version in facts.WHOLE_WORLD)
