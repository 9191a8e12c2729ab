"""Megatron core_r0.6.0 as one rank of a recovery sees it: what differs from newer releases, and nothing else.

It has no instances of the distributed optimizer (`megatron_06_replicas` makes them), no replay of wrong results, no
saves in the background, one format of checkpoints, and one function for all that a step of the optimizer is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from mindspeed_tft import runtime
from mindspeed_tft.engine.types import Commit, RankInfo, Update
from mindspeed_tft.patches import megatron_06_replicas, megatron_host, megatron_kinds, megatron_rollback
from mindspeed_tft.recovery.record import SmallState, StepRecord


class MegatronHost06(megatron_host.MegatronHost):
    """See `megatron_host.MegatronHost`."""

    put_back = tuple(rule for rule in megatron_rollback.PUT_BACK if rule is not megatron_rollback.rerun_machine)

    def _rerun_mode(self) -> Any:
        return None

    def replay_to_save(self, state: SmallState) -> dict[str, Any]:
        return {}

    def batches(self) -> Any:
        return megatron_host._module("megatron.training.global_vars")

    def _dropped(self, batches: Any) -> int:
        return 0  # a batch size that does not fit is an error

    def checkpoint_format(self) -> str:
        return "torch"

    def write_checkpoint(self, step: int, train: tuple[Any, ...]) -> None:
        flops = megatron_host.args().num_floating_point_operations_so_far
        megatron_host._module("megatron.training.checkpointing").save_checkpoint(step, *train[1:4], flops)

    def end_saves(self) -> None:
        """None is under way."""

    def info(self) -> RankInfo:
        everybody = megatron_host._mpu().get_data_parallel_group(with_context_parallel=True)
        mine = megatron_06_replicas.instance()
        instance = everybody if mine is None else mine.ranks
        whole = not megatron_host.args().use_distributed_optimizer
        name = f"{self._dense_part()}/dense"
        return RankInfo(
            rank=torch.distributed.get_rank(),
            host=self._host_name,
            pid=os.getpid(),
            part=self.part(),
            dp_rank=everybody.rank(),
            holds=(f"{name}/{0 if whole else instance.rank()}",),
            needs=tuple(f"{name}/{number}" for number in range(1 if whole else instance.size())),
        )

    def finish_update(self, record: StepRecord) -> None:
        """There is one optimizer, whose update has no stamps of its own."""
        if record.skipped or record.updates[0] is not Update.UNTOUCHED:
            return
        session = runtime.session()
        assert session is not None
        record.commit = Commit.PASSED
        session.update_begin(0)
        megatron_kinds.of(self.optimizer).update(self.optimizer)
        self.update_ends()
        session.update_end(0)

    def save_now(self, step: int, train: tuple[Any, ...]) -> Path:
        """Megatron's own checkpoint of the step that has just ended, unless it is there. `train`: as for
        `write_checkpoint`."""
        if not self.all_agree(self.saved_step() == step):
            training = megatron_host._module("megatron.training.training")
            training.save_checkpoint_and_time(step, *train[1:4], self._flops)
        return self.checkpoint_directory(self.save_directory(), step)
