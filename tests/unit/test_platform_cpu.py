"""The platforms, and the mapping of CUDA's names onto the CPU: it holds, and it leaves nothing behind."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from mindspeed_tft import platforms
from mindspeed_tft.patches.apex_on_cpu import FusedAdam
from mindspeed_tft.platforms import cpu, cuda_names
from mindspeed_tft.settings import Refused

if TYPE_CHECKING:
    from tests.conftest import Processes

without_gpu = pytest.mark.skipif(cuda_names.original(torch.cuda, "is_available")(), reason="has a GPU")


@pytest.fixture
def mapped() -> Iterator[None]:
    cpu.install()
    yield
    cpu.uninstall()


def bindings() -> dict[str, Any]:
    """All that the mapping may change: objects by identity, the environment by value."""
    owners = [torch, torch.Tensor, torch.nn.Module, torch.cuda, torch.cuda.random, torch.cuda.nvtx, DataLoader]
    found = {f"{owner.__name__}.{name}": id(value) for owner in owners for name, value in vars(owner).items()}
    return {**found, **os.environ}


# ---------------------------------------------------------------------------------------------- the mapping


def test_uninstall_restores_torch_completely() -> None:
    import torch._dynamo.config

    before = bindings()
    assert not torch._dynamo.config.disable
    cpu.install()
    cpu.install()
    changed = {name for name, value in bindings().items() if value != before.get(name)}
    assert len(changed) > 100 and cpu.installed() and torch._dynamo.config.disable
    cpu.uninstall()
    assert bindings() == before
    assert not torch._dynamo.config.disable and not cpu.installed()
    cpu.uninstall()  # harmless


def test_environment_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    cpu.install()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and os.environ["TORCHDYNAMO_DISABLE"] == "1"
    cpu.uninstall()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8" and "TORCHDYNAMO_DISABLE" not in os.environ


def test_failed_install_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bindings()

    def fail() -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(cuda_names, "_map_streams", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        cpu.install()
    assert not cpu.installed() and bindings() == before


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda"), torch.device("cuda", 3), "cpu"])
def test_device_arguments_mean_the_cpu(mapped: None, device: Any, tmp_path: Path) -> None:
    tensor = torch.arange(4.0, device=device, pin_memory=True)
    assert tensor.device.type == "cpu" and tensor.is_cuda
    made = [
        torch.zeros(2, device=device),
        torch.empty_like(tensor, device=device),
        torch.tensor([1], device=device),
        tensor.new_zeros(3, device=device),
        tensor.to(device),
        tensor.to(device=device),
        tensor.to(device, torch.float16),
        torch.randn(2, device=device, generator=torch.Generator(device="cuda")),
        torch.nn.Linear(2, 2).to(device).weight,
        torch.nn.Linear(2, 2, device="meta").to_empty(device=device).weight,
    ]
    assert {each.device.type for each in made} == {"cpu"}
    torch.save(tensor, tmp_path / "tensor.pt")
    location = device if not isinstance(device, int) else None
    assert torch.equal(torch.load(tmp_path / "tensor.pt", map_location=location), tensor)
    assert torch.equal(torch.load(tmp_path / "tensor.pt", location), tensor)
    assert torch.equal(torch.load(tmp_path / "tensor.pt", map_location=lambda storage, _: storage), tensor)


def test_arguments_that_are_no_devices_pass(mapped: None) -> None:
    tensor = torch.ones(2)
    assert tensor.to(torch.float64).dtype == torch.float64
    assert tensor.to(torch.ones(1, dtype=torch.float16)).dtype == torch.float16
    meta = torch.empty(2, device="meta")
    assert meta.device.type == "meta" and not meta.is_cuda


def test_tensors_and_modules_stay_where_they_are(mapped: None) -> None:
    tensor, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert tensor.cuda() is tensor and tensor.cuda(1, non_blocking=True) is tensor and tensor.pin_memory() is tensor
    assert module.cuda() is module and not tensor.is_pinned()
    tensor.record_stream(torch.cuda.current_stream())


def test_type_strings_are_those_of_the_device(mapped: None) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert parameter.type() == "torch.cuda.BFloat16Tensor"
    assert parameter.type("torch.cuda.FloatTensor").dtype == torch.float32
    assert parameter.type(torch.cuda.HalfTensor).dtype == parameter.type(torch.float16).dtype == torch.float16
    assert isinstance(torch.ones(2), torch.cuda.FloatTensor)


def test_generator_is_a_class(mapped: None) -> None:
    assert isinstance(torch.Generator, type)
    assert isinstance(torch.Generator(device="cuda"), torch.Generator) and isinstance(None, torch.Generator | None)
    assert isinstance(torch.default_generator, torch.Generator)
    assert issubclass(type(torch.default_generator), torch.Generator)
    assert torch.Generator().device.type == torch.Generator("cuda").device.type == "cpu"


def test_device_generator_is_the_cpu_one(mapped: None) -> None:
    torch.cuda.manual_seed(7)
    state, first = torch.cuda.get_rng_state(), torch.rand(3)
    assert torch.cuda.initial_seed() == torch.initial_seed() == 7
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.random.set_rng_state_all([state])
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(
        torch.cuda.default_generators[0].get_state(), state
    )
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), first)


def test_data_loader_does_not_move_the_generator(mapped: None) -> None:
    def order(seed: int) -> list[int]:
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found = [int(item) for item in DataLoader(list(range(100)), shuffle=True, batch_size=None)]  # type: ignore[arg-type]
        assert torch.equal(torch.get_rng_state(), before)
        return found

    assert order(1) == order(1) != order(2)
    own = torch.Generator()
    assert DataLoader([1], generator=own).generator is own  # type: ignore[arg-type]


def test_each_name_has_a_function_object_of_its_own(mapped: None) -> None:
    functions: dict[int, str] = {}
    for name, value in vars(torch.cuda).items():
        if isinstance(value, types.FunctionType) and value.__module__ == cuda_names.__name__:
            assert functions.setdefault(id(value), name) == name
    assert len(functions) >= 50


def test_streams_can_be_entered_again(mapped: None) -> None:
    stream, other = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    default = torch.cuda.current_stream()
    context = torch.cuda.stream(stream)
    for _ in range(2):
        with context:
            assert torch.cuda.current_stream() is stream
            with torch.cuda.stream(other), context:
                assert torch.cuda.current_stream() is stream
            assert torch.cuda.current_stream() is stream
    assert torch.cuda.current_stream() is default is torch.cuda.default_stream()
    with torch.cuda.stream(None):
        assert torch.cuda.current_stream() is default
    with stream:
        assert torch.cuda.current_stream() is stream
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    stream.wait_event(begin)
    stream.record_event(end)
    assert begin.elapsed_time(end) >= 0 and end.query() and isinstance(end, torch.cuda.Event)


def test_device_is_a_context_and_a_decorator(mapped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    @torch.cuda.nvtx.range("decorated")
    def work() -> int:
        with torch.cuda.device(1), torch.cuda.nvtx.range("block"):
            return torch.cuda.current_device()

    assert work() == 0
    torch.cuda.set_device(torch.device("cuda", 1))
    assert work() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.device_count() == 4


# ---------------------------------------------------------------------------------------------- selection


@without_gpu
def test_select_sees_through_the_mapping(mapped: None) -> None:
    assert torch.cuda.is_available()
    assert platforms.select().name == platforms.select("cpu").name == "cpu"
    with pytest.raises(Refused, match="--tft-platform: cuda cannot be used here"):
        platforms.select("cuda")


def test_select_refuses_what_is_not_there() -> None:
    with pytest.raises(Refused, match=r"--tft-platform: 'tpu' is no platform .*npu, cuda, cpu.*Remedy: pass"):
        platforms.select("tpu")
    if importlib.util.find_spec("torch_npu") is None:
        with pytest.raises(Refused, match="torch_npu is not installed"):
            platforms.select("npu")


def fake_npu(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    module: Any = types.ModuleType("torch_npu")
    module.__spec__ = importlib.util.spec_from_loader("torch_npu", None)
    module.npu = types.SimpleNamespace(
        is_available=lambda: available, get_device_name=lambda: "Ascend", memory_allocated=lambda: 5
    )
    monkeypatch.setitem(sys.modules, "torch_npu", module)


def test_an_npu_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npu(monkeypatch, available=True)
    found = platforms.select()
    assert (found.name, found.backend, found.description(), found.memory_allocated()) == ("npu", "hccl", "Ascend", 5)


@without_gpu
def test_torch_npu_without_an_npu_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npu(monkeypatch, available=False)
    assert platforms.select().name == "cpu"
    with pytest.raises(Refused, match="finds no usable NPU"):
        platforms.select("npu")


@without_gpu
def test_torch_npu_that_cannot_be_imported_gives_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise OSError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert platforms.select().name == "cpu"
    with pytest.raises(Refused, match=r"cannot be imported \(OSError: libhccl.so"):
        platforms.select("npu")


def test_cpu_platform_keeps_the_generator() -> None:
    platform = platforms.select("cpu")
    state = platform.rng_state()
    first = torch.rand(2)
    platform.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    assert platform.memory_allocated() > 2**20 and "cores" in platform.description()
    platform.synchronize()


# ---------------------------------------------------------------------------------------------- before Megatron


def test_importing_platforms_imports_no_host(processes: Processes) -> None:
    code = """
