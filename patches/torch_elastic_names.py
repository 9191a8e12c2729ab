"""torch.distributed.elastic: the modules that are patched, and the name of the patches' group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ELASTIC = "torch-elastic"

API = "torch.distributed.elastic.multiprocessing.api"
AGENT = "torch.distributed.elastic.agent.server.api"
LOCAL = "torch.distributed.elastic.agent.server.local_elastic_agent"
DYNAMIC = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
STATIC = "torch.distributed.elastic.rendezvous.static_tcp_rendezvous"

Call = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
