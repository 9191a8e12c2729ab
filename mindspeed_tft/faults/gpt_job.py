"""The small GPT pre-training that a drill runs; an ordinary Megatron program.

    torchrun ... -m mindspeed_tft.faults.gpt_job --with-plugin    MEGATRON FLAGS
    torchrun ... -m mindspeed_tft.faults.gpt_job --without-plugin MEGATRON FLAGS

Without the plugin the adaptor is never imported: what runs is Megatron alone. On a machine without accelerator that
needs the names of the device mapped to the CPU, which `mindspeed_tft.on_cpu` does and nothing more; and what Megatron
gets wrong mended (`patches.megatron_grad_norm`, `patches.megatron_reshardable`).

Among Megatron's flags may be one of the program's own, --drill-freeze: embeddings and every second layer are not
trained, as when only adapters are, or nothing of the last pipeline stage (--drill-freeze stage), or nothing but one
norm (--drill-freeze most), and the model has a buffer. No optimizer owns these tensors.

Environment (`imports` has one more):
  TFT_DRILL_STEPS   directory; every rank appends a line for each step that it ended, with begin and end times
  TFT_DRILL_LEVELS  when set, with what the process uses of memory (bytes), threads, files and process groups
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_tft.faults import imports

ENV_STEPS = "TFT_DRILL_STEPS"
ENV_LEVELS = "TFT_DRILL_LEVELS"

WITH_PLUGIN = "--with-plugin"
WITHOUT_PLUGIN = "--without-plugin"

_INTEGER_KEYS = ["tokens", "labels", "position_ids"]
_DEFAULTS = {"tokenizer_type": "NullTokenizer"}
_FREEZE = "--drill-freeze"
_MOCK_TOKENS = 100  # of the drill's vocabulary of 127


def prepare(with_plugin: bool) -> None:
    """What has to happen before Megatron is imported."""
    from mindspeed_tft import platforms

    device = platforms.select()
    device.translate_cuda()
    others = imports.wanted()
    imports.load(others.before)
    if with_plugin:
        importlib.import_module("mindspeed_tft.adaptor")
    elif device.name == "cpu":
        from mindspeed_tft.on_cpu import install_before_megatron

        install_before_megatron()
    imports.load(others.after)
    if not with_plugin:
        _mend()


def _mend() -> None:
    """What Megatron itself gets wrong is mended in the unbroken run as it is with the plugin."""
    from mindspeed_tft.patches import megatron_grad_norm, megatron_reshardable
    from mindspeed_tft.patches.groups import MENDED
    from mindspeed_tft.registry import REGISTRY

    megatron_grad_norm.declare()
    megatron_reshardable.declare()
    REGISTRY.activate(MENDED)


# -------------------------------------------------------------------------------------------- the program


def _holds_data(vp_stage: int | None = None) -> bool:
    """Whether the stage of the pipeline, or that part of it, reads data: the first one and the last one do."""
    from megatron.core import mpu

    place = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    return bool(mpu.is_pipeline_first_stage(**place) or mpu.is_pipeline_last_stage(**place))


def get_batch(iterator: Iterator[dict[str, Any]] | None, vp_stage: int | None = None) -> tuple[Any, Any, Any, Any]:
    """The next micro-batch; tensor-parallel ranks get it from their first."""
    import torch
    from megatron.core import mpu, tensor_parallel

    if not _holds_data(vp_stage):
        return None, None, None, None
    reads = mpu.get_tensor_model_parallel_rank() == 0
    data = next(iterator) if reads and iterator is not None else None
    integers = tensor_parallel.broadcast_data(_INTEGER_KEYS, data, torch.int64)
    mask = tensor_parallel.broadcast_data(["loss_mask"], data, torch.float32)["loss_mask"]
    return integers["tokens"], integers["labels"], mask, integers["position_ids"]


def loss_func(loss_mask: Any, output: Any, model: Any = None) -> tuple[Any, Any, dict[str, Any]]:
    """Masked loss, its number of tokens, and what is printed."""
    import torch

    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), tokens.view(1).float()])
    if _release() < (0, 13):  # the program adds up what is printed, over data-parallel ranks
        from megatron.core import mpu

        torch.distributed.all_reduce(report, group=mpu.get_data_parallel_group())
        return loss, tokens, {"lm loss": (report[0], report[1])}
    return loss, tokens, {"lm loss": report}


def _release() -> tuple[int, int]:
    """Of Megatron."""
    from megatron.core import package_info

    return package_info.MAJOR, package_info.MINOR


def forward_step(iterator: Iterator[dict[str, Any]] | None, model: Any) -> tuple[Any, Callable[..., Any]]:
    """One micro-batch forward."""
    tokens, labels, loss_mask, position_ids = get_batch(iterator, _virtual_stage(model))
    return model(tokens, position_ids, None, labels=labels), partial(_loss_func(), loss_mask)


def average_loss(loss_mask: Any, output: Any) -> tuple[Any, dict[str, Any]]:
    """Masked mean of a micro-batch, and what is printed, for the Megatron versions that divide by nothing else."""
    import torch
    from megatron.training.utils import average_losses_across_data_parallel_group

    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask) / mask.sum()
    return loss, {"lm loss": average_losses_across_data_parallel_group([loss])[0]}


def _loss_func() -> Callable[..., Any]:
    """Since Megatron can weigh by tokens it wants to know their number."""
    return loss_func if _release() >= (0, 8) else average_loss


def _virtual_stage(model: Any) -> int | None:
    """The place of a model among those of its rank; None where each rank has one, and before 0.13."""
    from megatron.core.utils import get_attr_wrapped_model

    try:
        stage: int | None = get_attr_wrapped_model(model, "vp_stage")
    except RuntimeError:
        return None
    return stage


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **unused: Any
) -> Any:
    """The GPT model, for the Megatron versions that ask the program for it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    model = GPTModel(
        config=unused.get("config") or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=args.num_experts),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )
    return freeze([model], args.drill_freeze)[0] if args.drill_freeze else model


