"""A process group that outlives its backend.

`SwappableGroup` is what Megatron, DDP buckets and optimizers hold. Below it sits the real group of the current epoch;
an abort frees every thread that waits in it, and later a new one can be put in its place without anyone noticing that
the object is still the same. Nothing here decides anything: the control plane calls `GroupTable.abort`.

A group of a device (hccl) is waited for as the device does it: what frees a thread there is the stop of the device, and
not the abort, which only keeps new communications from being started. Its backend may also stay, and be mended by the
device itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from mindspeed_tft.groups import sockets, start_up, waiting
from mindspeed_tft.groups.audit import Audit, Member, Store

# Operations whose handle can be waited for in slices (measured, one by one): a slice that times out changes nothing.
IN_SLICES = """allreduce allgather _allgather_base all_gather_single broadcast reduce gather scatter alltoall_base
all_to_all_single barrier""".split()
# All others. gloo builds a reduce-scatter and coalesced operations from others, and their handle ignores the time that
# it is given; a timed wait for a send or receive closes the connection.
ON_HELPER = """reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced
reduce_scatter_tensor_coalesced allreduce_coalesced allgather_coalesced all_gather_single_coalesced
allgather_into_tensor_coalesced alltoall send recv recv_anysource""".split()


DROPPING = "tft-drop-group"  # name of the threads that destroy the backends of an old epoch


class CommunicationAborted(RuntimeError):
    """A communication failed because a peer is gone or because this rank was told to stop.

    It says nothing against the rank that gets it: its own state is whole up to the operation it was in.
    """


class _Work(Work):
    """The work handle that callers get: waiting for it can be interrupted."""

    def __init__(
        self,
        inner: Any,
        group: SwappableGroup,
        wait: Callable[[Any, waiting.Abort], None],
        kept: start_up.Entry | None = None,
    ) -> None:
        super().__init__()
        self._inner, self._group, self._wait_inner, self._kept = inner, group, wait, kept

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            ended = bool(self._group.guarded(lambda: self._inner.wait(timeout)))
        else:
            self._group.guarded(lambda: self._wait_inner(self._inner, self._group.table.aborted))
            ended = True
        if self._kept is not None and ended:
            self._kept.ended()
        return ended

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

    def exception(self) -> Any:
        return self._inner.exception()

    def source_rank(self) -> int:
        return int(self._inner.source_rank())

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())


class SwappableGroup(ProcessGroup):
    """Stands for the group of one set of ranks; `configure` gives it a backend, `close` takes it away."""

    def __init__(
        self,
        table: GroupTable,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        device_backend: str = "",
        origin: Any = None,
    ) -> None:
        """`device_backend`: the name of the backend where it is a device's and not the table's own; `origin`: what it
        was made from, to be made anew."""
        # The documented overload, with a store, does not call Python overrides; this one is missing in the stubs.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.table, self._store, self._timeout = table, store, timeout
        self._rank, self._size, self._name, self._desc = rank, size, name, ""
        self.device_backend, self.origin = device_backend, origin
        self._inner: Any = None
        self._sockets: frozenset[sockets.SocketRef] = frozenset()
        self._cut = ""  # by a drill: the error of the next communication

    def configure(self, build: Callable[[SwappableGroup], Any]) -> None:
        """Put a freshly built backend below; a collective over the group's members."""
        self._cut = ""
        if self.device_backend:
            self._inner = build(self)  # its connections are the device's, and made when they are needed
            return
        before = sockets.tcp_sockets()
        inner = build(self)
        self._sockets = sockets.tcp_sockets() - before
        self._inner = inner

    @property
    def configured(self) -> bool:
        """Whether there is a backend below; that of a newcomer comes with the first regroup."""
        return self._inner is not None

    def kept(self) -> None:
        """The device has mended the backend, which stays."""
        self._cut = ""

    def close(self) -> int:
        """Shut the backend's connections; any thread may call. Returns how many were open."""
        return sockets.shut(self._sockets)

    def break_link(self, error: str) -> None:
        """What a broken link of a device looks like to this rank: its next communication fails with these words."""
        self._cut = error

    def ends(self) -> list[tuple[str, str]]:
        """Local and remote address of each connection of the backend."""
        return sockets.ends(self._sockets)

    def drop(self) -> Any:
        """Give up the backend; the caller destroys what is returned, which may take as long as a stuck operation."""
        inner, self._inner, self._sockets = self._inner, None, frozenset()
        return inner

    # ---------------------------------------------------------------------------------- operations

    def guarded(self, operation: Callable[[], Any]) -> Any:
        """Run a step of a communication; a failure of the connection becomes `CommunicationAborted`."""
        try:
            return operation()
        except waiting.Interrupted as exc:
            raise CommunicationAborted(f"group {self._name}: stopped ({exc})") from None
        except RuntimeError as exc:
            if self.device_backend:  # whose errors say more than that a peer is gone, and have to arrive as they are
                if not self.table.is_device_stop(str(exc)):
                    raise
                raise CommunicationAborted(f"group {self._name}: stopped ({self.table.aborted.reason})") from exc
            if self.table.is_connection_error(exc):
                first = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
                raise CommunicationAborted(f"group {self._name}: {first}") from exc
            raise

    def _launch(self, name: str, wait: Callable[[Any, waiting.Abort], None], *args: Any, **kwargs: Any) -> Work:
        if self.table.answers is not None:
            return self.table.answers.give(self._name, name, args, self._rank)
        if self.table.aborted.is_set or self._inner is None:
            raise CommunicationAborted(f"group {self._name}: stopped ({self.table.aborted.reason or 'no backend'})")
        if (audit := self.table.audit) is not None:
            audit.note(self._name, self._rank, name, (*args, *kwargs.values()))
        kept = self.table.journal.expect(self._name, name, args) if self.table.journal is not None else None
        if self._cut:
            raise RuntimeError(self._cut)
        wait = waiting.wait_on_device if self.device_backend else wait
        work = self.guarded(lambda: getattr(self._inner, name)(*args, **kwargs))
        return _Work(work, self, wait, kept)

    def _note(self, name: str) -> None:
        """One that has no arguments to compare."""
        if (audit := self.table.audit) is not None:
            audit.note(self._name, self._rank, name, ())

    # ------------------------------------------------------- what torch asks of a group (same answers as plain)

    @property
    def timeout(self) -> timedelta:
        """Of an operation, as the group was made or told since."""
        return self._timeout

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    def name(self) -> str:
        return self.device_backend or self.table.backend_name

    getBackendName = _get_backend_name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's GroupName is a plain string
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        # None while it is rebuilt: a device that is stopped in that moment looks at every group.
        return list(self._inner._device_types) if self._inner is not None else []

    def _backend(self) -> Any:
        if self._inner is None:
            raise CommunicationAborted(f"group {self._name}: no backend")
        return self._inner

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend()._get_backend(device)

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    def _has_hooks(self) -> bool:
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        self._backend()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> _Work:
        self._note("coalesced")
        wait = waiting.wait_on_device if self.device_backend else waiting.wait_on_helper
        return _Work(self._backend()._end_coalescing(device), self, wait)

    def _get_sequence_number_for_group(self) -> int:
        return int(self._backend()._get_sequence_number_for_group())

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> Any:
        self._note("monitored_barrier")
        return self.guarded(lambda: self._backend().monitored_barrier(*args, **kwargs))

    def abort(self) -> None:
        if self.device_backend and self._inner is not None:
            self._inner.abort()
        self.close()

    def shutdown(self) -> None:
        """torch destroys the group: it is not rebuilt any more."""
        self.table.remove(self)
        self._inner = None

    def __repr__(self) -> str:
        return f"SwappableGroup({self._name}, rank {self._rank} of {self._size})"


