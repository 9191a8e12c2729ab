"""What an online repair asks of an NPU: which calls reach torch_npu, in which order, and what their answers mean."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_tft.faults import classify
from mindspeed_tft.platforms import npu
from mindspeed_tft.platforms.npu import NAMES, NpuPlatform
from tests.unit.fake_torch_npu import FakeTorchNpu

SOURCES = "TFT_TORCH_NPU_SOURCES"  # a folder with the folder torch_npu of an unpacked wheel
DEVICE = 3


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorchNpu:
    fake = FakeTorchNpu()
    fake.set_device(DEVICE)
    monkeypatch.setitem(sys.modules, "torch_npu", fake.module)
    return fake


@pytest.fixture
def platform(fake: FakeTorchNpu) -> NpuPlatform:
    return NpuPlatform()


def on_another_thread(function: Callable[[], object]) -> BaseException | None:
    """Run it as the control plane's worker thread does; the exception that it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as exc:
            raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return raised[0] if raised else None


# ------------------------------------------------------------------------------------------------ the calls


def test_a_repair_makes_these_calls_in_this_order(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    platform.claim_device()
    assert on_another_thread(platform.stop_device) is None
    fake.uce_code = 3
    hit = torch.ones(4)
    fake.damaged.add(hit.untyped_storage().data_ptr())
    platform.default_streams()
    assert platform.damaged_memory() == "some"
    platform.restart_device()
    assert platform.make_safe(iter([hit])) == 1
    assert not fake.damaged
    assert fake.calls == [
        ("npu.stop_device", (DEVICE,)),
        ("npu.set_stream", (f"default stream of {DEVICE}",)),
        ("npu.check_uce_in_memory", (DEVICE,)),
        ("npu.restart_device", (DEVICE, False)),  # all resources would mark healthy tensors as unsafe too
        ("npu._recovery.update_npu_tensor_to_safe", (hit,)),
    ]


def test_the_worker_thread_stops_the_device_of_its_rank(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    """Control: on that thread torch_npu names another rank's device as the current one."""
    seen: list[int] = []
    on_another_thread(lambda: seen.append(fake.module.npu.current_device()))
    assert seen == [0]
    platform.claim_device()
    on_another_thread(platform.stop_device)
    assert fake.calls == [("npu.stop_device", (DEVICE,))]


def test_a_thread_of_ours_takes_the_device_of_its_rank(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    seen: list[int] = []

    def ask() -> None:
        platform.share_device()
        seen.append(fake.module.npu.current_device())

    on_another_thread(ask)  # nothing is claimed yet, and nothing guessed
    platform.claim_device()
    on_another_thread(ask)
    assert seen == [0, DEVICE]


def test_no_device_is_stopped_by_guess(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    with pytest.raises(RuntimeError, match="call claim_device on the main thread"):
        platform.stop_device()
    assert fake.calls == []


def test_a_device_that_refuses_to_stop_is_an_error(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    fake.stop_code = 1
    platform.claim_device()
    with pytest.raises(RuntimeError, match=r"NPU 3 refuses to abort its work \(stop_device returned 1\)"):
        platform.stop_device()


@pytest.mark.parametrize(("code", "damage"), [(0, "some"), (1, "lost"), (2, "none"), (3, "some")])
def test_codes_of_damage(fake: FakeTorchNpu, platform: NpuPlatform, code: int, damage: str) -> None:
    fake.uce_code = code
    assert platform.damaged_memory() == damage


@pytest.mark.parametrize("code", [-1, 4])
def test_an_unknown_code_proves_nothing(
    fake: FakeTorchNpu, platform: NpuPlatform, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    fake.uce_code = code
    assert platform.damaged_memory() == "lost"
    assert f"returned {code}, whose meaning is not known" in caplog.text


def test_a_restart_forgets_the_damage_and_is_never_taken_for_health(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    """Who asks too late gets tensors replaced without need, but is not told that they are whole."""
    fake.uce_code = 2
    assert platform.damaged_memory() == "none"
    platform.restart_device()
    assert platform.damaged_memory() == "some"


def test_every_tensor_is_made_safe_once_and_in_order(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    tensors = [torch.full((2,), float(i)) for i in range(3)]
    assert platform.make_safe(tensors) == 3
    told = [arguments[0] for _, arguments in fake.calls]
    assert all(one is tensor for one, tensor in zip(told, tensors, strict=True))
    assert platform.make_safe([]) == 0


CALLS: dict[str, Callable[[NpuPlatform], object]] = {
    "npu.stop_device": NpuPlatform.stop_device,
    "npu.set_stream": NpuPlatform.default_streams,
    "npu.check_uce_in_memory": NpuPlatform.damaged_memory,
    "npu.restart_device": NpuPlatform.restart_device,
    "npu._recovery.update_npu_tensor_to_safe": lambda platform: platform.make_safe([torch.ones(1)]),
    "npu.synchronize": NpuPlatform.synchronize,
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_of_the_device_are_passed_on_unchanged(fake: FakeTorchNpu, platform: NpuPlatform, name: str) -> None:
    """The text decides what kind of fault it is, so it has to arrive as it was."""
    platform.claim_device()
    error = RuntimeError("UCE ERROR[Error]: ERR00100 PTA call acl api failed")
    fake.errors[name] = error
    with pytest.raises(RuntimeError) as caught:
        CALLS[name](platform)
    assert caught.value is error and error.__cause__ is None
    assert classify.classify(str(caught.value), "npu").kind == "memory"


# ------------------------------------------------------------------------------------------------ process groups


@pytest.fixture
def gloo_group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_gloo_group_gets_a_new_backend(fake: FakeTorchNpu, platform: NpuPlatform, gloo_group: Any) -> None:
    assert platform.rebuild_in_place(gloo_group) is False
    assert fake.calls == []


@pytest.mark.parametrize(
    ("config", "in_place"), [("npu:hccl", True), ("hccl", True), ("cpu:gloo,npu:hccl", False), ("npu:lccl", False)]
)
def test_only_a_group_of_hccl_alone_is_rebuilt_in_place(
    fake: FakeTorchNpu, platform: NpuPlatform, gloo_group: Any, config: str, in_place: bool
) -> None:
    dist.distributed_c10d._world.pg_backend_config[gloo_group] = config
    assert platform.rebuild_in_place(gloo_group) is in_place
    assert fake.calls == ([("distributed.reinit_process_group", (gloo_group, True))] if in_place else [])


def test_errors_of_a_rebuild_are_passed_on_unchanged(
    fake: FakeTorchNpu, platform: NpuPlatform, gloo_group: Any
) -> None:
    dist.distributed_c10d._world.pg_backend_config[gloo_group] = "npu:hccl"
    error = fake.errors["distributed.reinit_process_group"] = RuntimeError("HCCL error: destroy failed")
    with pytest.raises(RuntimeError) as caught:
        platform.rebuild_in_place(gloo_group)
    assert caught.value is error


# ------------------------------------------------------------------------------------------------ another link


def test_hccl_is_told_of_its_backup_link_and_back(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    assert platform.why_no_link("backup") is None
    assert platform.switch_link("", range(3)) is True
    assert fake.calls == []  # it was never moved: a regroup asks nothing of it
    assert platform.switch_link("backup", range(3)) is True
    assert platform.switch_link("", range(3)) is True
    assert platform.switch_link("main", range(2)) is True
    assert fake.calls == [
        ("npu._comm_switch_nic", ([0, 1, 2], [True, True, True])),
        ("npu._comm_switch_nic", ([0, 1, 2], [False, False, False])),
        ("npu._comm_switch_nic", ([0, 1], [False, False])),
    ]


def test_a_switch_that_hccl_refuses_is_an_error(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    fake.moves = False
    with pytest.raises(RuntimeError, match="hccl could not move all of its groups to the backup link"):
        platform.switch_link("backup", range(2))


def test_links_that_hccl_does_not_have(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    assert platform.why_no_link("eth1") == (
        "link 'eth1': hccl knows the links main and backup of a device, and no names of interfaces"
    )
    fake.remove("npu._comm_switch_nic")
    assert "does not have torch_npu.npu._comm_switch_nic" in (platform.why_no_link("backup") or "")
    assert platform.why_no_repair({}) is None  # which does not need it


# ------------------------------------------------------------------------------------------------ at start-up


@pytest.mark.parametrize("value", ["1", " 1", "2", "1x"])
def test_no_repair_without_the_caching_allocator(fake: FakeTorchNpu, platform: NpuPlatform, value: str) -> None:
    reason = platform.why_no_repair({"PYTORCH_NO_NPU_MEMORY_CACHING": value})
    assert reason is not None
    assert reason.startswith(f"PYTORCH_NO_NPU_MEMORY_CACHING={value} turns the caching allocator off")
    assert reason.endswith("(unset it)")


@pytest.mark.parametrize("environ", [{}, *({"PYTORCH_NO_NPU_MEMORY_CACHING": value} for value in ("", "0", "no"))])
def test_repair_is_possible(fake: FakeTorchNpu, platform: NpuPlatform, environ: dict[str, str]) -> None:
    assert platform.why_no_repair(environ) is None


def test_each_missing_name_is_told(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    fake.remove("npu.stop_device")
    fake.remove("npu._recovery.update_npu_tensor_to_safe")
    fake.remove("distributed")
    reason = platform.why_no_repair({})
    assert reason == (
        "the installed torch_npu does not have torch_npu.npu.stop_device,"
        " torch_npu.npu._recovery.update_npu_tensor_to_safe, torch_npu.distributed.reinit_process_group"
        " (install a version that has)"
    )


def test_a_missing_parameter_is_told(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    fake.replace("npu.restart_device", lambda device_id: None)
    reason = platform.why_no_repair({})
    assert reason is not None and "torch_npu.npu.restart_device(rebuild_all_resources)" in reason
    fake.replace("npu.restart_device", lambda *args, **kwargs: None)  # a wrapper does not say what it takes
    assert platform.why_no_repair({}) is None


# ------------------------------------------------------------------------------------------------ the contract


def calls_in(source: str) -> dict[str, set[str]]:
    """The names that a module passes to `_call`, each with the parameters that it gives them."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_call":
            name = node.args[0]
            assert isinstance(name, ast.Constant) and len(node.args) == 1
            found.setdefault(name.value, set()).update(str(keyword.arg) for keyword in node.keywords)
    return found


def test_the_table_is_what_the_module_uses() -> None:
    source = Path(npu.__file__).read_text(encoding="utf-8")
    assert calls_in(source) == {name: set(parameters) for name, parameters in NAMES.items()}
    assert calls_in('_call("torch_npu.other", x=1)') == {"torch_npu.other": {"x"}}  # control: a call is seen
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert sum("torch_npu" in ast.unparse(node) for node in imports) == 1  # and _find is the only way in


def test_the_fake_has_the_names_of_the_table(fake: FakeTorchNpu) -> None:
    for name, parameters in NAMES.items():
        assert set(parameters) <= set(inspect.signature(npu._find(name)).parameters), name


def module_file(root: Path, dotted: str) -> Path | None:
    """The file of a module below `root`; None when there is none."""
    path = root.joinpath(*dotted.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def definition(root: Path, dotted: str, asked: frozenset[str] = frozenset()) -> ast.FunctionDef | None:
    """The function of that name, followed through the imports of the modules below `root`; None when there is none.

    `asked`: names that led here. Modules that import each other would lead in a circle.
    """
    module, _, name = dotted.rpartition(".")
    file = module_file(root, module)
    if file is None or dotted in asked:
        return None
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in reversed(ast.parse(file.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and (origin := imported(node, name, package)):
            found = definition(root, origin, asked | {dotted})
            if found:
                return found
    return None


def imported(node: ast.ImportFrom, name: str, package: str) -> str:
    """Where an import statement of `package` takes `name` from, or may take it from ("*"); "" where it does not."""
    parents = package.split(".")
    above = parents[: len(parents) - node.level + 1] if node.level else []
    for alias in node.names:
        if alias.name == "*" or (alias.asname or alias.name) == name:
            return ".".join([*above, *filter(None, [node.module]), name if alias.name == "*" else alias.name])
    return ""


def departures(root: Path) -> list[str]:
    """What the sources below `root` lack of the table."""
    found = []
    for name, parameters in NAMES.items():
        function = definition(root, name)
        if function is None:
            found.append(name)
        else:
            known = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
            found += [f"{name}({parameter})" for parameter in parameters if parameter not in known]
    return found


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small torch_npu that has all names of the table, by every way of importing that the real one knows."""
    package = tmp_path / "torch_npu"
    for folder in ("npu", "distributed"):
        (package / folder).mkdir(parents=True)
    (package / "__init__.py").write_text("import torch_npu.npu\n")
    text = {
        name.rpartition(".")[2]: f"def {name.rpartition('.')[2]}({', '.join(parameters)}): pass\n"
        for name, parameters in NAMES.items()
    }
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


def test_the_contract_finds_what_is_there_and_what_is_not(sources: Path) -> None:
    assert departures(sources) == []
    recovery = sources / "torch_npu" / "npu" / "_recovery.py"
    recovery.write_text(recovery.read_text().replace("tensor_obj", "other").replace("def stop_device", "def stop"))
    assert departures(sources) == [
        "torch_npu.npu.stop_device",
        "torch_npu.npu._recovery.update_npu_tensor_to_safe(tensor_obj)",
    ]


@pytest.mark.skipif(not os.environ.get(SOURCES), reason=f"{SOURCES} names no folder with the sources of torch_npu")
def test_the_names_exist_in_torch_npu() -> None:
    root = Path(os.environ[SOURCES])
    assert module_file(root, "torch_npu") is not None, f"{SOURCES}={root} has no folder torch_npu"
    assert departures(root) == []
