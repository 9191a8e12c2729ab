"""The names of CUDA, meaning the CPU: what torch_npu's transfer_to_npu does for NPUs, done for plain CPUs.

After `install` a program written for torch.cuda runs on CPU tensors: devices called "cuda" become "cpu", streams and
events do nothing because the CPU works in order, and the device's random generator is the CPU's. `uninstall` puts back
every attribute as it was. It is a mapping for training on gloo, not an emulator: CUDA graphs, memory pools and kernels
stay away, and `Tensor.cpu()` still returns the tensor itself, where on a device it would copy.

One trap decides the form of the code: torch's compiler keeps a table from function objects to their names and refuses
one object under two names. So every mapped name gets a function object of its own.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["install", "installed", "original", "ranks_here", "uninstall"]

_CPU = torch.device("cpu")
_ABSENT = object()
_DEVICE_NAME = "CPU in place of CUDA"

# torch.compile has nothing to gain here and takes minutes; Megatron asserts the third one, which CUDA alone reads.
_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "TORCH_COMPILE_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}

_FACTORIES = """empty zeros ones full rand randn randint randperm arange range tensor as_tensor asarray linspace
    logspace eye empty_strided zeros_like ones_like empty_like full_like rand_like randn_like randint_like tril_indices
    triu_indices scalar_tensor""".split()
_METHOD_FACTORIES = "new_empty new_zeros new_ones new_full new_tensor new_empty_strided".split()
_TENSOR_TYPES = "Float Double Half BFloat16 Int Long Short Char Byte Bool".split()

_ANSWERS: dict[str, tuple[Any, str]] = {
    "yes": (True, "is_available is_initialized is_bf16_supported"),
    "no": (False, "is_current_stream_capturing"),
    "nothing": (
        None,
        """init _lazy_init synchronize empty_cache ipc_collect check_error reset_peak_memory_stats
        reset_accumulated_memory_stats reset_max_memory_allocated reset_max_memory_cached""",
    ),
    "zero": (
        0,
        """memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached
        device_memory_used memory_usage utilization temperature power_draw clock_rate""",
    ),
}


class _Bindings:
    """Attributes that were replaced, and what stood there before."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._environment: list[str] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        # Of a class its own dictionary, not getattr: an inherited attribute is put back by deleting ours.
        before = vars(owner).get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name, _ABSENT)
        self._before.setdefault((id(owner), name), (owner, name, before))
        setattr(owner, name, value)

    def set_environment(self, name: str, value: str) -> None:
        if name not in os.environ:  # what the user has set is left alone
            os.environ[name] = value
            self._environment.append(name)

    def before(self, owner: Any, name: str) -> Any:
        if (id(owner), name) not in self._before:
            return getattr(owner, name)
        value = self._before[id(owner), name][2]
        return getattr(super(owner, owner), name) if value is _ABSENT else value

    def undo(self) -> None:
        for owner, name, value in reversed(list(self._before.values())):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._before.clear()
        for name in self._environment:
            os.environ.pop(name, None)
        self._environment.clear()


_bindings = _Bindings()
_installed = False
_lock = threading.Lock()


def install() -> None:
    """Map the names of CUDA onto the CPU, in this process, until `uninstall`. Again is harmless.

    Child processes that start from nothing need it too: those of multiprocessing get it where the program's main
    module installs it, because they import that module first.
    """
    global _installed
    with _lock:
        if _installed:
            return
        for name, value in _ENVIRONMENT.items():
            _bindings.set_environment(name, value)
        dynamo = sys.modules.get("torch._dynamo.config")
        if dynamo is not None:  # imported already: it has read the environment before
            _bindings.set(dynamo, "disable", True)
        try:
            _map_device_arguments()
            _map_tensors_and_modules()
            _map_generators()
            _map_queries()
            _map_devices()
            _map_streams()
        except BaseException:
            _bindings.undo()
            raise
        _installed = True


def uninstall() -> None:
    """Put back every attribute and variable that `install` has set."""
    global _installed
    with _lock:
        _bindings.undo()
        _installed = False


def installed() -> bool:
    return _installed


def original(owner: Any, name: str) -> Any:
    """`owner.name` as it is without the mapping, installed or not."""
    return _bindings.before(owner, name)


