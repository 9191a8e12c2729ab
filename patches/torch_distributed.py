"""torch.distributed: groups on gloo become swappable groups.

Wraps the one function through which `init_process_group` and `new_group` make a group, so that every group that
Megatron creates is a `SwappableGroup`. Built-in backend names win over registered ones in torch, therefore the name is
rewritten on the way in and what `get_backend()` reports is restored on the way out. Touched are names of gloo, and that
of a device which can be stopped (`device`): its backend is a plugin of torch, and is built as torch would build it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from mindspeed_tft.agent.places import JobStore, journal
from mindspeed_tft.groups import CommunicationAborted, GroupTable, SwappableGroup, links
from mindspeed_tft.groups.audit import Member
from mindspeed_tft.groups.start_up import Answers, Journal
from mindspeed_tft.patches import torch_store
from mindspeed_tft.patches.groups import HIGH_AVAILABILITY, MASTER
from mindspeed_tft.recovery.notices import Notice, in_store
from mindspeed_tft.registry import REGISTRY

log = logging.getLogger(__name__)

BACKEND = "tft_gloo"
DEVICE_BACKEND = "tft_device"
LOOK = 0.01  # seconds between two looks at the store
# Texts that gloo's transport puts into the RuntimeError of a failed operation.
GLOO_ERRORS = ("gloo/transport", "gloo::", "Connection closed by peer", "Connection reset by peer", "Broken pipe")

_table: GroupTable | None = None
_device = ""  # the backend of this rank's device; "": its groups are left alone


def swap_device_groups(backend: str, is_stop: Callable[[str], bool]) -> None:
    """From now on groups on this backend of the device are swappable too. Before the first of them is made.
    `is_stop(text)`: whether an error says that the device was stopped, and nothing else.

    Raises:
        RuntimeError: torch does not know the backend.
    """
    import torch.distributed as dist

    global _device
    if backend.upper() not in dist.Backend._plugins:
        raise RuntimeError(f"torch knows no backend {backend}: the library of the device did not register it")
    _device = backend
    table().is_device_stop = is_stop

    def create(options: Any, backend_options: Any) -> SwappableGroup:
        group = SwappableGroup(
            table(), options.store, options.group_rank, options.group_size, options.timeout, options.group_id,
            device_backend=backend, origin=(options, backend_options),
        )  # fmt: skip
        if table().answers is None:
            group.configure(lambda each: _build_device(each, options))
        table().add(group)
        return group

    known = dict(dist.Backend.default_device_backend_map)
    devices = list(dist.Backend.backend_capability[backend])
    dist.Backend.register_backend(DEVICE_BACKEND, create, extended_api=True, devices=devices)
    dist.Backend.default_device_backend_map.update(known)


def _build_device(group: SwappableGroup, options: Any) -> Any:
    """A plain torch group over the device's backend, as torch itself makes it of a plugin."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroup

    made = dist.Backend._plugins[group.device_backend.upper()].creator_fn(options, group.origin[1])
    if isinstance(made, ProcessGroup):
        return made
    inner = ProcessGroup(options.store, group.rank(), group.size())
    inner._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    for device in dist.Backend.backend_capability[group.device_backend]:
        inner._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, made)
    inner._set_group_name(group.group_name)  # type: ignore[arg-type]
    inner._set_group_desc(group.group_desc)
    return inner


def _device_options(group: SwappableGroup, store: Any) -> Any:
    """What torch has told the plugin about a group, with another store."""
    from torch._C._distributed_c10d import PrefixStore, _DistributedBackendOptions

    told, options = group.origin[0], _DistributedBackendOptions()
    options.store = PrefixStore(f"{group.group_name}/device/", store)
    options.group_rank, options.group_size = group.rank(), group.size()
    options.timeout, options.group_id = group.timeout, group.group_name
    options.global_ranks_in_group = told.global_ranks_in_group  # none for the world
    return options


