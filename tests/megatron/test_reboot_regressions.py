"""Real Megatron, ways to a wrong number that were found by hand: each was exact nearly everywhere, and is kept here.

All of them start stock Megatron's own jobs and checkpoints, and compare every byte.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_tft.faults import compare
from mindspeed_tft.faults.plans import Plan
from mindspeed_tft.faults.rehearsal import Rehearsal
from mindspeed_tft.faults.spec import parse_layout

from .conftest import Drilled

pytestmark = [pytest.mark.megatron, pytest.mark.full]

# Every data-parallel rank draws from states of its own, and each micro-batch draws.
OWN_RANDOMNESS = ("--data-parallel-random-init", "--hidden-dropout", "0.2", "--attention-dropout", "0.2")
# Of a job that is resumed from a checkpoint whose optimizer had others: Megatron goes on with those of the checkpoint.
OTHER_OPTIONS = ("--adam-beta1", "0.7", "--adam-beta2", "0.8", "--adam-eps", "1e-5", "--lr-warmup-iters", "6")
# The embedding has a group of its own, which is empty in one of the two shards, and not counted on there.
OWN_GROUP = ("--decoupled-lr", "5e-4", "--decoupled-min-lr", "1e-5")
LOADED = 4  # the step of that checkpoint


class _Silent:
    """Nobody watches."""

    def stage(self, name: str, text: str, first: int, last: int) -> None: ...
    def step(self, number: int) -> None: ...
    def done(self, text: str) -> None: ...


@pytest.fixture
def unbroken(references: Path, tmp_path: Path) -> Callable[..., Path]:
    """`unbroken(steps, *flags, layout)`: where stock Megatron saved each step of this job."""

    def run(steps: int, *flags: str, layout: str = "dp4") -> Path:
        work = tmp_path / "unbroken"
        work.mkdir(exist_ok=True)
        plan = Plan(layout=parse_layout(layout), faults=(), steps=steps, extra=flags)
        return Rehearsal(plan, work, references, _Silent()).reference()

    return run


@pytest.fixture
def load(unbroken: Callable[..., Path]) -> tuple[str, ...]:
    """Flags of a job that goes on from step `LOADED` of another one."""
    saved = unbroken(LOADED, "--lr-decay-iters", "12")
    return ("--load", str(saved), "--use-checkpoint-opt_param-scheduler")


def _faults(*faults: str) -> list[str]:
    return [word for fault in faults for word in ("--fault", fault)]


def _assert_exact(found: Drilled, strategy: str, restarted: list[int]) -> None:
    report = found.report
    assert (found.status, report["verdict"], report["reasons"]) == (0, "exact", []), found.output
    assert (report["strategy"], report["processes_restarted"], report["steps_lost"]) == (strategy, restarted, 0)
    assert report["compared"]["tensors"] > 30


# --------------------------------------------------------------------- randomness that no other rank has


@pytest.mark.parametrize(
    ("layout", "dtype", "faults", "restarted"),
    [
        ("dp4", "fp32", ("kill@1:7:backward",), [1]),
        ("pp2dp2", "fp32", ("kill@0:7:commit", "kill@3:7:commit"), [0, 3]),
        ("dp4", "bf16", ("kill@2:5:forward", "kill@0:7:update"), [0, 2]),  # the second one's partner came later itself
        ("tp2dp2", "bf16", ("exc@2:6:eval",), [2]),
    ],
)
def test_a_newcomer_draws_what_its_predecessor_would_have_drawn(
    drill: Callable[..., Drilled], layout: str, dtype: str, faults: tuple[str, ...], restarted: list[int]
) -> None:
    found = drill("--preset", "recover", "--layout", layout, "--dtype", dtype, *_faults(*faults), "--", *OWN_RANDOMNESS)
    _assert_exact(found, "recover", restarted)


def test_control_a_newcomer_that_draws_what_its_partner_draws_is_seen(
    drill: Callable[..., Drilled], spoil: Callable[..., None]
) -> None:
    others = "(states for rank, states in self._book.at(step).items() if rank != self._me)"
    mine = f"lambda self, step: module.random_states.from_bytes(next({others}))"
    spoil("megatron_random", f"Partners.mine = {mine}")
    found = drill("--preset", "recover", "--fault", "kill@1:7:backward", "--", *OWN_RANDOMNESS)
    assert (found.status, found.report["verdict"]) == (3, "inexact"), found.output


@pytest.mark.parametrize(("layout", "fault"), [("dp4", "kill@0:7:backward"), ("tp2dp2", "kill@3:7:update")])
def test_a_dump_holds_the_random_states_of_the_dead_rank(
    drill: Callable[..., Drilled], layout: str, fault: str
) -> None:
    found = drill("--layout", layout, "--fault", fault, "--", *OWN_RANDOMNESS)
    _assert_exact(found, "dump", [0, 1, 2, 3])
    assert {entry["what"] for entry in found.report["comparisons"]} == {"dump", "end"}


def test_where_all_go_back_everybody_gets_its_own_random_states(drill: Callable[..., Drilled]) -> None:
    """Both holders of a shard die, in updates that they began together; later one that went back dies, too."""
    faults = ("kill@1:7:update", "kill@3:7:update", "kill@1:9:forward")
    found = drill("--preset", "recover", "--save-interval", "4", *_faults(*faults), "--", *OWN_RANDOMNESS)
    report = found.report
    assert (found.status, report["verdict"]) == (4, "degraded"), found.output
    assert [(each["strategy"], each["step"]) for each in report["recoveries"]] == [("recover", 4), ("recover", 8)]
    assert (report["steps_lost"], report["compared"]["different"]) == (3, 0)


# --------------------------------------------------------------------- newcomers in a repair that did not end


@pytest.mark.parametrize(("preset", "restarted"), [("recover", [1, 2]), ("dump", [0, 1, 2, 3])])
def test_a_fault_right_before_the_first_evaluation_of_cyclic_data(
    drill: Callable[..., Drilled], preset: str, restarted: list[int]
) -> None:
    """Both survivors wait in a gather that their partners never enter, so that neither has read of it. (That loaders
    draw a number then cannot be seen here: on a CPU they have generators of their own. See test_megatron_data.)"""
    evaluation = ("--dataloader-type", "cyclic", "--eval-interval", "4", "--eval-iters", "2")
    dropout = ("--hidden-dropout", "0.2", "--attention-dropout", "0.2")
    found = drill("--preset", preset, *_faults("kill@1:4:update", "kill@2:4:update"), "--", *evaluation, *dropout)
    _assert_exact(found, preset, restarted)


@pytest.mark.parametrize("own_randomness", [(), OWN_RANDOMNESS])
def test_a_newcomer_whose_rollback_is_cut_short_stands_where_it_was_put(
    drill: Callable[..., Drilled], own_randomness: tuple[str, ...]
) -> None:
    """Rank 1 has its shard and its small state already, and waits in the rollback for rank 0, which dies."""
    found = drill("--preset", "recover", *_faults("kill@1:7:backward", "kill@0:7:rollback"), "--", *own_randomness)
    _assert_exact(found, "recover", [0, 1])


# --------------------------------------------------------------------- jobs that were resumed


def test_a_newcomer_takes_the_optimizers_options_from_the_others(
    drill: Callable[..., Drilled], load: tuple[str, ...]
) -> None:
    """It reads no checkpoint, and its command line says something else than the checkpoint that the others read."""
    found = drill("--preset", "recover", "--fault", "kill@1:7:backward", "--", *load, *OTHER_OPTIONS)
    _assert_exact(found, "recover", [1])


def test_control_a_newcomer_with_the_options_of_its_command_line_is_seen(
    drill: Callable[..., Drilled], load: tuple[str, ...], spoil: Callable[..., None]
) -> None:
    spoil("megatron_shards", "put_group_options = lambda optimizer, groups: None")
    found = drill("--preset", "recover", "--fault", "kill@1:7:backward", "--", *load, *OTHER_OPTIONS)
    assert (found.status, found.report["verdict"]) == (3, "inexact"), found.output


def test_a_newcomer_counts_updates_in_groups_that_are_empty_where_its_small_state_comes_from(
    drill: Callable[..., Drilled], unbroken: Callable[..., Path]
) -> None:
    saved = unbroken(LOADED, "--lr-decay-iters", "12", *OWN_GROUP)
    load = ("--load", str(saved), "--use-checkpoint-opt_param-scheduler", *OWN_GROUP)
    found = drill("--preset", "recover", *_faults("kill@1:7:backward", "kill@0:9:update"), "--", *load)
    _assert_exact(found, "recover", [0, 1])


BOTH_HOLDERS = ("uce@1:6:backward", "uce@3:6:backward")


def test_a_checkpoint_of_which_only_the_weights_were_loaded_is_not_gone_back_to(
    drill: Callable[..., Drilled], load: tuple[str, ...]
) -> None:
    """The job went on from it with a fresh optimizer: to load all of it now would make another job of it."""
    found = drill("--preset", "retry", *_faults(*BOTH_HOLDERS), "--", *load, "--no-load-optim", "--no-load-rng")
    assert (found.status, found.report["verdict"]) == (5, "lost"), found.output
    assert "rewind" not in [each["strategy"] for each in found.report["recoveries"]]


def test_a_checkpoint_whose_random_states_are_not_loaded_is_not_gone_back_to(
    drill: Callable[..., Drilled], unbroken: Callable[..., Path]
) -> None:
    """Megatron loads what jobs of other parallel sizes saved, and only prints that their random states stay out."""
    form = ("--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable")
    saved = unbroken(LOADED, "--lr-decay-iters", "12", *form, layout="tp2dp2")
    load = ("--load", str(saved), "--use-checkpoint-opt_param-scheduler", *form)
    found = drill("--preset", "retry", *_faults(*BOTH_HOLDERS), "--", *load)
    assert (found.status, found.report["verdict"]) == (5, "lost"), found.output
    assert "was loaded without its random states" in (found.directory / "broken.log").read_text()


def test_control_a_checkpoint_that_was_loaded_whole_is_gone_back_to(
    drill: Callable[..., Drilled], load: tuple[str, ...]
) -> None:
    found = drill("--preset", "retry", *_faults(*BOTH_HOLDERS), "--", *load)
    report = found.report
    assert [(each["strategy"], each["step"]) for each in report["recoveries"]] == [("rewind", LOADED)], found.output
    assert (report["steps_lost"], report["compared"]["different"]) == (1, 0)
    again = found.directory / "dump" / f"iter_{LOADED:07d}"
    assert again.is_dir(), "--save may hold later steps that nobody is to go on from: its tracker has to name this one"


def test_a_job_that_was_resumed_at_its_exit_interval_goes_on(
    drill: Callable[..., Drilled], load: tuple[str, ...]
) -> None:
    """The fault comes into its first step, so that it goes back to where it began."""
    end = ("--exit-interval", str(LOADED), "--lr-decay-iters", "12")
    found = drill("--preset", "retry", "--fault", "uce@1:5:backward", "--steps", "8", "--", *load, *end)
    _assert_exact(found, "retry", [])


def test_all_go_back_to_the_checkpoint_that_the_others_know(
    drill: Callable[..., Drilled], unbroken: Callable[..., Path], load: tuple[str, ...]
) -> None:
    """A newcomer without any holder of its shard; cyclic data, of which it draws as those that were there before; and
    samples of evaluations that are counted as at the start."""
    found = drill(
        *("--preset", "recover", "--replicas", "1", "--fault", "kill@1:6:backward", "--"),
        *(*load, "--dataloader-type", "cyclic", "--eval-interval", "4", "--eval-iters", "1"),
        *("--hidden-dropout", "0.2", "--attention-dropout", "0.2"),
    )
    report = found.report
    assert [(each["strategy"], each["step"]) for each in report["recoveries"]] == [("recover", LOADED)], found.output
    assert (report["processes_restarted"], report["compared"]["different"]) == ([1], 0)


# --------------------------------------------------------------------- a job that ends between two steps

EXIT = 8


@pytest.mark.parametrize(("preset", "fault"), [("retry", "uce@1:8:param-gather"), ("recover", "kill@1:8:update")])
def test_a_job_ends_at_its_exit_interval_though_it_was_repaired_just_before(
    drill: Callable[..., Drilled], unbroken: Callable[..., Path], preset: str, fault: str
) -> None:
    """The step of the fault is the last one, and is not computed again: training goes on behind it, where Megatron does
    not ask any more whether to end."""
    end = ("--exit-interval", str(EXIT))
    found = drill("--preset", preset, "--no-compare", "--fault", fault, "--", *end)
    report = found.report
    assert report["faults_fired"] == [fault], found.output
    assert [each["strategy"] for each in report["recoveries"]] == [preset]
    saved = found.directory / "dump"
    assert compare.tracked_iteration(saved) == EXIT
    result = compare.compare_checkpoints(unbroken(12, *end), saved)
    assert (result.different, result.differences) == (0, [])
    assert result.tensors > 30
