"""torch.distributed.elastic: one dead worker is started again, and torchrun's agent does not notice.

The agent polls its workers through a `SubprocessContext`, which holds a handler with a `Popen` for each. The `Popen` is
replaced by an `agent.supervisor.Watched`, which hides a death that is followed by another life. Everything else stays
torch's: rendezvous, log files, the restart of the whole group, signals, the end.

Supervised are programs (not functions: torchrun's --run-path), within `run` of an agent.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mindspeed_tft import kept
from mindspeed_tft.agent import places, policy, reboot, spare
from mindspeed_tft.agent.spare import Spare
from mindspeed_tft.agent.standby import Order
from mindspeed_tft.agent.supervisor import Process, Supervisor, Watched, say
from mindspeed_tft.agent.tftrun import settings_of, want_standby
from mindspeed_tft.engine.types import Deadlines
from mindspeed_tft.patches import torch_dynamic_rendezvous, torch_rendezvous
from mindspeed_tft.patches.torch_elastic_names import AGENT, API, DYNAMIC, ELASTIC, LOCAL, STATIC, Args, Call, Kwargs
from mindspeed_tft.registry import REGISTRY, PatchError
from mindspeed_tft.settings import Refused

_PER_RANK = ("RANK", "LOCAL_RANK", "ROLE_RANK", reboot.ENV_LOCAL_RANK)


def install() -> None:
    """Patch the torchrun of this process; again is harmless.

    A torch that the patches do not fit is used as it is, with a warning: workers then learn that reboot is not
    available.

    Raises:
        ValueError: an environment variable of ours cannot be.
    """
    policy.limits(os.environ)
    spare.wanted(os.environ)
    import torch.distributed.elastic.agent.server.local_elastic_agent  # patches land on what is imported
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous
    import torch.distributed.elastic.rendezvous.static_tcp_rendezvous  # noqa: F401

    try:
        REGISTRY.activate(ELASTIC)
        REGISTRY.verify(ELASTIC)
    except PatchError as exc:
        REGISTRY.undo(ELASTIC)
        say(f"a dead worker will not be started again alone: {exc}")


def uninstall() -> None:
    """torchrun as it was."""
    REGISTRY.undo(ELASTIC)


# ------------------------------------------------------------------------------------------------- signals


class _Shield:
    """Signals wait while the books of processes are changed.

    torch's handler raises wherever the main thread is; between the start of a process and its entry in the books that
    would leave it behind.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._waiting: Callable[[], object] | None = None

    def holds(self, deliver: Callable[[], object]) -> bool:
        """Keep a signal for the end of the shield; False: there is none up."""
        if self._depth:
            self._waiting = self._waiting or deliver
        return bool(self._depth)

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and self._waiting is not None:
                deliver, self._waiting = self._waiting, None
                deliver()


_shield = _Shield()


