"""The words to and from ClusterD: field numbers, addresses, and what makes no sense."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mindspeed_tft.clusterd import client, recover_pb2
from mindspeed_tft.clusterd import words as w
from mindspeed_tft.clusterd.address import Address
from mindspeed_tft.control.config import ControlConfig
from mindspeed_tft.engine.types import Deadlines

# Of the interface: a number that is another one here would be read as another field there.
FIELDS = {
    "ClientInfo": {"jobId": 1, "role": 2},
    "Status": {"code": 1, "info": 2},
    "FaultRank": {"rankId": 1, "faultType": 2},
    "ProcessManageSignal": {
        "uuid": 1, "jobId": 2, "signalType": 3, "actions": 4, "faultRanks": 5, "changeStrategy": 6, "timeout": 7,
        "nodeRankIds": 8, "extraParams": 9,
    },
    "StopCompleteRequest": {"jobId": 1, "status": 2, "faultRanks": 3},
    "RecoverStrategyRequest": {"jobId": 1, "faultRanks": 2, "strategies": 3},
    "RecoverStatusRequest": {"jobId": 1, "status": 2, "strategy": 3, "isolateRankIds": 4},
    "ProcessFaultRequest": {"jobId": 1, "faultRanks": 2},
}  # fmt: skip


def test_fields_have_the_numbers_of_the_interface() -> None:
    messages = recover_pb2.DESCRIPTOR.message_types_by_name
    assert {name: {f.name: f.number for f in message.fields} for name, message in messages.items()} == FIELDS


def test_a_signal_and_a_report_on_the_wire() -> None:
    faults = [recover_pb2.FaultRank(rankId="3", faultType="0")]
    message = recover_pb2.ProcessManageSignal(
        uuid="u", jobId="j", signalType="changeStrategy", actions=["change_strategy"], faultRanks=faults,
        changeStrategy="recover", timeout=33, nodeRankIds=["1"], extraParams="recover-in-place",
    )  # fmt: skip
    found = client.from_wire(message)
    wanted = ("u", "changeStrategy", ("change_strategy",), ((3, "0"),), "recover", 33, (1,), "recover-in-place")
    assert found == w.Signal(*wanted)
    request = client.to_wire(w.Report("ReportRecoverStatus", 405, "why", strategy="retry"), "j")
    assert (request.jobId, request.status.code, request.status.info, request.strategy) == ("j", 405, "why", "retry")


@pytest.mark.parametrize("field", [{"faultRanks": [recover_pb2.FaultRank(rankId="x")]}, {"nodeRankIds": ["-"]}])
def test_what_is_no_rank_makes_no_sense(field: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        client.from_wire(recover_pb2.ProcessManageSignal(signalType="stopTrain", **field))


@pytest.mark.parametrize(
    ("url", "target", "tls"),
    [
        ("http://10.0.0.1:8899", "10.0.0.1:8899", False),
        ("http://clusterd", "clusterd:8899", False),
        ("https://clusterd:1234/", "clusterd:1234", True),
        ("http://[fd00::1]", "[fd00::1]:8899", False),
    ],
)
def test_addresses(url: str, target: str, tls: bool) -> None:
    found = Address.parse(url)
    assert (found.target, found.tls) == (target, tls)


@pytest.mark.parametrize("url", ["clusterd:8899", "ftp://clusterd", "http://", "http://clusterd/path", "http://a:b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError):
        Address.parse(url)


def test_a_controller_that_asks_nobody_imports_nothing_of_it() -> None:
    deadlines = Deadlines(heartbeat=1, heartbeat_lost=5, stop=10, order=8, dump=30, exit=4)
    config = ControlConfig(deadlines, 2, 2, 0, 1, "here", "/tmp", "run").to_json()
    code = (
        "import sys; from mindspeed_tft.control.config import ControlConfig; "
        "from mindspeed_tft.control.controller import Controller; from mindspeed_tft.engine.machine import Engine; "
        "from mindspeed_tft.observe.incident import Recorder; config = ControlConfig.from_json(sys.argv[1]); "
        "Controller(config, Engine(config.deadlines, 2), Recorder('/tmp', 'run')); "
        "print([name for name in sys.modules if name.startswith('mindspeed_tft.clusterd')])"
    )
    found = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "[]", found.stderr
