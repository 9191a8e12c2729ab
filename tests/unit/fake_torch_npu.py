"""A torch_npu that records what it is asked for, over CPU tensors.

It has the names that the platform uses, with the parameters of torch_npu 2.7.1 (test_torch_npu_names.py compares them
with the real ones), and three habits of the real one that matter: the current device belongs to a thread, a stopped
device returns a code, and a restart clears what is known of damaged memory. It is for tests in one process; the one
that trains is in tests/support/fake_torch_npu.
"""

from __future__ import annotations

import importlib.util
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindspeed_tft.platforms import npu


class Cann:
    """The libraries of an installed CANN, and the functions that they have: here nothing loads them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has = {library: list(functions) for library, functions in npu.CANN.items()}
        monkeypatch.setattr(npu, "ctypes", types.SimpleNamespace(CDLL=self.load))

    def load(self, library: str) -> types.SimpleNamespace:
        if library not in self.has:
            raise OSError(f"{library}: cannot open shared object file")
        return types.SimpleNamespace(**dict.fromkeys(self.has[library]))


class FakeTorchNpu:
    """The state of the device, and `module`, to be put into `sys.modules["torch_npu"]`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []  # name below torch_npu, arguments, in order
        self.errors: dict[str, Exception] = {}  # name below torch_npu: what its call raises
        self.uce_code = 0  # the answer of check_uce_in_memory
        self.stop_code = 0  # the answer of stop_device
        self.moves = True  # the answer of _comm_switch_nic
        self.stress_code = 0  # the answer of stress_detect
        self.clock = 5000  # microseconds
        self.damaged: set[int] = set()  # addresses of storages that are marked unsafe
        self._thread = threading.local()
        self.module = self._build()

    def set_device(self, device: int) -> None:
        """The calling thread chooses its device, as the training framework does."""
        self._thread.device = device

    def remove(self, name: str) -> None:
        """Take a name away, as in a version that does not have it."""
        owner, _, last = name.rpartition(".")
        delattr(self._owner(owner), last)

    def replace(self, name: str, function: Callable[..., Any]) -> None:
        """Put something else under a name, as in a version with other parameters."""
        owner, _, last = name.rpartition(".")
        setattr(self._owner(owner), last, function)

    def _owner(self, dotted: str) -> Any:
        found: Any = self.module
        for part in filter(None, dotted.split(".")):
            found = getattr(found, part)
        return found

    def _note(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, arguments))
        if name in self.errors:
            raise self.errors[name]

    def _current(self) -> int:
        return int(getattr(self._thread, "device", 0))  # a thread that has chosen nothing is on device 0

    def _build(self) -> Any:
        def is_available() -> bool:
            return True

        def get_device_name(device_name: Any = None) -> str:
            return "Ascend"

        def synchronize(device: Any = None) -> None:
            self._note("npu.synchronize")

        def get_rng_state(device: Any = "npu") -> torch.Tensor:
            return torch.default_generator.get_state()

        def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
            torch.default_generator.set_state(new_state)

        def memory_allocated(device: Any = None) -> int:
            return 0

        def current_device() -> int:
            return self._current()

        def set_device(device: int) -> None:
            self.set_device(device)

        def default_stream(device: Any = None) -> str:
            return f"default stream of {self._current()}"

        def set_stream(stream: Any) -> None:
            self._note("npu.set_stream", stream)

        def stop_device(device_id: int) -> int:
            self._note("npu.stop_device", device_id)
            return self.stop_code

        def check_uce_in_memory(device_id: int) -> int:
            self._note("npu.check_uce_in_memory", device_id)
            return self.uce_code

        def restart_device(device_id: int, rebuild_all_resources: int = False) -> None:
            self._note("npu.restart_device", device_id, rebuild_all_resources)
            self.uce_code = 0

        def update_npu_tensor_to_safe(tensor_obj: torch.Tensor) -> None:
            self._note("npu._recovery.update_npu_tensor_to_safe", tensor_obj)
            self.damaged.discard(tensor_obj.untyped_storage().data_ptr())

        def reinit_process_group(group: Any = None, rebuild_link: bool = True) -> Any:
            self._note("distributed.reinit_process_group", group, rebuild_link)
            return group

        def _comm_switch_nic(ranks: list[int], useBackup: list[bool]) -> bool:  # as torch_npu names it
            self._note("npu._comm_switch_nic", ranks, useBackup)
            return self.moves

        def stress_detect(detect_type: str = "aic") -> int:
            self._note("npu.stress_detect", detect_type)
            return self.stress_code

        class Event:
            def __init__(event, enable_timing: bool = False) -> None:
                self._note("npu.Event", enable_timing)

            def record(event, stream: Any = None) -> None:
                self._note("npu.Event.record")

            def synchronize(event) -> None:
                self._note("npu.Event.synchronize")

            def recorded_time(event) -> int:
                self._note("npu.Event.recorded_time")
                return self.clock

        names = (is_available, get_device_name, synchronize, get_rng_state, set_rng_state, memory_allocated,
                 current_device, set_device, default_stream, set_stream, stop_device, check_uce_in_memory,
                 restart_device, _comm_switch_nic, stress_detect, Event)  # fmt: skip
        module: Any = types.ModuleType("torch_npu")
        module.__spec__ = importlib.util.spec_from_loader("torch_npu", None)
        module.__version__ = "2.7.1+fake"
        module.npu = types.SimpleNamespace(**{function.__name__: function for function in names})
        module.npu._recovery = types.SimpleNamespace(update_npu_tensor_to_safe=update_npu_tensor_to_safe)
        module.distributed = types.SimpleNamespace(reinit_process_group=reinit_process_group)
        return module