@REGISTRY.wrap(f"{API}:_terminate_process_handler", group=ELASTIC)
def on_signal(wrapped: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around the handler of torchrun's own signals."""
    if not _shield.holds(lambda: wrapped(*args, **kwargs)):
        wrapped(*args, **kwargs)


@REGISTRY.wrap(f"{LOCAL}:LocalElasticAgent._start_workers", group=ELASTIC)
def start_workers(wrapped: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The agent knows its workers only when all are started: no signal before that."""
    with _shield.up():
        return wrapped(*args, **kwargs)


# --------------------------------------------------------------------------------------------- an agent's run


class _Run:
    """One run of an agent: a directory, and the supervisor of the workers that it has now."""

    def __init__(self, directory: Path, patience: float, deadlines: Deadlines | None) -> None:
        """`patience`: seconds that workers have to end by themselves when they are asked to; `deadlines`: of a job that
        goes on when a node is replaced, else None."""
        self.directory, self.patience, self.deadlines = directory, patience, deadlines
        self.context: Any = None
        self.supervisor: Supervisor | None = None
        self.node: torch_rendezvous.Node | None = None  # of a job with several
        self._warned = False
        self._over_since: float | None = None  # monotonic seconds

    def join(self, agent: Any) -> None:
        """After a rendezvous, before workers are started: which place has this node in its job.

        Raises:
            RuntimeError: the job's store does not answer. The workers of this node could not meet those of the others,
                who have their places there.
        """
        self.leave_node()
        if self.deadlines is None:
            return
        self.node = self._find_node(agent, self.deadlines)
        if self.node is not None and self.node.place.replaced:
            place = self.node.place
            self.node.keeper.training_begins()
            say(f"training has begun: the workers of this node take the place of node {place.node} of {place.nodes}")

    def leave_node(self) -> None:
        if self.node is not None:
            self.node.keeper.close()
        self.node = None

    def farewell(self) -> None:
        """All workers of the job have finished."""
        if self.node is not None:
            self.node.keeper.farewell()

    def end_with_the_job(self) -> None:
        """A launcher that holds no place ends when the job does; its workers may do so by themselves before.

        Raises:
            RendezvousGracefulExitError: torch ends them.
        """
        from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

        if self.node is None or self.deadlines is None or not self.node.keeper.over:
            return
        if self._over_since is None:
            self._over_since = time.monotonic()
        if time.monotonic() > self._over_since + self.deadlines.exit:
            raise RendezvousGracefulExitError("the job is over")

    def stop_keeping(self) -> None:
        """The workers of this node end, or have ended: nobody is to join them."""
        if self.node is not None:
            self.node.keeper.stop()

    def gone_at_the_end(self, limit: float) -> list[int]:
        """Nodes whose launchers are gone when all workers of this one have finished."""
        return self.node.keeper.gone_at_the_end(limit) if self.node is not None else []

    def look(self, supervisor: Supervisor) -> None:
        """Look at the workers, and let other nodes know how far they are."""
        supervisor.look(time.monotonic())
        if self.node is not None and supervisor.all_train():
            self.node.keeper.training_begins()

    def _find_node(self, agent: Any, deadlines: Deadlines) -> torch_rendezvous.Node | None:
        until = time.monotonic() + deadlines.stop
        while True:
            try:
                return torch_rendezvous.join(agent, deadlines, self.directory)
            except (RuntimeError, OSError) as exc:
                if time.monotonic() >= until:
                    raise RuntimeError(
                        f"this launcher found no place in the job's store within {deadlines.stop:g} s ({exc}); the"
                        " others have theirs and wait for it: see why the store is slow, and start this node again"
                    ) from exc
                say(f"the job's store does not tell this launcher its place, it asks again: {exc}")
            time.sleep(deadlines.heartbeat)

    def prepare(self, context: Any) -> None:
        """Before the workers of a context are started: they learn where we are."""
        for leftover in (*self.directory.glob("rebootable-*"), *self.directory.glob("exit-*")):
            leftover.unlink()
        for local_rank, env in context.envs.items():
            env[reboot.ENV_DIRECTORY] = str(self.directory)
            env[reboot.ENV_AGENT] = str(os.getpid())
            env[reboot.ENV_LOCAL_RANK] = str(local_rank)
            if self.node is not None:
                env[places.ENV_STORE] = self.node.job_store.to_json()
                if self.node.place.replaced:
                    env[reboot.ENV_REBORN] = str(self.node.place.life)

    def supervise(self, context: Any) -> None:
        """After the workers of a context were started."""
        workers = {}
        for local_rank, handler in context.subprocess_handlers.items():
            rank = int(context.envs[local_rank]["RANK"])
            lives = int(context.envs[local_rank].get(reboot.ENV_REBORN, "0"))
            workers[local_rank] = handler.proc = Watched(local_rank, rank, handler.proc, self.directory, lives)
        standby = self._spare(context)
        self.context = context
        self.supervisor = Supervisor(
            self.directory,
            workers,
            lambda worker: _start_again(context, worker, standby),
            policy.Policy(policy.limits(os.environ)),
            standby,
        )
        if self.node is not None:
            self.node.keeper.start()

    def _spare(self, context: Any) -> Spare | None:
        if not spare.wanted(os.environ):
            return None
        obstacle = _no_standby(context)
        if obstacle:
            if not self._warned:
                say(f"there is no warm standby: {obstacle}")
            self._warned = True
            return None
        return Spare(context.entrypoint, context.args[0][1:], _common_environment(context), self.directory)


_run: _Run | None = None


def _supervisor_of(context: Any) -> Supervisor | None:
    return _run.supervisor if _run is not None and _run.context is context else None


@REGISTRY.wrap(f"{AGENT}:SimpleElasticAgent.run", group=ELASTIC)
def run(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """An agent's run has a directory, which ends with it."""
    global _run
    for name in (reboot.ENV_REBORN, places.ENV_STORE):
        os.environ.pop(name, None)  # of a worker that launches a job of its own
    with contextlib.ExitStack() as stack:
        with _shield.up():
            directory = tempfile.TemporaryDirectory(prefix="tft-agent-", ignore_cleanup_errors=True)
            stack.callback(_leave, directory)
            kept.keep(Path(directory.name))
            stack.callback(kept.let_go, Path(directory.name))
            try:
                deadlines = _deadlines(instance._worker_group.spec)
            except Refused as exc:
                print(f"mindspeed_tft: error: {exc}", file=sys.stderr)
                sys.exit(2)
            torch_dynamic_rendezvous.enable(deadlines)
            _run = _Run(Path(directory.name), float(getattr(instance, "_shutdown_timeout", 0)), deadlines)
        result = wrapped(*args, **kwargs)
        if result is not None and not result.is_failed():
            _run.farewell()
    return _not_needed() if result is None else result


def _deadlines(spec: Any) -> Deadlines | None:
    """Of a job whose nodes may be replaced; None: it is not to be, or is no program of ours."""
    settings = settings_of([word for word in spec.args if isinstance(word, str)])
    want_standby(settings, os.environ)  # also where the launcher's own command line was not read before
    return settings.deadlines() if settings.enable_worker_reboot else None


def _not_needed() -> Any:
    """What torch forgets to say when the rendezvous was closed while this launcher waited for a place."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState

    say("the job is over, and this launcher was not needed")
    return RunResult(state=WorkerState.SUCCEEDED)


def _leave(directory: tempfile.TemporaryDirectory[str]) -> None:
    global _run
    with _shield.up():
        if _run is not None:
            _run.leave_node()
        _run = None
        directory.cleanup()


@REGISTRY.wrap(f"{AGENT}:SimpleElasticAgent._rendezvous", group=ELASTIC)
def rendezvous(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """A node may find that the job trains already."""
    if _run is not None and _run.node is not None and _overtaken():
        _run.node.start_anew()
    result = wrapped(*args, **kwargs)
    if _run is not None:
        _run.join(instance)
    return result


@REGISTRY.wrap(f"{STATIC}:StaticTCPRendezvous.num_nodes_waiting", group=ELASTIC)
def static_nodes_waiting(wrapped: Call, _instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """torch restarts all workers of this node when it is not 0."""
    return 1 if _overtaken() else wrapped(*args, **kwargs)


@REGISTRY.wrap(f"{DYNAMIC}:DynamicRendezvousHandler.num_nodes_waiting", group=ELASTIC)
def num_nodes_waiting(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """torch restarts all workers when a node wants to join, and ends them when the store does not answer."""
    if _overtaken():
        return 1
    if _run is not None and _run.node is not None and _run.node.keeper.training:
        return torch_dynamic_rendezvous.waiting(instance)
    return wrapped(*args, **kwargs)


def nodes(numbers: Sequence[int]) -> str:
    """ "node 1" or "nodes 1, 2" """
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _overtaken() -> bool:
    """Whether all workers of this node have to start anew, because it has begun without those who train."""
    return _run is not None and _run.node is not None and _run.node.keeper.overtaken


@REGISTRY.wrap(f"{AGENT}:SimpleElasticAgent._exit_barrier", group=ELASTIC)
def exit_barrier(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """All workers of this node have finished. A launcher that has only waited for a place is not counted, and one that
    was killed is not waited for, which torch does for minutes."""
    if _run is not None:
        if _run.node is not None:
            _run.node.keeper.settle()  # a node that took the place of another one a moment ago counts
        _run.stop_keeping()
        if _run.node is not None and _run.node.keeper.spare:
            say(f"the job is over, and the place of node {_run.node.place.node} was not needed")
            return None
        gone = _run.gone_at_the_end(float(getattr(instance, "_exit_barrier_timeout", 300)))
        if gone:
            say(f"the launcher of {nodes(gone)} is gone: it is not waited for")
            return None
    return wrapped(*args, **kwargs)


@REGISTRY.wrap(f"{API}:SubprocessContext._start", group=ELASTIC)
def start(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The first life of the workers."""
    if _run is None:
        return wrapped(*args, **kwargs)
    _run.prepare(instance)
    result = wrapped(*args, **kwargs)
    _run.supervise(instance)
    return result


@REGISTRY.wrap(f"{API}:SubprocessContext._poll", group=ELASTIC)
def poll(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Before torch looks at its workers, we do."""
    supervisor = _supervisor_of(instance)
    if supervisor is not None and _run is not None:
        with _shield.up():
            _run.look(supervisor)
    return wrapped(*args, **kwargs)


@REGISTRY.wrap(f"{API}:SubprocessContext._close", group=ELASTIC)
def close(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The workers are ended: those in their second life too, and no more begin.

    torch gives them 30 seconds where one of them has failed, whatever --shutdown-timeout says: it counts for signals
    alone. The survivors of a failure are those who save.
    """
    supervisor = _supervisor_of(instance)
    if supervisor is None or _run is None:
        return wrapped(*args, **kwargs)
    with _shield.up():
        _run.stop_keeping()
        supervisor.stop()
    death_sig, timeout = _of_close(*args, **kwargs)
    return wrapped(death_sig, max(timeout, _run.patience))


def _of_close(death_sig: Any, timeout: float = 30) -> tuple[Any, float]:
    """The arguments of torch's `_close`."""
    return death_sig, timeout


@REGISTRY.wrap(f"{LOCAL}:LocalElasticAgent._monitor_workers", group=ELASTIC)
def monitor_workers(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The agent compares the pids it remembers with those of the context."""
    if _run is not None:
        _run.end_with_the_job()
    context = instance._pcontext
    if context is not None and _supervisor_of(context) is not None:
        pids = context.pids()
        for worker in instance._worker_group.workers:
            worker.id = pids[worker.local_rank]
    return wrapped(*args, **kwargs)


# --------------------------------------------------------------------------------------------- another life


def _start_again(context: Any, worker: Watched, standby: Spare | None) -> Process:
    """Start the process of a dead worker, warm if there is a standby, and put it into torch's books."""
    local_rank = worker.local_rank
    env = {**context.envs[local_rank], reboot.ENV_REBORN: str(worker.count)}
    _keep_error_file(context.error_files[local_rank], worker.count)
    old = context.subprocess_handlers[local_rank]
    process = _warm(context, local_rank, env, standby)
    handler = _cold(context, local_rank, env) if process is None else _handler_of(process, local_rank)
    for stream in (old._stdout, old._stderr):
        if stream is not None:
            stream.close()
    process = handler.proc
    handler.proc = worker
    context.subprocess_handlers[local_rank] = handler
    return process  # type: ignore[no-any-return]


def _keep_error_file(path: str, count: int) -> None:
    """torch reads why a worker failed from its error file: that of an earlier life would be the wrong reason."""
    if path and path != os.devnull and os.path.exists(path):
        os.replace(path, f"{path}.{count}")


def _cold(context: Any, local_rank: int, env: dict[str, str]) -> Any:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    stdout, stderr = context.stdouts[local_rank], context.stderrs[local_rank]

    class Appending(SubprocessHandler):
        """torch opens log files anew, and an earlier life has written to these."""

        def _popen(self, args: Any, env: Any) -> Any:
            self._stdout = open(stdout, "a") if stdout else None  # noqa: SIM115  (closed by the handler's `close`)
            self._stderr = open(stderr, "a") if stderr else None  # noqa: SIM115
            return super()._popen(args, env)

    # Not known to older versions of torch.
    numa = {"numa_options": context._numa_options} if hasattr(context, "_numa_options") else {}
    return Appending(
        entrypoint=context.entrypoint,
        args=context.args[local_rank],
        env=env,
        stdout=None,
        stderr=None,
        local_rank_id=local_rank,
        **numa,
    )


def _warm(context: Any, local_rank: int, env: dict[str, str], standby: Spare | None) -> Process | None:
    if standby is None:
        return None
    order = Order(
        env={**os.environ, **env},
        argv=list(context.args[local_rank][1:]),
        cwd=os.getcwd(),
        stdout=context.stdouts[local_rank],
        stderr=context.stderrs[local_rank],
    )
    return standby.take(order)


def _handler_of(process: Process, local_rank: int) -> Any:
    """A handler for a process that runs already."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    handler = SubprocessHandler.__new__(SubprocessHandler)
    handler._stdout = handler._stderr = None  # the process opens its files itself
    handler.local_rank_id = local_rank
    handler.proc = process  # type: ignore[assignment]
    return handler


def _no_standby(context: Any) -> str:
    """Why a standby cannot become a worker of this context; ""."""
    python = os.getenv("PYTHON_EXEC", sys.executable)
    if context.entrypoint != python or context.args[0][:1] != ("-u",):
        return "the program is not started by Python (--no-python)"
    if getattr(context, "_numa_options", None) is not None:
        return "workers are bound to their devices' cores when they are started (--numa-binding)"
    if len({env.get("CUDA_VISIBLE_DEVICES") for env in context.envs.values()}) > 1:
        return "each worker is started with a device of its own (--virtual-local-rank)"
    return ""


def _common_environment(context: Any) -> dict[str, str]:
    """What the workers of a context have in common."""
    envs = list(context.envs.values())
    common = {name: value for name, value in envs[0].items() if all(env.get(name) == value for env in envs)}
    both = {**os.environ, **common}
    return {name: value for name, value in both.items() if name not in _PER_RANK}
