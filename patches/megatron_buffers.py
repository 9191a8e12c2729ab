"""Buffers of the model that a step changes outside of the optimizer: what routers of experts count and adjust.

Megatron updates the bias of a router (`--moe-router-enable-expert-bias`) when gradients are final, which is before the
commit point, and counts tokens for it in every forward pass. A step that is computed again must not do that twice, so
these buffers belong to the small state of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

log = logging.getLogger(__name__)

LARGEST = 1 << 20  # bytes; what is larger is a table that the model was built with, and no count


class Buffers:
    """Where they are in the model, found once: a look at every module would cost a step more than their bytes."""

    def __init__(self, model: Sequence[Any]) -> None:
        """Before the first step. Gives buffers the types that they have in it: Megatron changes some in a rank's first
        forward pass, and a process that was just started must be able to take those of others."""
        for chunk in model:
            for module in chunk.modules():
                if hasattr(module, "_maintain_float32_expert_bias"):
                    module._maintain_float32_expert_bias()
        found = list(_places(model))
        large = [name for name, module, key in found if module._buffers[key].nbytes > LARGEST]
        if large and torch.distributed.get_rank() == 0:
            log.warning(
                "buffers of more than %d bytes are taken to be constant, a step that is computed again does not put"
                " them back: %s", LARGEST, ", ".join(large),
            )  # fmt: skip
        self._places = [place for place in found if place[0] not in large]

    def read(self) -> dict[str, torch.Tensor]:
        """Copies on the host, by name. One copy a type, not one a buffer: each waits for the device."""
        by_type: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
        for name, module, key in self._places:
            buffer = module._buffers[key].detach()
            by_type.setdefault(buffer.dtype, []).append((name, buffer))
        found: dict[str, torch.Tensor] = {}
        for several in by_type.values():
            flat = torch.cat([buffer.reshape(-1) for _, buffer in several]).cpu()
            pieces = torch.split(flat, [buffer.numel() for _, buffer in several])
            found.update(
                (name, piece.view(buffer.shape)) for (name, buffer), piece in zip(several, pieces, strict=True)
            )
        return found

    @torch.no_grad()
    def write(self, values: dict[str, torch.Tensor]) -> None:
        """The opposite of `read`."""
        for name, module, key in self._places:
            buffer, value = module._buffers[key], values[name]
            if value.dtype != buffer.dtype:
                buffer.data = value.to(buffer.device, copy=True)
            else:
                buffer.copy_(value)


def _places(model: Sequence[Any]) -> Iterator[tuple[str, Any, str]]:
    """(name, module, its name there), once each, in the model's order."""
    for number, chunk in enumerate(model):  # DDP hides the buffers of the module that it wraps
        for path, module in chunk.module.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield f"{number}/{path}.{key}", module, key