def _forward(name: str, wait: Callable[[Any, waiting.Abort], None]) -> Callable[..., Work]:
    def operation(self: SwappableGroup, *args: Any, **kwargs: Any) -> Work:
        return self._launch(name, wait, *args, **kwargs)

    operation.__name__ = name
    return operation


for _name in IN_SLICES:
    setattr(SwappableGroup, _name, _forward(_name, waiting.wait_in_slices))
for _name in ON_HELPER:
    setattr(SwappableGroup, _name, _forward(_name, waiting.wait_on_helper))


def _destroy(backend: list[Any]) -> None:
    """Let go of a backend, which nobody but this list holds, on a thread of its own. A gloo group waits for its threads
    when it is destroyed, and one of them may be stuck in a send that was under way when the connection was shut, until
    the group's own timeout: that must hold up neither the caller nor the end of another group."""
    threading.Thread(target=backend.clear, name=DROPPING, daemon=True).start()


class GroupTable:
    """All swappable groups of this process, in the order of their creation (the same on every rank of a group)."""

    def __init__(self, backend_name: str, connection_errors: tuple[str, ...]) -> None:
        self.backend_name = backend_name
        self.aborted = waiting.Abort()
        self.audit: Audit | None = None  # what was started since the groups were rebuilt; None: nobody wants to know
        self.journal: start_up.Journal | None = None  # of this rank's start-up, for one that takes its place
        self.answers: start_up.Answers | None = None  # of a newcomer, whose groups have no backend yet
        self.is_device_stop: Callable[[str], bool] = lambda _text: False  # an error that says so and nothing else
        self.link = ""  # that backends are built on (`links`); "": the one that the backend itself chooses
        self._connection_errors = connection_errors
        self._groups: list[SwappableGroup] = []
        self._lock = threading.Lock()
        self._built = 0  # epoch of the backends; an abort that answers an older stop comes too late
        self._builds = 0  # of that epoch

    def add(self, group: SwappableGroup) -> None:
        with self._lock:
            self._groups.append(group)

    def remove(self, group: SwappableGroup) -> None:
        with self._lock:
            self._groups = [other for other in self._groups if other is not group]

    def __len__(self) -> int:
        return len(self._groups)

    def groups(self) -> list[SwappableGroup]:
        """In the order of their creation."""
        with self._lock:
            return list(self._groups)

    def is_connection_error(self, exc: BaseException) -> bool:
        """Whether this text is one that the backend raises when a peer or a connection is gone."""
        text = str(exc)
        return self.aborted.is_set or any(mark in text for mark in self._connection_errors)

    def cut(self) -> int:
        """Shut all connections and tell nobody: what a broken link looks like. Returns how many were open."""
        return sum(group.close() for group in self.groups())

    def device_groups(self) -> list[SwappableGroup]:
        """Those whose backend is a device's."""
        return [group for group in self.groups() if group.device_backend]

    def rebuild(
        self,
        epoch: int,
        build: Callable[[SwappableGroup], Any],
        mend: Callable[[list[SwappableGroup]], bool] = lambda _groups: False,
    ) -> int:
        """Put a new backend of `epoch` below every group, in the order of their creation, which is the same on all
        members of a group; a collective over all ranks. For the thread that communicates, after `abort`. A failure
        leaves the groups aborted. What is started from then on is noted, until `check_lockstep`. Returns the number of
        groups.

        `mend(groups)` is asked once for the groups of a device, if there are any: whether the device has mended their
        backends, on all ranks of the job, so that they stay.

        Raises:
            CommunicationAborted: a stop of a later epoch came meanwhile.
        """
        with self._lock:
            self._builds = self._builds + 1 if epoch == self._built else 1
            self._built = epoch
            groups = list(self._groups)
        self.audit = self.answers = None
        devices = [group for group in groups if group.device_backend]
        if devices and mend(devices):
            for group in devices:
                group.kept()
            groups_to_build = [group for group in groups if not group.device_backend]
        else:
            groups_to_build = groups
        for group in groups_to_build:
            _destroy([group.drop()])
        for group in groups_to_build:
            if self.aborted.epoch > epoch:
                break
            group.configure(build)
        if not self.aborted.clear(epoch):
            self.cut()
            raise CommunicationAborted(f"epoch {epoch} was stopped while it was built ({self.aborted.reason})")
        self.audit = Audit(epoch, self._builds)
        return len(groups)

    def check_lockstep(self, connect: Callable[[], Store], members: Sequence[Member], timeout: timedelta) -> int:
        """End the audit that `rebuild` began: compare with the other ranks, which all call this too (`Audit.check`).
        Returns the number of streams compared, 0 without an audit.

        Raises:
            LockstepBroken: the ranks started different communications.
            CommunicationAborted: a stop came meanwhile.
        """
        audit, self.audit = self.audit, None
        if audit is None:
            return 0
        try:
            return audit.check(connect, members, timeout, self.aborted)
        except waiting.Interrupted as exc:
            raise CommunicationAborted(f"lockstep audit: stopped ({exc})") from None

    def answered(self, epoch: int) -> bool:
        """Whether the groups were rebuilt, or are being rebuilt, for the stop of this epoch or for a later one."""
        with self._lock:
            return epoch <= self._built

    def abort(self, reason: str, epoch: int) -> int:
        """Free every thread that waits in any group, and its connections, so that no peer of the
        abandoned epoch can write into our buffers any more. Returns connections shut.

        `epoch` is that of the stop; one that the groups were rebuilt for already is answered and aborts nothing.
        """
        with self._lock:
            if epoch <= self._built:
                return 0
            self.aborted.set(reason, epoch)
            groups = list(self._groups)
        return sum(group.close() for group in groups)
