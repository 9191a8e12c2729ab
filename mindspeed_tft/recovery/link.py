"""What a rank does when its groups are to use another network link, while it is held between two steps.

It remembers the link that was kept last, and nothing else is ever built for training: after a stop in the middle of a
move, the groups are built on that one again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, Protocol

from mindspeed_tft.engine.types import LinkState, Order
from mindspeed_tft.recovery.hold import NotDone

log = logging.getLogger(__name__)


class LinkHost(Protocol):
    """The part of `recovery.host.Host` that is used here."""

    def check_link(self, link: str) -> list[str]: ...
    def move_groups(self, link: str, epoch: int, seconds: float) -> None: ...
    def test_groups(self, seconds: float) -> dict[str, str]: ...


class Links:
    """The link of this rank's groups. For the main thread."""

    def __init__(self, host: LinkHost, tell: Callable[[LinkState], None]) -> None:
        """`tell(state)`: what is to be said when this rank registers with another controller."""
        self._host, self._tell = host, tell
        self._on = ""  # that groups were moved to last, for the test to come
        self.state = LinkState()

    def carry_out(self, order: Order) -> dict[str, str]:
        """Obey a LINK order; its result.

        Raises:
            NotDone: this rank cannot, and why. It can still be held, and be moved back.
        """
        try:
            return self._act(order.payload)
        except (RuntimeError, OSError) as exc:  # whatever torch, the device or the network say of a link
            log.warning("link: %s", exc)
            raise NotDone(str(exc).strip().partition("\n")[0]) from exc

    def _act(self, payload: Mapping[str, Any]) -> dict[str, str]:
        act = str(payload["act"])
        if act == "check":
            return {"addresses": ",".join(self._host.check_link(str(payload["link"])))}
        if act == "move":
            epoch, self._on = int(payload["epoch"]), str(payload["link"])
            self._set(replace(self.state, unsettled=epoch))
            self._host.move_groups(self._on, epoch, float(str(payload["seconds"])))
            return {}
        if act == "test":
            tested = self._host.test_groups(float(str(payload["seconds"])))
            if self._on == self.state.name:
                self._set(replace(self.state, unsettled=0))
            return {**tested, "at": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        if act == "keep":
            self.settle(payload.get("link"))
            return {}
        raise NotDone(f"unknown act {act!r}: the controller is of another version")

    def settle(self, told: Any) -> None:
        """This is the link from now on; None: as it was when the job started. Told with an order to keep it, and with
        every order to build the groups anew."""
        if told:
            found = {str(name): str(value) for name, value in dict(told).items()}
            state = LinkState(found["name"], found["before"], found["since"], int(found["epoch"]))
        else:
            state = LinkState()
        self._set(state)

    def _set(self, state: LinkState) -> None:
        self.state = state
        self._tell(state)
