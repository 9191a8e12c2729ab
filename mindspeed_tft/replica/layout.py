"""Which ranks hold the same parameters: the data-parallel lists of a job, from its sizes and Megatron's order of ranks.

Known before any process group exists, so that a layout which cannot work is refused at once. Arithmetic only; a test
compares it with the groups that Megatron builds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ORDER_FLAG = "--use-tp-pp-dp-mapping"


@dataclass(frozen=True)
class Sizes:
    """How the ranks of a job are divided; all sizes are numbers of ranks.

    Rank numbers run through the axes with the fastest first: tensor, context, expert, data, pipeline; with `data_last`
    (Megatron's flag above) data and pipeline are exchanged. Experts have axes of their own over the same ranks: no
    context parallelism, and what is left of the world is their data parallelism.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    experts: int = 0  # expert-parallel size; 0: a dense model
    expert_tensor: int = 0  # tensor-parallel size of experts; 0: as that of all else
    data_last: bool = False

    def exchanged(self) -> Sizes | None:
        """The same with the other order of ranks; None where it makes no difference or Megatron refuses it, which it
        does where `data_last` would leave experts another number of data-parallel ranks than all else."""
        if (
            self.pipeline == 1
            or (self.expert_tensor or self.tensor) * (self.experts or 1) != self.tensor * self.context
        ):
            return None
        return replace(self, data_last=not self.data_last)


def data_parallel_lists(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Ranks of each data-parallel list, in order, by what the ids of its shards begin with: "tp0-pp1/dense", and
    "tp0-pp1/expert" or, where experts are divided, "tp0-pp1-ep1/expert".

    The lists of dense parameters go through the context-parallel ranks as well, which hold the same parameters.

    Raises:
        ValueError: the world is no multiple of the ranks of one copy of the model.
    """
    found = _lists(sizes, sizes.tensor, 1, sizes.context, "dense")
    if sizes.experts:
        found.update(_lists(sizes, sizes.expert_tensor or sizes.tensor, sizes.experts, 1, "expert"))
    return {name: tuple(ranks) for name, ranks in found.items()}


def instances(sizes: Sizes, number: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each of the `number` instances of the optimizer of dense parameters, ascending: of every
    data-parallel list the same one of `number` equal parts.

    Raises:
        ValueError: as `data_parallel_lists`, or `number` does not divide the lists.
    """
    found: list[list[int]] = [[] for _ in range(number)]
    for name, ranks in data_parallel_lists(replace(sizes, experts=0)).items():
        part, rest = divmod(len(ranks), number)
        if rest:
            raise ValueError(f"{number} instances do not divide the {len(ranks)} ranks of {name}")
        for instance, held in enumerate(found):
            held += ranks[instance * part : (instance + 1) * part]
    return tuple(tuple(sorted(ranks)) for ranks in found)


def _lists(sizes: Sizes, tensor: int, experts: int, context: int, kind: str) -> dict[str, list[int]]:
    model = tensor * experts * context * sizes.pipeline
    copies, rest = divmod(sizes.world, model)
    if rest:
        raise ValueError(f"{sizes.world} ranks are no multiple of the {model} that one copy of the model takes")
    found: dict[str, list[int]] = {}
    for rank in range(sizes.world):
        outer, tensor_rank = divmod(rank, tensor)
        outer, expert_rank = divmod(outer // context, experts)
        pipeline_rank = outer % sizes.pipeline if sizes.data_last else outer // copies
        apart = f"-ep{expert_rank}" if experts > 1 else ""
        found.setdefault(f"tp{tensor_rank}-pp{pipeline_rank}{apart}/{kind}", []).append(rank)
    return found
