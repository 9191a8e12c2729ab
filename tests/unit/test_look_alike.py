"""A torch that only looks like it (MSAdapter's, over MindSpore): the import of the adaptor asks it for public names
alone, a run without our flags is as it was, and each feature is refused by its flag.

The look-alike of the tests (tests/support/look_alike) records what it is asked for, and has next to nothing.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PUBLIC = {"torch.device", "torch.Tensor", "torch.dtype"}
_JOB = """
import json, sys
import torch
import record
names = dict(vars(torch))
record.ASKED.clear()
{adaptor}
asked = list(record.ASKED)
from megatron.training.arguments import parse_args, validate_args
space = validate_args(parse_args(), {{}})
print(json.dumps({{
    "asked": asked,
    "later": record.ASKED[len(asked):],
    "same": dict(vars(torch)) == names,
    "flags": vars(space),
    "modules": [name for name in sys.modules if name.partition(".")[0] == "mindspeed_tft"],
}}))
"""
_IMPORT = "import mindspeed_tft.adaptor"


def run(root: Path, code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A process that finds the look-alike in the place of torch."""
    env = {key: value for key, value in os.environ.items() if key not in ("HIGH_AVAILABILITY", "RANK")}
    env["PYTHONPATH"] = str(root / "tests" / "support" / "look_alike")
    command = [sys.executable, "-c", code, *flags]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def untouched(root: Path) -> dict[str, object]:
    """A job with the adaptor and none of our flags."""
    done = run(root, _JOB.format(adaptor=_IMPORT), "--lr", "0.5")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_only_public_names_are_asked_for(untouched: dict[str, object]) -> None:
    asked = untouched["asked"]
    assert isinstance(asked, list)
    assert set(asked) <= PUBLIC, "modules below torch, or names that a look-alike need not have"


def test_without_flags_nothing_is_touched(untouched: dict[str, object]) -> None:
    assert untouched["same"] is True and untouched["later"] == []
    flags = untouched["flags"]
    assert isinstance(flags, dict)
    assert (flags["lr"], flags["validated"], flags["enable_high_availability"]) == (0.5, True, False)
    modules = untouched["modules"]
    assert isinstance(modules, list) and "mindspeed_tft.adaptor" in modules
    rooms = ("on_cpu", "runtime", "control", "recovery", "groups", "patches.megatron_on_cpu", "patches.torch_")
    assert not [name for name in modules if name.startswith(tuple(f"mindspeed_tft.{room}" for room in rooms))]


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (["--enable-high-availability"], ["--enable-high-availability"]),
        (
            ["--enable-high-availability", "--enable-hbmfault-repair", "--enable-worker-reboot"],
            ["--enable-worker-reboot", "--enable-hbmfault-repair", "--enable-high-availability"],
        ),
    ],
)
def test_each_feature_is_refused_by_its_flag(root: Path, wanted: list[str], named: list[str]) -> None:
    done = run(root, _JOB.format(adaptor=_IMPORT), *wanted)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(
        f"mindspeed_tft: error: {named[0]}: the torch of this process is MSAdapter's, over MindSpore"
    )
    assert all(flag in line for flag in named) and " Remedy: leave it out; " in line


def test_no_platform_can_be_chosen(root: Path) -> None:
    done = run(root, _IMPORT, "--tft-platform", "cpu")
    assert done.returncode == 2
    assert done.stderr.startswith("mindspeed_tft: error: --tft-platform: cpu cannot be used here, the torch of this")


def test_the_look_alike_would_have_noticed(root: Path) -> None:
    """A control: what must not be touched is seen, and refused."""
    touches = {
        "from torch.distributed import ProcessGroup": "torch.distributed",
        "import torch._C._distributed_c10d": "torch._C",
        "import torch.distributed.elastic": "torch.distributed",
        "torch.UntypedStorage": "torch.UntypedStorage",
    }
    tried = f"""
refused = []
for touch in {list(touches)}:
    try:
        exec(touch)
    except (ImportError, AttributeError):
        refused.append(touch)
assert len(refused) == {len(touches)}, refused
"""
    done = run(root, _JOB.format(adaptor=tried))
    assert done.returncode == 0, done.stderr
    asked = json.loads(done.stdout)["asked"]
    assert set(asked) == set(touches.values()) and not set(asked) & PUBLIC


def imported_at_once(path: Path) -> set[str]:
    """The dotted names that a module imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_inside_of_torch_is_imported_by_patches_alone(root: Path) -> None:
    """What torch does not promise is for `patches/`; an entry point of torchrun lives in torchrun."""
    inside = ("torch._", "torch.distributed.elastic", "torch.distributed.distributed_c10d", "torch.storage")
    room = root / "mindspeed_tft"
    found = {
        str(path.relative_to(room)): [name for name in imported_at_once(path) if name.startswith(inside)]
        for path in room.rglob("*.py")
    }
    assert len(found) > 150
    assert {path for path, names in found.items() if names} == {"agent/logs_specs.py"}