def ranks_here() -> int:
    """Ranks on this host, each of which takes the CPU for a device of its own."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


# ---------------------------------------------------------------------------------------------- device arguments


def _on_cpu(device: Any) -> Any:
    """The device that is meant: the CPU for anything that names a CUDA device, by string, index or object."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return _CPU
    if isinstance(device, str) and device.startswith("cuda"):
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return mapped


def _mover(function: Callable[..., Any]) -> Callable[..., Any]:
    """For `to` and `to_empty`, where the device may be the first positional argument."""

    @functools.wraps(function)
    def mapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        elif args:
            args = (_on_cpu(args[0]), *args[1:])
        return function(self, *args, **kwargs)

    return mapped


def _map_device_arguments() -> None:
    for name in _FACTORIES:
        _bindings.set(torch, name, _factory(getattr(torch, name)))
    for name in _METHOD_FACTORIES:
        _bindings.set(torch.Tensor, name, _factory(getattr(torch.Tensor, name)))
    for owner, name in ((torch.Tensor, "to"), (torch.nn.Module, "to"), (torch.nn.Module, "to_empty")):
        _bindings.set(owner, name, _mover(getattr(owner, name)))

    load = torch.load

    @functools.wraps(load)
    def mapped_load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Without a location torch would put tensors that were saved on a GPU back onto one.
        if not callable(map_location) and not isinstance(map_location, dict):
            map_location = _CPU if map_location is None else _on_cpu(map_location)
        return load(f, map_location, *args, **kwargs)

    _bindings.set(torch, "load", mapped_load)


# ---------------------------------------------------------------------------------------------- tensors and modules


