"""Flags, environment and YAML presets -> `Settings`.

Only collects and merges; what a value means together with Megatron's own flags is checked in
`patches.megatron_arguments`, and what it does is decided elsewhere.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.resources
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_tft import settings as settings_module
from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.settings import Refused, Settings


def key_of(flag: str) -> str:
    """The field of `Settings` that a flag sets."""
    return flag[2:].replace("-", "_")


_SWITCH: dict[str, Any] = {"action": "store_true"}
# (flag, options for argparse); the help is the description of the field in `Settings`.
_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--enable-high-availability", _SWITCH),
    ("--enable-hbmfault-repair", _SWITCH),
    ("--enable-worker-reboot", _SWITCH),
    ("--enable-elastic-training", _SWITCH),
    ("--distributed-optimizer-no-replica", _SWITCH),
    ("--optimizer-replica-num", {"type": int, "metavar": "N"}),
    ("--tft-require-separate-hosts", _SWITCH),
    ("--tft-platform", {"metavar": "auto|cpu|cuda|npu"}),
    ("--tft-deadline", {"type": float, "metavar": "SECONDS"}),
    ("--tft-reboot-wait", {"type": float, "metavar": "SECONDS"}),
    ("--tft-hang-seconds", {"type": float, "metavar": "SECONDS"}),
    ("--tft-warm-standby", {"action": argparse.BooleanOptionalAction}),
    ("--tft-shard-hash", {"metavar": "auto|step|stop|never"}),
    ("--tft-controller-port", {"type": int, "metavar": "PORT"}),
    ("--tft-tls-dir", {"metavar": "DIR"}),
    ("--tft-tls-key-password-file", {"metavar": "FILE"}),
    ("--tft-tls-decrypt", {"metavar": "MODULE:FUNCTION"}),
    ("--tft-insecure", _SWITCH),
    ("--tft-fault-rules", {"metavar": "FILE"}),
    ("--tft-incident-dir", {"metavar": "DIR"}),
    ("--tft-metrics-port", {"type": int, "metavar": "PORT"}),
    ("--tft-metrics-host", {"metavar": "HOST"}),
    ("--tft-otel-endpoint", {"metavar": "URL"}),
    ("--tft-clusterd", {"metavar": "URL|none"}),
    ("--tft-clusterd-job", {"metavar": "ID"}),
    ("--tft-clusterd-wait", {"type": float, "metavar": "SECONDS"}),
    ("--tft-log-format", {"metavar": "text|json"}),
)
CONFIG = "--tft-config"
# All flags. Every one defaults to None: "not given" must differ from "given as off", or a YAML preset could never take
# effect.
FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CONFIG, {"metavar": "PRESET|FILE", "help": "YAML preset by name, or a YAML file, of the flags here"}),
    *((flag, {**options, "help": settings_module.meaning(key_of(flag))}) for flag, options in _OPTIONS),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags, each only if nobody has defined it yet (MindSpeed-LLM defines some of them too)."""
    group = parser.add_argument_group(title="mindspeed_tft fault tolerance")
    for flag, options in FLAGS:
        if flag not in parser._option_string_actions:
            group.add_argument(flag, default=None, **options)


# Fields that a user may take for flags.
_NO_FLAGS = {
    f"--{key.replace('_', '-')}": f"set {variable}, or {key.replace('_', '-')} in the YAML of {CONFIG}"
    for key, variable in settings_module.VARIABLES.items()
}
_SURE = 0.85  # likeness of a word of the command line with one of our flags, from which on it was meant for one


def misspelt(rest: Iterable[str]) -> Iterator[Refused]:
    """Words of a command line that nobody knows and that can only be meant for us. Megatron would refuse them too, but
    does not know ours.

    Args:
        rest: what is left of a command line without our flags.
    """
    opposites = [f"--no-{flag[2:]}" for flag, how in FLAGS if how.get("action") is argparse.BooleanOptionalAction]
    known = [*(flag for flag, _ in FLAGS), *opposites]
    for word in rest:
        flag = word.partition("=")[0][: settings_module.LONGEST_NAME]
        if not flag.startswith("-"):
            continue
        plain = "--" + flag.lstrip("-").replace("_", "-").lower()
        if plain in _NO_FLAGS:
            yield Refused(flag, "there is no such flag", _NO_FLAGS[plain])
        elif plain.startswith("--tft") or difflib.get_close_matches(plain, known, n=1, cutoff=_SURE):
            yield Refused(flag, "there is no such flag", settings_module.nearest(plain, known))


def presets() -> Path:
    """The directory of the YAML presets that the package brings."""
    return Path(str(importlib.resources.files("mindspeed_tft.configs")))


