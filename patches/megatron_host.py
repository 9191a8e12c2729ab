"""Megatron as one rank of a recovery sees it: implements `recovery.host.Host` for the distributed optimizer.

Everything is looked up when it is called, never imported at the top: MindSpeed's un-patching skips our modules, and
this file must import without Megatron. What a dump uses communicates with nobody: the world may be broken then.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
import pickle
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_tft import encode
from mindspeed_tft.engine.types import Commit, RankInfo, Update
from mindspeed_tft.groups import CommunicationAborted, LockstepBroken
from mindspeed_tft.patches import (
    megatron_async_save,
    megatron_buffers,
    megatron_digest,
    megatron_dump,
    megatron_kinds,
    megatron_link,
    megatron_random,
    megatron_releases,
    megatron_rewind,
    megatron_rollback,
    megatron_shards,
    megatron_torch_dist,
    torch_distributed,
)
from mindspeed_tft.platforms.base import Damage, Platform
from mindspeed_tft.recovery import files
from mindspeed_tft.recovery.notices import Notice
from mindspeed_tft.recovery.record import SmallState, StepRecord
from mindspeed_tft.recovery.session import WrongNumbers
from mindspeed_tft.replica.digest import Shard


def _module(name: str) -> Any:
    return importlib.import_module(name)


def args() -> Any:
    """Megatron's global argument namespace."""
    return _module("megatron.training.global_vars").get_args()


def _mpu() -> Any:
    return _module("megatron.core.parallel_state")


class LockstepError(RuntimeError):
    """The ranks met at the commit point for different steps: the job is no longer in lockstep."""


