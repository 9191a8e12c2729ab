"""What of MindSpeed is refused beside the plugin, and who is in force where MindSpeed-LLM acts on the same flags."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import coexistence_support
import pytest
from coexistence_support import refusals, start, with_llm, write

from mindspeed_tft.patches import mindspeed as coexist
from mindspeed_tft.registry import Registry
from mindspeed_tft.settings import Refused

folder, registry = coexistence_support.folder, coexistence_support.registry  # fixtures


def test_no_conflict_beside_mindspeed_alone(folder: Path, registry: Registry) -> None:
    start("mindspeed ours", registry)
    assert refusals(enable_high_availability=True, ttp_enabled=False) == []


def test_ttp_of_mindspeed_is_refused(folder: Path, registry: Registry) -> None:
    start("mindspeed ours", registry)
    (refusal,) = refusals(ttp_enabled=True)
    assert refusal.startswith("--ttp-enabled: ") and "Remedy: leave it out" in refusal

    # Switched on by repatch, where no argument tells.
    write(folder, {"mindspeed/core/__init__.py": "", "mindspeed/core/ttp/__init__.py": "def new(cls): pass"})
    manager = sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager
    manager.register_patch("tinylm.optimizer.Chained.new", importlib.import_module("mindspeed.core.ttp").new)
    (refusal,) = refusals()
    assert refusal.startswith("--ttp-enabled: ") and "repatch" in refusal


def test_what_mindspeed_patches_by_is_judged_too(folder: Path, registry: Registry) -> None:
    """`repatch` changes what MindSpeed has read from the command line, and not what Megatron reads from it."""
    start("mindspeed ours", registry)
    write(
        folder,
        {"mindspeed/args_utils.py": "import types\n_MINDSPEED_ARGS = types.SimpleNamespace(swap_optimizer=True)"},
    )
    importlib.import_module("mindspeed.args_utils")
    (refusal,) = refusals(swap_optimizer=False)
    assert refusal.startswith("--swap-optimizer: ")


def test_options_of_the_same_name_are_nobodys_business_without_mindspeed() -> None:
    assert refusals(swap_optimizer=True, pipeline_model_parallel_layout="Et|L") == []


def test_mindspeed_llm_is_in_force_where_it_acts_on_the_same_flag(folder: Path, registry: Registry) -> None:
    start("mindspeed ours", registry)
    on, off = argparse.Namespace(enable_high_availability=True), argparse.Namespace(enable_high_availability=False)
    assert coexist.stays_off(on) == ""
    with_llm(folder)
    assert coexist.stays_off(off) == ""
    line = coexist.stays_off(on)
    assert "MindSpeed-LLM's is in force" in line and "this plugin stays off" in line and "facade.mindio" in line

    features = sys.modules["mindspeed.features_manager.features_manager"].MindSpeedFeaturesManager
    features.FEATURES_LIST.pop()
    assert coexist.stays_off(on) == ""
    write(folder, {"mindspeed_llm/core/__init__.py": "", "mindspeed_llm/core/high_availability.py": "def f(): pass"})
    manager = sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager
    manager.register_patch("tinylm.training.train", importlib.import_module("mindspeed_llm.core.high_availability").f)
    assert coexist.stays_off(on) == line and refusals(enable_high_availability=True) == []

    manager.patches_info.pop("tinylm.training.train")
    assert coexist.stays_off(on) == ""
    write(folder, {"mindspeed_llm/training/__init__.py": "", "mindspeed_llm/training/training.py": ""})
    importlib.import_module("mindspeed_llm.training.training")
    assert coexist.stays_off(on) == line


def test_mindspeed_of_old_acts_on_the_same_flag_itself(folder: Path, registry: Registry) -> None:
    adaptor = start("mindspeed ours", registry)
    on = argparse.Namespace(enable_high_availability=True)
    assert coexist.stays_off(on) == ""
    adaptor.high_availability_adaptation = lambda manager, args: None  # as the one for core_r0.6.0 has it
    assert "So MindSpeed's is in force" in coexist.stays_off(on)


def test_mindspeed_llm_without_mindio_is_refused(folder: Path) -> None:
    with pytest.raises(Refused, match=r"needs mindio_ttp.*Remedy: import mindspeed_tft.facade.mindio"):
        coexist.check_mindio()
    write(folder, {"mindio_ttp/__init__.py": ""})
    coexist.check_mindio()


class Chunk:
    """As a model under MindSpeed, which gathers dense parameters and experts apart."""

    def start_param_sync(self, *, force_sync: bool = False, dense_or_moe_group: str | None = None) -> str:
        return dense_or_moe_group or "all"


def test_a_broken_update_does_not_leave_a_gather_of_one_part_behind() -> None:
    whole, broken = Chunk(), Chunk()
    gather: Any = broken.start_param_sync
    broken.start_param_sync = functools.partial(gather, dense_or_moe_group="dense")  # type: ignore[method-assign]
    assert broken.start_param_sync() == "dense"
    coexist.forget_partials([whole, broken])
    assert whole.start_param_sync() == broken.start_param_sync() == "all"