def early_platform(words: Sequence[str]) -> str:
    """What --tft-platform will be once Megatron has parsed its arguments: the platform must stand before Megatron is
    imported, long before that.

    Raises:
        Refused: --tft-config names no readable YAML, or no platform in it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flag in (CONFIG, "--tft-platform"):
        parser.add_argument(flag, nargs="?")  # a flag without its value is Megatron's to refuse
    given = vars(parser.parse_known_args(list(words))[0])
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if given.get("tft_platform") is not None:
        layers.append(("flag", {"tft_platform": given["tft_platform"]}))
    elif given.get("tft_config") is not None:
        origin, values = settings_module.load_yaml(given["tft_config"], presets())
        layers.append((origin, {key: value for key, value in values.items() if key == "tft_platform"}))
    return settings_module.build(layers)[0].tft_platform


def resolve(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> tuple[Settings, dict[str, str]]:
    """Settings and the origin of each value, by precedence environment > flag > YAML > default.

    Raises:
        Refused: any value that cannot be, alone or beside the others.
    """
    found, origin = collect(args, environ)
    for refusal in conflicts(found, origin):
        raise refusal
    return found, origin


def collect(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """As `resolve`, each value judged by itself alone: see `conflicts`.

    Raises:
        Refused: a value of the wrong type or out of range, an unknown word, key or preset.
    """
    flags = {
        key: getattr(args, key)
        for key in Settings.model_fields
        if getattr(args, key, None) is not None and (getattr(args, key) is not False or key.startswith("tft_"))
    }  # fmt: skip
    layers: list[tuple[str, Mapping[str, Any]]] = [*settings_module.from_environment(environ), ("flag", flags)]
    config = getattr(args, "tft_config", None)
    if config is not None:
        layers.append(settings_module.load_yaml(config, presets()))
    layers.append(settings_module.from_platform(environ))
    return settings_module.build(layers)


# What is declared, so that scripts of other adaptors are understood, and is refused until it is built.
_NOT_BUILT = {"enable_elastic_training": "elastic training"}


def conflicts(found: Settings, origin: Mapping[str, str], patience: float | None = None) -> Iterator[Refused]:
    """All reasons why these values cannot work together, whatever Megatron's own flags say.

    Args:
        patience: seconds that the launcher lets survivors live, where it is known; all timeouts have to fit into it.
    """
    if not found.enable_high_availability:
        for key in ("enable_hbmfault_repair", "enable_worker_reboot", "enable_elastic_training"):
            if getattr(found, key):
                yield Refused(
                    settings_module.flag_of(key),
                    "it needs the master switch, which is off",
                    "add --enable-high-availability, or set HIGH_AVAILABILITY",
                )
        return  # what is off breaks nothing
    for key, name in _NOT_BUILT.items():
        if getattr(found, key):
            asked = "" if origin[key] == "flag" else f" (asked for by {origin[key]})"
            reason = f"{name} is not in this version yet{asked}"
            yield Refused(settings_module.flag_of(key), reason, "leave it out: the dump protects the job")
    yield from _replicated(found, origin)
    yield from _locked(found)
    yield from _observed(found)
    yield from steered(found, origin)
    yield from _ruled(found)
    yield from _timed(found, origin, patience)


def _replicated(found: Settings, origin: Mapping[str, str]) -> Iterator[Refused]:
    """Numbers and places of replicas that contradict each other."""
    where = origin["optimizer_replica_num"]
    if found.distributed_optimizer_no_replica and where == origin["distributed_optimizer_no_replica"] != "default":
        # From two places the stronger one wins, as ever.
        yield Refused(
            "--optimizer-replica-num",
            f"{found.optimizer_replica_num} contradicts --distributed-optimizer-no-replica, which keeps none (both from"
            f" {'the command line' if where == 'flag' else where})",
            "leave one of them out",
        )
    if found.distributed_optimizer_no_replica and found.strategies() == ("dump",):
        yield Refused(
            "--distributed-optimizer-no-replica",
            "without a replica a lost shard can only come from the last periodic checkpoint, which an online repair"
            " loads, and online repair is off",
            "add --enable-hbmfault-repair or --enable-worker-reboot, or keep replicas",
        )
    if found.tft_require_separate_hosts and found.replicas == 1:
        yield Refused(
            "--tft-require-separate-hosts",
            "without replicas each shard has one holder, which cannot be on two hosts",
            "leave out --distributed-optimizer-no-replica, or this flag",
        )


def _ruled(found: Settings) -> Iterator[Refused]:
    """A file of rules that cannot be used: better now than at the fault."""
    if found.tft_fault_rules is None:
        return
    from mindspeed_tft.faults import classify

    try:
        classify.load_rules(Path(found.tft_fault_rules))
    except classify.RuleError as exc:
        yield Refused("--tft-fault-rules", str(exc), "correct the file")


def _timed(found: Settings, origin: Mapping[str, str], patience: float | None) -> Iterator[Refused]:
    """Timeouts that do not fit into each other; or, where they do, not into the launcher's patience."""
    try:
        found.deadlines(None, origin)
        found.deadlines(patience, origin)
    except Refused as refusal:
        yield refusal


