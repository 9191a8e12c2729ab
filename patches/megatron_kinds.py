"""The kinds of optimizers in Megatron's chain, and all that differs between them: how much of the state a rank holds,
how it is taken out and put back, and how it becomes the state of a checkpoint.

`Distributed` is Megatron's distributed optimizer: a rank holds a slice of every bucket, the ranks of an instance all.
`Whole` is not sharded (--use-distributed-optimizer is off): every rank of the data-parallel list holds everything.

A shard is main parameters and moments. Its layout is the same on all ranks that hold it, so what travels is raw numbers
in a fixed order, never a description of them. Nothing here communicates, but `gather`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from mindspeed_tft.patches.groups import is_06
from mindspeed_tft.recovery import files

Shard = dict[str, torch.Tensor]


class Kind(Protocol):
    """What can be done with an optimizer of the chain, whatever its kind."""

    def take(self, optimizer: Any) -> Shard:
        """This rank's shard as copies on the host, float32, flat; moments that do not exist yet are zero."""

    def in_place(self, optimizer: Any) -> list[torch.Tensor]:
        """What `take` copies, where it lies: main parameters, then each of the moments, if there are any yet."""

    def put(self, optimizer: Any, shard: Shard, with_state: bool) -> None:
        """The opposite of `take`, into the tensors that are there. Without state the moments are forgotten, as before
        the first step."""

    def complete(self, optimizer: Any, shards: Sequence[Shard | None]) -> dict[Any, Any] | None:
        """The state of the whole optimizer as Megatron's file for it has it, from its shards in order (None: that of
        this rank); None where Megatron keeps it with everything else. The model's parameters are set from it: after a
        fault their gather is missing.

        Raises:
            DumpError: the shards are not those of this optimizer.
        """

    def update(self, optimizer: Any) -> None:
        """This rank's local update, from final gradients. No collective."""

    def to_model(self, optimizer: Any) -> None:
        """Set what this rank owns of the model's parameters from its main parameters."""

    def gather(self, model: Sequence[Any]) -> None:
        """What is missing after `to_model` on all ranks: a collective, where parameters are gathered at all."""


def of(optimizer: Any) -> Kind:
    """The kind of an optimizer of the chain."""
    if not hasattr(optimizer, "gbuf_ranges"):
        return WHOLE
    if is_06():
        from mindspeed_tft.patches import megatron_06_kinds  # which is made of this module

        return megatron_06_kinds.DISTRIBUTED
    return DISTRIBUTED


def is_expert(optimizer: Any) -> bool:
    """Whether it has the parameters of experts, which are replicated over other ranks than all the rest."""
    groups = getattr(optimizer.optimizer, "param_groups", ())
    return any(group.get("is_expert_parallel", False) for group in groups)


def _step_of(name: str) -> Any:
    return getattr(importlib.import_module("megatron.core.optimizer.optimizer"), name).step_with_ready_grads


# ------------------------------------------------------------------------------------------------ sharded


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
    group, order = optimizer.model_param_group_index_map[parameter]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    state = optimizer.optimizer.state
    known = main in state
    getter = getattr(optimizer, "_get_main_param_and_optimizer_states", None)
    found: dict[str, torch.Tensor] = getter(parameter) if getter is not None else {"param": main, **state[main]}
    if not known:  # the look has made an empty one, and Megatron would take that for moments to load into
        state.pop(main, None)
    return found


def _pieces(optimizer: Any, key: str) -> Iterator[tuple[str, int, int, Any]]:
    """(name of the bucket's tensor, begin, end, parameter) of everything that this rank owns, in one order."""
    for buffer_index, _, bucket_index, ranges in buckets(optimizer):
        for parameter, where in ranges["param_map"].items():
            yield f"{buffer_index}/{bucket_index}/{key}", where["gbuf_local"].start, where["gbuf_local"].end, parameter


