"""Options that are proved exact on the newest Megatron, and on some older release are not: refused with that one.

`docs/compatibility.md` lists them ("Releases"). Options that are refused with every release are in `megatron_unproved`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mindspeed_tft.patches import megatron_06_unproved, megatron_unproved
from mindspeed_tft.patches.megatron_unproved import Unproved
from mindspeed_tft.registry.versions import fits


class Older(NamedTuple):
    """Options that are refused with some releases."""

    versions: str
    options: tuple[Unproved, ...]


def _any_size(value: Any) -> bool:
    return bool(value)


IN_RELEASES: tuple[Older, ...] = (
    Older(megatron_06_unproved.VERSIONS, megatron_06_unproved.UNPROVED),
    Older(
        ">=0.12,<0.13",
        (
            Unproved(
                "num_experts",
                bool,
                "it keeps no optimizer replicas of experts",
                "use a Megatron of 0.17 or newer",
            ),
            Unproved("encoder_tensor_model_parallel_size", _any_size, "stages of an encoder are not proved exact"),
            Unproved("encoder_pipeline_model_parallel_size", _any_size, "stages of an encoder are not proved exact"),
            Unproved("pipeline_model_parallel_split_rank", _any_size, "stages of an encoder are not proved exact"),
            Unproved(
                "use_legacy_models",
                bool,
                "the models before Megatron core are not proved exact",
                "leave it out (and use models of Megatron core)",
            ),
            Unproved("retro_add_retriever", bool, "what its retriever keeps is not put back"),
        ),
    ),
    Older(
        "<0.17",
        (
            Unproved(
                "async_save",
                bool,
                "a save of this release under way cannot be given up in this version",
            ),
        ),
    ),
)


def first(space: Any, version: str, table: tuple[Older, ...] = IN_RELEASES) -> Unproved | None:
    """The first option of Megatron's arguments that is refused with this release, if there is one."""
    for older in table:
        if fits(version, older.versions):
            found = megatron_unproved.first(space, older.options)
            if found is not None:
                return found
    return None
