"""What an online repair asks of an NPU: which calls reach torch_npu, in which order, and what their answers mean."""

from __future__ import annotations

import ast
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_tft.faults import classify
from mindspeed_tft.platforms import npu
from mindspeed_tft.platforms.npu import METHODS, NAMES, NpuPlatform
from mindspeed_tft.recovery.window import UpdateWindow
from tests.unit.fake_torch_npu import Cann, FakeTorchNpu

DEVICE = 3


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorchNpu]:
    fake = FakeTorchNpu()
    fake.set_device(DEVICE)
    monkeypatch.setitem(sys.modules, "torch_npu", fake.module)
    npu._has_clock.cache_clear()
    yield fake
    npu._has_clock.cache_clear()


@pytest.fixture(autouse=True)
def cann(monkeypatch: pytest.MonkeyPatch) -> Cann:
    return Cann(monkeypatch)


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


def test_a_release_that_makes_the_whole_world_anew_is_not_asked_for_one_group(
    fake: FakeTorchNpu, platform: NpuPlatform, gloo_group: Any
) -> None:
    dist.distributed_c10d._world.pg_backend_config[gloo_group] = "npu:hccl"
    fake.module.distributed.distributed_c10d = types.SimpleNamespace(_reinit_process_group=lambda group: None)
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
    why = platform.why_no_repair({"PYTORCH_NO_NPU_MEMORY_CACHING": value})
    assert why is not None and why[1] == "unset it"
    assert why[0].startswith(f"PYTORCH_NO_NPU_MEMORY_CACHING={value} turns the caching allocator off")


@pytest.mark.parametrize("environ", [{}, *({"PYTORCH_NO_NPU_MEMORY_CACHING": value} for value in ("", "0", "no"))])
def test_repair_is_possible(fake: FakeTorchNpu, platform: NpuPlatform, environ: dict[str, str]) -> None:
    assert platform.why_no_repair(environ) is None