class Distributed:
    """Megatron's distributed optimizer. A shard is one flat tensor a bucket and key, named "buffer/bucket/key", of
    (bucket elements / ranks of the instance) elements. Gaps between parameters are zero, as in Megatron's own files."""

    def take(self, optimizer: Any) -> Shard:
        ranks = optimizer.data_parallel_group.size()
        shard: Shard = {}
        keys = ("param", *state_keys(optimizer))
        for buffer_index, _, bucket_index, _ in buckets(optimizer):
            numel = optimizer.buffers[buffer_index].buckets[bucket_index].grad_data.numel() // ranks
            for key in keys:
                shard[f"{buffer_index}/{bucket_index}/{key}"] = torch.zeros(numel, dtype=torch.float32)
        for key in keys:
            for name, begin, end, parameter in _pieces(optimizer, key):
                tensors = main_and_state(optimizer, parameter)
                if key in tensors:
                    shard[name][begin:end].copy_(tensors[key].detach().reshape(-1))
        return shard

    def in_place(self, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for key in ("param", *state_keys(optimizer)):
            for _, _, _, parameter in _pieces(optimizer, key):
                tensors = main_and_state(optimizer, parameter)
                if key in tensors:
                    found.append(tensors[key].detach())
        return found

    @torch.no_grad()
    def put(self, optimizer: Any, shard: Shard, with_state: bool) -> None:
        inner = optimizer.optimizer
        for name, begin, end, parameter in _pieces(optimizer, "param"):
            main = main_and_state(optimizer, parameter)["param"]
            main.view(-1).copy_(shard[name][begin:end])
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
                tensors[key].view(-1).copy_(shard[name][begin:end])

    def complete(self, optimizer: Any, shards: Sequence[Shard | None]) -> dict[Any, Any]:
        own = self.take(optimizer) if None in shards else {}
        state = assemble(optimizer, [own if shard is None else shard for shard in shards])
        copy_to_model(optimizer, state)
        return state

    def update(self, optimizer: Any) -> None:
        _step_of("MixedPrecisionOptimizer")(optimizer)  # its own ends with a gather

    def to_model(self, optimizer: Any) -> None:
        optimizer._copy_main_params_to_model_params()

    def gather(self, model: Sequence[Any]) -> None:
        for chunk in model:
            chunk.start_param_sync(force_sync=True)


def assemble(optimizer: Any, shards: list[Shard]) -> dict[Any, Any]:
    """Megatron's whole parameter state (the content of `distrib_optim.pt`) from the shards of all ranks of an
    instance, in rank order: per buffer and dtype one float32 tensor a key, without the padding between buckets.

    Raises:
        DumpError: the shards do not make up the buckets of this optimizer.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    offsets: dict[tuple[int, Any], int] = {}
    for buffer_index, dtype, bucket_index, _ in buckets(optimizer):
        buffer = optimizer.buffers[buffer_index]
        bucket = buffer.buckets[bucket_index]
        world = state.setdefault(buffer_index, {}).setdefault(dtype, {})
        start = offsets.get((buffer_index, dtype), 0)
        end = offsets[(buffer_index, dtype)] = start + bucket.numel_unpadded
        for key in ("param", *state_keys(optimizer)):
            if key not in world:
                world[key] = torch.zeros(buffer.numel_unpadded, dtype=torch.float32)
            pieces = torch.cat([shard[f"{buffer_index}/{bucket_index}/{key}"] for shard in shards])
            if pieces.numel() != bucket.grad_data.numel():
                raise files.DumpError(
                    f"bucket {bucket_index} has {bucket.grad_data.numel()} elements, its shards {pieces.numel()}"
                )
            world[key][start:end].copy_(pieces[: bucket.numel_unpadded])
        world["numel_unpadded"] = buffer.numel_unpadded
    return state


@torch.no_grad()
def copy_to_model(optimizer: Any, state: dict[Any, Any]) -> None:
    """Set the model's parameters from the assembled main parameters, with the cast that Megatron's own update does.

    Each rank updates its shard only and gathers the rest; after a fault that gather is missing.
    """
    for buffer_index, buffer in enumerate(optimizer.buffers):
        dtype = next(iter(optimizer.gbuf_ranges[buffer_index]))
        main = state[buffer_index][dtype]["param"]
        starts: list[int] = []
        total = 0
        for bucket in buffer.buckets:
            starts.append(total - bucket.offset)
            total += bucket.numel_unpadded
        for parameter, (begin, end, bucket_id) in buffer.param_index_map.items():
            shift = starts[bucket_id]
            parameter.data.copy_(main[begin + shift : end + shift].view(parameter.shape))


# ------------------------------------------------------------------------------------------------ not sharded

_MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's: all other optimizers are refused at start-up


class Whole:
    """Mixed precision (fp32 main parameters beside 16-bit ones) or fp32 without the distributed optimizer. A shard is
    all of it: one tensor a parameter and key, named "group/parameter/key". It is saved within `optimizer.state_dict()`.
    """

    def take(self, optimizer: Any) -> Shard:
        shard: Shard = {}
        for place, main in _mains(optimizer):
            state = optimizer.optimizer.state.get(main, {})
            for key in ("param", *_MOMENTS):
                value = main if key == "param" else state.get(key)
                flat = torch.zeros(main.numel()) if value is None else value.detach().reshape(-1).float().cpu()
                shard[f"{place}/{key}"] = flat.clone()
        return shard

    def in_place(self, optimizer: Any) -> list[torch.Tensor]:
        mains = [main for _, main in _mains(optimizer)]
        states = [optimizer.optimizer.state.get(main, {}) for main in mains]
        moments = [state[key].detach() for key in _MOMENTS for state in states if key in state]
        return [*(main.detach() for main in mains), *moments]

    @torch.no_grad()
    def put(self, optimizer: Any, shard: Shard, with_state: bool) -> None:
        inner = optimizer.optimizer
        for place, main in _mains(optimizer):
            main.data.view(-1).copy_(shard[f"{place}/param"])
            if not with_state:
                inner.state.pop(main, None)
                continue
            state = inner.state[main]
            for key in _MOMENTS:
                if key not in state:
                    state[key] = torch.zeros_like(main, dtype=torch.float32)
                state[key].view(-1).copy_(shard[f"{place}/{key}"])

    def complete(self, optimizer: Any, shards: Sequence[Shard | None]) -> None:
        (only,) = shards
        if only is not None:
            self.put(optimizer, only, with_state=True)
        self.to_model(optimizer)

    def update(self, optimizer: Any) -> None:
        mixed = hasattr(optimizer, "fp32_from_float16_groups")
        _step_of("MixedPrecisionOptimizer" if mixed else "FP32Optimizer")(optimizer)

    def to_model(self, optimizer: Any) -> None:
        if hasattr(optimizer, "fp32_from_float16_groups"):  # in fp32 the model's parameters are the main parameters
            optimizer._copy_main_params_to_model_params()

    def gather(self, model: Sequence[Any]) -> None:
        """Nothing is missing: every rank has set all parameters."""


def _mains(optimizer: Any) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(optimizer.optimizer.param_groups):
        for order, main in enumerate(group["params"]):
            yield f"{number}/{order}", main


DISTRIBUTED: Kind = Distributed()
WHOLE: Kind = Whole()
