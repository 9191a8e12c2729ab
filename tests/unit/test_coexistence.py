"""Beside MindSpeed's patch manager, in each order of imports; `coexistence_support` has a stand-in for it."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import coexistence_support
import pytest
from coexistence_support import (
    MINDSPEED,
    ORDERS,
    TARGETS,
    WITH_US,
    calls,
    host,
    marking,
    our_flags,
    ours,
    refusals,
    start,
    theirs,
    with_llm,
    write,
)

from mindspeed_tft.patches import mindspeed as coexist
from mindspeed_tft.registry import PatchError, Registry

folder, registry = coexistence_support.folder, coexistence_support.registry  # fixtures

# ------------------------------------------------------------------------------------------------------ rules


def test_nothing_is_imported_by_us(folder: Path, registry: Registry) -> None:
    assert coexist.present() and not coexist.loaded()
    ours(registry)
    imported = {name.partition(".")[0] for name in sys.modules}
    assert not {"tinylm", "mindspeed"} & imported
    assert {row.state for row in registry.list()} == {"waiting"}


def test_the_stand_in_alone(folder: Path) -> None:
    """What the other tests compare with: MindSpeed without us, also after it has patched again."""
    adaptor = theirs()
    host()
    assert calls() == TARGETS
    adaptor.repatch()
    assert calls() == TARGETS
    sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager.remove_patches()
    assert calls()["tinylm.optimizer:Chained.step"] == ["host step"]


@pytest.mark.parametrize("order", ORDERS)
def test_outermost_and_once_in_every_import_order(folder: Path, registry: Registry, order: str) -> None:
    adaptor = start(order, registry)
    registry.verify("ours")
    registry.verify(coexist.GROUP)
    assert {row.state for row in registry.list()} == {"applied"}
    assert calls() == WITH_US
    for _ in range(3):
        adaptor.repatch()
        assert calls() == WITH_US
    assert {row.state for row in registry.list()} == {"applied"}
    assert not any(row.detail for row in registry.list()), "lifted in time, so nobody was ever over us"


@pytest.mark.parametrize("order", ORDERS)
def test_without_the_guard_it_goes_wrong(folder: Path, registry: Registry, order: str) -> None:
    """The control: the same checks fail when we do not make room."""
    adaptor = start(order, registry, guarded=False)
    wrong = 0
    for act in (lambda: None, adaptor.repatch):
        act()
        try:
            wrong += calls() != WITH_US
        except (AssertionError, RecursionError):  # two names of one target differ; ours calls theirs calls ours
            wrong += 1
    assert wrong


def test_a_name_that_mindspeed_does_not_follow_stays_ours(folder: Path, registry: Registry) -> None:
    start("ours host mindspeed", registry)
    log = sys.modules["tinylm.trace"].log
    log.clear()
    sys.modules["tinylm.initialize"].parse()
    assert log == ["ours", "host parse_args"]  # without us: ["host parse_args"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("repatched", [False, True])
def test_undo_leaves_what_mindspeed_made(folder: Path, registry: Registry, order: str, repatched: bool) -> None:
    adaptor = start(order, registry)
    if repatched:
        adaptor.repatch()
    assert registry.undo() == ()
    assert calls() == TARGETS
    for path, patch in sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager.patches_info.items():
        owner, leaf = patch.owner()
        assert vars(owner)[leaf] is patch.now, path
        assert type(patch.first).__module__ in ("builtins", "types"), f"{path}: MindSpeed took ours for the original"
    adaptor.repatch()
    assert calls() == TARGETS


def test_what_mindspeed_patches_with_is_left_alone(folder: Path, registry: Registry) -> None:
    """Rule 3: its replacement is the object that lies at the target, under the same name."""
    functions = importlib.import_module("mindspeed.functions")
    mine = functions.compile_helpers
    adaptor = start("mindspeed ours", registry)
    for _ in range(2):
        assert functions.compile_helpers is mine
        assert sys.modules["tinylm.optimizer"].compile_helpers.__wrapped__ is mine
        adaptor.repatch()

    registry.undo()
    careless = Registry()  # the control
    careless.wrap("tinylm.optimizer:compile_helpers", group="ours")(marking(""))
    careless.activate("ours")
    assert functions.compile_helpers is not mine
    careless.undo()
    assert functions.compile_helpers is mine


def test_while_mindspeed_is_at_work_it_sees_the_host_without_us(folder: Path, registry: Registry) -> None:
    adaptor = start("ours host mindspeed", registry)
    seen: list[list[str]] = []

    class Spy:
        feature_name = "spy"

        def register_args(self, parser: argparse.ArgumentParser) -> None: ...

        def register_patches(self, manager: Any) -> None:
            def look_wrapper(fn: Any) -> Any:
                seen.append([row.state for row in registry.list("ours")])
                assert type(fn).__name__ == "function"
                return fn

            manager.register_patch("tinylm.training.train", look_wrapper)

    sys.modules["mindspeed.features_manager.features_manager"].MindSpeedFeaturesManager.FEATURES_LIST.append(Spy())
    adaptor.repatch()
    assert seen == [["waiting"] * len(TARGETS)]
    assert calls() == WITH_US


def test_ours_come_back_when_mindspeed_fails(folder: Path, registry: Registry) -> None:
    start("mindspeed ours", registry)
    manager = sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager
    manager.register_patch("no_such_package.f", marking("x"))
    with pytest.raises(RuntimeError, match="no_such_package"):
        manager.apply_patches()
    assert calls() == WITH_US


def test_removed_for_good_we_stay_on_the_host(folder: Path, registry: Registry) -> None:
    start("ours mindspeed", registry)
    sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager.remove_patches()
    found = calls()
    assert found["tinylm.optimizer:Chained.step"] == ["ours", "host step"]
    assert found["tinylm.arguments:parse_args"] == ["ours", "host parse_args"]


def test_a_module_with_mindspeed_in_its_name_must_not_hold_functions_of_the_host(folder: Path) -> None:
    """Rule 6, of MindSpeed itself: why our modules look the host up when they are called."""
    write(folder, {"tft_mindspeed_like.py": "import tinylm.training\nfrom tinylm.training import get_optimizer"})
    adaptor = theirs()
    host()
    like = importlib.import_module("tft_mindspeed_like")
    old = like.get_optimizer
    try:
        adaptor.repatch()
        assert like.get_optimizer is old, "stale: still what MindSpeed made the first time"
        assert like.tinylm.training.get_optimizer is not old
    finally:
        del sys.modules["tft_mindspeed_like"]


def test_the_host_without_mindspeed(folder: Path, registry: Registry) -> None:
    start("ours host", registry)
    registry.verify("ours")
    assert calls() == {target: ["ours", logged[-1].replace("ms", "host")] for target, logged in TARGETS.items()}
    assert {row.state for row in registry.list(coexist.GROUP)} == {"waiting"}
    assert refusals(enable_high_availability=True) == []


# ------------------------------------------------------------------------------------------------------ flags

ARGV = ["--enable-high-availability", "--optimizer-replica-num", "3", "--ms-flag", "--host-flag"]
PARSED = {"enable_high_availability": True, "optimizer_replica_num": 3, "ms_flag": True, "host_flag": True}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("llm", [False, True])
def test_our_flags_come_after_those_of_the_features_and_only_if_absent(
    folder: Path, registry: Registry, order: str, llm: bool
) -> None:
    start(order, registry)
    if llm:
        with_llm(folder)
    assert vars(sys.modules["tinylm.initialize"].parse_args(argv=ARGV)) == PARSED


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("llm", [False, True])
def test_flags_through_a_provider_come_last_too(folder: Path, registry: Registry, order: str, llm: bool) -> None:
    start(order, registry)
    registry.undo(coexist.GROUP)
    if llm:
        with_llm(folder)
    called: list[str] = []

    def of_the_user(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        called.append("user")
        return parser

    parse_args = sys.modules["tinylm.initialize"].parse_args
    assert vars(parse_args(coexist.flags_last(of_the_user, our_flags), ARGV)) == PARSED and called == ["user"]
    assert vars(parse_args(coexist.flags_last(None, our_flags), ARGV)) == PARSED

    def too_early(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:  # the control
        our_flags(parser)
        return parser

    if llm:
        with pytest.raises(argparse.ArgumentError, match="conflicting option string"):
            parse_args(too_early, ARGV)


def test_add_flag_if_absent_returns_the_action_in_force() -> None:
    parser = argparse.ArgumentParser()
    first = parser.add_argument("--a-flag", action="store_true")
    assert coexist.add_flag_if_absent(parser, "--a-flag", type=int) is first
    group = parser.add_argument_group("ours")
    second = coexist.add_flag_if_absent(group, "--b-flag", "-b", type=int)
    assert coexist.add_flag_if_absent(parser, "-b") is second
    assert parser.parse_args(["--a-flag", "-b", "4"]) == argparse.Namespace(a_flag=True, b_flag=4)


def test_an_old_mindspeed_without_remove_and_features(folder: Path, registry: Registry) -> None:
    source = MINDSPEED["mindspeed/patch_utils.py"].replace("def remove_patches", "def not_yet")
    write(folder, {"mindspeed/patch_utils.py": source})
    ours(registry)
    importlib.import_module("mindspeed.patch_utils")
    host()
    registry.verify("ours")
    states = {row.target.rpartition(".")[2]: row.state for row in registry.list(coexist.GROUP)}
    assert states == {"apply_patches": "applied", "remove_patches": "missing", "register_features_args": "waiting"}
    assert refusals() == []
    registry.verify(coexist.GROUP)


@pytest.mark.parametrize("order", ["ours mindspeed", "mindspeed ours"])
def test_a_mindspeed_with_another_manager_is_refused(folder: Path, registry: Registry, order: str) -> None:
    source = MINDSPEED["mindspeed/patch_utils.py"].replace("def apply_patches", "def apply_all_patches")
    write(folder, {"mindspeed/patch_utils.py": source})
    if order == "mindspeed ours":
        importlib.import_module("mindspeed.patch_utils")
        with pytest.raises(PatchError, match="MindSpeedPatchesManager has no 'apply_patches'"):
            ours(registry)
        return
    ours(registry)
    importlib.import_module("mindspeed.patch_utils")
    (refusal,) = refusals()
    assert "has no 'apply_patches'" in refusal and "install a MindSpeed" in refusal


def test_installed_twice_guards_once(folder: Path, registry: Registry) -> None:
    coexist.install(registry, our_flags)
    coexist.install(registry, our_flags)
    assert len(registry.list(coexist.GROUP)) == 3
