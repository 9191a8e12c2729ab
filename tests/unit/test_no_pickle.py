"""Nothing that comes from another process is unpickled or run: every place that could is listed here, with a reason."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
# Functions that unpickle, or run text, wherever they come from.
CALLS = {"load_pickle", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
         "recv_object_list", "send_object_list", "unsafe_load", "full_load"}  # fmt: skip
TORCH_LOAD = {"load", "jit.load", "package"}
BUILT_IN = {"eval", "exec", "compile", "__import__"}

# file -> what is used there -> why that is not a word of another process.
ALLOWED = {
    "mindspeed_tft/faults/compare.py": {
        "pickle": "reads checkpoints with an unpickler of its own, which builds plain values only; run by an operator",
        "torch.load": "the same",
    },
    "patches/megatron_06_on_cpu.py": {"torch.load": "Megatron's own call, as it was meant when it was written"},
    "patches/megatron_dump.py": {"torch.load": "a file of this dump, with weights_only"},
    "patches/megatron_host.py": {"pickle": "writes bytes for a hash, reads none"},
    "patches/megatron_torch_dist.py": {"pickle": "files of this dump below --save, whose hash is checked"},
}


def uses(path: Path) -> Iterator[tuple[str, int]]:
    """What a file uses of that, and where."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] in MODULES:
                    yield name.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.partition(".")[0] in MODULES:
                yield node.module.partition(".")[0], node.lineno
            yield from ((name.name, node.lineno) for name in node.names if name.name in CALLS)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            last = called.rpartition(".")[2]
            if called in BUILT_IN or last in CALLS:
                yield last, node.lineno
            elif called in {f"torch.{name}" for name in TORCH_LOAD}:
                yield called, node.lineno


@functools.cache
def found(root: Path) -> dict[str, dict[str, list[int]]]:
    everything: dict[str, dict[str, list[int]]] = {}
    for top in ("mindspeed_tft", "patches", "configs"):
        for path in sorted((root / top).rglob("*.py")):
            for name, line in uses(path):
                everything.setdefault(str(path.relative_to(root)), {}).setdefault(name, []).append(line)
    return everything


def test_what_could_run_foreign_bytes_is_listed(root: Path) -> None:
    here = {file: set(names) for file, names in found(root).items()}
    assert here == {file: set(names) for file, names in ALLOWED.items()}, found(root)


def test_the_control_plane_and_the_agent_use_none_of_it(root: Path) -> None:
    rooms = ("mindspeed_tft/control/", "mindspeed_tft/agent/", "mindspeed_tft/recovery/", "mindspeed_tft/engine/")
    assert not [file for file in {**ALLOWED, **found(root)} if file.startswith(rooms)]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import marshal as m",
        "import torch\ntorch.load('x')",
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "eval('1')",
        "__import__('x')",
    ],
)
def test_the_search_finds(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.py").write_text(text)
    assert list(uses(tmp_path / "x.py"))


@pytest.mark.parametrize("text", ["import json", "json.load(f)", "model.eval()", "# import pickle", "re.compile('x')"])
def test_the_search_does_not_cry_wolf(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.py").write_text(text)
    assert not list(uses(tmp_path / "x.py"))
