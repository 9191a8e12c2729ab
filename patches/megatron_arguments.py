"""megatron.training.arguments: our flags in Megatron's own parser, and every refusal at start-up.

The only module that patches anything when no feature is on.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from mindspeed_tft import arguments, platforms
from mindspeed_tft.addresses import is_loopback
from mindspeed_tft.agent import reboot
from mindspeed_tft.patches import megatron_layout, megatron_unproved, megatron_unproved_releases, mindspeed
from mindspeed_tft.patches.groups import PARSER, RELEASES, supported
from mindspeed_tft.platforms import Platform
from mindspeed_tft.registry import REGISTRY
from mindspeed_tft.replica import hosts
from mindspeed_tft.settings import Refused, Settings

MODULE = "megatron.training.arguments"
Arguments = tuple[Any, ...]


@REGISTRY.wrap(f"{MODULE}:parse_args", group=PARSER)
def parse_args(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Add our flags last and only if absent, whoever else (MindSpeed, MindSpeed-LLM) adds some."""
    provider = args[0] if args else kwargs.pop("extra_args_provider", None)
    space = wrapped(mindspeed.flags_last(provider, arguments.add_flags), *args[1:], **kwargs)
    arguments.or_exit(lambda: _refuse_lost_flags(space), _rank())
    return space


def _refuse_lost_flags(space: Any) -> None:
    """Megatron's --yaml-cfg replaces the whole namespace, and our flags with it: never let them vanish silently."""
    ours = {flag for flag, _ in arguments.FLAGS}
    given = [word.split("=")[0] for word in sys.argv[1:] if word.split("=")[0] in ours]
    if given and not hasattr(space, "enable_high_availability"):
        raise Refused(
            given[0],
            "Megatron dropped it: --yaml-cfg replaces all command line flags",
            "use flags instead of --yaml-cfg",
        )