def add_arguments(parser: Any) -> Any:
    """The program's own flag."""
    group = parser.add_argument_group("mindspeed_tft drill")
    group.add_argument(
        _FREEZE,
        nargs="?",
        const="layers",
        choices=("layers", "stage", "most"),
        help="Leave as they are: embeddings and every second layer (layers), all of the last pipeline stage (stage), or"
        " all but the last norm (most).",
    )
    return parser


def freeze(chunks: list[Any], which: str) -> list[Any]:
    """Take the embeddings and the layers of even number out of training (`which` is layers), or the last pipeline stage
    as a whole (stage), or all but the last norm (most), and give each chunk (a model or a stage of it) a buffer of
    shape (64,), fp32, that is saved."""
    import torch

    for chunk in chunks:
        chunk.register_buffer("drill_buffer", torch.arange(64, dtype=torch.float32))
        if which == "stage":
            if chunk.post_process:
                chunk.requires_grad_(False)
            continue
        if which == "most":
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_("final_layernorm" in name)
            continue
        for name, module in chunk.named_modules():
            if name == "embedding" or getattr(module, "layer_number", 1) % 2 == 0:
                module.requires_grad_(False)
    return chunks


def datasets_provider(samples: Sequence[int], vp_stage: int | None = None) -> Any:
    """Megatron's mock dataset, the same for every run with the same seed."""
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_args

    args = get_args()
    wanted = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": None,
        "blend_per_split": None,
        "split": args.split,
        "tokenizer": _tokenizer(args),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "mock": True,  # up to 0.7
    }
    known = inspect.signature(GPTDatasetConfig).parameters
    config = GPTDatasetConfig(**{name: value for name, value in wanted.items() if name in known})

    def builds() -> bool:
        return _holds_data(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0

    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, builds, config).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron looks for this mark


def _tokenizer(args: Any) -> Any:
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    except ImportError:  # before 0.16
        from megatron.training import get_tokenizer

        return get_tokenizer()
    return build_tokenizer(args)


def _keep_built_helpers() -> None:
    """Wheels bring no Makefile: where the dataset helpers are built, they are not built again. Up to 0.7 mock data
    needs none."""
    if _release() < (0, 8) or importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        from megatron.core.datasets import utils

        utils.compile_helpers = lambda: None


def _bound_mock_tokens() -> None:
    """Before 0.17 the ids of mock data run up to its sequence length, 4096, whatever the vocabulary."""
    if (0, 8) <= _release() < (0, 17):
        from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

        MockGPTLowLevelDataset.max_sequence_length = _MOCK_TOKENS


