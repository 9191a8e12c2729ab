"""What a rank gives to another in a recovery: optimizer shards with their counts, and tensors that no optimizer owns.

What a shard is, and how it is taken out and put back, is `megatron_kinds`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_tft.patches import megatron_kinds
from mindspeed_tft.recovery import files

DIGEST = 32  # bytes of a sha256


def is_dense(shard: str) -> bool:
    """Whether this shard id ("part/dense/number" or "part/expert/number") names one of what no expert has."""
    return shard.split("/")[1] == "dense"


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


def set_step(group: dict[str, Any], count: int) -> None:
    """How many updates an optimizer counts for a group: a number, or with some optimizers a tensor, which it stays."""
    if torch.is_tensor(group.get("step")):
        group["step"].fill_(count)
    else:
        group["step"] = count


def _put_counts(optimizer: Any, counts: list[float]) -> None:
    position = _put_scaler(optimizer, counts)
    for group in optimizer.optimizer.param_groups:
        if counts[position] >= 0:
            set_step(group, int(counts[position]))
        position += 1
        for main in group["params"]:
            if counts[position] >= 0:
                state = optimizer.optimizer.state[main]
                if torch.is_tensor(state.get("step")):
                    state["step"].fill_(counts[position])
                else:
                    state["step"] = torch.tensor(counts[position], dtype=torch.float32)
            position += 1


def unowned(model: list[Any]) -> list[torch.Tensor]:
    """Tensors that no optimizer owns: frozen parameters and buffers, in the model's order. DDP hides the buffers of
    the module that it wraps, so the inner module is asked."""
    owned = {id(p) for chunk in model for buffer in gradient_buffers(chunk) for p in buffer.param_index_map}
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
        for buffer in gradient_buffers(chunk):
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


def gradient_buffers(chunk: Any) -> list[Any]:
    """Of Megatron's data-parallel wrapper, whose `buffers` hides that of `torch.nn.Module`."""
    found = [getattr(chunk, name, None) for name in ("buffers", "expert_parallel_buffers")]
    return [buffer for buffers in found if isinstance(buffers, list) for buffer in buffers]


def memory(model: list[Any], optimizers: list[Any]) -> tuple[int, int]:
    """(bytes, parameters): parameters, gradient buffers, main parameters and gradients, moments. Storage is counted
    once, however many tensors view it."""
    storages: dict[int, int] = {}
    parameters = 0
    for chunk in model:
        for parameter in chunk.parameters():
            parameters += parameter.numel()
            _count(storages, parameter.data)
        for buffer in gradient_buffers(chunk):
            _count(storages, buffer.grad_data)
    for optimizer in optimizers:
        for group in optimizer.optimizer.param_groups:
            for main in group["params"]:
                _count(storages, main.data)
                if main.grad is not None:  # a copy where gradients have 16 bits, otherwise a view
                    _count(storages, main.grad)
                for value in optimizer.optimizer.state.get(main, {}).values():
                    if torch.is_tensor(value) and value.numel() > 1:
                        _count(storages, value)
    return sum(storages.values()), parameters


def _count(storages: dict[int, int], tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    storages[storage.data_ptr()] = storage.nbytes()


# ------------------------------------------------------------------------------------------------ on the way


def send(optimizer: Any, target: int) -> int:
    """Send this rank's shard of one optimizer, with its update counts; returns the bytes sent. Blocks until taken."""
    shard = megatron_kinds.of(optimizer).take(optimizer)
    # Empty where nothing of this rank is trained.
    flat = torch.cat([torch.empty(0), *(shard[name] for name in sorted(shard))])
    begun = any(count >= 0 for count in _counts(optimizer)[len(_scaler(optimizer)) :])
    sent = _send(torch.tensor([float(begun), *_counts(optimizer)], dtype=torch.float64), target)
    return sent + _send(flat, target)


def receive(optimizer: Any, source: int) -> int:
    """Take what `send` sends, into this rank's own tensors; returns the bytes taken.

    Raises:
        DumpError: something arrived with another hash than it was sent with.
    """
    kind = megatron_kinds.of(optimizer)
    shard = kind.take(optimizer)
    head = torch.empty(1 + len(_counts(optimizer)), dtype=torch.float64)
    flat = torch.empty(sum(tensor.numel() for tensor in shard.values()), dtype=torch.float32)
    taken = _receive(head, source) + _receive(flat, source)
    names = sorted(shard)
    parts = torch.split(flat, [shard[name].numel() for name in names])
    kind.put(optimizer, dict(zip(names, parts, strict=True)), with_state=bool(head[0]))
    _put_counts(optimizer, head[1:].tolist())
    return taken


def send_unowned(model: list[Any], target: int) -> int:
    """Send the tensors that no optimizer owns; returns the bytes sent."""
    return sum(_send(tensor.detach().cpu().contiguous(), target) for tensor in unowned(model))


@torch.no_grad()
def receive_unowned(model: list[Any], source: int) -> int:
    """Take what `send_unowned` sends; returns the bytes taken.

    Raises:
        DumpError: as `receive`.
    """
    total = 0
    for tensor in unowned(model):
        taken = torch.empty(tensor.shape, dtype=tensor.dtype)
        total += _receive(taken, source)
        tensor.copy_(taken)
    return total


def updates(optimizer: Any) -> int:
    """How many updates this rank's shard of an optimizer counts; 0 where nothing in it is trained: what the loading of
    a checkpoint left in empty groups is never counted on."""
    counts = [0.0]
    for group in optimizer.optimizer.param_groups:
        if group["params"]:
            counts.append(float(group.get("step", 0)))
            counts += [float(optimizer.optimizer.state.get(main, {}).get("step", 0)) for main in group["params"]]
    return int(max(counts))


def count_updates(optimizer: Any, count: int) -> None:
    """Where nothing of this rank's shard is trained, Megatron saves its groups without a count of updates."""
    if count and not any(group["params"] for group in optimizer.optimizer.param_groups):
        for group in optimizer.optimizer.param_groups:
            set_step(group, count)


def group_options(optimizer: Any) -> list[dict[str, Any]]:
    """What an optimizer's groups hold besides parameters: learning rates and their bounds, betas, weight decay. A job
    that was resumed has them from the checkpoint, and not from its command line. Counts of updates come with the shard:
    the sender may have another one, in which a group is empty and does not count on."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in optimizer.optimizer.param_groups
    ]


def put_group_options(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """The opposite of `group_options`."""
    for group, options in zip(optimizer.optimizer.param_groups, groups, strict=True):
        group.update(options)


def send_bytes(data: bytes, target: int) -> int:
    """Send a message whose length the other side does not know; returns the bytes sent."""
    sent = _send(torch.tensor([len(data)], dtype=torch.int64), target)
    return sent + _send(torch.frombuffer(bytearray(data), dtype=torch.uint8), target)


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
