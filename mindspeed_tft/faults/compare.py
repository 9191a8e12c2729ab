"""The oracle of a drill: are two Megatron checkpoints of one format (`torch` or `torch_dist`) the same, byte for byte?

    python -m mindspeed_tft.faults.compare A B        exit status 0: equal, 3: different

A and B are directories `iter_XXXXXXX`, or `--save` directories whose tracker file names one. Every tensor, array
and Python value is compared by type, shape and raw bytes: NaN payloads and the sign of zero count, tolerance there
is none. It first proves that it compares something: no tensor at all is a difference, never equality.

Files are read with an unpickler of our own. It builds tensors, arrays and plain values; any other class that a file
names becomes an inert record of its name and arguments, compared as such. So no code of a file runs, and Megatron
need not be importable.
"""

from __future__ import annotations

import argparse
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import torch

from mindspeed_tft.faults import torch_dist

EXIT_EQUAL = 0
EXIT_DIFFERENT = 3

TRACKER = "latest_checkpointed_iteration.txt"

# Files that tell of other files, and nothing of what is in them.
IGNORED_FILES: Mapping[str, str] = {
    "tft_manifest.json": "sizes and hashes of the files of a dump",
    "integrity.json": "the same by Megatron (--verify-integrity), which checks it when it loads",
}

# Values in the saved `args` that may differ between runs with the same training; each with its reason.
# Everything that is not listed must be equal.
IGNORED_ARGS: Mapping[str, str] = {
    "save": "where checkpoints go, not what is computed",
    "save_interval": "when checkpoints are written; a save changes no state",
    "load": "where this process started from",
    "iteration": "the iteration at which this process started; the checkpoint's own is compared beside args",
    "num_floating_point_operations_so_far": "the count at that iteration; the checkpoint's own is compared as well",
    "exit_interval": "when a run is stopped on purpose",
    "rank": "who wrote the file: with replicas any holder may",
    "local_rank": "who wrote the file: with replicas any holder may",
}
# Flags of the plugin: a program without it does not have them, and Megatron does not read them. What they do to
# Megatron's own settings (num_distributed_optimizer_instances) is compared.
PLUGIN_ARGS: frozenset[str] = frozenset(
    {
        "enable_high_availability",
        "enable_hbmfault_repair",
        "enable_worker_reboot",
        "enable_elastic_training",
        "distributed_optimizer_no_replica",
        "optimizer_replica_num",
    }
)
PLUGIN_ARG_PREFIX = "tft_"

_SHOWN = 20  # differences that are kept as text; all are counted


@dataclass
class Comparison:
    """What was compared, and what was found."""

    tensors: int = 0  # tensors and arrays
    bytes: int = 0  # their raw bytes
    values: int = 0  # plain Python values
    files: int = 0
    different: int = 0
    padding: int = 0  # elements left out because they belong to no parameter
    first_difference: str | None = None
    differences: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return self.different == 0 and self.tensors > 0

    def differ(self, where: str, what: str) -> None:
        """Note a difference."""
        text = f"{where}: {what}"
        self.different += 1
        if self.first_difference is None:
            self.first_difference = text
        if len(self.differences) < _SHOWN:
            self.differences.append(text)


class CheckpointError(ValueError):
    """A directory that is no checkpoint."""


def compare_checkpoints(a: Path, b: Path) -> Comparison:
    """Compare two checkpoints; differences are told from the side of `a`."""
    result = Comparison()
    files_a, files_b = _files(checkpoint_dir(a)), _files(checkpoint_dir(b))
    if torch_dist.INDEX in files_a and torch_dist.INDEX in files_b:
        _compare_sharded(result, _without_data(files_a), _without_data(files_b))
    for name in sorted(files_a.keys() | files_b.keys()):
        if name not in files_a or name not in files_b:
            result.differ(name, f"only in {a if name in files_a else b}")
            continue
        result.files += 1
        _compare_file(result, name, files_a[name], files_b[name])
    if result.tensors == 0:
        result.differ(".", f"nothing was compared: no tensor is in both {a} and {b}")
    return result


