"""Puts the rooms together in a training process: settings -> patches -> control plane -> session.

The composition root: it holds the one session of this process, and nothing else is global.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mindspeed_tft import arguments, platforms
from mindspeed_tft import settings as settings_module
from mindspeed_tft.agent import reboot
from mindspeed_tft.control import launch, stacks
from mindspeed_tft.control.config import ControlConfig, ControlRefused, ControlUnavailable
from mindspeed_tft.control.processor import Processor
from mindspeed_tft.groups import waiting
from mindspeed_tft.observe import logs
from mindspeed_tft.recovery import launcher, signals
from mindspeed_tft.recovery.halt import Halt
from mindspeed_tft.recovery.session import Session
from mindspeed_tft.recovery.stamps import Stamps
from mindspeed_tft.recovery.window import UpdateWindow
from mindspeed_tft.registry import REGISTRY
from mindspeed_tft.replica import holders, hosts, words
from mindspeed_tft.replica.hosts import Finding
from mindspeed_tft.settings import Refused, Settings

if TYPE_CHECKING:
    from mindspeed_tft.groups import GroupTable
    from mindspeed_tft.patches.megatron_host import MegatronHost
    from mindspeed_tft.platforms import Platform

log = logging.getLogger("mindspeed_tft")

_settings: Settings | None = None
_session: Session[MegatronHost] | None = None
_strategies: tuple[str, ...] = ()
_measured = False
_window: UpdateWindow | None = None


def session() -> Session[MegatronHost] | None:
    """The session of this process; None when no feature is on, or training is unprotected from the start."""
    return _session


def settings() -> Settings | None:
    return _settings


def platform() -> Platform:
    """The device that this process trains on."""
    return platforms.select(_settings.tft_platform if _settings is not None else "auto")


def window() -> UpdateWindow:
    """When the last update was, on the clock of this rank's device."""
    global _window
    if _window is None:
        _window = UpdateWindow(platform().moment)
    return _window


def online() -> bool:
    """Whether faults of this job can be repaired without its end."""
    return _strategies not in ((), ("dump",))


def regroup_seconds() -> float:
    """How long one process group may take to be built anew: shorter than a stop, which may come meanwhile."""
    assert _settings is not None
    return min(10.0, _settings.deadlines(launcher.patience(launcher.words())).stop / 2)


def enable(found: Settings, origin: dict[str, str]) -> None:
    """Turn the wanted features on, once Megatron's arguments are settled: here patches beyond the parser land."""
    global _settings, _strategies
    from mindspeed_tft.patches import high_availability
    from mindspeed_tft.patches.groups import DRILL, HIGH_AVAILABILITY, MENDED

    rank = int(os.environ.get("RANK", "0"))
    arguments.or_exit(lambda: found.deadlines(launcher.patience(launcher.words()), origin), rank)
    _settings = found
    logs.bind(rank=rank, host=os.uname().nodename)
    logs.install(found.tft_log_format)
    high_availability.declare()
    REGISTRY.activate(HIGH_AVAILABILITY)
    REGISTRY.activate(MENDED)
    _strategies = found.strategies()
    if platform().stops:
        from mindspeed_tft.faults import classify
        from mindspeed_tft.patches import torch_distributed

        name = platform().name
        torch_distributed.swap_device_groups(
            platform().backend, lambda text: classify.classify(text, name).kind == "stopped"
        )
    if found.enable_worker_reboot:
        _prepare_reboot()
    if os.environ.get("TFT_DRILL_FAULTS"):
        from mindspeed_tft.patches import megatron_drill

        megatron_drill.declare()
        REGISTRY.activate(DRILL)
    if rank == 0:
        chosen = ", ".join(
            f"{key}={getattr(found, key)} ({origin[key]})" for key in sorted(origin) if origin[key] != "default"
        )
        _say(f"high availability is on: {chosen}")


def _prepare_reboot() -> None:
    """Before any process group is made: a process that takes the place of a dead one makes them without its peers."""
    global _strategies
    from mindspeed_tft.patches import torch_distributed

    if reason := reboot.why_not(os.environ):
        _strategies = tuple(strategy for strategy in _strategies if strategy != "recover")
        if int(os.environ.get("RANK", "0")) == 0:
            _say(f"*** --enable-worker-reboot: {reason}. A dead process leads to a dump instead. ***")
    elif newcomer():
        torch_distributed.start_alone()
    else:
        torch_distributed.keep_journal()


def newcomer() -> bool:
    """Whether this process was started in the place of one that died while the others wait."""
    on = _settings is not None and _settings.enable_worker_reboot
    return on and reboot.lives(os.environ) > 0 and reboot.available(os.environ)


