"""What of Megatron is proved exact and by which drill, and what puts each state back that a fault leaves behind.

Data only: `test_compatibility.py` runs it, and `scripts/compatibility.py` prints it as `docs/compatibility.md` with
what is refused (`refused.py`). A row is written here once its drill has passed, and not before.
"""

from __future__ import annotations

from typing import NamedTuple

MEGATRON = "0.19.2"  # the release that all of this was run with


class Proved(NamedTuple):
    """Features that one drill proves, at once: the job trains with all of these flags."""

    name: str
    features: str
    flags: str
    fault: str  # several: separated by blanks
    preset: str = "recover"
    layout: str = "dp4"
    dtype: str = "fp32"
    seen: str = ""  # a pattern of the job's log which shows that the feature was at work
    options: str = ""  # of the drill
    strategies: str = ""  # of the recoveries, where they are not that of the preset

    def arguments(self) -> list[str]:
        """For `tftctl drill`."""
        faults = [word for fault in self.fault.split() for word in ("--fault", fault)]
        words = ["--preset", self.preset, "--layout", self.layout, "--dtype", self.dtype, *faults]
        return [*words, *self.options.split(), *(["--", *_words(self.flags)] if self.flags else [])]


def _words(flags: str) -> list[str]:
    """Split at blanks, but not inside quotation marks."""
    parts = flags.split('"')
    return [word for number, part in enumerate(parts) for word in ([part] if number % 2 else part.split())]


class Elsewhere(NamedTuple):
    """A feature that another test proves."""

    features: str
    flags: str
    tests: tuple[str, ...]  # file::function, below the repository


class Release(NamedTuple):
    """A release of Megatron besides `MEGATRON`, and what proves it there."""

    release: str
    source: str  # where it comes from
    proved: str
    tests: tuple[str, ...]  # file::function, below the repository


class State(NamedTuple):
    """A state that a fault leaves behind."""

    what: str
    by: tuple[str, ...]  # module.function of `mindspeed_tft`, or attribute of what is refused
    tests: tuple[str, ...]  # file::function, or the name of a row of `PROVED`


_OVERLAP = "--overlap-grad-reduce --overlap-param-gather"