def _locked(found: Settings) -> Iterator[Refused]:
    """Ways to open a key that there is not, or two of them."""
    given = [key for key in ("tft_tls_key_password_file", "tft_tls_decrypt") if getattr(found, key) is not None]
    for key in given:
        if not found.tft_tls_dir:
            yield Refused(
                settings_module.flag_of(key),
                "there is no key without --tft-tls-dir",
                "add --tft-tls-dir DIR, or leave it out",
            )
    if len(given) == 2:
        yield Refused("--tft-tls-decrypt", "--tft-tls-key-password-file opens the same key", "keep one of the two")
    hook = found.tft_tls_decrypt
    if hook is not None and not all(hook.partition(":")):
        yield Refused("--tft-tls-decrypt", f"{hook!r} names no function", "write module:function")


def _observed(found: Settings) -> Iterator[Refused]:
    """Metrics that everybody could read, and traces that nobody could send."""
    port, host, url = found.tft_metrics_port, found.tft_metrics_host, found.tft_otel_endpoint
    if port is not None and not (is_loopback(host) or found.tft_tls_dir or found.tft_insecure):
        yield Refused(
            "--tft-metrics-host",
            f"anybody who reaches {host} could read the metrics of this job",
            "give --tft-tls-dir, so that only who has a certificate may, or --tft-insecure on a network that you trust",
        )
    if port is not None and port == found.tft_controller_port:
        yield Refused("--tft-metrics-port", f"{port} is the port of the controller", "choose another one")
    if url is None:
        return
    if not url.startswith(("http://", "https://")):
        yield Refused(
            "--tft-otel-endpoint", f"{url!r} is no URL", "write http://HOST:4317, or https:// for a collector with TLS"
        )
    from mindspeed_tft.observe import tracing

    if package := tracing.missing():
        yield Refused("--tft-otel-endpoint", f"{package} is not installed", tracing.REMEDY)


def steered(found: Settings, origin: Mapping[str, str]) -> Iterator[Refused]:
    """A cluster manager that cannot be asked, or that somebody else asks already."""
    if not found.clusterd:
        return
    from mindspeed_tft.clusterd.address import Address, installed_taskd

    asked = "" if origin["tft_clusterd"] == "flag" else f" (asked for by {origin['tft_clusterd']})"
    nobody = "give --tft-clusterd none, so that nobody is asked"
    try:
        address = Address.parse(found.clusterd)
    except ValueError as error:
        yield Refused("--tft-clusterd", f"{error}{asked}", f"write http://HOST:{settings_module.CLUSTERD_PORT}")
        return
    if not found.tft_clusterd_job:
        yield Refused(
            "--tft-clusterd",
            f"ClusterD knows jobs by their ids, and there is none{asked}",
            "give --tft-clusterd-job ID",
        )
    if address.tls and not found.tft_tls_dir:
        yield Refused("--tft-clusterd", "https:// needs certificates", "give --tft-tls-dir DIR")
    if not (address.tls or found.tft_insecure or is_loopback(address.host)):
        yield Refused(
            "--tft-clusterd",
            f"anybody between this job and {address.host} could give it orders: that port is not encrypted{asked}",
            "use its proxy on this host (LOCAL_PROXY_ENABLE=on), https://, or --tft-insecure on a network that you"
            f" trust; or {nobody}",
        )
    if place := installed_taskd(os.environ):
        yield Refused(
            "--tft-clusterd",
            f"TaskD is installed in {place}, which is ClusterD's client of a job, and there can only be one{asked}",
            f"set TASKD_PROCESS_ENABLE=off where it is not started; or {nobody}",
        )


def store(found: Settings, args: argparse.Namespace) -> None:
    """Write the resolved values back, so that Megatron prints and saves what is really in force."""
    for key in Settings.model_fields:
        if hasattr(args, key):
            setattr(args, key, getattr(found, key))


def or_exit(action: Callable[[], Any], rank: int) -> Any:
    """Run a start-up check; a refusal ends the job with one clear message on rank 0.

    Every rank finds the same fault, but a launcher ends the others as soon as the first one exits: the other ranks
    hold still for a moment, or rank 0 might be ended before it has printed.
    """
    try:
        return action()
    except Refused as exc:
        leave(str(exc), rank)


def leave(message: str, rank: int) -> NoReturn:
    """End this rank before training began; only rank 0 speaks."""
    if rank == 0:
        print(f"mindspeed_tft: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(3.0)
    raise SystemExit(2)
