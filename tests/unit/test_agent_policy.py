"""Which dead worker is started again, and when."""

from __future__ import annotations

import pytest

from mindspeed_tft.agent import policy
from mindspeed_tft.agent.policy import Again, Limits, Policy, Report
from mindspeed_tft.engine.incident import EXIT_MOVED, EXIT_REBORN

KILLED = -9


def decide(
    chosen: Policy,
    status: int = KILLED,
    *,
    rank: int = 0,
    marked: bool = True,
    peers: dict[int, int] | None = None,
    now: float = 0.0,
) -> Again | Report:
    return chosen.decide(rank, status, marked=marked, peers=peers or {}, now=now)


@pytest.mark.parametrize(
    ("status", "again"),
    [(KILLED, True), (-15, True), (1, True), (EXIT_REBORN, True)] + [(code, False) for code in (0, 2, 75, 76, 77, 79)],
)
def test_by_status(status: int, again: bool) -> None:
    assert isinstance(decide(Policy(), status), Again) is again
    assert isinstance(decide(Policy(), status, marked=False), Report)


@pytest.mark.parametrize("status", [0, 75, 76, 77])
def test_nobody_is_started_into_a_job_that_ends(status: int) -> None:
    answer = decide(Policy(), peers={3: status})
    assert isinstance(answer, Report) and "worker 3" in answer.why
    assert isinstance(decide(Policy(), peers={3: 1}), Again), "another failure is no reason"


def test_nobody_is_started_on_a_node_that_leaves() -> None:
    answer = decide(Policy(), peers={3: EXIT_MOVED})
    assert isinstance(answer, Report) and "this node leaves the job: worker 3" in answer.why


def test_the_first_at_once_then_later_and_later_then_not() -> None:
    chosen = Policy()
    assert [decide(chosen, now=now) for now in (0.0, 1.0, 3.0)] == [Again(0.0), Again(1.0), Again(2.0)]
    answer = decide(chosen, now=6.0)
    assert isinstance(answer, Report) and "3 times within 60 s" in answer.why
    assert isinstance(decide(chosen, rank=1, now=6.0), Again), "it is the limit of one worker"
    assert decide(chosen, EXIT_REBORN, now=6.0) == Again(3.0), "who asks is started again, but not in a hurry"


def test_deaths_long_ago_are_forgotten() -> None:
    chosen = Policy()
    assert [decide(chosen, now=61.0 * number) for number in range(10)] == [Again(0.0)] * 10


def test_the_limit_of_a_node() -> None:
    chosen = Policy(Limits(total=2))
    assert isinstance(decide(chosen, rank=0), Again) and isinstance(decide(chosen, rank=1), Again)
    for status in (KILLED, EXIT_REBORN):
        answer = decide(chosen, status, rank=2)
        assert isinstance(answer, Report) and policy.ENV_LIMIT in answer.why


def test_the_limit_in_the_environment() -> None:
    assert policy.limits({}).total == 100
    assert policy.limits({policy.ENV_LIMIT: "0"}).total == 0
    for wrong in ("-1", "many", "1.5"):
        with pytest.raises(ValueError, match=policy.ENV_LIMIT):
            policy.limits({policy.ENV_LIMIT: wrong})
