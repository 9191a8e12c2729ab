"""A drill that was checked, and the flags of its jobs."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_tft.faults import jobs, releases, spec
from mindspeed_tft.faults.imports import NONE, Imports
from mindspeed_tft.faults.spec import HANGS, UNNOTICED, FaultSpec, Layout, SpecError
from mindspeed_tft.registry.versions import version_in

PROGRAM = "mindspeed_tft.faults.gpt_job"

_MICRO_BATCHES = 8  # of a step, over all data-parallel ranks: at least two on each, so that a step has an inside


@dataclass(frozen=True)
class Plan:
    """A drill that was checked: every fault names its phase."""

    layout: Layout
    faults: tuple[FaultSpec, ...]
    steps: int = 12
    dtype: str = "fp32"
    replicas: int = 2  # without the distributed optimizer as many as data-parallel ranks
    seed: int = 1234
    preset: str = "dump"
    megatron: Path | None = None
    compare: bool = True
    launcher: str = "torchrun"
    warm_standby: bool = False  # the launcher of the broken job keeps a process ready for the rank that dies
    pace: int = 0  # seconds between two faults that end the process of the same rank, at least
    timeout: float = 240.0  # seconds for each job
    extra: tuple[str, ...] = ()
    tls_dir: str = ""  # for the hosts of the broken run; "": in the open
    save_interval: int | None = None  # of the broken job; None: as `save_interval` finds it
    every_step: bool = True  # the unbroken run keeps a checkpoint of every step; False: of its last one
    nodes: int = 1  # of the broken job; all on this host, each with a launcher, a relay and a controller of its own
    hosts: tuple[tuple[str, ...], ...] = ()  # or: what to put before a command to run it on each node
    master: str = "127.0.0.1"  # address of the first node
    rendezvous: str = jobs.RENDEZVOUS[0]  # how the nodes find each other
    sharded: bool = True  # by Megatron's distributed optimizer; False: each data-parallel rank holds everything
    clusterd: str = ""  # URL of the cluster manager that decides in the broken job; "": nobody is asked
    takes_nodes: bool = False  # that manager takes the whole node of a victim away, and starts another one
    imports: Imports = NONE  # of all jobs, beside the plugin
    levels: bool = False  # the ranks of the broken job log what they use of memory, threads, files and groups
    program: str = PROGRAM  # module that all jobs run; it takes the arguments of `gpt_job`

    @property
    def step_at_fault(self) -> int:
        noticed = [fault for fault in self.faults if fault.kind not in UNNOTICED] or self.faults
        return min(fault.step for fault in noticed)

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return self.layout.world_size // self.nodes


def megatron_sources(path: Path | None) -> tuple[Path, ...]:
    """The directories of the Megatron that will run: of a checkout, or of the installed package."""
    if path is not None:
        roots = [path / "megatron"]
    else:
        found = importlib.util.find_spec("megatron")
        roots = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    parts = tuple(root / part for root in roots for part in ("core", "training") if (root / part).is_dir())
    if {part.name for part in parts} != {"core", "training"}:
        where = f"--megatron {path}" if path is not None else "--megatron: none given, and the installed Megatron"
        raise SpecError(f"{where}: holds no megatron/core and megatron/training; give a Megatron-LM checkout")
    return parts


def megatron_version(path: Path | None) -> str:
    """The version of the Megatron that will run; "0" where it does not say."""
    core = next(part for part in megatron_sources(path) if part.name == "core")
    return version_in(core / "package_info.py") or "0"


def training_flags(plan: Plan) -> tuple[str, ...]:
    """Megatron's flags for the small job; the same for all runs of a drill."""
    hidden = 128 if plan.layout.pp > 1 else 64  # some Megatron versions cannot split less over pipeline stages
    sizes = {
        "--num-layers": 2,
        "--hidden-size": hidden,
        "--ffn-hidden-size": 2 * hidden,
        "--num-attention-heads": 4,
        "--seq-length": 64,
        "--max-position-embeddings": 64,
        "--vocab-size": 127,
        "--micro-batch-size": 2,
        "--global-batch-size": 2 * _MICRO_BATCHES,
        "--train-iters": plan.steps,
        "--lr": 1e-3,
        "--min-lr": 1e-4,
        "--lr-warmup-iters": 2,
        "--weight-decay": 0.01,
        "--clip-grad": 1.0,
        "--seed": plan.seed,
        "--tensor-model-parallel-size": plan.layout.tp,
        "--pipeline-model-parallel-size": plan.layout.pp,
        "--log-interval": 1,
        **_evaluation(plan),
        "--num-workers": 0,
    }
    replaced = {ours for given in plan.extra for ours in _REPLACED_BY.get(given, ())}
    words = [word for flag, value in sizes.items() if flag not in replaced for word in (flag, str(value))]
    words += ["--lr-decay-style", "cosine", "--mock-data", "--tokenizer-type", "NullTokenizer", "--split", "98,1,1"]
    words += ["--transformer-impl", "local", "--ckpt-format", "torch"]
    words += ["--use-distributed-optimizer"] if plan.sharded else []
    words += _experts(plan.layout)
    words += _PLAIN_KERNELS + _dtype_flags(plan.dtype) + _device_flags() + _checks(plan)
    return (*releases.flags(megatron_version(plan.megatron), words), *plan.extra)


