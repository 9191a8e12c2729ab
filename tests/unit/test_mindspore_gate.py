"""`mindio_ttp` as MindSpore's own callback finds it: the gate is served, everything else is refused by its name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from mindspeed_tft.facade.words import FacadeError, NotServed

# What MindSpore 2.10 takes from `mindio_ttp.framework_ttp`, by the callback, the handle of MindIO and `Model.train`.
NAMES = """
tft_init_controller tft_start_controller tft_destroy_controller tft_init_processor tft_start_processor
tft_destroy_processor tft_is_reboot_node tft_get_reboot_type tft_report_error tft_wait_next_action tft_get_repair_step
tft_get_repair_type tft_can_do_uce_repair tft_set_optimizer_replica tft_set_step_args tft_end_updating_os
tft_pause_train tft_reset_limit_step tft_register_save_ckpt_handler tft_register_rename_handler
tft_register_exit_handler tft_register_stop_handler tft_register_clean_handler tft_register_repair_handler
tft_register_rebuild_group_handler tft_register_stream_sync_handler ReportState Action RepairType
""".split()


@pytest.fixture(scope="module")
def framework() -> Iterator[object]:
    from mindspeed_tft.facade import mindio as facade
    from mindspeed_tft.mindspore import mindio

    facade.uninstall()  # of another test in this process
    mindio.install()
    import mindio_ttp.framework_ttp as names

    yield names
    sys.meta_path.remove(mindio._Finder)
    for name in ("mindio_ttp", "mindio_ttp.framework_ttp"):
        del sys.modules[name]


def test_every_name_is_there_and_what_is_not_served_says_so(framework: object) -> None:
    assert [name for name in NAMES if not hasattr(framework, name)] == []
    with pytest.raises(NotServed, match=r"tft_set_optimizer_replica.*FaultTolerance"):
        framework.tft_set_optimizer_replica(0, [])  # type: ignore[attr-defined]
    with pytest.raises(FacadeError, match="tft_start_processor"):
        framework.tft_pause_train(1)  # type: ignore[attr-defined]
    assert framework.tft_is_reboot_node() is False  # type: ignore[attr-defined]


def test_a_dying_gasp_through_it_is_refused(framework: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1,TSP:1}")
    framework.tft_init_processor(0, 2, False)  # type: ignore[attr-defined]
    with pytest.raises(NotServed, match=r"TrainFaultTolerance.*FaultTolerance"):
        framework.tft_start_processor("127.0.0.1", 30000)  # type: ignore[attr-defined]


def test_nothing_of_it_needs_torch_or_mindspore() -> None:
    code = """
import sys
sys.modules["torch"] = sys.modules["mindspore"] = None
import mindspeed_tft.mindspore.mindio, mindspeed_tft.mindspore.agent, mindspeed_tft.mindspore.attach
import mindio_ttp.framework_ttp
import mindspeed_tft.control.host_main, mindspeed_tft.control.controller_main, mindspeed_tft.control.relay
import mindspeed_tft.control.candidate, mindspeed_tft.cli.main, mindspeed_tft.engine.machine
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
