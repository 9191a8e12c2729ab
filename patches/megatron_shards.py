"""Optimizer shards of Megatron's distributed optimizer as plain tensors: take them out, put them back, send, receive.

A shard is what one rank of an optimizer instance owns: main parameters and moments, per buffer and bucket. Its layout
is the same on all ranks that hold it, so what travels is raw numbers in a fixed order, never a description of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_tft.recovery import files

DIGEST = 32  # bytes of a sha256


def buckets(optimizer: Any) -> Iterator[tuple[int, Any, int, Any]]:
    """(buffer index, its dtype key, bucket index, range map) in the order of Megatron's own state."""
    for buffer_index, ranges in enumerate(optimizer.gbuf_ranges):
        for dtype, per_bucket in ranges.items():
            for bucket_index, ranges_of_bucket in enumerate(per_bucket):
                yield buffer_index, dtype, bucket_index, ranges_of_bucket


def state_keys(optimizer: Any) -> tuple[str, ...]:
    return tuple(getattr(optimizer, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))


def main_and_state(optimizer: Any, parameter: Any) -> dict[str, torch.Tensor]:
    """Main parameter and moments of the slice of `parameter` that this rank owns; no moments before the first step."""
    getter = getattr(optimizer, "_get_main_param_and_optimizer_states", None)
    if getter is not None:
        found: dict[str, torch.Tensor] = getter(parameter)
        return found
    group, order = optimizer.model_param_group_index_map[parameter]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    return {"param": main, **optimizer.optimizer.state[main]}


def _pieces(optimizer: Any, key: str) -> Iterator[tuple[str, int, int, Any]]:
    """(name of the bucket's tensor, begin, end, parameter) of everything that this rank owns, in one order."""
    for buffer_index, _, bucket_index, ranges in buckets(optimizer):
        for parameter, where in ranges["param_map"].items():
            yield f"{buffer_index}/{bucket_index}/{key}", where["gbuf_local"].start, where["gbuf_local"].end, parameter


def local_shards(optimizer: Any) -> dict[str, torch.Tensor]:
    """This rank's shards of main parameters and moments: float32 CPU tensors of shape (bucket elements / ranks of the
    optimizer instance,), named "buffer/bucket/key". Gaps between parameters are zero, as in Megatron's own files; so
    are moments that do not exist yet."""
    ranks = optimizer.data_parallel_group.size()
    shards: dict[str, torch.Tensor] = {}
    keys = ("param", *state_keys(optimizer))
    for buffer_index, _, bucket_index, _ in buckets(optimizer):
        numel = optimizer.buffers[buffer_index].buckets[bucket_index].grad_data.numel() // ranks
        for key in keys:
            shards[f"{buffer_index}/{bucket_index}/{key}"] = torch.zeros(numel, dtype=torch.float32)
    for key in keys:
        for name, begin, end, parameter in _pieces(optimizer, key):
            tensors = main_and_state(optimizer, parameter)
            if key in tensors:
                shards[name][begin:end].copy_(tensors[key].detach().reshape(-1))
    return shards


@torch.no_grad()
def put_shards(optimizer: Any, shards: dict[str, torch.Tensor], with_state: bool) -> None:
    """The opposite of `local_shards`, into the tensors that are there. Without state the moments are forgotten, as
    before the first step."""
    inner = optimizer.optimizer
    for name, begin, end, parameter in _pieces(optimizer, "param"):
        main = main_and_state(optimizer, parameter)["param"]
        main.view(-1).copy_(shards[name][begin:end])
        if not with_state:
            inner.state.pop(main, None)
    if not with_state:
        return
    for key in state_keys(optimizer):
        for name, begin, end, parameter in _pieces(optimizer, key):
            tensors = main_and_state(optimizer, parameter)
            if key not in tensors:
                inner.state[tensors["param"]][key] = torch.zeros_like(tensors["param"])
                tensors = main_and_state(optimizer, parameter)
            tensors[key].view(-1).copy_(shards[name][begin:end])


