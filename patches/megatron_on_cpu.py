"""What Megatron itself needs in order to run on a plain CPU, once torch's CUDA names mean the CPU.

Each entry of `_HOOKS` and `_STAND_INS` names one module of Megatron, the releases that need it, and why; it takes
effect when that module is imported, so that installing imports no Megatron. Nothing here has to do with fault
tolerance: a run without the plugin uses it as well (`mindspeed_tft.on_cpu`). It is not undone: Megatron is not used
otherwise in a process that has no device.
"""

from __future__ import annotations

import builtins
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typing_extensions
import wrapt

from mindspeed_tft.patches import apex_on_cpu, megatron_06_on_cpu
from mindspeed_tft.patches.megatron_06_on_cpu import StandIn
from mindspeed_tft.registry.versions import fits, version_of

__all__ = ["install"]

_installed = False


def install() -> None:
    """Register everything, before Megatron's modules are imported. Again is harmless."""
    global _installed
    if _installed:
        return
    _installed = True
    if not hasattr(typing, "override"):
        # megatron.training.models (0.18, 0.19) imports it, the only thing they need of Python 3.12.
        setattr(typing, "override", typing_extensions.override)  # noqa: B010 (mypy knows 3.10 has no such name)
    if not hasattr(np, "product"):
        # megatron.core.dist_checkpointing (0.12) calls it, which numpy 2 has no more.
        setattr(np, "product", np.prod)  # noqa: B010
    for module, hook in [*_HOOKS.items(), *(megatron_06_on_cpu.HOOKS.items() if _is_06() else ())]:
        wrapt.register_post_import_hook(hook, module)
    # Behind wrapt's finder, which must see these modules as well, and right before the one that would find them.
    finders: list[Any] = sys.meta_path
    place = finders.index(importlib.machinery.PathFinder) if importlib.machinery.PathFinder in finders else len(finders)
    finders.insert(place, _StandIns())


def _is_06() -> bool:
    """Told from the sources, without importing them."""
    found = version_of("megatron", file="core/package_info.py", distribution="megatron-core")()
    return found is not None and fits(found, megatron_06_on_cpu.VERSIONS)


# ---------------------------------------------------------------------------------------------- post-import hooks


def _dataset_helpers(module: Any) -> None:
    """All releases: the first rank runs make for helpers.cpp at every start. The wheels ship no Makefile for it, and
    that of a checkout builds for the python3 that is first on the PATH, which need not be the one that runs.
    """

    def compile_unless_built() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            _build_helpers(Path(module.__file__).parent)
            importlib.invalidate_caches()

    module.compile_helpers = compile_unless_built