def table() -> GroupTable:
    """The swappable groups of this process; made on first use."""
    global _table
    if _table is None:
        _table = GroupTable("gloo", GLOO_ERRORS)
        _register(_table)
    return _table


def _register(groups: GroupTable) -> None:
    import torch.distributed as dist

    def create(options: Any, _backend_options: Any) -> SwappableGroup:
        group = SwappableGroup(
            groups, options.store, options.group_rank, options.group_size, options.timeout, options.group_id
        )
        if groups.answers is None:
            group.configure(lambda g: build_gloo(g, options.store, options.timeout))
        groups.add(group)
        return group

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])


def regroup(
    epoch: int,
    timeout: timedelta,
    link: str = "",
    mend: Callable[[Any], bool] = lambda _group: False,
) -> int:
    """Give every swappable group a new backend for `epoch`, on `link` (see `groups.links`); all ranks of the job call
    it with the same words.

    The ranks meet at the job's own store, under the epoch's name: a rank of an older epoch looks elsewhere, so it can
    never join, and its connections are closed. Returns the number of groups.

    `mend(group)`: let the device mend the backend that a group of it has (`Platform.rebuild_in_place`). Only where all
    ranks have done so do these backends stay: a process that is new has none that could be mended, and where the device
    of one rank refuses, all ranks build new ones.

    Raises:
        RuntimeError: some rank did not come within `timeout` per group, or the store is gone.
    """
    import torch.distributed.distributed_c10d as c10d

    _renew_default_store(timeout)
    place = _meeting_place(f"tft-epoch-{epoch}", timeout)
    _meet(place, epoch, timeout)

    table().link = link
    count = _build_all(epoch, place, timeout, lambda groups: _mend_all(groups, mend, place, epoch, timeout))
    c10d._world.pg_coalesce_state.clear()  # an exception inside torch's coalescing manager leaves its list behind
    return count


def move(link: str, epoch: int, timeout: timedelta) -> int:
    """Give every swappable group a new backend on `link` (see `groups.links`), for `epoch`. All ranks call it with the
    same words, between two steps: nobody waits for a communication, as after a stop.

    Until all ranks have come, the old backends stay; from then on they are gone, also where the new ones cannot be
    built: the groups are aborted then, and another move or regroup has to follow. Returns the number of groups.

    Raises:
        LinkUnusable: this host cannot use the link; nothing has changed.
        CommunicationAborted: a stop of a later epoch came meanwhile.
        RuntimeError: some rank did not come within `timeout`, or cannot be reached on this link.
    """
    links.addresses(link)
    place = _meeting_place(f"tft-epoch-{epoch}", timeout)
    _meet(place, epoch, timeout)
    table().abort(f"moving to {links.words(link)}", epoch)
    table().link = link
    return _build_all(epoch, place, timeout)


def _build_all(
    epoch: int,
    place: Any,
    timeout: timedelta,
    mend: Callable[[list[SwappableGroup]], bool] = lambda _groups: False,
) -> int:
    def build(group: SwappableGroup) -> Any:
        if group.device_backend:
            return _build_device(group, _device_options(group, place))
        inner = build_gloo(group, place, timeout)
        inner.set_timeout(group.timeout)
        return inner

    return table().rebuild(epoch, build, mend)


def _mend_all(
    groups: list[SwappableGroup], mend: Callable[[Any], bool], place: Any, epoch: int, timeout: timedelta
) -> bool:
    """Whether the device has mended the backends of all these groups, on all ranks: they meet once more to say so.
    Nobody communicates before that, which mending needs as well.

    Raises:
        CommunicationAborted: a stop of a later epoch came meanwhile.
        RuntimeError: some rank did not come within `timeout`.
    """
    why = _mend_mine(groups, mend)
    if why:
        place.add("not mended", 1)
    _meet(place, epoch, timeout, "mended")
    others = place.add("not mended", 0)
    if others:
        log.warning(
            "epoch %d: %s; all groups of the device are built anew", epoch, why or f"not mended on {others} ranks"
        )
    return not others