def run() -> None:
    """Start training, in whichever way this Megatron wants to be called."""
    _keep_built_helpers()
    _bound_mock_tokens()
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    if ENV_STEPS in os.environ:
        _log_steps(Path(os.environ[ENV_STEPS]))
    kind = ModelType.encoder_or_decoder
    parameters = list(inspect.signature(pretrain).parameters)
    if "cfg_container" not in parameters:  # up to 0.17
        pretrain(
            datasets_provider,
            model_provider,
            kind,
            forward_step,
            extra_args_provider=add_arguments,
            args_defaults=_DEFAULTS,
        )
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(add_arguments, args_defaults=_DEFAULTS)
    if parameters.index("model_provider") == 2:  # 0.18
        pretrain(pretrain_cfg_container_from_args(args), datasets_provider, model_provider, kind, forward_step)
        return
    from megatron.training.argument_utils import gpt_config_from_args  # 0.19: the model comes from the configuration

    model = gpt_config_from_args(args)
    if args.drill_freeze:
        model.pre_wrap_hooks.append(partial(freeze, which=args.drill_freeze))
    pretrain(pretrain_cfg_container_from_args(args, model), datasets_provider, kind, forward_step)


# ----------------------------------------------------------------------------------------------- its clock


def _log_steps(directory: Path) -> None:
    """Append a line for each step that this rank ended. The same clock for runs with and without the plugin."""
    from megatron.training import training

    train_step = training.train_step
    directory.mkdir(parents=True, exist_ok=True)
    log = (directory / f"rank{os.environ['RANK']}.jsonl").open("a", buffering=1)
    levels = _levels if os.environ.get(ENV_LEVELS) else dict

    def timed(*args: Any, **options: Any) -> Any:
        begin, begin_wall, cpu = time.perf_counter(), time.time(), time.process_time()
        result = train_step(*args, **options)
        end = time.perf_counter()
        record = {
            "step": _current_step(),
            "pid": os.getpid(),
            "begin": begin,
            "end": end,
            "begin_wall": begin_wall,
            "end_wall": begin_wall + end - begin,
            "cpu": cpu,  # of all threads of this rank, at the begin
            **levels(),
        }
        log.write(json.dumps(record) + "\n")
        return result

    training.train_step = timed


def _levels() -> dict[str, int]:
    """What this process uses now: it must not grow with the number of recoveries."""
    import psutil
    from torch.distributed import distributed_c10d

    heap = _heap()
    process = psutil.Process()
    with process.oneshot():
        memory = process.memory_info()
        return {
            "heap": heap,
            "memory": memory.rss - memory.shared,  # without the files (code) that come in bit by bit
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "groups": len(distributed_c10d._world.pg_map),
            "winding": sum(thread.name == "tft-drop-group" for thread in threading.enumerate()),
        }


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _heap() -> int:
    """Bytes that are allocated now, in all arenas; 0 where the C library cannot tell (before glibc 2.33, or another).

    What the heap keeps without need is given back before, so that the resident memory says little else: groups that
    come and go with their threads leave tens of megabytes of it.
    """
    library = ctypes.CDLL(None)
    if not (hasattr(library, "malloc_trim") and hasattr(library, "mallinfo2")):
        return 0
    library.malloc_trim(0)
    library.mallinfo2.restype = _Mallinfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def _current_step() -> int:
    from megatron.training import get_args

    return int(get_args().curr_iteration) + 1


def main() -> None:
    """Take the first argument off the command line and leave the others to Megatron."""
    modes = {WITH_PLUGIN: True, WITHOUT_PLUGIN: False}
    if len(sys.argv) < 2 or sys.argv[1] not in modes:
        sys.exit(f"gpt_job: the first argument must be {WITH_PLUGIN} or {WITHOUT_PLUGIN}")
    prepare(modes[sys.argv.pop(1)])
    run()
    leave()


def leave() -> None:
    """End the process at once after a training that succeeded.

    Megatron leaves its process groups open. A worker thread of gloo that drops its last operation while the interpreter
    is being torn down aborts the process (SIGABRT), rarely, and after everything was saved.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in the process that writes checkpoints in the background
    prepare(with_plugin=False)