PROVED: tuple[Proved, ...] = (
    Proved(
        "virtual-pipeline",
        "virtual pipeline stages, interleaved schedule, with evaluations",
        "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --eval-interval 3 --eval-iters 2",
        "kill@1:7:backward",
        layout="pp2dp2",
        dtype="bf16",
        seen=r"Number of virtual stages per pipeline stage: 2",
    ),
    Proved(
        "virtual-pipeline-overlap",
        "virtual pipeline stages with overlapped communication, not aligned between stages; dump",
        f"--num-layers 4 --num-virtual-stages-per-pipeline-rank 2 {_OVERLAP} --no-align-grad-reduce"
        " --no-align-param-gather",
        "kill@2:7:update",
        preset="dump",
        layout="pp2dp2",
        seen=r"Number of virtual stages per pipeline stage: 2",
    ),
    Proved(
        "virtual-pipeline-groups",
        "groups of micro-batches of a virtual stage, overlapped sends in warm-up and flush, aligned communication",
        f"--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 {_OVERLAP}"
        " --microbatch-group-size-per-virtual-pipeline-stage 4 --overlap-p2p-communication-warmup-flush",
        "uce@3:7:forward",
        preset="retry",
        layout="pp2dp2",
        dtype="bf16",
        seen=r"Number of virtual stages per pipeline stage: 2",
    ),
    Proved(
        "sequence-parallel",
        "sequence parallelism, selective recomputation of activations, rotary positions, SwiGLU, RMSNorm, grouped"
        " queries, no biases",
        "--sequence-parallel --recompute-granularity selective --position-embedding-type rope --swiglu"
        " --no-bias-swiglu-fusion --normalization RMSNorm --group-query-attention --num-query-groups 2"
        " --disable-bias-linear",
        "kill@1:7:backward",
        layout="tp2dp2",
        dtype="bf16",
        seen=r"sequence_parallel \.+ True",
    ),
    Proved(
        "recompute-dropout",
        "full recomputation of activations, distributed over tensor-parallel ranks, with dropout",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        " --distribute-saved-activations --hidden-dropout 0.2 --attention-dropout 0.2",
        "kill@2:7:backward",
        layout="tp2dp2",
        seen=r"recompute_granularity \.+ full",
    ),
    Proved(
        "batch-ramp-up",
        "a global batch that grows: step 7 is the first with twice the samples, and a newcomer has to find them",
        '--step-batch-size-schedule "0:8,3072:16"',
        "kill@1:7:backward",
        seen=r"iteration +7/ +12 \| consumed samples: +64 ",
    ),
    Proved(
        "train-samples",
        "training by samples, weight decay that grows, a learning rate of its own for embeddings, several buckets",
        "--train-samples 192 --lr-warmup-samples 32 --start-weight-decay 0.01 --end-weight-decay 0.1"
        " --weight-decay-incr-style linear --decoupled-lr 5e-4 --decoupled-min-lr 1e-5 --ddp-num-buckets 3"
        f" {_OVERLAP}",
        "kill@1:7:forward",
        seen=r"setting training iterations to 12",
    ),
    Proved(
        "gradient-types",
        "bf16 with gradients of 16 bits, buckets of a given size, padded, averaged by the collective",
        f"--grad-reduce-in-bf16 {_OVERLAP} --ddp-bucket-size 20000 --ddp-pad-buckets-for-high-nccl-busbw"
        " --ddp-average-in-collective",
        "kill@1:7:update",
        dtype="bf16",
        seen=r"accumulate_allreduce_grads_in_fp32 \.+ False",
    ),
    Proved(
        "found-inf",
        "fp16: a step that the loss scaler skips, committed as skipped",
        "--loss-scale-window 1 --hysteresis 1",
        "kill@3:7:commit",
        dtype="fp16",
        seen=r"iteration +(7|8|10)/ +12 .*number of skipped iterations: +1 ",  # 7 has no line if it is finished
    ),
    Proved(
        "constant-scale",
        "fp16 with a constant loss scale, no clipping, loss by token, a batch that does not divide",
        "--loss-scale 8 --clip-grad 0 --calculate-per-token-loss --global-batch-size 18"
        " --eval-global-batch-size 16 --decrease-batch-size-if-needed",
        "kill@1:7:update",
        preset="dump",
        dtype="fp16",
        seen=r"iteration +6/ +12 \| consumed samples: +96 ",  # 16 of 18 in each step
    ),
    Proved(
        "frozen",
        "frozen parameters (as with LoRA) and a buffer that no optimizer owns",
        "--drill-freeze --num-layers 4",
        "uce@1:4:backward kill@2:8:forward",
        strategies="retry recover",
        seen=r"drill_freeze \.+ layers",
    ),
    Proved(
        "frozen-dump",
        "frozen parameters in a dump",
        "--drill-freeze --num-layers 4",
        "kill@3:7:update",
        preset="dump",
        dtype="bf16",
        seen=r"drill_freeze \.+ layers",
    ),
    Proved(
        "frozen-most",
        "so little that is trained that the shard of the rank that writes a dump is empty",
        "--drill-freeze most --ddp-pad-buckets-for-high-nccl-busbw",
        "kill@0:7:backward",
        preset="dump",
        seen=r"drill_freeze \.+ most",
    ),
    Proved(
        "random-init-whole",
        "random states of each data-parallel rank, without the distributed optimizer",
        "--data-parallel-random-init --attention-dropout 0.1 --hidden-dropout 0.1",
        "kill@3:5:update uce@2:8:clip",
        options="--no-distributed-optimizer",
        strategies="recover retry",
        seen=r"data_parallel_random_init \.+ True",
    ),
    Proved(
        "frozen-stage",
        "a pipeline stage of which nothing is trained",
        "--drill-freeze stage --num-layers 4 --untie-embeddings-and-output-weights",
        "kill@2:5:update uce@3:8:clip",
        layout="pp2dp2",
        preset="recover",
        strategies="recover retry",
        seen=r"drill_freeze \.+ stage",
    ),
    Proved(
        "untied",
        "output weights of their own, an uneven pipeline, another order of ranks",
        "--untie-embeddings-and-output-weights --num-layers 3 --decoder-first-pipeline-num-layers 1"
        " --use-tp-pp-dp-mapping",
        "kill@1:7:backward",
        layout="pp2dp2",
        seen=r"untie_embeddings_and_output_weights \.+ True",
    ),
    Proved(
        "watching",
        "norms, zeros and times that are logged, weights that are compared between ranks, ways in which Megatron ends"
        " a job itself, collection of garbage by hand",
        "--log-params-norm --log-num-zeros-in-grad --log-throughput --log-progress --timing-log-level 2"
        " --check-weight-hash-across-dp-replicas-interval 3 --train-sync-interval 2 --empty-unused-memory-level 2"
        " --exit-duration-in-mins 1000 --exit-interval 1000 --exit-signal-handler --manual-gc --manual-gc-interval 2",
        "kill@2:7:backward",
        seen=r"Weight hashes match after 9 iterations",
    ),
    Proved(
        "evaluation",
        "evaluation with a batch of its own, not from the beginning",
        "--eval-global-batch-size 8 --eval-micro-batch-size 1 --start-eval-at-iter 2",
        "kill@1:6:eval",
        seen=r"validation loss at iteration 12 ",
    ),
    Proved(
        "cyclic-data",
        "a data loader that shuffles, with workers",
        "--dataloader-type cyclic --num-workers 2",
        "kill@1:7:backward",
        seen=r"dataloader_type \.+ cyclic",
    ),
    Proved(
        "retained",
        "old checkpoints that Megatron removes itself: back to the one that is left",
        "--save-retain-interval 4",
        "nan@1:7:backward",
        preset="retry",
        options="--save-interval 2",
        strategies="rewind",
        seen=r"save_retain_interval \.+ 4",
    ),
)

