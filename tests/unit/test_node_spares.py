"""What a spare launcher makes of the state of a c10d rendezvous. Pure, on torch's own records."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import api, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action, _NodeDesc

from mindspeed_tft.engine.types import Deadlines
from mindspeed_tft.patches import torch_dynamic_rendezvous
from mindspeed_tft.patches.torch_dynamic_rendezvous import Join, Seat

ME, *OTHERS = (_NodeDesc("host", pid, 0) for pid in range(1, 5))
DEADLINES = Deadlines(heartbeat=0.1, heartbeat_lost=1.0, stop=2.0, order=5.0, dump=8.0, exit=3.0, reboot=5.0)


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_dynamic_rendezvous, "_deadlines", DEADLINES)


class Backend:
    """The store of a job that trains with two nodes in round 1."""

    def _call_store(self, operation: str, *_keys: object) -> Any:
        return {"check": True, "get": b"2"}[operation]


class Handler:
    """The part of torch's handler that is needed."""

    def __init__(self, state: dynamic_rendezvous._RendezvousState) -> None:
        self._state_holder = self
        self._backend, self.state = Backend(), state

    def get_run_id(self) -> str:
        return "toy"


def state_of(number: int, *participants: _NodeDesc, complete: bool) -> dynamic_rendezvous._RendezvousState:
    made = dynamic_rendezvous._RendezvousState()
    made.round, made.complete = number, complete
    made.participants = {node: rank for rank, node in enumerate(participants)}
    return made


def move(join: Join, state: dynamic_rendezvous._RendezvousState) -> Any:
    timeout = dynamic_rendezvous.RendezvousTimeout()
    settings = dynamic_rendezvous.RendezvousSettings("toy", 2, 2, timeout, timedelta(seconds=5), 3)
    return torch_dynamic_rendezvous._move(join, dynamic_rendezvous._RendezvousContext(ME, state, settings))


def join_of(state: dynamic_rendezvous._RendezvousState, spare: int | None) -> Join:
    return Join(Handler(state), spare)


@pytest.mark.parametrize(
    ("state", "spare", "waits"),
    [
        pytest.param(state_of(0, complete=False), 1, True, id="an empty store"),
        pytest.param(state_of(0, complete=False), 0, True, id="an empty store, and the first round"),
        pytest.param(state_of(0, *OTHERS[:1], complete=False), 0, True, id="others begin"),
        pytest.param(state_of(0, *OTHERS[:2], complete=True), 1, True, id="others have begun"),
        pytest.param(state_of(2, complete=False), 1, True, id="all were silent"),
        pytest.param(state_of(2, *OTHERS[:1], complete=False), 1, False, id="all workers start anew"),
        pytest.param(state_of(0, complete=False), None, False, id="no spare"),
    ],
)
def test_a_spare_opens_no_round(state: dynamic_rendezvous._RendezvousState, spare: int | None, waits: bool) -> None:
    assert move(join_of(state, spare), state) == (_Action.SYNC if waits else None)
    assert ME not in state.participants


def test_its_turn() -> None:
    state = state_of(1, *OTHERS[:2], complete=True)
    join = join_of(state, None)
    assert move(join, state) == _Action.ADD_TO_REDUNDANCY_LIST and join.spare == 1
    state.redundancy_list.add(ME)
    state.last_heartbeats[ME] = datetime.now(timezone.utc)
    assert move(join, state) == _Action.SYNC
    del state.participants[OTHERS[0]]
    assert move(join, state) == _Action.KEEP_ALIVE
    assert state.participants == {OTHERS[1]: 1, ME: 0} and not state.redundancy_list


def test_it_leaves_the_list_when_the_job_is_over_and_ends() -> None:
    state = state_of(1, *OTHERS[:2], complete=True)
    state.closed = True
    state.redundancy_list.add(ME)
    join = join_of(state, 1)
    assert move(join, state) == _Action.REMOVE_FROM_REDUNDANCY_LIST
    state.redundancy_list.clear()
    assert move(join, state) is None, "torch's turn"

    def closed() -> None:
        raise api.RendezvousClosedError

    with pytest.raises(api.RendezvousGracefulExitError, match="the job is over"):
        torch_dynamic_rendezvous._join(join, closed)
    with pytest.raises(api.RendezvousClosedError):
        torch_dynamic_rendezvous._join(join_of(state, None), closed)


def test_it_knows_that_the_job_is_over_when_the_store_goes() -> None:
    state = state_of(1, *OTHERS[:2], complete=True)
    state.closed = True

    def gone() -> None:
        raise api.RendezvousConnectionError

    with pytest.raises(api.RendezvousGracefulExitError, match="the job is over"):
        torch_dynamic_rendezvous._join(join_of(state, 1), gone)
    with pytest.raises(api.RendezvousConnectionError):
        torch_dynamic_rendezvous._join(join_of(state, None), gone)


def test_it_waits_so_long_for_those_who_train_and_joins_as_in_a_first_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    state = state_of(0, complete=False)
    join = join_of(state, 0)
    tries = 0

    def attempt() -> Any:
        nonlocal tries
        tries += 1
        return move(join, state)

    assert torch_dynamic_rendezvous._join(join, attempt) == _Action.SYNC
    now += DEADLINES.reboot + DEADLINES.heartbeat_lost
    assert torch_dynamic_rendezvous._join(join, attempt) == _Action.SYNC
    now += 0.1
    assert torch_dynamic_rendezvous._join(join, attempt) is None and join.spare is None
    assert tries == 4 and capsys.readouterr().err.count("it joins as in a first start") == 1


def test_a_round_that_has_only_the_number_of_ours() -> None:
    seat = Seat(1, 0, {ME, OTHERS[0]})
    assert seat.of(state_of(1, ME, complete=True)) and seat.of(state_of(1, *OTHERS, complete=True))
    for other in (
        state_of(1, *OTHERS[1:], complete=True),
        state_of(2, ME, complete=True),
        state_of(1, ME, complete=False),
    ):
        assert not seat.of(other)
