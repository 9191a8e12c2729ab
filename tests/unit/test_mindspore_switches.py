"""What the environment of a MindSpore job turns on: its names keep their meaning, and nothing is ignored."""

from __future__ import annotations

import pytest

from mindspeed_tft.mindspore import switches, training
from mindspeed_tft.settings import Refused


def test_without_a_word_the_line_in_the_script_is_the_wish() -> None:
    found = switches.read({})
    assert (found.named, found.dump, found.pause, found.restart, found.address, found.port) == (
        False, True, True, False, None, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "dump", "pause", "restart"),
    [
        ("{TTP:1,TSP:1}", True, True, False),
        ("{TSP:1}", False, True, False),
        ("'{ TTP:1, UCE:0, RSC:1 }'", True, False, True),
        ("{TTP:0}", False, False, False),
        ("{}", False, False, False),
    ],
)
def test_features(text: str, dump: bool, pause: bool, restart: bool) -> None:
    found = switches.read({"MS_ENABLE_TFT": text})
    assert (found.named, found.dump, found.pause, found.restart) == (True, dump, pause, restart)
    assert found.any == (dump or pause)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{UCE:1}", "in place"),
        ("{TTP:1,ARF:1}", "cannot join"),
        ("{HCCE:1}", "in place"),
        ("{TRE:2}", "norm"),
        ("{TTP:2}", "on with 1"),
        ("{TPT:1}", "unknown feature 'TPT'"),
        ("TTP:1", "of the form"),
        ("{TTP}", "of the form"),
    ],
)
def test_what_is_not_served_is_refused_by_name(text: str, word: str) -> None:
    with pytest.raises(Refused, match=word) as refused:
        switches.read({"MS_ENABLE_TFT": text})
    assert refused.value.flag.startswith("MS_ENABLE_TFT") and refused.value.remedy


def test_controller_address_and_port_become_settings() -> None:
    environ = {"MS_TFT_IP": "10.0.0.7", "MS_TFT_PORT": "30001"}
    found = training.settle(environ, {"tft_deadline": 60.0, "tft_controller_port": 30002}, switches.read(environ))
    assert (found.tft_controller_address, found.tft_controller_port, found.tft_deadline) == ("10.0.0.7", 30001, 60.0)


@pytest.mark.parametrize("text", ["80", "70000", "port"])
def test_a_port_that_is_none(text: str) -> None:
    with pytest.raises(Refused, match="MS_TFT_PORT"):
        switches.read({"MS_TFT_PORT": text})


@pytest.mark.parametrize(
    ("environ", "given", "word"),
    [
        ({"HIGH_AVAILABILITY": "retry"}, {}, "enable_hbmfault_repair"),
        ({}, {"enable_worker_reboot": True}, "enable_worker_reboot"),
        ({}, {"tft_dedline": 60}, "tft_dedline"),
        ({}, {"tft_deadline": "soon"}, "--tft-deadline"),
    ],
)
def test_settings_that_mindspore_cannot_serve(environ: dict[str, str], given: dict[str, object], word: str) -> None:
    with pytest.raises(Refused, match=word):
        training.settle(environ, given, switches.read(environ))


def test_hccl_moves_links_only_with_its_retry() -> None:
    assert not switches.why_no_link_switch(switches.read({"HCCL_OP_RETRY_ENABLE": "L0:0, L1:1, L2:1"}))
    for text, missing in (("L0:1, L1:1", "L2 is not on"), ("L0:0, L1:0, L2:0", "L1, L2"), ("", "L1, L2")):
        assert missing in switches.why_no_link_switch(switches.read({"HCCL_OP_RETRY_ENABLE": text}))
    with pytest.raises(Refused, match="HCCL_OP_RETRY_ENABLE"):
        switches.read({"HCCL_OP_RETRY_ENABLE": "L7:1"})