def test_each_missing_name_is_told(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    fake.remove("npu.stop_device")
    fake.remove("npu._recovery.update_npu_tensor_to_safe")
    fake.remove("distributed")
    assert platform.why_no_repair({}) == (
        "the installed torch_npu 2.7.1+fake does not have torch_npu.npu.stop_device,"
        " torch_npu.npu._recovery.update_npu_tensor_to_safe, torch_npu.distributed.reinit_process_group",
        "install a torch_npu that has it (known to have it: 2.1.0.post8, 2.1.0.post17, 2.6.0, 2.7.1, 2.14.0)",
    )


def test_a_missing_parameter_is_told(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    fake.replace("npu.restart_device", lambda device_id: None)
    why = platform.why_no_repair({})
    assert why is not None and "torch_npu.npu.restart_device(rebuild_all_resources)" in why[0]
    fake.replace("npu.restart_device", lambda *args, **kwargs: None)  # a wrapper does not say what it takes
    assert platform.why_no_repair({}) is None


def test_a_function_that_cann_does_not_have_is_told(fake: FakeTorchNpu, platform: NpuPlatform, cann: Cann) -> None:
    cann.has["libascendcl.so"].remove("aclrtMemUceRepair")
    assert platform.why_no_abort("hccl") is None  # which needs less
    assert platform.why_no_repair({}) == (
        "the installed CANN is too old: its libascendcl.so has no aclrtMemUceRepair",
        "install a newer CANN",
    )
    cann.has["libascendcl.so"].remove("aclrtDeviceTaskAbort")
    why = platform.why_no_abort("nccl")
    assert why is not None and "has no aclrtDeviceTaskAbort" in why[0]


def test_a_cann_that_cannot_be_asked_is_told(fake: FakeTorchNpu, platform: NpuPlatform, cann: Cann) -> None:
    cann.has.clear()
    for why in (platform.why_no_repair({}), platform.why_no_abort("hccl")):
        assert why is not None and "cannot open shared object file" in why[0]
        assert why[1] == "source CANN's set_env.sh before the job"
    assert "libhccl.so cannot be loaded" in (platform.why_no_link("backup") or "")


def test_a_rank_comes_out_of_collectives_of_hccl_and_gloo(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    assert [platform.why_no_abort(backend) for backend in ("hccl", "nccl", "gloo")] == [None] * 3
    why = platform.why_no_abort("lccl")
    assert why is not None and why[0].startswith("a rank cannot be taken out of a collective of lccl")
    fake.remove("npu.restart_device")
    why = platform.why_no_abort("nccl")
    assert why is not None and "does not have torch_npu.npu.restart_device" in why[0]


# ------------------------------------------------------------------------------------------------ its clock


def test_the_moment_of_a_commit_is_on_the_devices_clock(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    assert platform.moment() == 5000
    assert [name for name, _ in fake.calls] == [
        "npu.Event", "npu.Event.record", "npu.Event.synchronize", "npu.Event.recorded_time",
    ]  # fmt: skip


@pytest.mark.parametrize("old", ["npu.Event", "npu.Event.recorded_time"])
def test_a_release_without_a_clock_says_so_once(
    fake: FakeTorchNpu, platform: NpuPlatform, caplog: pytest.LogCaptureFixture, old: str
) -> None:
    fake.remove(old)
    assert (platform.moment(), platform.moment()) == (0, 0)
    assert caplog.text.count("torch_npu 2.7.1+fake has no clock") == 1


@pytest.mark.parametrize(
    ("error_us", "kind"),
    [(4999, "corrupted"), (5000, "corrupted"), (5001, "memory")],  # gradients of the update, or this rank alone
)
def test_an_old_error_is_judged_by_the_time_of_the_last_commit(
    fake: FakeTorchNpu, platform: NpuPlatform, error_us: int, kind: str
) -> None:
    window = UpdateWindow(platform.moment)
    text = f"HBM MULTI BIT ECC ERROR. detail, time us= {error_us}. time is {error_us}"
    assert classify.classify(text, "npu", window=window.read()).kind == "corrupted"  # before the first update
    window.begins()
    assert classify.classify(text, "npu", window=window.read()).kind == kind


def test_a_clock_that_fails_leaves_no_older_time(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    """The other ranks may be past that commit: the time of the one before would acquit an error of these gradients."""
    window = UpdateWindow(platform.moment)
    window.begins()
    fake.errors["npu.Event.synchronize"] = RuntimeError("HBM MULTI BIT ECC ERROR. time us= 7000.")
    with pytest.raises(RuntimeError) as caught:
        window.begins()
    assert classify.classify(str(caught.value), "npu", window=window.read()).kind == "corrupted"


# ------------------------------------------------------------------------------------------------ under stress


def test_a_device_is_put_under_stress(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    platform.stress("aic")
    platform.stress("hccs")
    assert fake.calls == [("npu.stress_detect", ("aic",)), ("npu.stress_detect", ("hccs",))]
    fake.stress_code = 2
    with pytest.raises(RuntimeError, match=r"NPU 3 failed the stress test aic \(stress_detect returned 2\)"):
        platform.stress("aic")


def test_stress_of_an_older_release(fake: FakeTorchNpu, platform: NpuPlatform) -> None:
    asked: list[str] = []
    fake.replace("npu.stress_detect", lambda: asked.append("cores") or 0)
    platform.stress("aic")
    assert asked == ["cores"]
    why = platform.why_no_stress("hccs")
    assert why is not None and "torch_npu.npu.stress_detect(detect_type)" in why and "2.7.1" in why
    with pytest.raises(RuntimeError, match="does not have"):
        platform.stress("hccs")
    assert platform.why_no_stress("disk") == "stress 'disk': there are aic and hccs"


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
    assert sum(ast.unparse(node) == "import torch_npu" for node in imports) == 1  # and _find is the only way in


def test_the_fake_has_the_names_of_the_table(fake: FakeTorchNpu) -> None:
    for name, parameters in NAMES.items():
        assert set(parameters) <= set(inspect.signature(npu._find(name)).parameters), name
    for owner, methods in METHODS.items():
        assert all(callable(npu._find(f"{owner}.{method}")) for method in methods)