class MegatronHost:
    """State and actions of this rank. `attach` is called once Megatron has built model and optimizer."""

    put_back = megatron_rollback.PUT_BACK  # the rules for all states that a broken step leaves behind

    def __init__(self, platform: Platform, host_name: str | None = None, regroup_seconds: float = 10.0) -> None:
        """`regroup_seconds`: how long one process group may take to be built anew."""
        self.platform = platform
        self._host_name = host_name or socket.gethostname()
        self.model: list[Any] = []
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.data: Any = None
        self.validation: Any = None
        self.rerun_mode: Any = None
        self.loaders: megatron_rewind.Loaders | None = None
        self.partners: megatron_random.Partners | None = None  # where this rank's random states are its own
        self.recovered_by = ""  # how the last recovery was done on this rank
        self.since = 0  # the step after which this run began to train, on whatever process
        self.evaluated = -1  # the step whose evaluation the validation data have behind themselves
        self._given: SmallState | None = None  # to a newcomer, which has not put it in place yet
        self._saved: dict[int, Path] = {}  # step -> directory of checkpoints; only those of this run
        self._under_way: list[int] = []  # steps whose checkpoint is being written in the background
        self._regroup_seconds = regroup_seconds
        self._flops = 0.0
        self._flops_open = False  # a step has ended whose operations are not counted yet
        self._ballot: torch.Tensor | None = None
        self.buffers = megatron_buffers.Buffers([])
        self._buffers_of: tuple[int, dict[str, torch.Tensor]] = (-1, {})  # the step at whose end they were so

    def attach(
        self, model: list[Any], optimizer: Any, scheduler: Any, data: Any, validation: Any, flops: float
    ) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.data, self.validation = data, validation
        self.rerun_mode = self._rerun_mode()
        self.partners = megatron_random.partners(args(), self.rng)
        self._buffers_of = (-1, {})
        self.buffers = megatron_buffers.Buffers(model)
        self._flops = float(flops)
        self._flops_open = False

    # ------------------------------------------------------------------------------------------- this release

    def _rerun_mode(self) -> Any:
        return _module("megatron.core.rerun_state_machine").get_rerun_state_machine().get_mode()

    def replay_to_save(self, state: SmallState) -> dict[str, Any]:
        """What a checkpoint of format torch has of Megatron's replay for wrong results, at the end of `state.step`."""
        megatron_rollback.rerun_machine(self, state)
        return {"rerun_state": megatron_releases.rerun_state(megatron_rollback.iterators(self.data), "torch")}

    def batches(self) -> Any:
        """The module that knows the number of micro-batches and the batch size."""
        return _module("megatron.core.num_microbatches_calculator")

    def checkpoint_format(self) -> str:
        """torch or torch_dist."""
        return str(args().ckpt_format)

    def write_checkpoint(self, step: int, train: tuple[Any, ...]) -> None:
        """Megatron's own checkpoint of `step`, a collective. `train`: the arguments of Megatron's `train`."""
        flops = args().num_floating_point_operations_so_far
        _module("megatron.training.checkpointing").save_checkpoint(step, *train[1:4], flops, train[8])

    def end_saves(self) -> None:
        """Wait for the end of saves in the background, which are the last ones."""
        _module("megatron.training.async_utils").maybe_finalize_async_save(blocking=True, terminate=True)

    # ------------------------------------------------------------------------------------------- who

    def part(self) -> str:
        """Its ranks hold the same parameters. Where experts are divided, those of each expert rank are another part."""
        mpu = _mpu()
        expert = mpu.get_expert_model_parallel_rank()
        return self._dense_part() + (f"-ep{expert}" if mpu.get_expert_model_parallel_world_size() > 1 else "")

    def _dense_part(self) -> str:
        mpu = _mpu()
        return f"tp{mpu.get_tensor_model_parallel_rank()}-pp{mpu.get_pipeline_model_parallel_rank()}"

    def info(self) -> RankInfo:
        mpu = _mpu()
        like_me = mpu.get_data_parallel_group(with_context_parallel=True)
        instance = mpu.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        sharded = {f"{self._dense_part()}/dense": instance}
        if args().num_experts:
            like_me = mpu.get_expert_data_parallel_group()
            instance = megatron_releases.instance_group_of_experts()
            sharded[f"{self.part()}/expert"] = instance
        whole = not args().use_distributed_optimizer  # then each of these ranks holds all there is
        return RankInfo(
            rank=torch.distributed.get_rank(),
            host=self._host_name,
            pid=os.getpid(),
            part=self.part(),
            dp_rank=like_me.rank(),
            holds=tuple(f"{name}/{0 if whole else ranks.rank()}" for name, ranks in sharded.items()),
            needs=tuple(
                f"{name}/{number}" for name, ranks in sharded.items() for number in range(1 if whole else ranks.size())
            ),
        )

    def optimizer_of(self, shard: str) -> Any:
        """The optimizer of the chain that a shard of this part belongs to; None: its layers are on other stages, and
        the shard is empty."""
        expert = not megatron_shards.is_dense(shard)
        return next((each for each in self.optimizers() if megatron_kinds.is_expert(each) is expert), None)

    def shards(self) -> dict[str, Shard]:
        return megatron_digest.shards(self)

    def data_parallel_size(self) -> int:
        return int(_mpu().get_data_parallel_world_size(with_context_parallel=True))

    def precision(self) -> str:
        """Name of the `replica.holders.Precision` that this job trains in."""
        space = args()
        if not (space.bf16 or space.fp16):
            return "FP32"
        return "GRADS_32" if space.accumulate_allreduce_grads_in_fp32 else "GRADS_16"

    def save_directory(self) -> Path:
        return Path(os.path.realpath(args().save))

    def checkpoint_directory(self, base: Path, step: int) -> Path:
        return Path(
            _module("megatron.training.checkpointing").get_checkpoint_name(str(base), step, return_base_dir=True)
        )

    def tracker(self, base: Path) -> Path:
        return Path(_module("megatron.training.checkpointing").get_checkpoint_tracker_filename(str(base)))

    def saved_step(self) -> int:
        base = self.save_directory()
        return max((step for step, place in self._saved.items() if place == base), default=-1)

    def last_checkpoint(self) -> int:
        """The last step whose checkpoint this run has completed or loaded; 0: none."""
        return max(self._saved, default=0)

    def saved(self, step: int, base: Path | None = None) -> None:
        """Megatron completed its checkpoint of `step` in `--save`, or loaded that of `base`."""
        self._saved[step] = base or self.save_directory()

    def save_begun(self, step: int) -> None:
        """Megatron writes the checkpoint of `step` in the background."""
        self._under_way.append(step)

    def saves_under_way(self, count: int) -> None:
        """All but the last `count` of the saves that were begun in the background are complete, on all ranks."""
        while len(self._under_way) > count:
            self.saved(self._under_way.pop(0))

    def stopped(self) -> None:
        if in_background():
            megatron_async_save.give_up()
            self._under_way.clear()

    def saving(self, step: int) -> None:
        """The checkpoint of `step` is being overwritten, or was found to be unusable: it does not count any more."""
        self._saved.pop(step, None)

    def checkpoints(self) -> tuple[int, ...]:
        if megatron_rewind.why_not(self):
            return ()
        return tuple(sorted(step for step, base in self._saved.items() if self._loadable(step, base)))

    def _loadable(self, step: int, base: Path) -> bool:
        """It is still there. Where this job does not save, it has to be the one that the tracker names: Megatron reads
        the optimizer of that one."""
        tracker = self.tracker(base)
        if not (self.checkpoint_directory(base, step).is_dir() and tracker.is_file()):
            return False
        return base == self.save_directory() or tracker.read_text(encoding="utf-8").strip() == str(step)

    # ------------------------------------------------------------------------------------------- commit

    @property
    def notices(self) -> Callable[[int], Notice]:
        return torch_distributed.notices(timedelta(seconds=self._regroup_seconds))

    def commit(self, step: int, hold: int = 0, save: int = 0, limit: int = 0) -> tuple[int, int, int]:
        """One all-reduce of five integers over the world: nobody leaves it before everybody has entered it.

        Its maximum says whether all ranks are at one step (that of -step is minus the lowest one), and what the best
        informed rank knows of the wishes of operators.

        Raises:
            CommunicationAborted: a rank is gone or this one was told to stop.
            LockstepError: the ranks disagree about the step.
        """
        self._give_randomness(step)
        self._buffers_of = (step, self.buffers.read())  # nothing changes them from here to the next step
        if self._ballot is None:
            self._ballot = torch.zeros(5, dtype=torch.int64, device=torch.cuda.current_device())
        self._ballot.copy_(torch.tensor([step, -step, hold, save, limit], dtype=torch.int64))
        torch.distributed.all_reduce(self._ballot, op=torch.distributed.ReduceOp.MAX)
        last, first, *agreed = self._ballot.tolist()
        if last != step or -first != step:
            raise LockstepError(f"commit of step {step}: the ranks are at steps {-first} to {last}")
        held, saved, longest = agreed
        return held, saved, longest

    def update_ends(self) -> None:
        """An update was begun on the device, which does the rest of it later. Where a stop throws away what the device
        has not done yet, an update has ended only once it has done all: what this rank says of it is believed."""
        if self.platform.stops:
            self.platform.synchronize()

    def step_begins(self, step: int) -> None:
        """Before the first draw of `step`."""
        if self.partners is not None:
            self.partners.step_begins(step, evaluated=evaluation_samples(step - 1) > 0)

    def _give_randomness(self, step: int) -> None:
        if self.partners is not None:
            self.partners.give(step)

    def all_agree(self, mine: bool) -> bool:
        """Whether all ranks say yes: a collective."""
        return bool(self.lowest(int(mine)))

    def lowest(self, mine: int) -> int:
        """The least of what all ranks say: a collective."""
        vote = torch.tensor([mine], dtype=torch.int64, device=torch.cuda.current_device())
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN)
        return int(vote.item())

    # ------------------------------------------------------------------------------------------- small state

    def rng(self) -> dict[str, Any]:
        """The RNG states in the form that Megatron's checkpoints hold them."""
        return {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": _module("megatron.core.tensor_parallel").get_cuda_rng_tracker().get_states(),
        }

    def rng_digest(self, state: SmallState) -> str:
        """To compare ranks of a part; "" where each has its own states."""
        if self.partners is not None:
            return ""
        digest = hashlib.sha256()
        for key in sorted(state.rng):
            _feed(digest, state.rng[key])
        return digest.hexdigest()

    def small_state(self, step: int) -> SmallState:
        if self._given is not None and self._given.step == step:
            return self._given
        return SmallState(
            step=step,
            rng=self.rng(),
            counters=self.counters(step),
            scheduler=self.scheduler.state_dict(),
            scalers=[_copy(scaler.state_dict()) if scaler is not None else {} for scaler in self.scalers()],
            flops=self._flops,
            buffers=self._buffers(step),
        )

    def counters(self, step: int) -> dict[str, int]:
        """Of samples, as Megatron's arguments have them now, taken for the end of `step`; and how many samples are a
        step now, and how many more it passes over."""
        space, batches = args(), self.batches()
        samples = {key: int(getattr(space, key)) for key in megatron_rollback.COUNTERS if hasattr(space, key)}
        batch = _mpu().get_data_parallel_world_size() * space.micro_batch_size * batches.get_num_microbatches()
        here = {"curr_iteration": step - 1, "since": self.since}
        return {**samples, **here, "batch": batch, "dropped": self._dropped(batches)}

    def _dropped(self, batches: Any) -> int:
        return int(batches.get_current_global_batch_size() - batches.get_current_running_global_batch_size())

    def _buffers(self, step: int) -> dict[str, torch.Tensor]:
        known, found = self._buffers_of
        return found if known == step else self.buffers.read()

    def small_state_after(self, record: StepRecord) -> SmallState:
        """Never `+=` on what is there now: a rank may have been stopped before or after Megatron counted the step."""
        start = record.start
        if start is None:
            raise files.DumpError(f"no state was kept at the start of step {record.step}")
        megatron_rollback.begin_evaluation(self, record.step)
        now, batch = self.small_state(record.step), start.counters["batch"]
        validated = start.counters["consumed_valid_samples"] + evaluation_samples(record.step)
        counters = {
            **start.counters,
            "curr_iteration": record.step - 1,
            "consumed_train_samples": start.counters["consumed_train_samples"] + batch,
            "consumed_valid_samples": validated,
        }
        if "skipped_train_samples" in counters:
            counters["skipped_train_samples"] += start.counters["dropped"]
        scheduler = dict(start.scheduler)
        if not record.skipped:
            scheduler["num_steps"] = start.scheduler["num_steps"] + batch
        flops = start.flops + _module("megatron.training.training").num_floating_point_operations(args(), batch)
        return SmallState(record.step, now.rng, counters, scheduler, now.scalers, flops, now.buffers)

    def has_evaluated(self, step: int) -> bool:
        """Whether this run has done so up to the end of `step`."""
        interval = args().eval_interval
        first = (self.since // interval + 1) * interval if interval else step + 1
        return any(evaluation_samples(done) for done in range(first, step + 1, interval or 1))

    def batch_grows_after(self, step: int) -> bool:
        """Whether the next step has more samples than `step`, where this rank stands. Megatron saves there.

        A step with as many samples as the next one began that many samples ago, and batches never shrink.
        """
        space, batches = args(), self.batches()
        now = batches.get_num_microbatches()
        before = space.consumed_train_samples - self.counters(step)["batch"]
        if before < 0:
            return bool(space.consumed_train_samples)
        try:
            batches.update_num_microbatches(before, consistency_check=False)
            return bool(batches.get_num_microbatches() != now)
        finally:
            batches.update_num_microbatches(space.consumed_train_samples, consistency_check=False)

    def evaluation_batches(self, step: int) -> int:
        """Micro-batches that this rank reads in the evaluation after `step`; 0 if there is none."""
        space = args()
        micro = getattr(space, "eval_micro_batch_size", None) or space.micro_batch_size
        return evaluation_samples(step) // int(micro * _mpu().get_data_parallel_world_size())

    def step_ended(self) -> None:
        self._flops_open = True

    def count_flops(self, value: float) -> None:
        """Megatron keeps its count of operations in a local variable; we add up what it adds up, once a step."""
        if self._flops_open:
            self._flops += float(value)
            self._flops_open = False

    def scalers(self) -> list[Any]:
        return [getattr(optimizer, "grad_scaler", None) for optimizer in self.optimizers()]

    def optimizers(self) -> list[Any]:
        """The optimizers of the chain, in Megatron's order."""
        return list(getattr(self.optimizer, "chained_optimizers", None) or [self.optimizer])

    # ------------------------------------------------------------------------------------------- orders

    def finish_update(self, record: StepRecord) -> None:
        if record.skipped:
            return
        for index, optimizer in enumerate(self.optimizers()):
            if record.updates[index] is Update.UNTOUCHED:
                record.commit = Commit.PASSED  # the wrapper around the local update must not enter the commit again
                with _without_timers(optimizer):
                    megatron_kinds.of(optimizer).update(optimizer)

    def stage_shards(self, shards: list[str], directory: Path) -> dict[str, str]:
        self._check_mine(shards)
        return megatron_dump.stage_shards(self, shards, directory)

    def _check_mine(self, shards: list[str]) -> None:
        mine = self.info().holds
        for shard in shards:
            if shard not in mine:
                raise files.DumpError(f"asked for shard {shard}, but this rank holds {', '.join(mine)}")

    def write_part(self, state: SmallState, part: str, sources: dict[str, str], directory: Path) -> dict[Path, str]:
        if part != self.part():
            raise files.DumpError(f"asked to write part {part}, but this rank is {self.part()}")
        return megatron_dump.write_part(self, state, sources, directory)

    def complete(self, step: int, parts: list[str], directory: Path) -> dict[Path, str]:
        if self.checkpoint_format() != "torch_dist":
            return {}
        return megatron_torch_dist.complete(self.checkpoint_directory(directory, step), directory, parts)

    # ------------------------------------------------------------------------------------------- repair

    def damage(self) -> Damage:
        self.platform.stop_device()  # what is still under way on it would fail, or use what is hit
        return self.platform.damaged_memory()

    def regroup(self, epoch: int, link: str) -> None:
        if self.platform.switch_link(link, range(torch.distributed.get_world_size())):
            link = ""  # it is the device's own: groups on gloo never left theirs
        torch_distributed.regroup(epoch, timedelta(seconds=self._regroup_seconds), link, self.platform.rebuild_in_place)

    def check_link(self, link: str) -> list[str]:
        return megatron_link.check(self.platform, link)

    def move_groups(self, link: str, epoch: int, seconds: float) -> None:
        megatron_link.move(self.platform, self.model, link, epoch, seconds)

    def test_groups(self, seconds: float) -> dict[str, str]:
        return megatron_link.test(self.platform, seconds)

    def audit(self) -> None:
        """At the end of the first step over new process groups: did all ranks communicate in lockstep?

        Raises:
            WrongNumbers: they did not, and an update was made of what came of it.
        """
        try:
            torch_distributed.audit_lockstep(timedelta(seconds=self._regroup_seconds))
        except LockstepBroken as exc:
            raise WrongNumbers(str(exc), mine=True) from exc

    def send_shard(self, shard: str, target: int) -> int:
        if shard == self._unowned:
            return megatron_shards.send_unowned(self.model, target)
        self._check_mine([shard])
        sent = 0
        if (optimizer := self.optimizer_of(shard)) is not None:
            sent += megatron_shards.send(optimizer, target)
        if self._brings_unowned(shard):
            sent += megatron_shards.send_unowned(self.model, target)
        if self.partners is not None and megatron_shards.is_dense(shard):
            self.partners.send(target)  # random states: a few kilobytes, not counted
        return sent

    def receive_shard(self, shard: str, source: int) -> int:
        if shard == self._unowned:
            self._overwrite()
            return megatron_shards.receive_unowned(self.model, source)
        self._check_mine([shard])
        self._overwrite()
        taken = 0
        if (optimizer := self.optimizer_of(shard)) is not None:
            taken += megatron_shards.receive(optimizer, source)
        if self._brings_unowned(shard):
            taken += megatron_shards.receive_unowned(self.model, source)
        if self.partners is not None and megatron_shards.is_dense(shard):
            self.partners.receive(source)
        return taken

    def _brings_unowned(self, shard: str) -> bool:
        """What no optimizer owns comes with the last shard: where experts are divided, all its holders are of one
        part."""
        return shard == self.info().holds[-1]

    def _overwrite(self) -> None:
        """All of this rank's state is about to be replaced: its shards and the tensors that nobody owns by a holder's,
        gradients by zeros, parameters by a gather, or everything by a checkpoint. To say so twice does no harm."""
        self.platform.make_safe(megatron_shards.state_tensors(self.model, self.optimizers()))

    @property
    def _unowned(self) -> str:
        """The tensors that no optimizer owns: the same on all ranks of a part, and not all of them in a checkpoint."""
        return f"{self.part()}/unowned"

    def roll_back(self, state: SmallState, again: bool) -> None:
        self.recovered_by = "retry"
        self._buffers_of = (state.step, state.buffers)
        megatron_rollback.roll_back(self, state, again)
        self.set_flops(state.flops)
        self._give_randomness(state.step)

    def send_state(self, state: SmallState, target: int) -> int:
        told = {
            "state": state.to_bytes(),
            "saved": {step: str(base) for step, base in self._saved.items()},
            "groups": [megatron_shards.group_options(optimizer) for optimizer in self.optimizers()],
        }
        return megatron_shards.send_bytes(encode.dumps(told), target)

    def receive_state(self, source: int) -> SmallState:
        told = encode.loads(megatron_shards.receive_bytes(source))
        self._saved = {int(step): Path(base) for step, base in told["saved"].items()}
        for optimizer, groups in zip(self.optimizers(), told["groups"], strict=True):
            megatron_shards.put_group_options(optimizer, groups)
        state = SmallState.from_bytes(told["state"])
        if self.partners is not None:  # who have told by now: shards come before small states
            state = dataclasses.replace(state, rng=self.partners.mine(state.step))
        megatron_rollback.scheduler_options(self, state)
        self._given = state
        return state

    def take_place(self, state: SmallState) -> None:
        self.recovered_by = "recover"
        self._buffers_of = (state.step, state.buffers)
        megatron_rewind.take_place(self, state)
        self._given = None
        self.set_flops(state.flops)
        self._give_randomness(state.step)

    def forget_first_times(self) -> None:
        if self.recovered_by == "retry":
            self.recovered_by = "recover"  # with newcomers
        megatron_rollback.forget_first_times(self)

    def load(self, step: int) -> None:
        self.recovered_by = "rewind"
        self._given = None
        self._buffers_of = (-1, {})
        try:
            base = self._place_of(step)
            megatron_rewind.rewind(self, step, base)
            self._give_randomness(step)
        except CommunicationAborted:
            raise
        except Exception:
            if not torch_distributed.table().aborted.is_set:  # else a device was stopped, in its own words
                self.saving(step)  # whatever is wrong with it, the next try takes an older one
            raise
        self._saved = {**{saved: place for saved, place in self._saved.items() if saved < step}, step: base}

    def _place_of(self, step: int) -> Path:
        """Where the checkpoint of `step` is: a collective of all ranks. A newcomer has saved nothing and was told
        nothing; what lies in its --save may be of another run, and the others know. Where all are newcomers, it is
        looked for."""
        known, world = self._saved.get(step), torch.distributed.get_world_size()
        knower = self.lowest(torch.distributed.get_rank() if known is not None else world)
        if knower == world:
            there = args().load is None or self.checkpoint_directory(self.save_directory(), step).is_dir()
            return self.save_directory() if there else Path(os.path.realpath(args().load))
        told = torch.tensor(list(os.fsencode(known or "")), dtype=torch.uint8, device=torch.cuda.current_device())
        size = -self.lowest(-len(told) if torch.distributed.get_rank() == knower else 0)
        if torch.distributed.get_rank() != knower:
            told = torch.empty(size, dtype=torch.uint8, device=torch.cuda.current_device())
        torch.distributed.broadcast(told, knower)
        return known or Path(os.fsdecode(bytes(told.tolist())))

    @property
    def loaded_elsewhere(self) -> bool:
        """Whether all ranks went back to a checkpoint that is not in --save."""
        last = self._saved.get(self.last_checkpoint())
        return self.recovered_by == "rewind" and last not in (None, self.save_directory())

    def set_flops(self, value: float) -> None:
        """Operations of all steps so far."""
        self._flops, self._flops_open = value, False

    # ------------------------------------------------------------------------------------------- memory

    def memory(self) -> tuple[int, int]:
        """(bytes, parameters) of the training state on this rank."""
        return megatron_shards.memory(self.model, self.optimizers())


def in_background() -> bool:
    """Whether Megatron writes its checkpoints in the background."""
    return bool(getattr(args(), "async_save", False))


def evaluation_samples(step: int) -> int:
    """Samples that the evaluation after `step` reads, 0 if there is none. Megatron saves a step after its evaluation,
    so a state of the end of that step has it behind itself."""
    space = args()
    begun = getattr(space, "start_eval_at_iter", None)
    due = space.eval_interval and step % space.eval_interval == 0 and getattr(space, "do_valid", False)
    if not due or (begun is not None and step < begun):
        return 0
    iterations = sum(space.eval_iters) if isinstance(space.eval_iters, list) else space.eval_iters
    batch = getattr(space, "eval_global_batch_size", None) or space.global_batch_size
    return int(iterations * batch)


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """On the host and of its own: the tensors behind it may be overwritten, or be what breaks."""
    return {key: value.detach().cpu().clone() if torch.is_tensor(value) else value for key, value in state.items()}


def _feed(digest: Any, value: Any) -> None:
    if torch.is_tensor(value):
        digest.update(value.cpu().numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, np.ndarray):
        digest.update(value.tobytes())
    else:
        digest.update(pickle.dumps(value, protocol=4))


@contextmanager
def _without_timers(optimizer: Any) -> Iterator[None]:
    """Megatron's timers may hold a barrier, and the world is broken: the last update runs without them."""
    timers, optimizer.config.timers = optimizer.config.timers, None
    try:
        yield
    finally:
        optimizer.config.timers = timers