import sys, torch
before = torch.cuda.is_available
import mindspeed_tft.platforms, mindspeed_tft.on_cpu
assert torch.cuda.is_available is before
assert not {"megatron", "torch_npu", "mindspeed", "mindspeed_tft.adaptor"} & set(sys.modules)
"""
    processes.python(code)


def test_the_adaptor_takes_the_platform_of_a_preset(tmp_path: Path, processes: Processes) -> None:
    """What YAML names counts at the import already, as a flag does: here one that this machine has not."""
    preset = tmp_path / "mine.yaml"
    preset.write_text("tft-platform: npu\n")
    code = f"""
import sys, torch
sys.argv[1:] = ["--tft-config", {str(preset)!r}]
try:
    import mindspeed_tft.adaptor
except SystemExit as left:
    assert left.code == 2
else:
    raise AssertionError("not refused")
"""
    processes.python(code)


MEGATRON = {
    "__init__.py": "import torch\nmapped = torch.cuda.is_available()",
    "core/__init__.py": "",
    "core/datasets/__init__.py": "",
    "core/datasets/utils.py": "def compile_helpers():\n    raise AssertionError('make was run')",
    "core/transformer/__init__.py": "",
    "core/transformer/moe/__init__.py": "",
    "core/transformer/moe/paged_stash.py": """