def checkpoint_dir(path: Path) -> Path:
    """`path` itself, or the checkpoint that the tracker file in it names."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory")
    tracker = path / TRACKER
    if not tracker.exists():
        return path
    return path / f"iter_{tracked_iteration(path):07d}"


def tracked_iteration(save: Path) -> int:
    """The iteration that a `--save` directory's tracker file names."""
    text = (save / TRACKER).read_text().strip()
    if not text.isdigit():
        raise CheckpointError(f"{save / TRACKER}: {text!r} is no iteration")
    return int(text)


def compare_values(result: Comparison, where: str, a: Any, b: Any) -> None:
    """Compare two values of a checkpoint, going into containers."""
    if type(a) is not type(b):
        result.differ(where, f"{_shown(a)} against {_shown(b)}")
        return
    for kind, compare in _COMPARERS:
        if isinstance(a, kind):
            compare(result, where, a, b)
            return
    result.values += 1
    if a != b:
        result.differ(where, f"{_shown(a)} against {_shown(b)}")


# ------------------------------------------------------------------------------------------------ reading


class Opaque:
    """Stands for an object of a class that is not rebuilt: what its pickle said about it."""

    pickled_name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any]

    def __new__(cls, *arguments: Any, **keywords: Any) -> Opaque:
        made = object.__new__(cls)
        made.arguments = (*arguments, *sorted(keywords.items()))
        made.items = []
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: list[Any]) -> None:
        self.items.extend(values)

    def told(self) -> tuple[Any, ...]:
        return (self.pickled_name, self.arguments, self.state, self.items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.told() == other.told()

    def __hash__(self) -> int:
        return hash((self.pickled_name, self.arguments))

    def __repr__(self) -> str:
        plain = [argument for argument in self.arguments if isinstance(argument, (bool, int, float, str))]
        return f"<{self.pickled_name} {plain}>"


_REBUILT = {
    ("argparse", "Namespace"),
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
            *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    *(("builtins", name) for name in ("bytearray", "complex", "frozenset", "range", "set", "slice")),
}
_opaque_classes: dict[str, type[Opaque]] = {}


class _Unpickler(pickle.Unpickler):
    """Builds data; everything else becomes `Opaque`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REBUILT:
            return super().find_class(module, name)
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _with_attributes
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _opaque(f"{module}.{name}")


def _with_attributes(rebuild: Callable[..., torch.Tensor], _kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """A tensor that has attributes of its own, such as a main parameter that tells how it is sharded."""
    return [rebuild(*arguments), state]


def _opaque(pickled_name: str) -> type[Opaque]:
    if pickled_name not in _opaque_classes:
        _opaque_classes[pickled_name] = type(pickled_name, (Opaque,), {"pickled_name": pickled_name})
    return _opaque_classes[pickled_name]


def _pickle_module() -> ModuleType:
    """What `torch.load` asks of its `pickle_module`, with our unpickler."""
    module = ModuleType("inert_pickle")
    vars(module).update(vars(pickle))
    vars(module).update(
        Unpickler=_Unpickler,
        load=lambda file, **options: _Unpickler(file, **options).load(),
        __name__="inert_pickle",
    )
    return module


def load(source: Path | IO[bytes]) -> Any:
    """Read what `torch.save` wrote, without running anything of it."""
    mapped = isinstance(source, Path)
    return torch.load(source, map_location="cpu", weights_only=False, pickle_module=_pickle_module(), mmap=mapped)


def _files(directory: Path) -> dict[str, Path]:
    found = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if name not in IGNORED_FILES}


# ---------------------------------------------------------------------------------------------- comparing


def _without_data(found: dict[str, Path]) -> Path:
    """Take index and data files of format `torch_dist` out of `found`, since what they hold is compared instead; the
    directory that they lie in."""
    directory = found.pop(torch_dist.INDEX).parent
    for name in [name for name in found if name.endswith(torch_dist.DATA_SUFFIX)]:
        del found[name]
    return directory


def _compare_sharded(result: Comparison, a: Path, b: Path) -> None:
    """What two checkpoints of format `torch_dist` hold, whichever files it is in."""
    contents = []
    for directory in (a, b):
        try:
            contents.append(open_sharded(directory))
        except Exception as error:  # as for a damaged `.pt` file
            result.differ(torch_dist.INDEX, f"{directory} cannot be read: {type(error).__name__}: {error}")
            return
    left, right = contents
    result.files += 1
    for name in sorted(left.names | right.names):
        if name not in left.names or name not in right.names:
            result.differ(name, f"only in {a if name in left.names else b}")
            continue
        try:
            gaps = sorted({*left.padding(name), *right.padding(name)})
            values = [_without_gaps(content.value(name), gaps) for content in contents]
        except Exception as error:
            result.differ(name, f"cannot be read: {type(error).__name__}: {error}")
            continue
        result.padding += sum(end - begin for begin, end in gaps)
        compare_values(result, name, *values)


def open_sharded(directory: Path) -> torch_dist.Content:
    """A checkpoint of format `torch_dist`, read without running anything of it."""
    with open(directory / torch_dist.INDEX, "rb") as file:
        return torch_dist.Content(directory, _Unpickler(file).load(), load)


def _without_gaps(value: Any, gaps: list[tuple[int, int]]) -> Any:
    for begin, end in gaps:
        value[begin:end] = 0
    return value


def _compare_file(result: Comparison, name: str, a: Path, b: Path) -> None:
    if a.suffix != ".pt":
        _compare_bytes(result, name, a.read_bytes(), b.read_bytes())
        return
    loaded = []
    for path in (a, b):
        try:
            loaded.append(load(path))
        except Exception as error:  # a damaged pickle raises nearly anything; whatever it is, it is a difference
            result.differ(name, f"{path} cannot be read: {type(error).__name__}: {error}")
            return
    result.padding += max(_clear_padding(content) for content in loaded)
    compare_values(result, name, loaded[0], loaded[1])


def _clear_padding(content: Any) -> int:
    """Set to zero what the optimizer's file of older releases (core_r0.6.0) has behind the last parameter of a bucket:
    nobody has written there. Returns the number of such elements."""
    found = 0
    unpadded = content.get("per_bucket_numel_unpadded", ()) if isinstance(content, dict) else ()
    for buffer, of_buffer in enumerate(unpadded):
        for dtype, numbers in of_buffer.items():
            for tensors in content[buffer][dtype].values():
                for tensor, numel in zip(tensors, numbers, strict=True):
                    tensor[numel:] = 0
                    found += tensor[numel:].numel()
    return found


def _compare_tensor(result: Comparison, where: str, a: torch.Tensor, b: torch.Tensor) -> None:
    result.tensors += 1
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        result.differ(where, f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}")
        return
    left, right = _tensor_bytes(a), _tensor_bytes(b)
    result.bytes += left.size
    _compare_raw(result, where, left, right, a.element_size(), lambda side, index: (a, b)[side].reshape(-1)[index])


def _compare_array(result: Comparison, where: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> None:
    result.tensors += 1
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        result.differ(where, f"{a.dtype} {a.shape} against {b.dtype} {b.shape}")
        return
    if a.dtype.hasobject:
        compare_values(result, where, a.tolist(), b.tolist())
        return
    left, right = (np.frombuffer(x.tobytes(), dtype=np.uint8) for x in (a, b))
    result.bytes += left.size
    _compare_raw(result, where, left, right, a.dtype.itemsize, lambda side, index: (a, b)[side].reshape(-1)[index])


def _compare_raw(
    result: Comparison,
    where: str,
    a: np.ndarray[Any, Any],
    b: np.ndarray[Any, Any],
    element_size: int,
    element: Callable[[int, int], Any],
) -> None:
    if np.array_equal(a, b):
        return
    first = int(np.flatnonzero(a != b)[0])
    index = first // element_size
    raw_a, raw_b = (x[index * element_size : (index + 1) * element_size].tobytes().hex() for x in (a, b))
    result.differ(
        where,
        f"byte {first} of {a.size} (element {index}): {_number(element(0, index))} [{raw_a}] "
        f"against {_number(element(1, index))} [{raw_b}]",
    )


def _compare_bytes(result: Comparison, where: str, a: bytes, b: bytes) -> None:
    result.values += 1
    if a == b:
        return
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    result.differ(where, f"byte {first}: {_shown(a[first : first + 8])} against {_shown(b[first : first + 8])}")


def _compare_mapping(result: Comparison, where: str, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> None:
    for key in sorted(a.keys() | b.keys(), key=repr):
        inner = f"{where}[{key!r}]"
        if key not in a or key not in b:
            result.differ(inner, "missing on the second side" if key in a else "missing on the first side")
        else:
            compare_values(result, inner, a[key], b[key])


def _compare_ordered(result: Comparison, where: str, a: OrderedDict[Any, Any], b: OrderedDict[Any, Any]) -> None:
    _compare_mapping(result, where, a, b)
    # torch keeps module versions in an attribute of the state dictionary.
    _compare_mapping(result, f"{where}.__dict__", vars(a), vars(b))


def _compare_sequence(
    result: Comparison, where: str, a: list[Any] | tuple[Any, ...], b: list[Any] | tuple[Any, ...]
) -> None:
    if len(a) != len(b):
        result.differ(where, f"length {len(a)} against {len(b)}")
        return
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        compare_values(result, f"{where}[{index}]", x, y)


def _compare_float(result: Comparison, where: str, a: float, b: float) -> None:
    result.values += 1
    if struct.pack("<d", a) != struct.pack("<d", b):
        result.differ(where, f"{a!r} [{struct.pack('<d', a).hex()}] against {b!r} [{struct.pack('<d', b).hex()}]")


def _compare_namespace(result: Comparison, where: str, a: argparse.Namespace, b: argparse.Namespace) -> None:
    left, right = (dict(_training_args(x)) for x in (a, b))
    if not left:
        result.differ(where, "empty on the first side")
    _compare_mapping(result, where, left, right)


def _training_args(namespace: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    for name, value in vars(namespace).items():
        if name in IGNORED_ARGS or name in PLUGIN_ARGS or name.startswith(PLUGIN_ARG_PREFIX):
            continue
        yield name, value


def _compare_opaque(result: Comparison, where: str, a: Opaque, b: Opaque) -> None:
    compare_values(result, where, a.told(), b.told())


_COMPARERS: tuple[tuple[type | tuple[type, ...], Callable[[Comparison, str, Any, Any], None]], ...] = (
    (torch.Tensor, _compare_tensor),
    ((np.ndarray, np.generic), lambda result, where, a, b: _compare_array(result, where, np.asarray(a), np.asarray(b))),
    (OrderedDict, _compare_ordered),
    (dict, _compare_mapping),
    ((list, tuple), _compare_sequence),
    (argparse.Namespace, _compare_namespace),
    (Opaque, _compare_opaque),
    (float, _compare_float),
    ((bytes, bytearray), lambda result, where, a, b: _compare_bytes(result, where, bytes(a), bytes(b))),
)


def _tensor_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return np.empty(0, dtype=np.uint8)
    raw: np.ndarray[Any, Any] = flat.view(torch.uint8).numpy()
    return raw


def _number(element: Any) -> str:
    value = element.item() if isinstance(element, torch.Tensor) else element
    return f"{value!r}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


# ------------------------------------------------------------------------------------------- command line


def main(arguments: list[str] | None = None) -> int:
    """Compare two checkpoints from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_tft.faults.compare",
        description="Compare two Megatron checkpoints byte for byte.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="iter_XXXXXXX directory, or a --save directory")
    parser.add_argument("b", type=Path, metavar="B", help="iter_XXXXXXX directory, or a --save directory")
    chosen = parser.parse_args(arguments)
    try:
        result = compare_checkpoints(chosen.a, chosen.b)
    except CheckpointError as error:
        parser.error(str(error))
    print(
        f"compared {result.files} files, {result.tensors} tensors, {result.bytes} bytes, {result.values} values: "
        f"{result.different} different"
    )
    for text in result.differences:
        print(f"  {text}")
    return EXIT_EQUAL if result.equal else EXIT_DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
