"""What a piece of code allocates on a device, measured on a machine that has none.

    with OnDevice(tensors) as seen:      # these are taken to lie on the device, all others on the host
        ...
    seen.touched                         # operations on what lies there: 0 if nothing was measured
    seen.allocated                       # bytes of all new storages there, also of those that are gone again

An operation leaves its result where its inputs are. `copy_` between the two allocates nothing on the device: where the
types differ, torch converts a blocking copy on the host. What `.cpu()` returns is still counted as the device's (on the
CPU it is the same tensor), so the number is an upper bound, of the peak as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OnDevice(TorchDispatchMode):
    """Counts in this thread, while it is entered."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.touched = self.allocated = 0
        self.operations: dict[str, int] = {}  # bytes by operation
        self._there = {_place(tensor) for tensor in tensors}
        self._kept: list[torch.Tensor] = []  # so that no address is given out twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        inputs = {_place(leaf) for leaf in tree_leaves((args, options)) if torch.is_tensor(leaf)}
        result = func(*args, **options)
        self.touched += bool(inputs & self._there)
        if inputs & self._there and str(options.get("device")) != "cpu":
            for leaf in tree_leaves(result):
                if torch.is_tensor(leaf) and _place(leaf) not in inputs | self._there:
                    self._count(str(func), leaf)
        return result

    def _count(self, operation: str, tensor: torch.Tensor) -> None:
        size = tensor.untyped_storage().nbytes()
        self._there.add(_place(tensor))
        self._kept.append(tensor)
        self.allocated += size
        self.operations[operation] = self.operations.get(operation, 0) + size


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
