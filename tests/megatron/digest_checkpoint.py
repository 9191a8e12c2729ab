"""Print the sha256 of every tensor of a checkpoint in Megatron's `torch` format, as JSON.

A program of its own, because unpickling needs Megatron, and Megatron on a CPU changes torch for the whole process.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mindspeed_tft import on_cpu


def tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside nested dictionaries, lists and tuples, with its path."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors(item, f"{name}/{index}")


def main() -> None:
    on_cpu.install_before_megatron()
    folder = Path(sys.argv[1])
    digests = {}
    for file in sorted(folder.rglob("*.pt")):
        content = torch.load(file, map_location="cpu", weights_only=False)
        for name, tensor in tensors(content, str(file.relative_to(folder))):
            data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            digests[name] = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data).hexdigest()
    json.dump(digests, sys.stdout)


if __name__ == "__main__":
    main()
