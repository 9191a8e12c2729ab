"""The manifest of a dump, when Megatron is about to load it, and when it writes over it."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_tft.recovery import manifest
from mindspeed_tft.recovery.files import MANIFEST, DumpError

if TYPE_CHECKING:
    from mindspeed_tft.patches.megatron_host import MegatronHost

log = logging.getLogger(__name__)

_NONE = 1 << 62  # no file is wrong
_UNREADABLE = -1  # the manifest itself is


def _args() -> Any:
    return importlib.import_module("megatron.training.global_vars").get_args()


def check_load(host: MegatronHost) -> None:
    """Whether the checkpoint that `--load` names is still what was written. A collective of all ranks, which come to
    the same answer, each having read its share of the files.

    Raises:
        DumpError: a file is not, and which.
    """
    where = _named(host)
    stated: dict[str, manifest.Stated] = {}
    unreadable, wrong = "", None
    if where is not None:
        try:
            stated = manifest.read(where)
            if manifest.written_over(where, stated):
                log.warning("%s was saved over since it was dumped: %s says nothing about it", where, MANIFEST)
                stated = {}
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
            wrong = manifest.first_wrong(where, stated, rank, world)
        except DumpError as exc:
            unreadable, wrong = str(exc), _UNREADABLE
    vote = torch.tensor([_NONE if wrong is None else wrong], dtype=torch.int64, device=torch.cuda.current_device())
    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN)
    first = int(vote.item())
    if first == _NONE:
        return
    if unreadable or first == _UNREADABLE or first >= len(stated):
        raise DumpError(unreadable or f"{where or _args().load}: the manifest cannot be read by every rank")
    assert where is not None
    name = list(stated)[first]
    raise DumpError(manifest.refusal(where, name, stated[name]))


def _named(host: MegatronHost) -> Path | None:
    """The directory that Megatron is going to read; None: there is none, or Megatron will say what is wrong with it."""
    space = _args()
    if not space.load:
        return None
    base = Path(space.load)
    tracker = host.tracker(base)
    text = str(space.ckpt_step or "") or (tracker.read_text(encoding="utf-8").strip() if tracker.is_file() else "")
    return host.checkpoint_directory(base, int(text)) if text.isdigit() else None


def forget(host: MegatronHost, step: int) -> None:
    """Megatron writes over a dump of that step: what the manifest states of its files holds no more."""
    if torch.distributed.get_rank() == 0:
        (host.checkpoint_directory(host.save_directory(), step) / MANIFEST).unlink(missing_ok=True)