def _mend_mine(groups: list[SwappableGroup], mend: Callable[[Any], bool]) -> str:
    """Why not all of them are mended; "" when they are."""
    for group in groups:
        if not group.configured:
            return "this process is new"
        try:
            if not mend(group):
                return f"the device does not mend group {group.group_name}"
        except Exception as exc:  # whatever the device says: a new backend may work
            return f"the device cannot mend group {group.group_name} ({type(exc).__name__}: {exc})"
    return ""


def _meet(place: Any, epoch: int, timeout: timedelta, what: str = "here") -> None:
    """Wait until all ranks are about to build their groups: a group that waits for a rank which does not come cannot be
    interrupted. `what`: under which name, where they meet several times.

    Raises:
        CommunicationAborted: a stop of a later epoch came meanwhile.
        RuntimeError: some rank did not come within `timeout`.
    """
    world, end = torch.distributed.get_world_size(), time.monotonic() + timeout.total_seconds()
    if place.add(what, 1) == world:
        place.set(f"all {what}", what)
    while not place.check([f"all {what}"]):
        if table().aborted.epoch > epoch:
            raise CommunicationAborted(f"epoch {epoch} was stopped before it was built ({table().aborted.reason})")
        if time.monotonic() > end:
            raise RuntimeError(f"epoch {epoch}: {place.add(what, 0)} of {world} ranks came to build their groups")
        time.sleep(LOOK)


def keep_journal() -> None:
    """From now on small results of communications are kept, for a process that takes the place of this one."""
    table().journal = Journal()


def store_journal() -> None:
    """Start-up is over: lay the journal down where a newcomer finds it, on whichever node it runs."""
    import torch.distributed as dist

    kept, table().journal = table().journal, None
    if kept is not None:
        _job_store().set(journal(dist.get_rank()), kept.to_bytes().decode())


def start_alone() -> None:
    """This process takes the place of a dead one: until the first regroup its groups talk to nobody."""
    table().answers = Answers(_read_journal)


def alone() -> bool:
    return _table is not None and _table.answers is not None


def _read_journal() -> bytes:
    import torch.distributed as dist

    key, place = journal(dist.get_rank()), JobStore.from_env(os.environ)
    store = _job_store()
    end = time.monotonic() + (place.patience if place is not None else 0.0)
    while not store.check([key]):  # a store that was lost is being filled again by the other nodes
        if time.monotonic() > end:
            log.warning("nobody has kept how rank %d started: its peers are taken to be equal to it", dist.get_rank())
            return b""
        time.sleep(LOOK)
    return bytes(store.get(key))


def _job_store() -> Any:
    """The part of the job's store that this generation of workers shares, and that its launchers know."""
    import torch.distributed.distributed_c10d as c10d
    from torch._C._distributed_c10d import PrefixStore

    store: Any = c10d._get_default_store()
    place, below = JobStore.from_env(os.environ), torch_store.root(store)
    return store if place is None or below is None else PrefixStore(place.prefix, below)


def notices(timeout: timedelta) -> Callable[[int], Notice]:
    """What ranks that are held tell each other; `timeout`: for one request to the job's store."""
    return in_store(lambda: _meeting_place("tft-holds", timeout), torch.distributed.get_world_size())


def audit_lockstep(timeout: timedelta) -> int:
    """At the end of the first step after `regroup`, on all ranks: did all start the same communications since?
    Returns the number of streams compared, 0 if there was no regroup since the last audit.

    Raises:
        LockstepBroken: they did not.
        CommunicationAborted: a stop came meanwhile.
    """
    import torch.distributed as dist

    if table().audit is None:
        return 0
    members = [Member(g.group_name, g.rank(), tuple(dist.get_process_group_ranks(g))) for g in table().groups()]
    return table().check_lockstep(lambda: _meeting_place("tft-audit", timeout), members, timeout)