def _counts(optimizer: Any) -> list[float]:
    """Scalars of the optimizer: its loss scaler, and how many updates it counts per group and parameter (-1 where it
    has not begun to count)."""
    found = _scaler(optimizer)
    for group in optimizer.optimizer.param_groups:
        found.append(float(group.get("step", -1)))
        found += [float(optimizer.optimizer.state.get(main, {}).get("step", -1)) for main in group["params"]]
    return found


_SCALER = ("_scale", "_growth_tracker", "_hysteresis_tracker")


def _scaler(optimizer: Any) -> list[float]:
    scaler = getattr(optimizer, "grad_scaler", None)
    return [float(getattr(scaler, name)) for name in _SCALER if hasattr(scaler, name)]


def _put_scaler(optimizer: Any, values: list[float]) -> int:
    scaler: Any = getattr(optimizer, "grad_scaler", None)
    names = [name for name in _SCALER if hasattr(scaler, name)]
    for name, value in zip(names, values, strict=False):
        if name == "_scale":
            scaler._scale.fill_(value)
        else:
            setattr(scaler, name, int(value))
    return len(names)


def _put_counts(optimizer: Any, counts: list[float]) -> None:
    position = _put_scaler(optimizer, counts)
    for group in optimizer.optimizer.param_groups:
        if counts[position] >= 0:
            group["step"] = int(counts[position])
        position += 1
        for main in group["params"]:
            if counts[position] >= 0:
                state = optimizer.optimizer.state[main]
                if torch.is_tensor(state.get("step")):
                    state["step"].fill_(counts[position])
                else:
                    state["step"] = torch.tensor(counts[position], dtype=torch.float32)
            position += 1


def unowned(model: list[Any], optimizers: list[Any]) -> list[torch.Tensor]:
    """Tensors that no optimizer owns: frozen parameters and buffers, in the model's order. DDP hides the buffers of
    the module that it wraps, so the inner module is asked."""
    owned = {id(p) for optimizer in optimizers for buffer in optimizer.buffers for p in buffer.param_index_map}
    found: list[torch.Tensor] = []
    for chunk in model:
        module = chunk.module
        found += [parameter.data for parameter in module.parameters() if id(parameter) not in owned]
        found += list(module.buffers())
    return found


def state_tensors(model: list[Any], optimizers: list[Any]) -> Iterator[torch.Tensor]:
    """What device memory holds of the training state of this rank, owned by an optimizer or not."""
    for chunk in model:
        yield from chunk.parameters()
        yield from (buffer for _, buffer in chunk.named_buffers())  # persistent or not
        for buffer in _gradient_buffers(chunk):
            yield from (tensor for tensor in (buffer.grad_data, buffer.param_data) if tensor is not None)
    for optimizer in optimizers:
        scaler = getattr(optimizer, "grad_scaler", None)
        if scaler is not None:
            yield scaler.scale
        inner = optimizer.optimizer
        for main in (main for group in inner.param_groups for main in group["params"]):
            yield main.data
            if main.grad is not None:
                yield main.grad
            # Counters of steps have no dimension: torch keeps them in the host's memory.
            yield from (value for value in inner.state.get(main, {}).values() if torch.is_tensor(value) and value.dim())


def _gradient_buffers(chunk: Any) -> list[Any]:
    """Of Megatron's data-parallel wrapper, whose `buffers` hides that of `torch.nn.Module`."""
    found = [getattr(chunk, name, None) for name in ("buffers", "expert_parallel_buffers")]
    return [buffer for buffers in found if isinstance(buffers, list) for buffer in buffers]


# ------------------------------------------------------------------------------------------------ on the way


def send(optimizers: list[Any], model: list[Any], target: int) -> int:
    """Send this rank's shard, update counts and unowned tensors; returns the bytes sent. Blocks until taken."""
    total = 0
    for optimizer in optimizers:
        shards = local_shards(optimizer)
        flat = torch.cat([shards[name] for name in sorted(shards)])
        begun = any(count >= 0 for count in _counts(optimizer)[len(_scaler(optimizer)) :])
        total += _send(torch.tensor([float(begun), *_counts(optimizer)], dtype=torch.float64), target)
        total += _send(flat, target)
    return total + send_unowned(optimizers, model, target)


