"""torch.distributed.elastic: where a node stands in its job, and how its launcher keeps hold of the job's store.

Under static rendezvous the store lives in the launcher of node 0, at --master-addr; under c10d in the launcher at
--rdzv-endpoint. A node that joins a job that trains takes the place of a node that is gone.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mindspeed_tft.agent.keeper import Keeper, Place
from mindspeed_tft.agent.places import JobStore, Keys, Owner, journal, newest_generation, owner_of
from mindspeed_tft.agent.reboot import write_whole
from mindspeed_tft.agent.supervisor import say, try_to_write
from mindspeed_tft.engine.types import Deadlines
from mindspeed_tft.groups import sockets
from mindspeed_tft.patches import torch_dynamic_rendezvous, torch_store

# In the launcher's directory, once all is kept that a later node needs: {node, nodes, generation, life, kept}
NODE_FILE = "node.json"
IDENTICAL = "TORCH_ELASTIC_WORKER_IDENTICAL"  # torch: all nodes have equally many workers, and ranks follow from that
_ROLE, _RANKS = "torchelastic/role_info", "torchelastic/assigned_ranks"


class Kind(Protocol):
    """What differs between torch's kinds of rendezvous."""

    @property
    def prefix(self) -> str:
        """Of what torch's launchers tell each other in the store."""

    @property
    def copied(self) -> tuple[str, ...]:
        """Keys that a node asks for when it joins, beside those of both kinds."""

    def generation(self, store: Any, keys: Keys) -> int:
        """The start of all workers that this node is part of."""

    def adopt(self, store: Any) -> None:
        """The rendezvous has lost its store: `store` is a connection to the one that is there."""

    def refill(self, store: Any, nodes: int) -> None:
        """The same, where the one that is there is another one, and knows only what a `Keeper` has written."""


class Static:
    """--master-addr, --node-rank: the store waits for all nodes when it is made, and for nobody later."""

    copied: tuple[str, ...] = ()

    def __init__(self, agent: Any, address: tuple[str, int], patience: float) -> None:
        self._agent, self._address, self._patience = agent, address, patience
        self.prefix = str(agent._worker_group.spec.rdzv_handler.get_run_id())

    def generation(self, store: Any, keys: Keys) -> int:
        """The restart count; that of the job, which may have started anew before this launcher came."""
        agent, most = self._agent, self._agent._worker_group.spec.max_restarts
        own = most - agent._remaining_restarts
        newest = newest_generation(store, keys, most)
        if newest is None or newest <= own:
            return int(own)
        agent._remaining_restarts = most - newest
        return newest

    def adopt(self, store: Any) -> None:
        self._agent._worker_group.spec.rdzv_handler._store = store

    def refill(self, store: Any, nodes: int) -> None:
        self.adopt(store)
        torch_store.connect(*self._address, self._patience, patience=self._patience, nodes=nodes)


class Dynamic:
    """--rdzv-backend c10d: the store keeps a state that all launchers write."""

    def __init__(self, agent: Any, seat: torch_dynamic_rendezvous.Seat, patience: float) -> None:
        self._handler = agent._worker_group.spec.rdzv_handler
        self._seat, self._patience = seat, patience
        self.prefix = f"torch.rendezvous.{self._handler.get_run_id()}.{seat.round}"
        self.copied = (f"{self.prefix}/MASTER_ADDR", f"{self.prefix}/MASTER_PORT")

    def generation(self, store: Any, keys: Keys) -> int:
        return self._seat.round

    def adopt(self, store: Any) -> None:
        torch_dynamic_rendezvous.use(self._handler, store)

    def refill(self, store: Any, nodes: int) -> None:
        torch_dynamic_rendezvous.refill(self._handler, store, self._patience)


