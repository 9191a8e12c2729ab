"""What is refused on Megatron core_r0.6.0 beyond what is refused everywhere (`megatron_unproved`)."""

from __future__ import annotations

from mindspeed_tft.patches.groups import MEGATRON_06
from mindspeed_tft.patches.megatron_unproved import Unproved

VERSIONS = MEGATRON_06

UNPROVED: tuple[Unproved, ...] = (
    Unproved(
        "use_mcore_models",
        lambda value: not value,
        "the older models need kernels that the tests cannot run, so that they are not proved exact",
        "add --use-mcore-models",
        "--use-mcore-models (off by default)",
    ),
    Unproved("use_dist_ckpt", bool, "dumps on this release are in format torch"),
    Unproved(
        "num_experts",
        bool,
        "this release updates all that is dense before it knows the norm of the experts' gradients, so that there is no"
        " point from which every rank could finish a step alone",
        "use a newer Megatron",
    ),
    Unproved(
        "use_distributed_optimizer",
        lambda value: not value,
        "its other optimizers are not proved exact on this release",
        "add --use-distributed-optimizer",
        "--use-distributed-optimizer (off by default)",
    ),
    Unproved("overlap_param_gather", bool, "its gathers belong to the optimizer here, and are not put back"),
    Unproved("log_num_zeros_in_grad", bool, "each zero would be counted once for each replica"),
    Unproved("data_parallel_random_init", bool, "this release cannot begin with it"),
    Unproved("pipeline_model_parallel_split_rank", bool, "models with an encoder are not proved exact"),
    Unproved("retro_add_retriever", bool, "Retro is not proved exact"),
)
