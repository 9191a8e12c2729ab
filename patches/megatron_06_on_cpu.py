"""What Megatron core_r0.6.0 needs in order to run on a plain CPU, beyond `megatron_on_cpu`.

It imports apex, amp_C and TransformerEngine without a fallback, and setuptools' pkg_resources, which is gone. What a
training with `--transformer-impl local` uses of them is here in plain torch operations; the rest are empty classes that
others are derived from. Nothing here has to do with fault tolerance.
"""

from __future__ import annotations

import importlib.metadata
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import packaging.version
import torch
import torch.nn.functional as functional

__all__ = ["HOOKS", "STAND_INS", "VERSIONS", "StandIn"]

VERSIONS = ">=0.6,<0.7"


class StandIn(NamedTuple):
    """A library that single modules may import although it is not installed; `unless`: the package that would make it
    unnecessary."""

    library: types.ModuleType
    unless: str


def _library(name: str, **content: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


# ------------------------------------------------------------------------------------------------ apex, amp_C


def _apply(operation: Callable[..., Any], buffer: Any, lists: Sequence[Sequence[torch.Tensor]], *args: Any) -> Any:
    return operation(buffer, lists, *args)


def _l2norm(_buffer: Any, lists: Sequence[Sequence[torch.Tensor]], _per_tensor: bool = False) -> tuple[Any, None]:
    """Norm of all elements of one list of tensors, fp32, shape (1,)."""
    return torch.norm(torch.stack([torch.norm(tensor.float()) for tensor in lists[0]])).view(1), None


def _scale(_buffer: Any, lists: Sequence[Sequence[torch.Tensor]], factor: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * factor)


class _LayerNorm:
    """apex's autograd function of a layer norm, as far as it is called."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, normalized_shape: Any, eps: float) -> Any:
        """Only its signature is read."""
        raise NotImplementedError

    @staticmethod
    def apply(input: Any, weight: Any, bias: Any, shape: Any, eps: float) -> torch.Tensor:
        return functional.layer_norm(input, shape, weight, bias, eps)


_APPLIER = StandIn(_library("apex.multi_tensor_apply", multi_tensor_applier=_apply), "apex")
_KERNELS = StandIn(_library("amp_C", multi_tensor_l2norm=_l2norm, multi_tensor_scale=_scale), "amp_C")
_NORM = StandIn(_library("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=_LayerNorm), "apex")


# ------------------------------------------------------------------------------------------------ others


class _Layer(torch.nn.Module):
    """Base of layers that nobody makes."""


class _EngineNorm(torch.nn.LayerNorm):
    """TransformerEngine's layer norm, which this release uses behind the last layer whatever `--transformer-impl` says.
    It marks its parameters: Megatron then adds up their gradients over tensor-parallel ranks."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if zero_centered_gamma:
            raise ValueError("on a CPU this norm cannot be centred around zero: leave --apply-layernorm-1p out")
        super().__init__(hidden_size, eps=eps, dtype=params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


def _version(name: str) -> str:
    """An old TransformerEngine, of which nothing is expected."""
    return "0.9.0" if name.replace("_", "-") == "transformer-engine" else importlib.metadata.version(name)


_LAYERS = ("Linear", "LayerNormLinear", "DotProductAttention")
_ENGINE = StandIn(
    _library(
        "transformer_engine", pytorch=types.SimpleNamespace(LayerNorm=_EngineNorm, **dict.fromkeys(_LAYERS, _Layer))
    ),
    "transformer_engine",
)
_ITS_VERSION = StandIn(_library("importlib.metadata", version=_version), "transformer_engine")
_RESOURCES = StandIn(_library("pkg_resources", packaging=packaging), "pkg_resources")

STAND_INS: dict[str, tuple[StandIn, ...]] = {
    "megatron.core.optimizer.optimizer": (_APPLIER, _KERNELS),
    "megatron.core.optimizer.clip_grads": (_APPLIER, _KERNELS),
    "megatron.training.utils": (_APPLIER, _KERNELS),
    "megatron.core.fusions.fused_layer_norm": (_NORM,),
    "megatron.core.transformer.custom_layers.transformer_engine": (_ENGINE, _ITS_VERSION, _RESOURCES),
    "megatron.core.transformer.attention": (_RESOURCES,),
    "megatron.core.models.retro.config": (_ITS_VERSION, _RESOURCES),
}


# ------------------------------------------------------------------------------------------------ post-import hooks


class _Torch(types.ModuleType):
    """torch, whose `load` reads whatever was pickled: the default when this Megatron was written, up to torch 2.5."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(*args: Any, **kwargs: Any) -> Any:
        return torch.load(*args, **{"weights_only": False, **kwargs})


def _loads(module: Any) -> None:
    module.torch = _Torch("torch")


def _distrib_optimizer(module: Any) -> None:
    """fp32: loading a checkpoint copies into views of leaves that require a gradient."""
    _loads(module)
    cls = module.DistributedOptimizer
    for name in ("load_parameter_state_from_dp_zero", "load_parameter_state_from_fs_bucket_space"):
        setattr(cls, name, torch.no_grad()(getattr(cls, name)))


HOOKS: dict[str, Callable[[Any], None]] = {
    "megatron.training.checkpointing": _loads,
    "megatron.core.optimizer.optimizer": _loads,
    "megatron.core.optimizer.distrib_optimizer": _distrib_optimizer,
}