def _map_tensors_and_modules() -> None:
    tensor, module = torch.Tensor, torch.nn.Module
    _bindings.set(tensor, "cuda", _answer("cuda", _first))
    _bindings.set(tensor, "pin_memory", _answer("pin_memory", _first))
    _bindings.set(tensor, "is_pinned", _answer("is_pinned", _always(False)))
    _bindings.set(tensor, "record_stream", _answer("record_stream", _always(None)))
    _bindings.set(tensor, "is_cuda", property(lambda self: self.device.type == "cpu"))
    _bindings.set(module, "cuda", _answer("cuda", _first))

    # Optimizers compare the strings: "torch.cuda.FloatTensor" is a parameter that they take.
    original_type = tensor.type

    @functools.wraps(original_type)
    def mapped_type(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return str(original_type(self)).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original_type(self, dtype, *args, **kwargs)

    _bindings.set(tensor, "type", mapped_type)
    for name in _TENSOR_TYPES:
        _bindings.set(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


# ---------------------------------------------------------------------------------------------- random numbers


class _GeneratorType(type):
    """Type of the mapped torch.Generator. It must stay a class, because programs write `torch.Generator | None`, but
    what it makes and what it recognises are torch's own generators."""

    def __call__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator(device=_on_cpu(device))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, torch._C.Generator)


def _map_generators() -> None:
    generator = torch.default_generator

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        generator.manual_seed(int(seed))

    def initial_seed() -> int:
        return generator.initial_seed()

    def seed() -> None:
        generator.seed()

    def seed_all() -> None:
        generator.seed()

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return generator.get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        generator.set_state(new_state)

    def get_rng_state_all() -> list[torch.Tensor]:
        return [generator.get_state() for _ in range(ranks_here())]

    def set_rng_state_all(new_states: Any) -> None:
        generator.set_state(next(iter(new_states)))

    for function in (manual_seed, manual_seed_all, initial_seed, seed, seed_all, get_rng_state, set_rng_state,
                     get_rng_state_all, set_rng_state_all):  # fmt: skip
        _bindings.set(torch.cuda, function.__name__, function)
        _bindings.set(torch.cuda.random, function.__name__, function)
    _bindings.set(torch.cuda, "default_generators", tuple(generator for _ in range(ranks_here())))
    _bindings.set(torch, "Generator", _GeneratorType("Generator", (), {"__module__": "torch"}))
    _map_data_loader()


def _map_data_loader() -> None:
    """Give every DataLoader a generator of its own.

    An iterator draws its base seed from the CPU's generator when it is made, which on a resume is after the random
    state was restored. On a GPU that moves nothing; here the same generator draws the dropout masks.
    """
    initialize = torch.utils.data.DataLoader.__init__
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def mapped(self: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(self, *args, **kwargs)
        if call.arguments.get("generator") is None:
            own = torch._C.Generator()
            own.manual_seed(torch.initial_seed())  # shuffling follows torch.manual_seed, as it should
            call.arguments["generator"] = own
        initialize(*call.args, **call.kwargs)

    _bindings.set(torch.utils.data.DataLoader, "__init__", mapped)


# ---------------------------------------------------------------------------------------------- queries and devices


def _first(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _answer(name: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """A new function object called `name` (why new: see the top of this module)."""

    def mapped(*args: Any, **kwargs: Any) -> Any:
        return behaviour(*args, **kwargs)

    mapped.__name__ = mapped.__qualname__ = name
    return mapped


def _map_queries() -> None:
    for value, names in _ANSWERS.values():
        for name in names.split():
            _bindings.set(torch.cuda, name, _answer(name, _always(value)))

    def host_memory(device: Any = None) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def properties(device: Any = None) -> types.SimpleNamespace:
        memory = host_memory()[1]
        return types.SimpleNamespace(
            name=_DEVICE_NAME, major=8, minor=0, total_memory=memory, multi_processor_count=os.cpu_count() or 1
        )

    def cudart() -> types.SimpleNamespace:
        return types.SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)

    def lazy_call(function: Callable[[], Any], **kwargs: Any) -> None:
        function()

    behaviours: dict[str, Callable[..., Any]] = {
        "mem_get_info": host_memory,
        "get_device_properties": properties,
        "get_device_capability": _always((8, 0)),  # bf16 works, so the programs' checks must see a device that has it
        "get_device_name": _always(_DEVICE_NAME),
        "memory_stats": lambda *args, **kwargs: collections.defaultdict(int),
        "memory_snapshot": lambda *args, **kwargs: [],
        "cudart": cudart,
        "_lazy_call": lazy_call,
    }
    for name, behaviour in behaviours.items():
        _bindings.set(torch.cuda, name, _answer(name, behaviour))


class _DeviceContext(contextlib.ContextDecorator):
    """torch.cuda.device and nvtx.range: contexts, and decorators, in which nothing changes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _DeviceContext:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


def _map_devices() -> None:
    current = int(os.environ.get("LOCAL_RANK", "0"))

    def set_device(device: Any) -> None:
        nonlocal current
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            current = index

    _bindings.set(torch.cuda, "set_device", set_device)
    _bindings.set(torch.cuda, "current_device", _answer("current_device", lambda: current))
    _bindings.set(torch.cuda, "device_count", _answer("device_count", ranks_here))
    _bindings.set(torch.cuda, "device", type("device", (_DeviceContext,), {}))
    for name in "range_push range_pop range_start range_end mark".split():
        _bindings.set(torch.cuda.nvtx, name, _answer(name, _always(None)))
    _bindings.set(torch.cuda.nvtx, "range", type("range", (_DeviceContext,), {}))


# ---------------------------------------------------------------------------------------------- streams


class _Stream:
    """A queue of work that is always empty: the CPU has done everything when the call returns."""

    cuda_stream = 0
    stream_id = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else _Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        _stack().append(self)
        return self

    def __exit__(self, *args: Any) -> None:
        _stack().pop()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return float(end_event._recorded - self._recorded) * 1e3


class _StreamContext:
    """torch.cuda.stream: makes a stream the current one, and may be entered again, also inside itself."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        _stack().append(self.stream if self.stream is not None else _stack()[-1])

    def __exit__(self, *args: Any) -> None:
        _stack().pop()


_DEFAULT_STREAM = _Stream()
_current = threading.local()


def _stack() -> list[Any]:
    """This thread's streams, the current one last."""
    if not hasattr(_current, "stack"):
        _current.stack = [_DEFAULT_STREAM]
    stack: list[Any] = _current.stack
    return stack


def _map_streams() -> None:
    def set_stream(stream: Any) -> None:
        if stream is not None:
            _stack()[-1] = stream

    _bindings.set(torch.cuda, "set_stream", set_stream)
    _bindings.set(torch.cuda, "current_stream", _answer("current_stream", lambda device=None: _stack()[-1]))
    _bindings.set(torch.cuda, "default_stream", _answer("default_stream", lambda device=None: _DEFAULT_STREAM))
    _bindings.set(torch.cuda, "stream", _answer("stream", _StreamContext))
    for name, base in (("Stream", _Stream), ("ExternalStream", _Stream), ("Event", _Event)):
        _bindings.set(torch.cuda, name, type(name, (base,), {}))
