"""What the names of `mindio_ttp` do in this process: one adaptor, one session, at most one controller to start.

    init_controller, start_controller (rank 0) -> init_processor, start_processor -> set_optimizer_replica, callbacks
    -> the training function, again and again

The control plane comes up with `start_processor`; a rank takes part from `set_optimizer_replica` on, when it is known
what it holds.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspeed_tft import arguments, platforms
from mindspeed_tft import settings as settings_module
from mindspeed_tft.agent import reboot
from mindspeed_tft.control import launch, stacks
from mindspeed_tft.control.config import ControlConfig, ControlRefused, ControlUnavailable
from mindspeed_tft.control.processor import Processor
from mindspeed_tft.facade import shards, texts
from mindspeed_tft.facade.callbacks import CallbackHost, Callbacks
from mindspeed_tft.facade.gate import Gate
from mindspeed_tft.facade.session import CallbackSession
from mindspeed_tft.facade.words import (
    EXPORTS,
    KIND_OF_STATE,
    MAX_WORLD,
    REBOOTED,
    Action,
    FacadeError,
    NotServed,
    ReportState,
)
from mindspeed_tft.observe import logs
from mindspeed_tft.platforms import Platform
from mindspeed_tft.recovery import launcher, signals
from mindspeed_tft.settings import Refused, Settings

log = logging.getLogger(__name__)

ENV_CONFIG = "TFT_FACADE_CONFIG"  # preset or YAML file, as for --tft-config
ENV_CLEAN = "TTP_STOP_CLEAN_BEFORE_DUMP"
_ELSEWHERE = {  # settings that a job under this facade cannot have, reason and remedy
    "tft_clusterd": (
        "existing adaptors leave the talk with ClusterD to TaskD, and nobody here would hear its decisions",
        "leave it out, or import mindspeed_tft.adaptor in the place of the facade",
    ),
    "tft_fault_rules": (
        "texts of errors are told from each other by the adaptor's own patterns",
        "leave it out, and give the patterns to tft_register_exception_handler",
    ),
}
ENGINE = "mindspeed_tft.engine.joint:JointEngine"


class Process:
    """The state of this process. The functions of `mindio_ttp` are its methods, with the checks of their arguments."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self.callbacks = Callbacks()
        self.export = ""
        self.window = texts.Window()
        self.rules = texts.Rules()
        self._controller = self._controller_started = False
        self._ranks: tuple[int, int] | None = None  # this rank, all ranks
        self._wanted: tuple[str, ...] = ()
        self._config: ControlConfig | None = None
        self._path, self._unavailable = Path(os.devnull), ""
        self._gate = Gate()
        self._device: Platform | None = None
        self._session: CallbackSession | None = None
        self._link: Processor | None = None
        self._clean_before_dump = environ.get(ENV_CLEAN) == "1"

    # ------------------------------------------------------------------------------------------ the control plane

    def init_controller(self, rank: int, world_size: int, local_copy: bool, zit: bool) -> None:
        """Remember that this process is to start the job's controller. A second call is ignored."""
        if rank == -1:
            reason = "a controller in a process that trains nothing is a platform's; ours is started with rank 0"
            raise NotServed("tft_init_controller with rank -1", reason, "unset MINDX_TASK_ID")
        _check_rank("tft_init_controller", rank, world_size)
        if rank != 0:
            reason = "further controllers start by themselves, one for each of the next hosts"
            raise NotServed(f"tft_init_controller with rank {rank}", reason, "call it on rank 0 alone")
        _refuse_options(local_copy, zit)
        self._controller = True

    def start_controller(self, port: int) -> None:
        """It comes up with `start_processor`, when all is known that it is told."""
        _check_port("tft_start_controller", port)
        if not self._controller:
            raise FacadeError("tft_start_controller: call tft_init_controller before it")
        self._controller_started = True

    def init_processor(self, rank: int, world_size: int, local_copy: bool, uce: bool, arf: bool, zit: bool) -> None:
        """This process is a rank, and these faults are to be repaired online."""
        if "mindspeed_tft.adaptor" in sys.modules:
            raise FacadeError(
                "mindspeed_tft.adaptor and mindspeed_tft.facade.mindio are imported both, and each would protect this"
                " job; keep one of the two imports"
            )
        _check_rank("tft_init_processor", rank, world_size)
        if rank < 0:
            raise FacadeError("tft_init_processor: a processor needs a rank of at least 0")
        _refuse_options(local_copy, zit)
        self._ranks = (rank, world_size)
        wanted = {"retry": uce, "recover": arf}
        if arf and (reason := reboot.why_not(self._environ)):
            wanted["recover"] = False
            if rank == 0:
                logs.say(f"*** enable_arf: {reason}. A dead process leads to a dump instead. ***")
        self._wanted = (*(name for name, on in wanted.items() if on), "dump")

    def start_processor(self, master_ip: str, port: int) -> None:
        """Bring up this host's relay, and with rank 0 the controller, or wait for them.

        Raises:
            FacadeError: an order of calls or an environment that cannot be.
            SystemExit: a setting has to be corrected; status 2, as adaptors expect.
        """
        _check_port("tft_start_processor", port)
        if self._ranks is None:
            raise FacadeError("tft_start_processor: call tft_init_processor before it")
        rank, world_size = self._ranks
        if missing := [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE") if name not in self._environ]:
            raise FacadeError(f"tft_start_processor: {', '.join(missing)} not set; start with tftrun or torchrun")
        if int(self._environ["WORLD_SIZE"]) != world_size:
            raise FacadeError(
                f"tft_init_processor: a world of {world_size}, but WORLD_SIZE={self._environ['WORLD_SIZE']}"
            )
        if rank == 0 and not (self._controller_started or self.reborn):
            raise FacadeError("tft_start_processor: rank 0 has started no controller; call tft_start_controller")
        found = arguments.or_exit(lambda: self._settings(), rank)
        logs.bind(rank=rank, host=os.uname().nodename)
        logs.install(found.tft_log_format)
        self._config = arguments.or_exit(lambda: self._configure(found, master_ip, port), rank)
        local = int(self._environ["LOCAL_RANK"])
        try:
            self._path = (
                launch.join_host(self._config, local) if self.reborn else launch.ensure_host(self._config, rank, local)
            )
        except ControlRefused as exc:
            arguments.leave(str(exc), rank)
        except (ControlUnavailable, OSError) as exc:
            self._unavailable = str(exc)
            self._path = launch.meeting_place(self._config)

    @property
    def reborn(self) -> bool:
        """This process was started in the place of one that died while the others wait."""
        return "recover" in self._wanted and reboot.lives(self._environ) > 0

    def _settings(self) -> Settings:
        """From the environment and a YAML file. What is to be repaired is the adaptor's word."""
        flags = {
            "enable_high_availability": True,
            "enable_hbmfault_repair": "retry" in self._wanted,
            "enable_worker_reboot": "recover" in self._wanted,
        }
        layers: list[tuple[str, Mapping[str, Any]]] = [("the adaptor", flags)]
        layers += [
            (name, {key: value for key, value in layer.items() if key not in flags})
            for name, layer in settings_module.from_environment(self._environ)
        ]
        if named := self._environ.get(ENV_CONFIG):
            layers.append(settings_module.load_yaml(named, arguments.presets()))
        for name, layer in layers:
            for key in sorted(layer.keys() & _ELSEWHERE.keys()):
                raise Refused(f"{key} ({name})", *_ELSEWHERE[key])
        found, origin = settings_module.build(layers)
        for refusal in arguments.conflicts(found, origin, launcher.patience(launcher.words())):
            raise refusal
        return found

    def _configure(self, found: Settings, master_ip: str, port: int) -> ControlConfig:
        # No watch for ranks that hang: nobody says here who waits for whom.
        deadlines = dataclasses.replace(found.deadlines(launcher.patience(launcher.words())), hang=0.0)
        config = ControlConfig.from_env(
            deadlines,
            found.tft_incident_dir or str(Path.cwd() / "tft_incidents"),
            self._environ,
            tls_dir=found.tft_tls_dir,
            tls_key_password_file=found.tft_tls_key_password_file,
            tls_decrypt=found.tft_tls_decrypt,
            insecure=found.tft_insecure,
            strategies=self._wanted,
            metrics_port=found.tft_metrics_port,
            metrics_host=found.tft_metrics_host,
            otel_endpoint=found.tft_otel_endpoint,
            job={"adaptor": self.export or "of mindio_ttp", "strategies": " ".join(self._wanted)},
            log_format=found.tft_log_format,
            engine=ENGINE,
            port=found.tft_controller_port,
        )
        address = found.tft_controller_address or master_ip
        if config.nnodes > 1 and config.port is None:
            config = dataclasses.replace(config, port=port)
        return dataclasses.replace(config, controller_host=address)

    def set_optimizer_replica(self, rank: int, entries: Sequence[Mapping[str, Any]]) -> None:
        """This rank holds so much of the optimizers: from now on it takes part."""
        rank_, _ = self._need_ranks("tft_set_optimizer_replica")
        if rank != rank_:
            raise FacadeError(f"tft_set_optimizer_replica: rank {rank}, but the processor is rank {rank_}")
        if self._session is not None:
            raise FacadeError("tft_set_optimizer_replica: it was called before; what a rank holds does not change")
        config = self._config
        if config is None:
            raise FacadeError("tft_set_optimizer_replica: call tft_start_processor before it")
        info = shards.info(rank, config.host, os.getpid(), shards.read(rank, entries))
        local = int(self._environ["LOCAL_RANK"])
        link = Processor(
            self._path,
            config.deadlines,
            on_stop=self._on_stop,
            revive=None if self._unavailable else launch.reviver(config, local),
        )
        device = self._device = platforms.select("auto")
        device.claim_device()
        session = CallbackSession(
            CallbackHost(info, self.callbacks),
            link,
            config.deadlines,
            lambda text: self.rules.kind(text, self.window, device.name),
            self._gate,
            self._clean_before_dump,
            device.share_device,
        )
        self._session, self._link = session, link
        stacks.offer()
        started = link.start(info, 1.0 if self._unavailable else config.start, bare=self.reborn)
        if not started and self.reborn:
            why = self._unavailable or "see above"
            arguments.leave(f"rank {rank} was started again, but there is no controller ({why})", 0)
        if not started:
            log.error("*** rank %d trains WITHOUT protection for now: %s ***", rank, self._unavailable or "see above")
        if "recover" in self._wanted:
            reboot.mark_rebootable(self._environ)
        logs.bind(step=lambda: link.step, epoch=lambda: link.stop_epoch)
        signals.catch_endings(session)
        _catch_uncaught(session, self._goodbye)
        atexit.register(self._goodbye)
        if started:
            log.info("pid %d is protected through mindio_ttp names: part %s, holds %s", info.pid, info.part,
                     ", ".join(info.holds))  # fmt: skip

    def _on_stop(self, epoch: int, reason: str) -> None:
        assert self._session is not None
        self._session.come_out(epoch, reason)

    def _goodbye(self) -> None:
        if self._link is not None:
            self._link.goodbye()
            self._link.close()

    def destroy_processor(self) -> None:
        """This rank leaves in the ordinary way."""
        self.session("tft_destroy_processor")
        reboot.unmark(self._environ)
        self._goodbye()

    # ------------------------------------------------------------------------------------------ who is asked

    def _need_ranks(self, name: str) -> tuple[int, int]:
        if self._ranks is None:
            raise FacadeError(f"{name}: call tft_init_processor and tft_start_processor before it")
        return self._ranks

    def session(self, name: str) -> CallbackSession:
        """The session, for the function `name`.

        Raises:
            FacadeError: there is none yet.
        """
        if self._session is None:
            raise FacadeError(f"{name}: call tft_set_optimizer_replica before it, which says what this rank holds")
        return self._session

    @property
    def known(self) -> CallbackSession | None:
        return self._session

    def set_export(self, version: str) -> None:
        if version not in EXPORTS:
            raise FacadeError(f"set_mindio_export_version: {version!r} is none of {', '.join(EXPORTS)}")
        self.export = version
        self._clean_before_dump = True
        if self._session is not None:
            self._session.clean_before_dump = True

    def moment(self) -> int | None:
        """Microseconds on the clock with which the device dates its errors, when all that it was told is done. None: it
        has no such clock, or nobody would use it."""
        if self._device is None or "retry" not in self._wanted:
            return None
        return self._device.moment() or None

    @property
    def connected(self) -> bool:
        return self._link is not None and self._link.connected

    # ------------------------------------------------------------------------------------------ training

    def run(self, train: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the training function until it ends by itself. Its positional arguments are kept in a list, which the
        callbacks are given, and may change.

        Raises:
            FacadeError: no session, or a callback that every recovery needs is not registered.
        """
        session = self.session("tft_exception_handler")
        if missing := self.callbacks.missing():
            raise FacadeError(f"no callback is registered for {', '.join(missing)}; use tft_register_*_handler")
        train_args = self.callbacks.train_args = list(args)
        while True:
            try:
                result = train(*train_args, **kwargs)
            except Exception as exc:
                fault: Exception | None = exc
            else:
                fault = None
            if fault is None:
                reboot.unmark(self._environ)
                self._goodbye()
                return result
            if REBOOTED in str(fault) and self.reborn and not session.resumed:
                fault = None
                session.join()
            else:
                session.recover(fault)
                fault = None

    def report_error(self, state: ReportState, code: str) -> None:
        """Without the decorator: this rank has left training. RS_UNKNOWN does not come back."""
        session = self.session("tft_report_error")
        if state in (ReportState.RS_PREREPAIR_FINISH, ReportState.RS_INIT_FINISH):
            if not self.reborn:
                raise FacadeError(f"tft_report_error: {state.name} is the word of a process that was started again")
            return
        if state not in KIND_OF_STATE:
            raise NotServed(f"tft_report_error with {state.name}", "there is no hot switch", "leave it out")
        torn = self._gate.arrive()
        session.announce(KIND_OF_STATE[state], f"{state.name} {code}".strip(), torn)
        if state is ReportState.RS_UNKNOWN:
            session.obey()

    def wait_next_action(self) -> Action:
        """Carry out orders until training is to go on. Where it is not, the process ends here."""
        session = self.session("tft_wait_next_action")
        if self.reborn and not session.resumed:
            session.join()
        else:
            session.obey()
        return Action.RETRY


def _check_rank(name: str, rank: int, world_size: int) -> None:
    if not 1 <= world_size <= MAX_WORLD or not -1 <= rank < world_size:
        raise FacadeError(f"{name}: rank {rank} of {world_size}; a world has 1 to {MAX_WORLD} ranks")


def _check_port(name: str, port: int) -> None:
    if not 1024 <= port <= 65535:
        raise FacadeError(f"{name}: port {port}; give one from 1024 to 65535")


def _refuse_options(local_copy: bool, zit: bool) -> None:
    if local_copy:
        reason = "copies of optimizer states in host memory are not in this version"
        raise NotServed("enable_local_copy", reason, "initialize with enable_local_copy=False")
    if zit:
        raise NotServed("enable_zit", "elastic training is not in this version", "leave out --enable-elastic-training")


def _catch_uncaught(session: CallbackSession, goodbye: Callable[[], None]) -> None:
    """Faults outside the training function reach the interpreter's own hook."""
    previous = sys.excepthook

    def handle(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        atexit.unregister(goodbye)  # this is no ordinary end: the others must not wait for this rank
        if isinstance(exc, Exception) and session.protected():
            session.recover(exc, outside=True)
        previous(kind, exc, trace)

    sys.excepthook = handle


@functools.cache
def process() -> Process:
    """The one of this process."""
    return Process()