@REGISTRY.wrap(f"{MODULE}:validate_args", group=PARSER)
def validate_args(wrapped: Callable[..., Any], _instance: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
    """Settle our settings before Megatron settles its own, then turn the wanted features on."""
    space = args[0] if args else kwargs["args"]
    settings, origin = arguments.or_exit(lambda: arguments.resolve(space), _rank())
    arguments.store(settings, space)
    if not settings.enable_high_availability:
        return wrapped(*args, **kwargs)
    if reason := mindspeed.stays_off(space):
        arguments.or_exit(mindspeed.check_mindio, _rank())
        if _rank() == 0:
            print(f"*** mindspeed_tft: {reason} ***", flush=True)
        return wrapped(*args, **kwargs)
    arguments.or_exit(lambda: check(settings, space, os.environ, origin), _rank())
    if _local_rank() == 0:
        arguments.or_exit(lambda: check_save(space.save), 0)
    if _rank() == 0 and not reboot.lives(os.environ):  # else the controller of this very job listens there
        arguments.or_exit(lambda: check_port(settings), 0)
    if space.use_distributed_optimizer and hasattr(space, "num_distributed_optimizer_instances"):
        space.num_distributed_optimizer_instances = settings.replicas
    result = wrapped(*args, **kwargs)
    arguments.or_exit(lambda: _check_proved(settings, space, megatron_unproved.SETTLED_LATE), _rank())
    from mindspeed_tft import runtime  # not at the top: with every feature off none of it is even imported

    runtime.enable(settings, origin)
    return result


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


# ------------------------------------------------------------------------------------------------ refusals


def check(settings: Settings, space: Any, environ: Any, origin: Mapping[str, str] | None = None) -> None:
    """Refuse what cannot work, before any process group exists. `space` is not validated by Megatron yet. `origin`:
    where settings come from, by their names.

    Raises:
        Refused: with flag, reason and remedy.
    """
    platforms.look_alike.refuse(settings)
    _check_release()
    _check_layout(settings, space, origin or {})
    _check_checkpoint(space)
    _check_proved(settings, space)
    version = REGISTRY.version("megatron")
    older = megatron_unproved_releases.first(space, version or "")
    if older is not None:
        raise Refused(older.flag, f"with Megatron {version}: {older.reason}", older.remedy)
    for refusal in mindspeed.refuse_conflicts(space):
        raise refusal
    _check_network(settings, space, environ)
    _check_hosts(settings, space, environ)


def _check_proved(settings: Settings, space: Any, among: Collection[str] = ()) -> None:
    unproved = megatron_unproved.first(space, online=settings.strategies() != ("dump",), among=among)
    if unproved is not None:
        raise Refused(unproved.flag, unproved.reason, unproved.remedy)


def _check_release() -> None:
    version = REGISTRY.version("megatron") or "of an unknown version"
    if not supported(version):
        raise Refused("--enable-high-availability", f"it is not proved exact with megatron-core {version}",
                      f"use {RELEASES}, or train without it")  # fmt: skip


def _check_layout(settings: Settings, space: Any, origin: Mapping[str, str]) -> None:
    model = space.tensor_model_parallel_size * space.pipeline_model_parallel_size * (space.context_parallel_size or 1)
    size, rest = divmod(space.world_size, model)
    replicas = settings.replicas
    if rest:
        return  # Megatron's own message about the world size is the better one
    if size < 2:
        raise Refused("--enable-high-availability",
                      f"the data-parallel size is {size}, so no other rank could hold a replica",
                      "use at least twice as many ranks, or less model parallelism")  # fmt: skip
    copies = _copies_of_experts(space)
    if not getattr(space, "use_distributed_optimizer", False):
        _check_every_holder(settings, origin, size, copies)
        return
    if copies and copies % replicas:
        raise Refused("--optimizer-replica-num",
                      f"{replicas} does not divide the {copies} data-parallel ranks of each expert",
                      "use less --expert-model-parallel-size, more ranks, or a number that does")  # fmt: skip
    if size % replicas:
        divisors = ", ".join(str(n) for n in range(2, size + 1) if size % n == 0)
        raise Refused("--optimizer-replica-num", f"{replicas} does not divide the data-parallel size {size}",
                      f"use one of {divisors}")  # fmt: skip
    given = getattr(space, "num_distributed_optimizer_instances", 1) or 1
    if given not in (1, replicas):
        reason = f"{given} contradicts --optimizer-replica-num {replicas}"
        raise Refused("--num-distributed-optimizer-instances", reason, "leave it out, it is set for you")


def _copies_of_experts(space: Any) -> int:
    """Ranks that hold the same experts; 0 for a dense model.

    Raises:
        Refused: experts are divided in a way that is not proved.
    """
    if not space.num_experts:
        return 0
    tensor = space.tensor_model_parallel_size
    if (getattr(space, "expert_tensor_parallel_size", None) or tensor) != tensor:
        raise Refused("--expert-tensor-parallel-size",
                      f"another size than that of all else ({tensor}) is not proved exact in this version",
                      "leave it out")  # fmt: skip
    divided = tensor * space.pipeline_model_parallel_size * (space.expert_model_parallel_size or 1)
    return int(space.world_size // divided)


def _check_every_holder(settings: Settings, origin: Mapping[str, str], size: int, copies: int) -> None:
    """Without the distributed optimizer every data-parallel rank holds all of its part."""
    why = f"without --use-distributed-optimizer each of the {size} data-parallel ranks holds all"
    if settings.distributed_optimizer_no_replica:
        raise Refused("--distributed-optimizer-no-replica", why, "leave it out, or add --use-distributed-optimizer")
    if origin.get("optimizer_replica_num") == "flag" and settings.optimizer_replica_num != size:
        raise Refused("--optimizer-replica-num", why, "leave it out, or add --use-distributed-optimizer")
    if copies == 1:
        raise Refused("--expert-model-parallel-size", "each expert is on one rank, so no other rank could replace it",
                      "use less of it, or more ranks")  # fmt: skip


def _check_checkpoint(space: Any) -> None:
    if not space.save:
        raise Refused("--enable-high-availability", "there is no place for a dump, --save is missing", "add --save DIR")
    if space.save_interval is None:
        raise Refused("--save", "Megatron wants to know how often to save as well", "add --save-interval N")
    if hasattr(space, "ckpt_format") and space.ckpt_format not in ("torch", "torch_dist"):
        raise Refused("--ckpt-format", f"dumps in format {space.ckpt_format!r} are not in this version",
                      "use --ckpt-format torch_dist (Megatron's default) or torch")  # fmt: skip
    names = ("use_gloo_process_groups", "enable_gloo_process_groups")  # the second before 0.17
    if not all(getattr(space, name, True) for name in names):
        reason = "Megatron saves format torch through gloo groups, and format torch_dist is not proved without them"
        raise Refused("--disable-gloo-process-groups", reason, "leave it out")
    strategy = getattr(space, "async_strategy", "mcore")
    in_background = getattr(space, "async_save", False) and getattr(space, "use_persistent_ckpt_worker", False)
    if in_background and strategy != "mcore":  # without that worker Megatron switches --async-save off
        raise Refused("--async-strategy", f"a save of {strategy!r} under way cannot be given up in this version",
                      "add --async-strategy mcore, or leave --async-save out")  # fmt: skip


def _check_network(settings: Settings, space: Any, environ: Any) -> None:
    _check_device(platforms.select(settings.tft_platform), settings, space.distributed_backend, environ)
    hosts = int(environ.get("GROUP_WORLD_SIZE", "1"))
    controller = settings.tft_controller_address or environ.get("TTP_ADDR") or environ.get("MASTER_ADDR", "")
    open_network = hosts > 1 and not is_loopback(controller)  # several "nodes" of one machine need no secrets
    if open_network and not settings.tft_tls_dir and not settings.tft_insecure:
        raise Refused("--tft-tls-dir", f"{hosts} nodes would talk to the controller without authentication",
                      "give a directory with ca.crt, node.crt and node.key, or say --tft-insecure")  # fmt: skip


def _check_device(device: Platform, settings: Settings, backend: str, environ: Any) -> None:
    if why := device.why_no_abort(backend):
        raise Refused("--distributed-backend", *why)
    for flag, wanted in (("--enable-hbmfault-repair", settings.enable_hbmfault_repair),
                         ("--enable-worker-reboot", settings.enable_worker_reboot)):  # fmt: skip
        if wanted and (why := device.why_no_repair(environ)):
            raise Refused(flag, *why)


def _check_hosts(settings: Settings, space: Any, environ: Any) -> None:
    """Where ranks run is certain only when they have met, and is judged then once more (`runtime.protect`)."""
    where = hosts.pretended(environ)
    if settings.tft_require_separate_hosts and len(where) == space.world_size:
        try:
            found = hosts.judge(megatron_layout.sizes(space), megatron_layout.replicas(space, settings.replicas), where)
        except ValueError:
            return  # a world of no such sizes: Megatron's own message is the better one
        if found is not None:
            raise Refused(hosts.WANTED, found.reason, found.remedy)


def check_save(save: str) -> None:
    """Write and remove a small file in `save`, which is made if it does not exist.

    Raises:
        Refused: not writable.
    """
    try:
        Path(save).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=save, prefix=".tft-probe-") as file:
            file.write(b"probe")
            file.flush()
            os.fsync(file.fileno())
    except OSError as exc:
        raise Refused("--save", f"{save} is not writable ({exc.strerror or exc})",
                      "give a directory that every rank may write to") from None  # fmt: skip


def check_port(settings: Settings) -> None:
    """See at once that a wanted port is taken; the controller's own bind, a little later, is what counts.

    Raises:
        Refused: somebody listens there.
    """
    if settings.tft_controller_port is None:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", settings.tft_controller_port))
        except OSError as exc:
            raise Refused("--tft-controller-port", f"port {settings.tft_controller_port} is taken ({exc.strerror})",
                          "choose a free port, or leave it out on a single host") from None  # fmt: skip
