"""A small data-parallel job of MindSpore: a network of three layers with Adam, whose batches follow from step and rank.

It is what a user would write, with one line for the plugin. The argument is JSON:
    steps, out (for the final bytes), mode (0 graph, 1 pynative), plugin (arguments of FaultTolerance; none: without),
    fault {step, rank, signal, mark}: sent to this very process once, as long as the file `mark` is not there,
    epochs: of the same STEPS / EPOCHS batches each (1); calls: each in a call of `Model.train` of its own
    late: the script's own callback comes after ours, so that ours is the first to wait for what a step computes
    slow: seconds that each step takes at least
    links: a file to which the handler of link switches adds what it is asked for; refuse: it says that it failed
    tsp: MindSpore's own TrainFaultTolerance instead of our callback, over our `mindio_ttp`
    spoil: one weight is the next number above what it should be
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

WORDS = json.loads(sys.argv[1])
EPOCHS = WORDS.get("epochs", 1)
BATCHES = WORDS["steps"] // EPOCHS


class Network(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(8, 64), nn.Tanh(), nn.Dense(64, 64), nn.Tanh(), nn.Dense(64, 4))

    def construct(self, x: Any) -> Any:
        return self.layers(x)


class Batches:
    """Of one rank, from the step after `done` on."""

    def __init__(self, done: int, rank: int) -> None:
        self.done, self.rank = done, rank

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for step in range(self.done + 1, BATCHES + 1):
            numbers = np.random.default_rng([step, self.rank])
            x = numbers.standard_normal((16, 8), dtype=np.float32)
            yield x, np.tanh(x[:, :4] * 0.5).astype(np.float32)

    def __len__(self) -> int:
        return BATCHES - self.done


class Watch(Callback):  # type: ignore[misc]
    """Says each step, takes its time, and meets its fault."""

    def __init__(self, done: int, rank: int) -> None:
        super().__init__()
        self.done, self.rank = done, rank  # `done`: steps before this call of `Model.train`

    def on_train_step_begin(self, run_context: Any) -> None:
        step = self.done + run_context.original_args().cur_step_num
        fault = WORDS.get("fault")
        if fault and (step, self.rank) == (fault["step"], fault["rank"]) and not os.path.exists(fault["mark"]):
            Path(fault["mark"]).write_text(str(time.time()))
            os.kill(os.getpid(), getattr(signal, fault["signal"]))
        time.sleep(WORDS.get("slow", 0.0))

    def on_train_step_end(self, run_context: Any) -> None:
        args = run_context.original_args()
        print(f"step {self.done + args.cur_step_num} loss {float(args.net_outputs.asnumpy()).hex()}", flush=True)


def switch(ranks: list[int], backup: list[bool]) -> bool:
    with open(f"{WORDS['links']}-{get_rank()}", "a", encoding="utf-8") as file:
        print(json.dumps([ranks, backup]), file=file)
    return not (WORDS.get("refuse") and backup[0])


def fault_tolerance_of_mindspore() -> Any:
    """It refuses every device but Ascend: that check, in two modules, is told what it wants to hear."""
    from mindspore.train import TrainFaultTolerance
    from mindspore.train.callback import _train_fault_tolerance
    from mindspore.utils import utils

    from mindspeed_tft.mindspore import mindio

    class Context:
        @staticmethod
        def get_context(name: str) -> Any:
            return "Ascend" if name == "device_target" else ms.get_context(name)

    utils.context = _train_fault_tolerance.context = Context
    mindio.link_handler = switch
    return TrainFaultTolerance()


def main() -> None:
    ms.set_context(mode=WORDS.get("mode", 0), device_target="CPU")
    ms.set_seed(7)
    init()
    rank = get_rank()
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True, device_num=get_group_size()
    )
    network = Network()
    model = Model(network, nn.MSELoss(), nn.Adam(network.trainable_params(), learning_rate=0.01))
    if WORDS.get("spoil"):
        weight = network.trainable_params()[0]
        changed = weight.asnumpy().copy()
        changed.flat[0] = np.nextafter(changed.flat[0], np.float32(9))
        weight.set_data(ms.Tensor(changed))
    done, callbacks = 0, []
    if "plugin" in WORDS:
        from mindspeed_tft.mindspore import FaultTolerance

        handler = switch if "links" in WORDS else None
        protection = FaultTolerance(**WORDS["plugin"], link_handler=handler)
        done = protection.resume(model.train_network)
        callbacks.append(protection)
    if WORDS.get("tsp"):
        callbacks.append(fault_tolerance_of_mindspore())
    watch = Watch(done, rank)
    callbacks.insert(len(callbacks) if WORDS.get("late") else 0, watch)
    data = GeneratorDataset(Batches(done, rank), ["x", "y"], shuffle=False, num_parallel_workers=1)
    print(f"from step {done}", flush=True)
    if WORDS.get("calls"):
        for call in range(EPOCHS):
            watch.done = call * BATCHES
            model.train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    elif done < WORDS["steps"]:
        model.train(EPOCHS, data, callbacks=callbacks, dataset_sink_mode=False)
    final = {name: value.asnumpy() for name, value in model.train_network.parameters_dict().items()}
    np.savez(f"{WORDS['out']}-{rank}.npz", **{name.replace("/", "|"): value for name, value in final.items()})
    print("finished", flush=True)


if __name__ == "__main__":
    main()