def _meeting_place(name: str, timeout: timedelta) -> Any:
    """A part of the job's own store, over a connection of its own: nobody waits for another thread's request.

    Raises:
        StoreUnreachable: nobody serves the store, within `timeout`.
    """
    import torch.distributed.distributed_c10d as c10d
    from torch._C._distributed_c10d import PrefixStore

    place = JobStore.from_env(os.environ)
    if place is not None:
        return PrefixStore(name, torch_store.job_store(place, timeout))
    # Without a launcher that replaces nodes, the store is where it was, or the job is over.
    store = c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    return PrefixStore(name, store)


def _renew_default_store(timeout: timedelta) -> None:
    """The node that served the job's store may have been replaced: torch too has to use the store that is there now.

    Always over a new connection: one to a host that is gone without a word looks as good as any other.
    """
    import torch.distributed.distributed_c10d as c10d
    from torch._C._distributed_c10d import PrefixStore

    place = JobStore.from_env(os.environ)
    if place is None:
        return
    store = PrefixStore("default_pg", torch_store.job_store(place, timeout))  # as `init_process_group` makes it
    store.set_timeout(c10d._get_default_store().timeout)  # type: ignore[attr-defined]
    group = c10d._get_default_group()
    c10d._world.pg_map[group] = (c10d._world.pg_map[group][0], store)


def build_gloo(group: SwappableGroup, store: Any, timeout: timedelta) -> Any:
    """A plain torch group over gloo for the members of `group`, meeting at `store`."""
    from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo

    prefixed = PrefixStore(f"{group.group_name}/", store)
    inner = ProcessGroup(prefixed, group.rank(), group.size())
    own, ranks = PrefixStore("cpu/", prefixed), (group.rank(), group.size())
    if names := links.interfaces(table().link):
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in names]
        options._threads = 2 * len(names)  # as torch does it
        backend = ProcessGroupGloo(own, *ranks, options)
    else:
        backend = ProcessGroupGloo(own, *ranks, timeout=timeout)
    backend._set_sequence_number_for_group()
    inner._set_default_backend(ProcessGroup.BackendType.GLOO)
    for device in ("cpu", "cuda"):
        inner._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
    inner._set_group_name(group.group_name)  # type: ignore[arg-type]  # a plain string to everybody but the stubs
    inner._set_group_desc(group.group_desc)
    return inner


@REGISTRY.wrap("torch.distributed.distributed_c10d:_new_process_group_helper", group=HIGH_AVAILABILITY, needs=MASTER)
def new_group_helper(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around `torch.distributed.distributed_c10d._new_process_group_helper`."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    head, backend, tail = args[:3], args[3], args[4:]
    if _is_device(str(backend)):
        return _new_device_group(wrapped, args, kwargs)
    if not _is_gloo(str(backend)):
        return wrapped(*args, **kwargs)
    table()  # registers the backend name with torch
    result = wrapped(*head, dist.Backend(BACKEND), *tail, **kwargs)
    group = result[0]
    if isinstance(group, SwappableGroup):
        c10d._world.pg_map[group] = ("gloo", c10d._world.pg_map[group][1])
        c10d._world.pg_backend_config[group] = "cpu:gloo,cuda:gloo"
    return result


def _is_gloo(backend: str) -> bool:
    """`gloo`, or torch's own spelling of "gloo for every device" (`cpu:gloo,cuda:gloo`)."""
    names = {part.split(":")[-1] for part in backend.split(",")}
    return names == {"gloo"}


def _is_device(backend: str) -> bool:
    """The device's backend, or torch's own spelling of it (`npu:hccl`)."""
    return bool(_device) and {part.split(":")[-1] for part in backend.split(",")} == {_device}


def _new_device_group(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    result = wrapped(*args[:3], dist.Backend(DEVICE_BACKEND), *args[4:], **kwargs)
    group = result[0]
    if isinstance(group, SwappableGroup):
        c10d._world.pg_map[group] = (_device, c10d._world.pg_map[group][1])
        devices = dist.Backend.backend_capability[_device]
        c10d._world.pg_backend_config[group] = ",".join(f"{device}:{_device}" for device in devices)
    return result