_DUMP, _RETRY = "tests/megatron/test_drill_dump.py", "tests/megatron/test_drill_retry.py"
_RECOVER, _REGRESSIONS = "tests/megatron/test_drill_recover.py", "tests/megatron/test_reboot_regressions.py"
_REFUSALS = "tests/megatron/test_refusals.py::test_bad_input_is_refused_with_flag_reason_and_remedy"
_EXPERTS, _TORCH_DIST = "tests/megatron/test_experts.py", "tests/megatron/test_torch_dist.py"
_MATRICES = (f"{_DUMP}::test_matrix", f"{_RETRY}::test_matrix", f"{_RECOVER}::test_matrix")

ELSEWHERE: tuple[Elsewhere, ...] = (
    Elsewhere("data, tensor and pipeline parallelism", "--tensor-model-parallel-size, ...", _MATRICES),
    Elsewhere("all three at once", "--tensor-model-parallel-size, ...", (f"{_DUMP}::test_eight_ranks_in_three_axes",)),
    Elsewhere("gradient accumulation: several micro-batches a step", "--global-batch-size", _MATRICES),
    Elsewhere("fp32; bf16 with fp32 gradients", "--bf16 --accumulate-allreduce-grads-in-fp32", _MATRICES),
    Elsewhere("embeddings and output weights tied over pipeline stages", "(default)", _MATRICES),
    Elsewhere(
        "dropout",
        "--hidden-dropout --attention-dropout",
        (*_MATRICES, f"{_RETRY}::test_with_dropout_the_same_masks_are_drawn_again"),
    ),
    Elsewhere(
        "evaluation between steps",
        "--eval-interval --eval-iters",
        (f"{_RETRY}::test_matrix", f"{_RECOVER}::test_matrix"),
    ),
    Elsewhere("periodic checkpoints", "--save-interval", (f"{_RETRY}::test_matrix", f"{_RECOVER}::test_matrix")),
    Elsewhere(
        "overlapped gradient reduction and parameter gather",
        _OVERLAP,
        (
            f"{_DUMP}::test_flags_for_megatron",
            f"{_RETRY}::test_communication_that_overlaps_computing",
            f"{_RECOVER}::test_communication_that_overlaps_computing",
        ),
    ),
    Elsewhere(
        "fp16 with dynamic loss scale, steps that it skips",
        "--fp16 --loss-scale-window --hysteresis",
        (f"{_DUMP}::test_fp16_with_its_loss_scaler", f"{_RETRY}::test_steps_that_the_loss_scaler_skips"),
    ),
    Elsewhere(
        "random states of each data-parallel rank",
        "--data-parallel-random-init",
        (
            f"{_REGRESSIONS}::test_a_newcomer_draws_what_its_predecessor_would_have_drawn",
            f"{_REGRESSIONS}::test_a_dump_holds_the_random_states_of_the_dead_rank",
        ),
    ),
    Elsewhere(
        "Megatron's own replay of wrong results",
        "--rerun-mode validate_results",
        (f"{_RETRY}::test_the_verdict_of_megatrons_rerun_sends_all_back_to_the_last_checkpoint",),
    ),
    Elsewhere(
        "wrong numbers as an error",
        "--rerun-mode disabled, --check-for-nan-in-loss-and-grad (default)",
        (f"{_RETRY}::test_after_a_corrupted_gradient_all_go_back_to_the_last_checkpoint",),
    ),
    Elsewhere(
        "a job that was resumed, with the options of its checkpoint",
        "--load --use-checkpoint-opt_param-scheduler",
        (f"{_REGRESSIONS}::test_a_newcomer_takes_the_optimizers_options_from_the_others",),
    ),
    Elsewhere(
        "a job that began with loaded weights alone",
        "--load --no-load-optim --no-load-rng",
        (f"{_REGRESSIONS}::test_a_checkpoint_of_which_only_the_weights_were_loaded_is_not_gone_back_to",),
    ),
    Elsewhere(
        "experts, expert parallelism, a router's bias",
        "--num-experts --expert-model-parallel-size --moe-router-enable-expert-bias",
        (
            f"{_EXPERTS}::test_a_dump_is_what_megatron_would_have_saved",
            f"{_EXPERTS}::test_repairs_and_reboots",
            f"{_EXPERTS}::test_experts_that_are_not_divided",
        ),
    ),
    Elsewhere(
        "optimizer that is not sharded",
        "(without --use-distributed-optimizer)",
        (
            "tests/megatron/test_every_holder.py::test_a_dump",
            "tests/megatron/test_every_holder.py::test_repairs_and_reboots",
        ),
    ),
    Elsewhere(
        "checkpoints of the default format, all layouts and sharding types",
        "--ckpt-format torch_dist",
        (
            f"{_TORCH_DIST}::test_data_parallel_ranks",
            f"{_TORCH_DIST}::test_layouts_and_sharding_types",
            f"{_TORCH_DIST}::test_a_newcomer_saves_with_the_others",
            f"{_TORCH_DIST}::test_back_to_a_checkpoint",
        ),
    ),
    Elsewhere(
        "checkpoints that are written in the background",
        "--async-save",
        (
            f"{_TORCH_DIST}::test_a_save_in_the_background_is_given_up_for_the_dump",
            f"{_TORCH_DIST}::test_saves_in_the_background_go_on_after_a_repair",
        ),
    ),
    Elsewhere(
        "an end at a given step",
        "--exit-interval",
        (f"{_REGRESSIONS}::test_a_job_ends_at_its_exit_interval_though_it_was_repaired_just_before",),
    ),
)

