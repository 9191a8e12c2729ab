"""Backend `hccl` over gloo, with hccl's habits: communicators are made late, peers that are gone are not noticed, and
what ends a wait is the device's stop alone."""

from __future__ import annotations

import threading
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Work
from torch.distributed import ProcessGroup

from mindspeed_tft.groups import sockets
from torch_npu._device import device as _device

DEVICE = torch.device("cpu")
SLICE = timedelta(milliseconds=20)
NAME = "name"  # of a communicator, in the store
PATIENCE = 120.0  # seconds that somebody waits for a peer that does not come
IN_SLICES = """allreduce allgather _allgather_base all_gather_single broadcast reduce gather scatter alltoall_base
all_to_all_single barrier""".split()
ON_HELPER = """reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced
reduce_scatter_tensor_coalesced allreduce_coalesced allgather_coalesced all_gather_single_coalesced
allgather_into_tensor_coalesced alltoall""".split()


def _wait_for(store: Any, keys: list[str]) -> None:
    end = time.monotonic() + PATIENCE
    while not store.check(keys):
        _device.check()
        if time.monotonic() > end:
            raise RuntimeError("HCCL: a peer did not come to the communicator")
        time.sleep(0.005)


class Communicator:
    """gloo between the members of a group, which meet at `store` by a name that rank 0 makes up. Who finds an old name
    there waits in vain, which is why it has to be deleted. A stop of the device ends the communicator."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._sockets: frozenset[sockets.SocketRef] = frozenset()
        self.ended = False
        if rank == 0:
            store.set(NAME, uuid.uuid4().hex)
        _wait_for(store, [NAME])
        store = PrefixStore(store.get(NAME).decode() + "/", store)
        store.set(f"here/{rank}", "1")
        _wait_for(store, [f"here/{peer}" for peer in range(size)])  # gloo's own wait could not be ended
        before = sockets.tcp_sockets()
        gloo = ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=PATIENCE))
        gloo._set_sequence_number_for_group()
        self._sockets = sockets.tcp_sockets() - before
        self.group = ProcessGroup(store, rank, size)
        self.group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.group._register_backend(DEVICE, ProcessGroup.BackendType.GLOO, gloo)
        with _device.condition:
            if not _device.stopped:
                _device.communicators.append(self)
                return
        self.end()
        _device.check()

    def end(self) -> None:
        self.ended = True
        sockets.shut(self._sockets)


class HcclWork(Work):
    def __init__(self, inner: Any, in_slices: bool) -> None:
        super().__init__()
        self._inner, self._in_slices = inner, in_slices

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            if self._in_slices:
                self._wait_in_slices()
            else:
                self._wait_on_helper()
        except RuntimeError:  # of gloo: a peer's end of the connection was shut
            _device.wait_stopped(PATIENCE)
            raise
        _device.check()
        return True

    def _wait_in_slices(self) -> None:
        while not self._inner.is_completed():
            _device.check()
            try:
                self._inner.wait(SLICE)
            except RuntimeError as exc:
                if not str(exc).startswith("Operation timed out"):
                    raise
        self._inner.wait()

    def _wait_on_helper(self) -> None:
        over: list[BaseException | None] = []

        def wait() -> None:
            try:
                self._inner.wait()
                over.append(None)
            except BaseException as exc:  # handed to who waits
                over.append(exc)
            with _device.condition:
                _device.condition.notify_all()

        threading.Thread(target=wait, name="fake-hccl-wait", daemon=True).start()
        with _device.condition:
            _device.condition.wait_for(lambda: bool(over) or _device.stopped)
        _device.check()
        if over[0] is not None:
            raise over[0]

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def get_future(self) -> Any:
        return self._inner.get_future()

    def result(self) -> Any:
        return self._inner.result()


class HcclGroup(ProcessGroup):
    """A group, and its backend in one."""

    def __init__(self, store: Any, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store, self._rank, self._size, self._name, self._desc = store, rank, size, name, ""
        self._communicator: Communicator | None = None
        self._pairs: dict[int, Communicator] = {}
        self._number = 0

    def _made(self) -> ProcessGroup:
        _device.check()
        if self._communicator is None:
            number, self._number = self._number, self._number + 1
            self._communicator = Communicator(PrefixStore(f"{number}/", self._store), self._rank, self._size)
        if self._communicator.ended:
            raise RuntimeError(f"HCCL: the communicator of group {self._name} was ended and not rebuilt")
        return self._communicator.group

    def _pair(self, peer: int) -> ProcessGroup:
        """Two ranks that send and receive have a communicator of their own: the others need not come."""
        _device.check()
        if peer not in self._pairs:
            ends = sorted((self._rank, peer))
            store = PrefixStore(f"{ends[0]}:{ends[1]}/", self._store)
            self._pairs[peer] = Communicator(store, ends.index(self._rank), 2)
        if self._pairs[peer].ended:
            raise RuntimeError(f"HCCL: a communicator of group {self._name} was ended and not rebuilt")
        return self._pairs[peer].group

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> HcclWork:
        return self._p2p("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> HcclWork:
        return self._p2p("recv", tensors, peer, tag)

    def _p2p(self, name: str, tensors: list[torch.Tensor], peer: int, tag: int) -> HcclWork:
        pair = self._pair(peer)
        try:
            return HcclWork(getattr(pair, name)(tensors, int(self._rank < peer), tag), in_slices=False)
        except RuntimeError:
            _device.wait_stopped(PATIENCE)  # of gloo, as below
            raise

    # ------------------------------------------------------- what only hccl has

    def _delete_tcpstore_key(self) -> None:
        PrefixStore("0/", self._store).delete_key(NAME)
        for peer in self._pairs:
            PrefixStore("{}:{}/".format(*sorted((self._rank, peer))), self._store).delete_key(NAME)

    def abort_hccl_comm(self, reason: str) -> None:
        dropped = [*([self._communicator] if self._communicator else []), *self._pairs.values()]
        self._communicator, self._pairs = None, {}
        if dropped:
            for communicator in dropped:
                communicator.end()
            threading.Thread(target=dropped.clear, name="fake-hccl-drop", daemon=True).start()
        self._number = 0

    def resume_hccl_comm(self, device_id: int) -> None:
        raise RuntimeError("HCCL: the fake cannot resume a communicator, only make a new one")

    def set_watchdog_status(self, status: int) -> None:
        pass

    def clear_workmeta_list(self) -> None:
        pass

    def get_hccl_comm_name(self, rankid: int, **kwargs: Any) -> str:
        return f"{self._name}%{self._number}"

    # ------------------------------------------------------- what torch asks of a group

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    def name(self) -> str:
        return "hccl"

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [DEVICE]

    def _get_backend(self, device: Any) -> Any:
        return self

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def _has_hooks(self) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _start_coalescing(self, device: torch.device) -> None:
        self._made()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> HcclWork:
        return HcclWork(self._made()._end_coalescing(device), in_slices=False)

    def shutdown(self) -> None:
        self.abort_hccl_comm("shutdown")

    def abort(self) -> None:
        self.abort_hccl_comm("abort")


def _forward(name: str, in_slices: bool) -> Any:
    def operation(self: HcclGroup, *args: Any, **kwargs: Any) -> HcclWork:
        group = self._made()
        try:
            return HcclWork(getattr(group, name)(*args, **kwargs), in_slices)
        except RuntimeError:
            _device.wait_stopped(PATIENCE)  # of gloo, as above
            raise

    operation.__name__ = name
    return operation


for _name in IN_SLICES:
    setattr(HcclGroup, _name, _forward(_name, True))
for _name in ON_HELPER:
    setattr(HcclGroup, _name, _forward(_name, False))


def register() -> None:
    def create(options: Any, _pg_options: Any) -> HcclGroup:
        return HcclGroup(options.store, options.group_rank, options.group_size, options.group_id)

    known = dict(dist.Backend.default_device_backend_map)
    dist.Backend.register_backend("hccl", create, extended_api=True, devices=[DEVICE.type])
    dist.Backend.default_device_backend_map.update(known)  # gloo stays what a group of unnamed backend uses
