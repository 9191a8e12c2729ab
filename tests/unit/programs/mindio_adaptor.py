"""A small training program with an adaptor for `mindio_ttp`, written against its names alone.

Data parallel over gloo with a sharded Adam: the list of ranks is cut into replicas, each rank of one holds a slice.
What its JSON argument says goes wrong does; what the callbacks are given goes to a log; the final state goes to a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_tft.facade.mindio  # noqa: F401  (turns the facade on: the only line that knows of it)

# isort: split
from mindio_ttp.framework_ttp import (
    Action,
    RepairType,
    ReportState,
    set_mindio_export_version,
    tft_end_updating_os,
    tft_exception_handler,
    tft_get_repair_step,
    tft_init_controller,
    tft_init_processor,
    tft_is_reboot_node,
    tft_pause_train,
    tft_register_clean_handler,
    tft_register_exception_handler,
    tft_register_rebuild_group_handler,
    tft_register_rename_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
    tft_register_stream_sync_handler,
    tft_report_error,
    tft_set_dp_group_info,
    tft_set_optimizer_replica,
    tft_set_step_args,
    tft_start_controller,
    tft_start_processor,
    tft_start_updating_os,
    tft_wait_next_action,
)
from mindio_ttp.framework_ttp.ttp_decorator import tft_get_repair_type, tft_report_load_ckpt_step
from mindio_ttp.utils import tft_set_update_end_time, tft_set_update_start_time

words: dict[str, Any] = json.loads(sys.argv[1])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
REPLICAS, STEPS, NUMBERS = int(words.get("replicas", 2)), int(words["steps"]), 64
SLICES = WORLD // REPLICAS
SAVE = Path(words["save"])
SHORT, LONG = timedelta(milliseconds=50), timedelta(seconds=20)
OPTIMIZER, MODEL = 1, 0  # positions in what `train` is given

stopped = threading.Event()
fired: set[str] = set()
torch.set_num_threads(1)


def tell(what: str, **values: object) -> None:
    with Path(words["log"]).open("a") as file:
        file.write(json.dumps({"rank": RANK, "what": what, "at": time.time(), **values}) + "\n")


def store(name: str) -> dist.Store:
    return dist.PrefixStore(name, dist.FileStore(words["store"], -1))


def group_of(name: str, ranks: list[int]) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store(name), ranks.index(RANK), len(ranks), LONG)


def wait(work: dist.Work) -> None:
    """In slices, so that a stop ends it, as the abort of a device would."""
    while True:
        try:
            work.wait(SHORT)
            return
        except RuntimeError as exc:
            if not str(exc).startswith("Operation timed out"):
                raise
            if work.is_completed():
                work.wait()
                return
        if stopped.is_set():
            raise RuntimeError("FORCE STOP: the communication was aborted")


class Groups:
    """Of all ranks, and of this rank's replica."""

    def __init__(self) -> None:
        self.generation = 0

    def build(self, name: str = "") -> None:
        self.generation += 1
        name = name or f"g{self.generation}"
        first = RANK // SLICES * SLICES
        self.world = group_of(f"{name}-world", list(range(WORLD)))
        self.replica = group_of(f"{name}-replica{first}", list(range(first, first + SLICES)))


class Optimizer:
    """Adam over one slice of the model."""

    def __init__(self) -> None:
        self.step_done = 0
        self.main = torch.linspace(-1, 1, NUMBERS).chunk(SLICES)[RANK % SLICES].clone()
        self.first, self.second = torch.zeros_like(self.main), torch.zeros_like(self.main)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.main, self.first, self.second

    def update(self, gradient: torch.Tensor, step: int) -> None:
        mine = gradient.chunk(SLICES)[RANK % SLICES]
        self.first.mul_(0.9).add_(mine, alpha=0.1)
        if fault_at(step, "update"):
            strike(self)
        self.second.mul_(0.99).addcmul_(mine, mine, value=0.01)
        self.main.sub_(0.01 * self.first / (self.second.sqrt() + 1e-8))


groups = Groups()
optimizer = Optimizer()
model = torch.linspace(-1, 1, NUMBERS)


