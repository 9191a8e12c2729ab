"""A small GPT pre-training on Megatron's own training loop: everything but the choice of plugin.

`pretrain_gpt.py` runs it with the plugin, `pretrain_gpt_plain.py` without. Model, data and arguments are those of
Megatron; the data is its mock data set. Holds for megatron-core 0.19, 0.18, and the releases before with
`megatron.training` (checkouts of Megatron-LM included).
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, package_info, tensor_parallel
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args

RELEASE = (package_info.MAJOR, package_info.MINOR)
DEFAULTS = {"tokenizer_type": "NullTokenizer"}


def on_data_stage() -> bool:
    """Whether this rank's pipeline stage reads data: the first one the tokens, the last one the labels."""
    return bool(mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage())


def get_batch(iterator: Any) -> tuple[Any, Any, Any, Any]:
    """The next micro-batch: read by the first tensor-parallel rank, sent to the others."""
    if not on_data_stage():
        return None, None, None, None
    data = next(iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    integers = tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], data, torch.int64)
    floats = tensor_parallel.broadcast_data(["loss_mask"], data, torch.float32)
    return integers["tokens"], integers["labels"], floats["loss_mask"], integers["position_ids"]


def loss_func(loss_mask: Any, output: Any, model: Any = None) -> tuple[Any, Any, dict[str, Any]]:
    """Sum of the losses of this micro-batch's tokens, the number of tokens, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    report = torch.stack([loss.detach(), tokens.float()])
    if RELEASE <= (0, 12):  # there the loss function itself averages the log over the data-parallel ranks
        torch.distributed.all_reduce(report, group=mpu.get_data_parallel_group())
        return loss, tokens, {"lm loss": (report[0], report[1])}
    return loss, tokens, {"lm loss": report}


def forward_step(iterator: Any, model: Any) -> tuple[Any, Any]:
    tokens, labels, loss_mask, position_ids = get_batch(iterator)
    output = model(tokens, position_ids, None, labels=labels)
    return output, partial(loss_func, loss_mask)


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """The model of this rank's stage. From 0.19 on Megatron builds it from its own configuration instead."""
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )


def tokenizer() -> Any:
    try:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    except ImportError:  # releases before 0.17
        from megatron.training import get_tokenizer

        return get_tokenizer()
    return build_tokenizer(get_args())


def datasets_provider(samples: Any, vp_stage: int | None = None) -> Any:
    """Mock data: training, validation and test."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=None,
        split=args.split,
        tokenizer=tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    if "vocab_size" not in inspect.getsource(gpt_dataset.MockGPTLowLevelDataset):
        # Releases before 0.18 number the tokens up to the longest sequence, whatever the vocabulary.
        gpt_dataset.MockGPTLowLevelDataset.max_sequence_length = min(100, args.padded_vocab_size)
    builds_here = lambda: on_data_stage() and mpu.get_tensor_model_parallel_rank() == 0  # noqa: E731
    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, builds_here, config).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it


def main() -> None:
    """Train, and leave."""
    try:
        train()
    except SystemExit as end:  # so --exit-interval and its like end a training that succeeded
        if end.code:
            raise
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        # Megatron leaves its process groups open. A thread of gloo that drops its last operation while the interpreter
        # is torn down aborts the process: rarely, and after all is done, but then the job has failed.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def train() -> None:
    """Hand everything to Megatron, by the signature that its release has."""
    parameters = list(inspect.signature(pretrain).parameters)
    if parameters[0] != "cfg_container":  # up to 0.17
        pretrain(datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step, args_defaults=DEFAULTS)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(args_defaults=DEFAULTS)
    if parameters[2] == "model_provider":  # 0.18
        config = pretrain_cfg_container_from_args(args)
        pretrain(config, datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
    else:
        from megatron.training.argument_utils import gpt_config_from_args

        config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