def training_begins() -> None:
    """Start-up is over: from now on this process may die, and another may take its place."""
    if _settings is None or not _settings.enable_worker_reboot or not reboot.available(os.environ):
        return
    from mindspeed_tft.patches import torch_distributed

    torch_distributed.store_journal()
    reboot.mark_rebootable(os.environ)


def training_ends() -> None:
    """There is no way back into a training that is over."""
    reboot.unmark(os.environ)


def protect(host: MegatronHost) -> None:
    """Start protection, once the ranks have met and the model-parallel groups stand.

    A port that is taken or a missing certificate ends the job here (the user asked for what cannot be); anything that
    merely fails leaves training unprotected, with a loud warning (rule 6).
    """
    global _session
    assert _settings is not None
    REGISTRY.verify("high-availability")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    info = host.info()
    exposed = None if newcomer() else _judge_hosts(_settings, rank, info.host)  # a collective: before anything differs
    deadlines = _settings.deadlines(launcher.patience(launcher.words()))
    incidents = _settings.tft_incident_dir or str(host.save_directory() / "tft_incidents")
    device = platform()
    device.claim_device()
    config = ControlConfig.from_env(
        deadlines,
        incidents,
        port=_settings.tft_controller_port,
        tls_dir=_settings.tft_tls_dir,
        tls_key_password_file=_settings.tft_tls_key_password_file,
        tls_decrypt=_settings.tft_tls_decrypt,
        insecure=_settings.tft_insecure,
        strategies=_strategies,
        metrics_port=_settings.tft_metrics_port,
        metrics_host=_settings.tft_metrics_host,
        otel_endpoint=_settings.tft_otel_endpoint,
        clusterd=_settings.clusterd,
        clusterd_job=_settings.tft_clusterd_job or "",
        job=_describe(_settings, device),
        log_format=_settings.tft_log_format,
    )
    if _settings.tft_controller_address:
        config = dataclasses.replace(config, controller_host=_settings.tft_controller_address)
    if config.clusterd:
        from mindspeed_tft.clusterd.address import beside

        config = beside(config)
    # Whatever fails here, every rank has a session: the commit is a collective of all, protected or not.
    path, unavailable = _meet(config, rank, local_rank)
    table = _groups()
    halt = Halt(device.stop_device, device.restart_device)
    stops = logs.Stops(lambda: _session.resumed if _session is not None else 0)

    def on_stop(epoch: int, reason: str) -> None:
        stops.heard(epoch)
        _come_out(table, halt, epoch, reason)

    link = Processor(
        path,
        deadlines,
        on_stop=on_stop,
        revive=None if unavailable else launch.reviver(config, local_rank),
        waits=waiting.for_peers,
    )
    stacks.offer()
    started = link.start(info, 1.0 if unavailable else config.start, bare=newcomer())
    if not started and newcomer():
        arguments.leave(f"rank {rank} was started again, but there is no controller ({unavailable or 'see above'})", 0)
    if started and newcomer():
        reboot.mark_rebootable(os.environ)  # the others wait: another one may come if this one dies in its start-up
    if not started:
        log.error("*** rank %d trains WITHOUT protection for now: %s ***", rank, unavailable or "see above")
    save = str(host.save_directory())
    _session = Session(
        host,
        link,
        deadlines,
        resume=lambda _step: launcher.resume_command(save),
        classify=_classifier(_settings),
        stamps=Stamps(host.shards, _settings.tft_shard_hash, device.beside),
        halt=halt,
    )
    logs.bind(step=lambda: link.step, epoch=lambda: link.stop_epoch, incident=stops.incident)
    signals.catch_endings(_session)
    _catch_uncaught(_session)
    atexit.register(_goodbye, link)
    atexit.register(_session.stamps.end)
    if started:
        log.info("pid %d is protected: part %s, holds %s", info.pid, info.part, ", ".join(info.holds))
    if rank == 0 and device.unproved:
        _say(f"*** {device.unproved} ***")
    if rank == 0:
        _tell_replicas(_settings, host, exposed)
        _warn_of_patience(_settings)


def _describe(found: Settings, device: Platform) -> dict[str, str]:
    """This job, for who reads an incident."""
    from mindspeed_tft.patches import megatron_host, megatron_layout

    told = megatron_layout.job(megatron_host.args(), found.replicas)
    return {**told, "strategies": " ".join(_strategies), "platform": device.name}