_RULES = "patches.megatron_rollback"

_CHECKOUTS = "tests/megatron/test_checkouts.py"
RELEASES: tuple[Release, ...] = (
    Release(
        "0.6.0",
        "git branch core_r0.6.0",
        "replicas, which are the plugin's own there, change no byte of a stock run without; dump, retry and recover on"
        " dp4, and with fewer drills on tp2dp2 and pp2dp2; fp32, bf16 and fp16; overlapped gradient reductions; rewind",
        tuple(
            f"tests/megatron/test_core_06.py::{name}"
            for name in (
                "test_replicas_change_no_byte",
                "test_a_run_with_replicas_goes_on_from_a_checkpoint_without",
                "test_a_fault_changes_no_byte",
                "test_all_go_back_to_the_last_checkpoint",
            )
        ),
    ),
    Release(
        "0.12.1",
        "git tag core_v0.12.1",
        "dump, retry (in every phase of a step, a save, an evaluation) and recover on dp4, tp2dp2 and pp2dp2, fp32 and"
        " bf16; rewind; a dump in format torch_dist (tp2dp2)",
        tuple(
            f"{_CHECKOUTS}::{name}"
            for name in (
                *("test_dump", "test_retry", "test_recover", "test_the_default_format"),
                "test_wrong_numbers_send_all_back_to_the_last_checkpoint",
            )
        ),
    ),
    Release(
        "0.12.1",
        "git tag core_v0.12.1",
        "its own `pretrain_gpt.py` with the one line: recover; the gradient norm with replicas is that without",
        (
            f"{_CHECKOUTS}::test_its_own_program_with_the_one_line",
            f"{_CHECKOUTS}::test_the_norm_of_two_instances_is_that_of_one",
            f"{_CHECKOUTS}::test_control_without_the_mending_the_norm_is_another",
        ),
    ),
    Release(
        "0.12.1",
        "git tag core_v0.12.1",
        "fp16 and overlapped communication; four holders; no distributed optimizer; a newcomer that saves torch_dist;"
        " sequence parallelism, recomputation with dropout, training by samples, 16-bit gradients, skipped steps,"
        " frozen parameters, untied embeddings, shuffled data; virtual pipeline stages where sends need not overlap (on"
        " gloo this release computes NaN where they do, without any fault)",
        tuple(
            f"{_CHECKOUTS}::{name}"
            for name in (
                *("test_fp16_and_communication_that_overlaps", "test_without_the_distributed_optimizer"),
                *("test_four_holders_of_each_shard", "test_a_newcomer_saves_the_default_format_with_the_others"),
                *("test_features", "test_a_step_that_the_loss_scaler_skips", "test_virtual_pipeline"),
                "test_control_a_rule_that_is_missing_is_seen",
                "test_control_a_flipped_byte_of_a_dump_is_seen",
            )
        ),
    ),
    Release(
        "0.17.1, 0.18.2",
        "package index",
        "dump, retry and recover",
        (f"{_CHECKOUTS}::test_releases_of_the_package_index",),
    ),
)

