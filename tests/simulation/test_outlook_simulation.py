"""What an operator is told of the next fault is what then happens: the outlook against simulated jobs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from mindspeed_tft.engine.outlook import ENDS_SAVED, ENDS_UNSAVED, GOES_ON

from .layout import Agent, Fault, Layout, Scenario
from .simulation import Simulation

LAYOUTS = {
    "replicas": Layout(parts=2, d=4, n=2, per_host=1),
    "replicas beside each other": Layout(parts=2, d=4, n=2, per_host=6),  # one host holds both copies of a shard
    "no replicas": Layout(parts=1, d=4, n=1, per_host=1),
}
FAULTS = {"process": "kill", "device memory": "memory", "link": "link", "host": "kill_host"}
OUTCOMES = {GOES_ON: ("finished",), ENDS_SAVED: ("dumped", "exists"), ENDS_UNSAVED: ("failed",)}


class Foretold(Simulation):
    """Asks for the outlook in the moment before the fault."""

    outlook: dict[str, dict[str, Any]]

    def _strike(self, rank: Any, fault: Fault) -> None:
        told: Any = self.engine.status()["outlook"]
        self.outlook = {one["fault"]: one for one in told}
        super()._strike(rank, fault)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", FAULTS)
def test_what_is_foretold_happens(kind: str, name: str) -> None:
    seen = set()
    for retry, reboot, (saves, one_way) in product((False, True), (False, True), ((0, False), (2, False), (2, True))):
        agent = Agent() if reboot else None
        # In the middle of a step, long after a heartbeat has told of the last checkpoint.
        fault = Fault(FAULTS[kind], "compute@11", 1, 0.0)
        layout = LAYOUTS[name]
        scenario = Scenario(7, layout, (fault,), retry=retry, agent=agent, save_every=saves, last_step=14,
                            one_way=one_way)  # fmt: skip
        run = Foretold(scenario).run()
        assert run.struck, scenario
        told, outcome = run.outlook[kind], run.closed[0][1].outcome
        assert outcome in OUTCOMES[told["result"]], f"{scenario}: foretold {told}, and it {run.closed[0][1]}"
        if told["result"] == GOES_ON:
            rewound = run.recovered[0][1].summary.startswith("Rewound online")
            assert rewound is ("load the checkpoint" in told["text"]), f"{scenario}: foretold {told}"
        seen.add(told["result"])
    assert len(seen) > 1, "it depends on the settings"