def _build_helpers(folder: Path) -> None:
    """Compile helpers.cpp for this Python, beside itself, where Megatron's own make puts it too."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    with tempfile.NamedTemporaryFile(dir=folder, prefix="helpers_cpp-", suffix=".tmp", delete=False) as file:
        made = Path(file.name)
    try:
        includes = subprocess.run(
            [sys.executable, "-m", "pybind11", "--includes"], capture_output=True, text=True, check=True
        ).stdout.split()
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        command = [*compiler, "-O3", "-Wall", "-shared", "-std=c++11", "-fPIC", *includes]
        subprocess.run([*command, str(folder / "helpers.cpp"), "-o", str(made)], capture_output=True, check=True)
        os.chmod(made, 0o755)
        os.rename(made, folder / f"helpers_cpp{suffix}")  # whole, or not there: another job may be looking for it
    except (OSError, subprocess.CalledProcessError) as exc:
        made.unlink(missing_ok=True)
        raise RuntimeError(
            f"Megatron's dataset helpers cannot be compiled in {folder}: {exc}. A C++ compiler (g++, or CXX) and"
            " pybind11 are needed, and the folder must be writable; or compile its helpers.cpp beforehand, as"
            " scripts/setup_venv.py does (`make venv` in a checkout of mindspeed_tft)."
        ) from exc


def _random(module: Any) -> None:
    """0.16 and newer: drawing device numbers must not move the host's generator, and here it is the same one.

    Megatron warns at every draw, several times a step, and goes on.
    """
    logging.getLogger(module.__name__).addFilter(lambda record: not record.getMessage().startswith("CPU RNG state"))


def _fused_kernels(module: Any) -> None:
    """Up to 0.13: `load` compiles CUDA sources with nvcc."""
    module.load = lambda args: None


def _fp8_utils(module: Any) -> None:
    """0.12: raises without TransformerEngine also when there is no fp8 parameter to quantize (fixed in 0.13)."""
    quantize = getattr(module, "_quantize_param_shard_impl", None)
    if quantize is not None and not getattr(module, "HAVE_TE", False):
        module._quantize_param_shard_impl = lambda params, *args: quantize(params, *args) if params else None


def _core_utils(module: Any) -> None:
    """0.12: is_te_min_version, reached when a torch_dist checkpoint is loaded, imports TransformerEngine unguarded."""
    if getattr(module, "_te_version", "") is None and importlib.util.find_spec("transformer_engine") is None:
        from packaging.version import Version

        module._te_version = Version("0.0.0")


def _distrib_optimizer(module: Any) -> None:
    """All releases, fp32: loading a `torch` checkpoint copies into views of leaves that require a gradient."""
    cls = getattr(module, "DistributedOptimizer", None)
    setter = getattr(cls, "_set_main_param_and_optimizer_states", None)
    if cls is not None and setter is not None:
        cls._set_main_param_and_optimizer_states = torch.no_grad()(setter)


def _filesystem_async(module: Any) -> None:
    _staged_copies(module)
    _write_item_with_format(module)


def _staged_copies(module: Any) -> None:
    """All releases: a save in the background copies tensors from the device to the host before training goes on. What
    lies on the host already is not copied, and is written while training changes it."""
    cls = getattr(module, "FileSystemWriterAsync", None)
    prepare = getattr(cls, "prepare_write_data", None)
    if cls is None or prepare is None:
        return

    def prepare_copies(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = prepare(self, *args, **kwargs)
        self.write_buckets = [
            (*place, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
            for *place, (objects, tensors) in self.write_buckets or ()
        ]
        return result

    cls.prepare_write_data = prepare_copies


def _write_item_with_format(module: Any) -> None:
    """0.12 with torch 2.8 or newer: the private function of torch that it calls has one more required argument."""
    write_item = getattr(module, "_write_item", None)
    if write_item is None:
        return
    parameters = inspect.signature(write_item).parameters
    added = parameters.get("serialization_format")
    if added is None or added.default is not inspect.Parameter.empty:
        return
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    def with_format(*args: Any, **kwargs: Any) -> Any:
        if len(args) < len(parameters):
            kwargs.setdefault("serialization_format", SerializationFormat.TORCH_SAVE)
        return write_item(*args, **kwargs)

    module._write_item = with_format


def _torch_norm(module: Any) -> None:
    """0.12 and newer: torch's norms are refused with sequence parallelism. The norms that are not (apex's, and
    TransformerEngine's) only mark their parameters: Megatron then adds up their gradients over tensor-parallel ranks.
    """
    make = module.WrappedTorchNorm.__new__

    def make_with_mark(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return make(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = make(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    module.WrappedTorchNorm.__new__ = make_with_mark


_HOOKS: dict[str, Callable[[Any], None]] = {
    "megatron.core.datasets.utils": _dataset_helpers,
    "megatron.core.utils": _core_utils,
    "megatron.core.fp8_utils": _fp8_utils,
    "megatron.core.tensor_parallel.random": _random,
    "megatron.core.transformer.torch_norm": _torch_norm,
    "megatron.core.optimizer.distrib_optimizer": _distrib_optimizer,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _filesystem_async,
    "megatron.legacy.fused_kernels": _fused_kernels,
    "megatron.fused_kernels": _fused_kernels,
}


# ---------------------------------------------------------------------------------------------- stand-in libraries


class _Triton(types.ModuleType):
    """Decorators that decorate nothing, and a value for every other name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Triton(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # @triton.jit, and @triton.jit(...)
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


_TRITON = StandIn(_Triton("triton"), "triton")
_APEX = StandIn(apex_on_cpu.optimizers, "apex")
_STAND_INS: dict[str, tuple[StandIn, ...]] = {
    # 0.18, 0.19: the MoE "paged stash" imports triton with no fallback, for kernels that only a GPU runs.
    "megatron.core.transformer.moe.paged_stash": (_TRITON,),
    "megatron.core.transformer.moe.ops.paged_stash": (_TRITON,),
    # All releases: see apex_on_cpu. Elsewhere apex stays away: its other parts are CUDA kernels.
    "megatron.core.optimizer": (_APEX,),
    "megatron.core.optimizer.distrib_optimizer": (_APEX,),
}


class _StandIns(importlib.abc.MetaPathFinder):
    """Let single modules import libraries that are not installed.

    A library appears inside these modules alone. In sys.modules it would be seen by all others, which ask by
    importing whether they may use its kernels.
    """

    def __init__(self) -> None:
        self._of_release = megatron_06_on_cpu.STAND_INS if _is_06() else {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        wanted = [*_STAND_INS.get(fullname, ()), *self._of_release.get(fullname, ())]
        # Where the real library is here, that is used.
        libraries = [each.library for each in wanted if importlib.util.find_spec(each.unless) is None]
        if not libraries:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _ScopedLoader(spec.loader, libraries)
        return spec


class _ScopedLoader(importlib.abc.Loader):
    """Runs a module with an import statement of its own, which knows `libraries`."""

    def __init__(self, loader: importlib.abc.Loader, libraries: Sequence[types.ModuleType]) -> None:
        self._loader = loader
        self._libraries = libraries

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        libraries = self._libraries

        def import_(name: str, *args: Any, **kwargs: Any) -> Any:
            for library in libraries:
                if name == library.__name__ or name.startswith(f"{library.__name__}."):
                    return library
            return builtins.__import__(name, *args, **kwargs)

        vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_}
        self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:  # get_source and the like, for tracebacks
        return getattr(self._loader, name)