class Node:
    """This launcher's node, in one generation of a job of several nodes."""

    def __init__(self, agent: Any, store: Any, deadlines: Deadlines, directory: Path) -> None:
        """Find its place, after each rendezvous. `store`: the TCPStore of the rendezvous."""
        self._agent, self._deadlines, self._file = agent, deadlines, directory / NODE_FILE
        self._patience = deadlines.heartbeat_lost  # seconds of silence after which a store or a launcher counts as gone
        self.host, self.port = store.host, store.port
        torch_store.limit_silence(sockets.tcp_sockets(), self.port, self._patience)
        seat = torch_dynamic_rendezvous.seat_of(agent._worker_group.spec.rdzv_handler)
        self._kind: Kind = (
            Static(agent, (self.host, self.port), self._patience)
            if seat is None
            else Dynamic(agent, seat, self._patience)
        )
        connection = self.connect(self._patience)
        self.place = self._find_place(connection)
        owner = Owner(socket.gethostname(), os.getpid(), self.place.life)
        if not self.place.replaced:  # else the keeper sees first whether the last owner is silent
            connection.set(self.place.keys.node(self.place.node), owner.to_json())
        self.keeper = Keeper(
            self.place,
            owner,
            self,
            period=deadlines.heartbeat,
            patience=self._patience,
            forgotten=deadlines.reboot + self._patience,
            complete=self._tell,
        )

    @property
    def job_store(self) -> JobStore:
        """Where the workers of this generation meet."""
        place = self.place
        return JobStore(self.host, self.port, place.keys.workers(place.generation), self._patience)

    def connect(self, seconds: float) -> Any:
        return torch_store.connect(self.host, self.port, seconds, patience=self._patience)

    def start_anew(self) -> None:
        """The next rendezvous is one of a node that comes later."""
        say("those who train have found the job's store again: the workers of this node start anew, beside them")
        torch_dynamic_rendezvous.leave_seat(self._agent._worker_group.spec.rdzv_handler)

    def adopt(self, empty: bool) -> None:
        """torch's launcher gets a connection that lives, of its own: it may wait in a request for long."""
        from torch._C._distributed_c10d import PrefixStore

        store = self.connect(self._patience)
        self._agent._store = self._agent._worker_group.store = PrefixStore(self._kind.prefix, store)
        if empty:
            self._kind.refill(store, self.place.nodes)
        else:
            self._kind.adopt(store)

    def _tell(self, entries: int) -> None:
        facts = {"node": self.place.node, "nodes": self.place.nodes, "generation": self.place.generation}
        text = json.dumps({**facts, "life": self.place.life, "kept": entries})
        try_to_write(lambda: write_whole(self._file, text), "what this launcher keeps")

    def _find_place(self, store: Any) -> Place:
        group = self._agent._worker_group
        keys, node, nodes = Keys(group.spec.rdzv_handler.get_run_id()), group.group_rank, group.group_world_size
        generation = self._kind.generation(store, keys)
        token = store.compare_set(keys.started(generation), "", uuid.uuid4().hex).decode()
        replaced = bool(store.check([keys.begun(generation)]))
        owner = owner_of(store, keys, node)
        life = (owner.life if owner is not None else 0) + 1 if replaced else 0
        ranks = [worker.global_rank for worker in group.workers]
        ranks += self._ranks_of(store, (node + 1) % nodes, len(ranks))
        journals = [f"{keys.workers(generation)}/{journal(rank)}" for rank in ranks]
        return Place(keys, node, nodes, generation, token, replaced, life, self._copied(nodes), journals)

    def _ranks_of(self, store: Any, node: int, equal: int) -> Sequence[int]:
        if os.environ.get(IDENTICAL, "0") == "1":
            return range(node * equal, (node + 1) * equal)
        first = json.loads(store.get(f"{self._kind.prefix}/{_RANKS}/{node}"))[0]
        count = json.loads(store.get(f"{self._kind.prefix}/{_ROLE}/{node}"))["local_world_size"]
        return range(first, first + count)

    def _copied(self, nodes: int) -> list[str]:
        """What torch's launcher asks the store for when it joins."""
        numbered = () if os.environ.get(IDENTICAL, "0") == "1" else (_ROLE, _RANKS)
        told = [f"{self._kind.prefix}/{name}/{node}" for name in numbered for node in range(nodes)]
        return [*self._kind.copied, *told]


def join(agent: Any, deadlines: Deadlines, directory: Path) -> Node | None:
    """Find this node's place after a rendezvous; None: the job has one node, or meets in a store of another kind.

    Raises:
        RuntimeError, OSError: the store is gone.
    """
    store = torch_store.root(agent._store)
    if store is None or agent._worker_group.group_world_size == 1:
        return None
    return Node(agent, store, deadlines, directory)
