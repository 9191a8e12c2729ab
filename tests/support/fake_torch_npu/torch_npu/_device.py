"""The device of this process: whether it is stopped, and a record of what it was asked for."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode

HOST_ONLY = ("_set_grad_enabled",)  # they look like operations, and ask nothing of a device
FORCE_STOP = "FORCE STOP."


class ForceStop(RuntimeError):
    """What the real one raises is a plain RuntimeError with this text."""


class _Noticing(TorchFunctionMode):
    """Records the operations on tensors that a thread starts while its device is stopped."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__qualname__", str(func))
        if name not in HOST_ONLY:
            device.note("op", name)
        return func(*args, **(kwargs or {}))


class Device:
    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.stopped = False
        self.condition = threading.Condition()
        self.communicators: list[Any] = []  # which a stop ends
        self._calls: dict[str, int] = {}
        self._refused = [self._refusal(text) for text in os.environ.get("FAKE_NPU_REFUSE", "").split(",") if text]
        folder = os.environ.get("FAKE_NPU_RECORD")
        self._record = Path(folder, f"rank{self.rank}.jsonl") if folder else None
        self._noticing: _Noticing | None = None

    @staticmethod
    def _refusal(text: str) -> tuple[str, int, str]:
        name, _, place = text.strip().rpartition("@")
        rank, _, number = place.partition(":")
        return name, int(rank), number

    def note(self, name: str, *arguments: Any) -> None:
        """Record a call.

        Raises:
            RuntimeError: it is one that the test wants to be refused.
        """
        with self.condition:
            self._calls[name] = number = self._calls.get(name, 0) + 1
            if self._record is not None:
                words = {
                    "call": name,
                    "arguments": [value if isinstance(value, int | str | list) else repr(value) for value in arguments],
                    "thread": threading.current_thread().name,
                    "pid": os.getpid(),
                    "time": time.monotonic(),
                }
                with self._record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(words) + "\n")
        for wanted, rank, which in self._refused:
            if (wanted, rank) == (name, self.rank) and which in ("*", str(number)):
                raise RuntimeError(f"the fake NPU refuses {name} (call {number} of rank {rank})")

    def check(self) -> None:
        """What every use of the device begins with.

        Raises:
            RuntimeError: it is stopped.
        """
        if self.stopped:
            self._notice()
            raise ForceStop(FORCE_STOP)

    def wait_stopped(self, seconds: float) -> None:
        """The peer is gone, and nobody says so."""
        with self.condition:
            self.condition.wait_for(lambda: self.stopped, seconds)
        self.check()

    def stop(self) -> None:
        with self.condition:
            self.stopped = True
            ended, self.communicators = self.communicators, []
            self.condition.notify_all()
        for communicator in ended:
            communicator.end()
        self._notice()

    def restart(self) -> None:
        if self._noticing is not None and threading.current_thread() is threading.main_thread():
            if _get_current_function_mode() is self._noticing:  # autograd puts back what was before a backward
                self._noticing.__exit__(None, None, None)
            self._noticing = None
        with self.condition:
            self.stopped = False

    def _notice(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and self._noticing is None and self._record is not None:
            mode = _Noticing()
            mode.__enter__()
            self._noticing = mode


device = Device()
device.note("start")
DAMAGE = int(os.environ.get("FAKE_NPU_DAMAGE", "3"))