def _come_out(table: GroupTable, halt: Halt, epoch: int, reason: str) -> None:
    """Free the main thread, wherever it waits. What was built anew for this stop already is left alone, and so is a
    process that starts for it: it waits for nobody."""
    if table.answered(epoch) or table.answers is not None:
        halt.passed(epoch)
        return
    table.abort(f"epoch {epoch}: {reason}", epoch)
    halt.stop(epoch)


def _meet(config: ControlConfig, rank: int, local_rank: int) -> tuple[Path, str]:
    """Where this host's relay listens, or will, and why it does not ("" when it does)."""
    try:
        return launch.join_host(config, local_rank) if newcomer() else launch.ensure_host(config, rank, local_rank), ""
    except ControlRefused as exc:
        arguments.leave(str(exc), 0)
    except (ControlUnavailable, OSError) as exc:
        return launch.meeting_place(config), str(exc)


def _classifier(found: Settings) -> Callable[[str], str]:
    """Names the kind of a fault by its text: a rank whose memory is in doubt gives nothing, not for a dump either."""
    from mindspeed_tft.faults import classify

    name = platform().name
    rules = classify.load_rules(Path(found.tft_fault_rules)) if found.tft_fault_rules else ()

    def kind_of(text: str) -> str:
        kind = classify.classify(text, name, rules, window().read()).kind
        # What of the memory was hit matters to a repair alone, and whether the device can tell was not checked.
        return "device" if kind == "memory" and not online() else kind

    return kind_of


def _groups() -> GroupTable:
    from mindspeed_tft.patches import torch_distributed

    return torch_distributed.table()


def _goodbye(link: Processor) -> None:
    link.goodbye()
    link.close()


def _catch_uncaught(current: Session[Any]) -> None:
    """Faults outside the training loop (building the model, the last save) reach the interpreter's own hook."""
    previous = sys.excepthook

    def handle(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
        atexit.unregister(_goodbye)  # this is no ordinary end: the others must not wait for this rank
        if current.protected():
            current.recover(exc, outside=True)
        previous(kind, exc, trace)

    sys.excepthook = handle


def _judge_hosts(found: Settings, rank: int, mine: str) -> Finding | None:
    """What is lost with one host. A collective of all ranks, which come to the same answer: all refuse, or none."""
    from mindspeed_tft.patches import megatron_host, megatron_layout

    space = megatron_host.args()
    where = megatron_layout.hosts(mine)
    exposed = hosts.judge(megatron_layout.sizes(space), megatron_layout.replicas(space, found.replicas), where)
    if exposed is not None and found.tft_require_separate_hosts:
        arguments.leave(str(Refused(hosts.WANTED, exposed.reason, exposed.remedy)), rank)
    return exposed


def _tell_replicas(found: Settings, host: MegatronHost, exposed: Finding | None) -> None:
    from mindspeed_tft.patches import megatron_host, megatron_layout

    space = megatron_host.args()
    number = megatron_layout.replicas(space, found.replicas)
    for line in words.replicas(megatron_layout.copies(space), number, holders.Precision[host.precision()]):
        _say(line)
    if number != 1 and not newcomer():  # who comes later has not met the others
        _say(words.hosts(exposed))


def _warn_of_patience(found: Settings) -> None:
    patience = launcher.patience(launcher.words())
    if patience is None or patience >= found.tft_deadline:
        return
    remedy = (
        "for large models start with tftrun, or add --logs-specs mindspeed_tft --shutdown-timeout"
        f" {found.tft_deadline + settings_module.LAUNCHER_MARGIN:g} to torchrun"
    )
    if (least := found.deadline(patience)) >= patience:
        _say(
            f"*** torchrun kills the survivors of a fault after {patience:g} s, less than the {least:g} s that a"
            f" recovery is given at least, so they may be killed before they have saved; {remedy} ***"
        )
        return
    _say(
        f"note: torchrun kills the survivors of a fault after {patience:g} s, so all deadlines end before that,"
        f" not at --tft-deadline {found.tft_deadline:g}; {remedy}"
    )


def after_first_step() -> None:
    """Print the bytes measured beside the formula, once the optimizer has made its states."""
    global _measured
    if _measured or _session is None or _settings is None:
        return
    _measured = True
    if _session.info.rank == 0:
        from mindspeed_tft.patches import megatron_host, megatron_layout

        host, space = _session.host, megatron_host.args()
        number = megatron_layout.replicas(space, _settings.replicas)
        kinds, sizes = megatron_layout.parameters(host.model), megatron_layout.copies(space)
        _say(words.measured(host.memory()[0], kinds, sizes, number, holders.Precision[host.precision()]))


def _say(text: str) -> None:
    logs.say(text)