def send_unowned(optimizers: list[Any], model: list[Any], target: int) -> int:
    """Send the tensors that no optimizer owns; returns the bytes sent."""
    return sum(_send(tensor.detach().cpu().contiguous(), target) for tensor in unowned(model, optimizers))


def receive(optimizers: list[Any], model: list[Any], source: int) -> int:
    """Take what `send` sends, into this rank's own tensors; returns the bytes taken.

    Raises:
        DumpError: something arrived with another hash than it was sent with.
    """
    total = 0
    for optimizer in optimizers:
        shards = local_shards(optimizer)
        head = torch.empty(1 + len(_counts(optimizer)), dtype=torch.float64)
        flat = torch.empty(sum(shard.numel() for shard in shards.values()), dtype=torch.float32)
        total += _receive(head, source) + _receive(flat, source)
        names = sorted(shards)
        parts = torch.split(flat, [shards[name].numel() for name in names])
        begun = bool(head[0])
        put_shards(optimizer, dict(zip(names, parts, strict=True)), with_state=begun)
        _put_counts(optimizer, head[1:].tolist())
    return total + receive_unowned(optimizers, model, source)


@torch.no_grad()
def receive_unowned(optimizers: list[Any], model: list[Any], source: int) -> int:
    """Take what `send_unowned` sends; returns the bytes taken.

    Raises:
        DumpError: as `receive`.
    """
    total = 0
    for tensor in unowned(model, optimizers):
        taken = torch.empty(tensor.shape, dtype=tensor.dtype)
        total += _receive(taken, source)
        tensor.copy_(taken)
    return total


def group_options(optimizer: Any) -> list[dict[str, Any]]:
    """What an optimizer's groups hold besides parameters: learning rates and their bounds, betas, weight decay. A job
    that was resumed has them from the checkpoint, and not from its command line."""
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.optimizer.param_groups
    ]


def put_group_options(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """The opposite of `group_options`."""
    for group, options in zip(optimizer.optimizer.param_groups, groups, strict=True):
        group.update(options)


def send_bytes(data: bytes, target: int) -> None:
    """Send a message whose length the other side does not know."""
    _send(torch.tensor([len(data)], dtype=torch.int64), target)
    _send(torch.frombuffer(bytearray(data), dtype=torch.uint8), target)


def receive_bytes(source: int) -> bytes:
    """Take what `send_bytes` sends.

    Raises:
        DumpError: as `receive`.
    """
    length = torch.empty(1, dtype=torch.int64)
    _receive(length, source)
    message = torch.empty(int(length), dtype=torch.uint8)
    _receive(message, source)
    return message.numpy().tobytes()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    digest = hashlib.sha256(_bytes(tensor).numpy().tobytes()).digest()
    return torch.tensor(list(digest), dtype=torch.uint8)


def _send(tensor: torch.Tensor, target: int) -> int:
    if tensor.numel() == 0:
        return 0
    torch.distributed.send(torch.cat([_hash(tensor), _bytes(tensor)]).to(message_device()), target)
    return tensor.numel() * tensor.element_size()


def _receive(tensor: torch.Tensor, source: int) -> int:
    if tensor.numel() == 0:
        return 0
    size = tensor.numel() * tensor.element_size()
    message = torch.empty(DIGEST + size, dtype=torch.uint8, device=message_device())
    torch.distributed.recv(message, source)
    message = message.cpu()
    _bytes(tensor).copy_(message[DIGEST:])
    if not torch.equal(_hash(tensor), message[:DIGEST]):
        raise files.DumpError(f"{size} bytes from rank {source} do not have the hash that they were sent with")
    return size


def message_device() -> Any:
    """Where messages between ranks have to lie: the backend's device, and the CPU for gloo."""
    return "cpu" if torch.distributed.get_backend() == "gloo" else torch.cuda.current_device()
