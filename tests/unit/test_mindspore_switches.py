"""What the environment of a MindSpore job says: its names keep their meaning, and nothing is ignored."""

from __future__ import annotations

import pytest

from mindspeed_tft.mindspore import places, switches, training
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
        ({}, {"tft_fault_rules": "rules.yaml"}, "texts of errors decide nothing"),
        ({}, {"tft_clusterd": "http://10.0.0.9:8899", "tft_clusterd_job": "j"}, "that port is not encrypted"),
        ({}, {"tft_clusterd": "http://127.0.0.1:8899"}, "there is none"),
        ({"MINDX_TASK_ID": "j", "MINDX_SERVER_IP": "10.0.0.9", "PROCESS_RECOVER": "on"}, {}, "asked for by environ"),
    ],
)
def test_settings_that_mindspore_cannot_serve(environ: dict[str, str], given: dict[str, object], word: str) -> None:
    with pytest.raises(Refused, match=word):
        training.settle(environ, given, switches.read(environ))


def test_clusterd_decides_for_a_job_of_mindcluster() -> None:
    environ = {"MINDX_TASK_ID": "j", "MINDX_SERVER_IP": "10.0.0.9", "PROCESS_RECOVER": "on", "LOCAL_PROXY_ENABLE": "on"}
    found = training.settle(environ, {}, switches.read(environ))
    assert (found.clusterd, found.tft_clusterd_job) == ("http://127.0.0.1:8899", "j")
    assert training.settle(environ, {"tft_clusterd": "none"}, switches.read(environ)).clusterd == ""


def test_ranks_count_on_no_more_time_than_the_agent_gives_them() -> None:
    found = training.settle({}, {"tft_deadline": 600.0}, switches.read({}))
    agent = {places.LIFE: "0", places.PATIENCE: "150"}
    alone, below = places.deadlines(found, {}), places.deadlines(found, agent)
    assert alone.stop + alone.dump + alone.exit == pytest.approx(600.0)
    assert below.stop + below.dump + below.exit < 150.0
    told = training.settle({"TTP_OT": "400"}, {"tft_deadline": 600.0}, switches.read({}))
    with pytest.raises(Refused, match=r"TTP_OT: .*after 150 s.*set TFT_MSRUN_PATIENCE to at least 603; or .*most 102"):
        places.deadlines(told, agent)
    fits = training.settle({"TTP_OT": "100"}, {"tft_deadline": 600.0}, switches.read({}))
    assert places.deadlines(fits, agent).dump == 100.0


def test_hccl_moves_links_only_with_its_retry() -> None:
    assert not switches.why_no_link_switch(switches.read({"HCCL_OP_RETRY_ENABLE": "L0:0, L1:1, L2:1"}))
    for text, missing in (("L0:1, L1:1", "L2 is not on"), ("L0:0, L1:0, L2:0", "L1, L2"), ("", "L1, L2")):
        assert missing in switches.why_no_link_switch(switches.read({"HCCL_OP_RETRY_ENABLE": text}))
    with pytest.raises(Refused, match="HCCL_OP_RETRY_ENABLE"):
        switches.read({"HCCL_OP_RETRY_ENABLE": "L7:1"})


MSRUN = {"MS_WORKER_NUM": "8", "MS_NODE_ID": "5", "MS_SCHED_HOST": "10.0.0.7", "MS_SCHED_PORT": "8118"}


def test_a_worker_of_msrun_knows_its_place() -> None:
    found = places.find({**MSRUN, places.LOCAL: "4", places.LIFE: "2"})
    assert (found.rank, found.world_size, found.local_rank, found.nodes) == (5, 8, 1, 2)
    config = found.config(training.settle({}, {}, switches.read({})).deadlines(), "incidents", strategies=("dump",))
    assert (config.node_rank, config.nnodes, config.controller_host, config.restart) == (1, 2, "10.0.0.7", 2)
    assert (config.run_name, config.master) == ("msrun-8118", "10.0.0.7:8118")


def test_workers_of_one_host_are_all_local_and_a_program_alone_is_a_job_of_one() -> None:
    found = places.find({**MSRUN, "MS_SCHED_HOST": "127.0.0.1"})
    assert (found.local_rank, found.local_world_size, found.nodes) == (5, 8, 1)
    assert (places.find({}).world_size, places.find({}).rank) == (1, 0)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"MS_NODE_ID": ""}, "MS_NODE_ID.*--node_rank"),
        ({"MS_WORKER_NUM": "many"}, "MS_WORKER_NUM"),
        ({places.LOCAL: "3"}, "not a multiple of 3"),
    ],
)
def test_a_place_that_cannot_be_known_is_refused(changed: dict[str, str], word: str) -> None:
    with pytest.raises(Refused, match=word):
        places.find({**MSRUN, places.LOCAL: "4", **changed})


def test_under_the_agent_a_dying_gasp_is_possible() -> None:
    assert places.why_no_dying_gasp({places.LIFE: "0"}) == ""