def _experts(layout: Layout) -> list[str]:
    """Two experts a rank, where the layout divides any; each token goes to two of them."""
    if layout.ep == 1:
        return []
    sizes = {"--num-experts": 2 * layout.ep, "--expert-model-parallel-size": layout.ep, "--moe-router-topk": 2}
    words = [word for flag, value in sizes.items() for word in (flag, str(value))]
    return [*words, "--moe-aux-loss-coeff", "0.01", "--moe-token-dispatcher-type", "alltoall"]


# Flags of the drill that Megatron does not want beside one that was given for it; of the others the later one counts.
_REPLACED_BY: Mapping[str, tuple[str, ...]] = {
    "--train-samples": ("--train-iters", "--lr-warmup-iters"),
    "--step-batch-size-schedule": ("--global-batch-size",),
}


def _evaluation(plan: Plan) -> dict[str, int]:
    """None, unless a fault is to fall into one; then the unbroken run evaluates at the same steps."""
    steps = [fault.step for fault in plan.faults if fault.phase == "eval"]
    return {"--eval-interval": math.gcd(*steps), "--eval-iters": 2} if steps else _NEVER


_ONLINE: Mapping[str, tuple[str, ...]] = {
    "dump": (),
    "retry": ("--enable-hbmfault-repair",),
    "recover": ("--enable-hbmfault-repair", "--enable-worker-reboot"),
}

_NEVER = {"--eval-interval": 1000, "--eval-iters": 0}

_PLAIN_KERNELS = [
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-persist-layer-norm",
    "--no-rope-fusion",
]


def _dtype_flags(dtype: str) -> list[str]:
    # A scale near where it settles: from Megatron's default of 2**32 a short run would skip nearly all its steps.
    return {"fp32": [], "bf16": ["--bf16"], "fp16": ["--fp16", "--initial-loss-scale", "65536"]}[dtype]


def _checks(plan: Plan) -> list[str]:
    """A wrong number has to be an error at once. Megatron's default is to compute the step again by itself first, and
    then to end the job for somebody to look at it."""
    return ["--rerun-mode", "disabled"] if any(fault.kind == "nan" for fault in plan.faults) else []


def _device_flags() -> list[str]:
    from mindspeed_tft import platforms  # with torch, which `tftctl` of a MindSpore job does without

    if platforms.select().name != "cpu":
        return ["--distributed-backend", "nccl"]
    return ["--distributed-backend", "gloo", "--use-cpu-initialization"]


def stock_flags(plan: Plan) -> tuple[str, ...]:
    flag = "--num-distributed-optimizer-instances"
    known = plan.sharded and releases.knows(megatron_version(plan.megatron), flag)
    return (*training_flags(plan), *((flag, str(plan.replicas)) if known else ()))


def plugin_flags(plan: Plan) -> tuple[str, ...]:
    replicas = _replica_flags(plan.replicas) if plan.sharded else ()
    # The steps of a drill are too few to find out how long one takes.
    hang = ("--tft-hang-seconds", "5") if any(fault.kind in HANGS for fault in plan.faults) else ()
    # What is rehearsed is a bit that flips after the hash of its step.
    hashed = ("--tft-shard-hash", "step") if any(fault.kind == "flip" for fault in plan.faults) else ()
    closed = ["--tft-insecure"] if plan.hosts else []  # a network that was made for a test
    if plan.tls_dir:
        closed = ["--tft-tls-dir", plan.tls_dir]
    words = (*training_flags(plan), "--enable-high-availability", *replicas, *_ONLINE[plan.preset])
    steered = ("--tft-clusterd", plan.clusterd, "--tft-clusterd-job", "drill") if plan.clusterd else ()
    return (*words, *hang, *hashed, *closed, *steered)


def _replica_flags(replicas: int) -> tuple[str, ...]:
    if replicas == 1:
        return ("--distributed-optimizer-no-replica",)
    return ("--optimizer-replica-num", str(replicas))


def save_interval(plan: Plan) -> int:
    """So large that Megatron saves at its end alone: an ordinary checkpoint near the fault would make the dump's work
    easier. Unless a fault is to fall into a save, or needs a checkpoint to go back to."""
    if plan.save_interval is not None:
        return plan.save_interval
    rewind = spec.first_rewind(plan.faults, plan.replicas)
    if rewind is not None:
        return spec.interval_before(rewind.step)
    return math.gcd(*(fault.step for fault in plan.faults if fault.phase == "save")) or plan.steps + 1
