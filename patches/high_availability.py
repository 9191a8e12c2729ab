"""All patches that `--enable-high-availability` needs, declared by importing their modules."""

from __future__ import annotations

from mindspeed_tft.patches import (  # noqa: F401  (importing declares)
    megatron_06_optimizer,
    megatron_06_replicas,
    megatron_06_training,
    megatron_async_save,
    megatron_grad_norm,
    megatron_initialize,
    megatron_optimizer,
    megatron_rerun,
    megatron_reshardable,
    megatron_tensorboard,
    megatron_training,
    torch_distributed,
)


def declare() -> None:
    """Importing this module declares; calling this says so where it is used."""