import triton
import triton.language as tl
from triton import Config
from ... import sibling

@triton.jit
def kernel(size: tl.constexpr): return "kept"

@triton.autotune(configs=[Config({"SIZE": 1})], key=["size"])
def tuned(): return "kept"
""",
    "core/sibling.py": """
try:
    import triton
    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False
""",
    "core/optimizer/__init__.py": "from apex.optimizers import FusedAdam, FusedSGD",
    "core/optimizer/distrib_optimizer.py": """
import torch
from apex.optimizers import FusedAdam
class DistributedOptimizer:
    def _set_main_param_and_optimizer_states(self): return torch.is_grad_enabled()
""",
}


def test_megatron_is_prepared_when_it_is_imported(processes: Processes, tmp_path: Path) -> None:
    """On a stand-in with the parts of Megatron that need it (the real one: tests/megatron)."""
    if importlib.util.find_spec("triton") is not None or importlib.util.find_spec("apex") is not None:
        pytest.skip("the real libraries are here")
    for name, text in MEGATRON.items():
        path = tmp_path / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = """
import sys, torch
from mindspeed_tft import on_cpu
on_cpu.install_before_megatron()
on_cpu.install_before_megatron()
import json.tool
assert not torch.cuda.is_available()
import megatron
assert megatron.mapped and not any(type(f).__name__ == "_InstallFirst" for f in sys.meta_path)
from megatron.core.transformer.moe import paged_stash
assert paged_stash.kernel(1) == "kept" and not paged_stash.sibling.HAVE_TRITON
assert not {"triton", "apex"} & set(sys.modules)
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
assert optimizer.FusedAdam is distrib_optimizer.FusedAdam
assert distrib_optimizer.DistributedOptimizer()._set_main_param_and_optimizer_states() is False
from typing import override
from megatron.core.datasets import utils
try:
    utils.compile_helpers()
except RuntimeError as error:
    assert "make venv" in str(error)
else:
    raise AssertionError("helpers that are not there were not missed")
from mindspeed_tft.platforms import cpu
on_cpu.install_before_megatron()
assert cpu.installed()
"""
    processes.python(code, env={"PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_adam_computes_adam(decoupled: bool) -> None:
    torch.manual_seed(3)
    ours, theirs = (torch.nn.Parameter(torch.arange(5.0)) for _ in range(2))
    group = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    torch_adam = torch.optim.AdamW if decoupled else torch.optim.Adam
    pair = [(ours, FusedAdam([ours], adam_w_mode=decoupled, **group)), (theirs, torch_adam([theirs], **group))]
    for _ in range(4):
        gradient = torch.randn(5)
        for parameter, optimizer in pair:
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
    fused = pair[0][1]
    assert fused.param_groups[0]["step"] == 4 and set(fused.state[ours]) == {"exp_avg", "exp_avg_sq"}


def test_fused_adam_refuses_what_it_cannot_do() -> None:
    make = functools.partial(FusedAdam, [torch.nn.Parameter(torch.ones(1))])
    make(capturable=False)
    with pytest.raises(ValueError, match="master_weights"):
        make(master_weights=True)