def fault_at(step: int, phase: str) -> bool:
    """Once, on the rank that it is for, and in no later life of it."""
    wanted = words.get("fault", {})
    mine = wanted.get("rank") == RANK and wanted.get("step") == step and wanted.get("phase") == phase
    if not mine or phase in fired or int(os.environ.get("TFT_REBORN", "0")):
        return False
    fired.add(phase)
    return True


def strike(optimizer: Optimizer) -> None:
    kind = words["fault"]["kind"]
    tell("fault", kind=kind)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "uce":  # what the memory held is gone
        for tensor in optimizer.tensors:
            tensor.fill_(float("nan"))
        raise RuntimeError("UCE ERROR at some address")
    raise RuntimeError(words["fault"]["text"])


def train(weights: torch.Tensor, optimizer: Optimizer) -> str:
    if tft_is_reboot_node() and not fired:
        fired.add("joined")
        raise RuntimeError("ARF FINISH")
    if pace := words.get("pace", 0.0):
        tell("begin")
    for step in range(optimizer.step_done + 1, STEPS + 1):
        time.sleep(pace * RANK / WORLD)  # not all at the same moment
        noise = torch.Generator().manual_seed(1000 * step + RANK)
        if fault_at(step, "forward"):
            strike(optimizer)
        gradient = weights * 0.1 + torch.randn(NUMBERS, generator=noise)
        wait(groups.world.allreduce([gradient]))
        wait(groups.world.barrier())
        if fault_at(step, "late"):  # the others update already
            time.sleep(0.1)
            strike(optimizer)
        tft_start_updating_os()
        tft_set_update_start_time()
        optimizer.update(gradient, step)
        tft_set_update_end_time()
        tft_end_updating_os(step)
        optimizer.step_done = step
        gather(weights, optimizer)
        if step == words.get("periodic"):
            SAVE.mkdir(exist_ok=True)
            torch.save({"step": step, "tensors": optimizer.tensors}, SAVE / f"periodic-{RANK}.pt")
        tft_pause_train(step)
    return "trained"


def gather(weights: torch.Tensor, optimizer: Optimizer) -> None:
    slices = [torch.empty_like(optimizer.main) for _ in range(SLICES)]
    wait(groups.replica.allgather([slices], [optimizer.main]))
    weights.copy_(torch.cat(slices))


# ------------------------------------------------------------------------------------------------ callbacks


def stop(train_args: list[Any], ctx: Any) -> None:
    tell("stop", thread=threading.current_thread() is threading.main_thread(), args=len(train_args), ctx=ctx)
    stopped.set()


def clean(is_uce_error: bool, train_args: list[Any], ctx: Any) -> int:
    kind = tft_get_repair_type()
    tell("clean", uce=is_uce_error, type=kind)
    stopped.clear()
    if kind == "retry":
        groups.build()
    return int(words.get("clean", {}).get(str(RANK), 0))


def rebuild(fault_ranks: list[int], train_args: list[Any], ctx: Any) -> None:
    tell("rebuild", ranks=fault_ranks)
    groups.build(f"rebuilt-{'-'.join(map(str, fault_ranks))}")


def repair(
    step: int, need_rebuild: bool, error_ranks: list[int], info: dict[str, Any], train_args: Any, ctx: Any
) -> None:
    tell("repair", step=step, rebuild=need_rebuild, errors=error_ranks, info=info)
    if info["repair_type"] in (RepairType.RT_LOAD_CKPT.value, RepairType.RT_LOAD_REBUILD.value):
        load_periodic(train_args[OPTIMIZER])
        return
    ranks = info["rank_list"]
    group = group_of(f"repair-{step}-{ranks}", ranks)
    optimizer: Optimizer = train_args[OPTIMIZER]
    if info["repair_type"] == RepairType.RT_SEND.value:
        for target in info["dst"]:
            for tensor in optimizer.tensors:
                group.send([tensor], ranks.index(target), 0).wait()
    else:
        for source in info["src"]:
            for tensor in optimizer.tensors:
                group.recv([tensor], ranks.index(source), 0).wait()
        if words.get("sabotage"):
            optimizer.second[0] += 1e-7