# Written, and not run with the release that they are for when this page was made.
NOT_RUN: tuple[str, ...] = (f"{_CHECKOUTS}::test_the_default_format_in_the_background",)

STATES: tuple[State, ...] = (
    State(
        "handles of gradient reductions and parameter gathers, counts of a backward pass, of dense and expert buckets",
        (f"{_RULES}.bucket_groups", f"{_RULES}.forget_first_times"),
        (f"{_RETRY}::test_communication_that_overlaps_computing", "virtual-pipeline-overlap"),
    ),
    State(
        "a `no_sync` context that was entered by hand; graph, activations and tracebacks of the broken step",
        ("recovery.frames.release",),
        ("tests/unit/test_replay.py::test_released_frames_run_their_finally_now_and_hold_nothing",),
    ),
    State(
        "torch's list of operations that are being coalesced",
        ("patches.torch_distributed.regroup",),
        ("tests/unit/test_regroup_processes.py::test_blocked_ranks_come_out_and_many_regroups_leave_nothing",),
    ),
    State(
        "gradients that were accumulated in part, `grad_added_to_main_grad`",
        (f"{_RULES}.gradients", "gradient_accumulation_fusion", "defer_embedding_wgrad_compute"),
        (f"{_RETRY}::test_matrix",),
    ),
    State(
        "main parameters, moments and update counts, torn inside a rank or between ranks",
        ("patches.megatron_optimizer.local_update", "patches.megatron_shards.receive"),
        (
            f"{_DUMP}::test_matrix",
            f"{_RETRY}::test_matrix",
            "tests/unit/test_session.py::test_a_dirty_shard_is_never_written",
        ),
    ),
    State(
        "an update between two optimizers of the chain",
        ("recovery.record.update", "overlap_param_gather_with_optimizer_step"),
        ("tests/unit/test_record.py::test_an_update_that_was_cut_short_is_whole",),
    ),
    State(
        "loss scale, its trackers, an overflow that was found",
        (f"{_RULES}.optimizer_scalars",),
        (f"{_RETRY}::test_steps_that_the_loss_scaler_skips", "found-inf", "constant-scale"),
    ),
    State(
        "moments and main parameters of fewer bits, parameter remainders",
        ("use_precision_aware_optimizer",),
        (_REFUSALS,),
    ),
    State("copies, streams and events of an offloaded optimizer", ("optimizer_cpu_offload",), (_REFUSALS,)),
    State(
        "history and scales of fp8 and fp4, TransformerEngine's global state",
        ("fp8", "fp4", "transformer_impl"),
        (_REFUSALS,),
    ),
    State(
        "captured graphs and their memory",
        ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        (_REFUSALS,),
    ),
    State(
        "random states of Python, numpy, torch, the device and Megatron's tracker",
        (f"{_RULES}.random_states", "patches.megatron_random.Partners"),
        (
            f"{_RETRY}::test_with_dropout_the_same_masks_are_drawn_again",
            f"{_REGRESSIONS}::test_a_newcomer_draws_what_its_predecessor_would_have_drawn",
            "recompute-dropout",
        ),
    ),
    State(
        "batches that were read, loader workers",
        (f"{_RULES}.data", f"{_RULES}.validation_data", "patches.megatron_rewind.take_place"),
        (
            "tests/unit/test_replay.py::test_training_sees_every_batch_once_whatever_breaks",
            f"{_RECOVER}::test_newcomers_and_survivors_go_back_together",
            "cyclic-data",
        ),
    ),
    State(
        "counters of samples and steps, number of micro-batches, scheduler",
        (f"{_RULES}.counters", f"{_RULES}.optimizer_scalars", f"{_RULES}.scheduler_options"),
        (
            "batch-ramp-up",
            "train-samples",
            f"{_REGRESSIONS}::test_a_newcomer_takes_the_optimizers_options_from_the_others",
        ),
    ),
    State(
        "tensors that no optimizer owns: frozen parameters, buffers",
        ("patches.megatron_shards.unowned",),
        ("frozen", "frozen-dump", "frozen-most", "frozen-stage"),
    ),
    State(
        "parameters whose gather was interrupted, or belongs to the next step",
        (f"{_RULES}.parameters",),
        (f"{_RETRY}::test_matrix", f"{_RECOVER}::test_communication_that_overlaps_computing"),
    ),
    State(
        "buffers that a step changes outside of the optimizer: a router's bias, its counts of tokens",
        (f"{_RULES}.buffers", f"{_RULES}.expert_counts"),
        (
            f"{_EXPERTS}::test_the_step_is_computed_again_after_the_bias_was_updated",
            f"{_EXPERTS}::test_control_a_bias_that_is_not_put_back_is_noticed",
        ),
    ),
    State(
        "metrics of experts that are added up",
        (f"{_RULES}.expert_counts",),
        (f"{_EXPERTS}::test_repairs_and_reboots",),
    ),
    State(
        "buffers of fused dispatchers, bound to a group",
        ("moe_token_dispatcher_type", "moe_enable_deepep"),
        (_REFUSALS,),
    ),
    State("trackers of multi-token prediction", ("mtp_num_layers",), (_REFUSALS,)),
    State(
        "Megatron's global memory buffer (written before each use, bound to no group); symmetric and registered memory",
        ("nccl_ub", "symmetric_ar_type", "tp_comm_overlap"),
        (_REFUSALS, "sequence-parallel"),
    ),
    State(
        "Megatron's replay of wrong results: where it stands, its counts",
        (f"{_RULES}.rerun_machine", "check_for_spiky_loss", "check_for_large_grads"),
        (f"{_RETRY}::test_the_verdict_of_megatrons_rerun_sends_all_back_to_the_last_checkpoint",),
    ),
    State(
        "a checkpoint that was being written: it does not count, and the tracker comes last",
        ("patches.megatron_training.save_checkpoint", "recovery.files.publish"),
        (f"{_RETRY}::test_matrix", f"{_RECOVER}::test_matrix", "retained"),
    ),
    State(
        "pipelines, allocators and unsharded parameters of FSDP", ("use_megatron_fsdp", "use_torch_fsdp2"), (_REFUSALS,)
    ),
    State(
        "callbacks of the schedule that an evaluation takes away and gives back at its end only",
        (f"{_RULES}.callbacks", f"{_RULES}.forward_hooks"),
        ("evaluation", f"{_RETRY}::test_matrix"),
    ),
    State(
        "timers that run; points of a log that come twice after a rewind, each with its step; the handler of a signal",
        (f"{_RULES}.timers", "recovery.signals.catch_endings", "log_straggler"),
        ("watching", "tests/unit/test_signals.py::test_a_handler_of_somebody_else_stays"),
    ),
    State(
        "names and numbers of process groups, keys of the store",
        ("patches.torch_distributed.regroup",),
        ("tests/unit/test_regroup_processes.py::test_a_rank_that_slept_through_a_regroup_disturbs_nobody",),
    ),
    State(
        "connections of abandoned groups, and a rank that waits in one",
        ("groups.sockets.shut", "groups.waiting.wait_in_slices"),
        ("tests/unit/test_groups.py::test_same_results_and_everybody_comes_out",),
    ),
    State(
        "what only the first step of a process finds out",
        (f"{_RULES}.forget_first_times",),
        (f"{_RECOVER}::test_newcomers_and_survivors_go_back_together",),
    ),
)