def load_periodic(optimizer: Optimizer) -> None:
    state = torch.load(SAVE / f"periodic-{RANK}.pt", weights_only=True)
    for mine, loaded in zip(optimizer.tensors, state["tensors"], strict=True):
        mine.copy_(loaded)
    tft_report_load_ckpt_step(state["step"] + (RANK if words.get("load_apart") else 0))


def rollback(step: int, train_args: list[Any], ctx: Any) -> None:
    tell("rollback", step=step)
    if words.get("rollback_fails") == RANK and "rollback" not in fired:
        fired.add("rollback")
        raise RuntimeError("this rollback fails once")
    train_args[OPTIMIZER].step_done = step
    gather(train_args[MODEL], train_args[OPTIMIZER])


def save(step: int, save_info: list[dict[str, Any]], train_args: list[Any], ctx: Any) -> None:
    tell("save", step=step, info=save_info)
    optimizer: Optimizer = train_args[OPTIMIZER]
    (entry,) = save_info
    ranks = entry["ranks"]
    group = group_of(f"save-{step}-{ranks}", ranks)
    mine = torch.stack(optimizer.tensors)
    slices = [torch.empty_like(mine) for _ in ranks]
    group.allgather([slices], [mine]).wait()
    if ranks[0] == RANK:
        directory = SAVE / f"iter_{step:07d}_tmp"
        directory.mkdir(parents=True)
        torch.save({"step": step, "slices": slices}, directory / "state.pt")


def rename(step: int, train_args: list[Any]) -> None:
    tell("rename", step=step)
    (SAVE / f"iter_{step:07d}_tmp").rename(SAVE / f"iter_{step:07d}")
    (SAVE / "latest_checkpointed_iteration.txt").write_text(str(step))


def sync() -> None:
    tell("sync", done=optimizer.step_done)


# ------------------------------------------------------------------------------------------------ the program


def start() -> None:
    arf, uce = bool(words.get("arf")), bool(words.get("uce"))
    if RANK == 0 and not int(os.environ.get("TFT_REBORN", "0")):
        tft_init_controller(RANK, WORLD, False, arf, False)
        tft_start_controller("127.0.0.1", 8000, False, "")
    tft_init_processor(RANK, WORLD, False, False, "", uce, arf, False)
    tft_start_processor("127.0.0.1", 8000)


def register() -> None:
    ranks = list(range(WORLD))
    tft_set_optimizer_replica(RANK, [{"rank_list": ranks, "replica_cnt": REPLICAS, "replica_shift": 0}])
    tft_set_dp_group_info(RANK, ranks)
    tft_register_save_ckpt_handler(save)
    tft_register_rename_handler(rename)
    tft_register_stop_handler(stop, "my context")
    tft_register_clean_handler(clean)
    tft_register_repair_handler(repair)
    tft_register_rollback_handler(rollback)
    tft_register_rebuild_group_handler(rebuild)
    tft_register_stream_sync_handler(sync)
    tft_register_exception_handler("MY NUMBERS", "RS_RETRY", lambda text: text)
    tft_register_exception_handler("MY LINK", "RS_HCCL_FAILED", lambda text: text)


def explicitly(*train_args: Any) -> str:
    """What the decorator does, by hand."""
    tft_set_step_args(list(train_args))
    while True:
        try:
            return train(*train_args)
        except RuntimeError as exc:
            found = "UCE ERROR" in str(exc)
            tft_report_error(ReportState.RS_UCE if found else ReportState.RS_NORMAL)
        if tft_wait_next_action() is Action.EXIT:
            raise SystemExit(1)
        tell("again", step=tft_get_repair_step())


def main() -> int:
    set_mindio_export_version("MindSpeed-LLM")
    start()
    if words.get("load"):
        state = torch.load(SAVE / f"iter_{words['load']:07d}" / "state.pt", weights_only=True)
        optimizer.step_done = state["step"]
        for mine, loaded in zip(optimizer.tensors, state["slices"][RANK % SLICES], strict=True):
            mine.copy_(loaded)
    if not tft_is_reboot_node():
        groups.build()
        gather(model, optimizer)
    register()
    result = explicitly(model, optimizer) if words.get("explicit") else tft_exception_handler(train)(model, optimizer)
    tell("end", result=result, step=optimizer.step_done)
    torch.save([model, *optimizer.tensors], Path(words["final"]) / f"rank{RANK}.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
