"""What Megatron's own parser and checks say to the flags of a job that is not started, in one process for all ranks.

For `tftctl config --check --megatron`: nothing is trained, no process group is made, no directory is written. The
process ends afterwards; it has imported Megatron, and MindSpeed where that is wanted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from mindspeed_tft.patches.mindspeed_flags import MINDSPEED
from mindspeed_tft.registry import REGISTRY
from mindspeed_tft.settings import Refused

UNKNOWN = "unknown"  # the version of a package that does not tell it
MODULE = "megatron.training.arguments"
DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}  # what Megatron's own pretrain_gpt.py gives
COPIES = 2  # data-parallel ranks of a job of which nobody says how many ranks it has


def look(
    words: Sequence[str], world_size: int | None, environ: Mapping[str, str], with_mindspeed: bool
) -> dict[str, Any]:
    """Parse and validate, as every rank of a job would.

    Args:
        world_size: ranks of the job; None: as many as its model needs, twice.
        with_mindspeed: MindSpeed's adaptor is imported first, as its users do.

    Returns:
        megatron, mindspeed: versions ("" without). parsed: number of flags that were understood. world_size: ranks.
        refused: (flag, reason, remedy) of each thing that is wrong.
    """
    sys.argv = ["pretrain_gpt.py", *words]
    if with_mindspeed and importlib.util.find_spec("torch_npu") is None:
        needs = Refused("--mindspeed", "MindSpeed imports torch_npu, which is not installed here",
                        "ask on a machine that has it, or leave --mindspeed out")  # fmt: skip
        return {"megatron": "", "mindspeed": "", "parsed": 0, "world_size": 0, "refused": [_plain(needs)]}
    if with_mindspeed:
        importlib.import_module("mindspeed.megatron_adaptor")
    importlib.import_module("mindspeed_tft.adaptor")
    module = importlib.import_module(MODULE)
    versions = {"megatron": _version("megatron"), "mindspeed": _version("mindspeed") if with_mindspeed else ""}
    try:
        space, rest = _parse(module)
    except Refused as refusal:
        return {**versions, "parsed": 0, "world_size": world_size or 0, "refused": [_plain(refusal)]}
    unknown = [word.partition("=")[0] for word in rest if word.startswith("--")]
    given = sum(word.startswith("--") for word in words)
    space.rank, space.world_size = 0, world_size or COPIES * _model(space)
    refused = [_unknown(flag, versions["megatron"], with_mindspeed) for flag in unknown]
    refused += _ours(space, environ)
    refused += _megatrons(module, space)
    return {
        **versions,
        "parsed": given - len(unknown),
        "world_size": space.world_size,
        "refused": [_plain(refusal) for refusal in refused],
    }


def _plain(refusal: Refused) -> tuple[str, str, str]:
    return refusal.flag, refusal.reason, refusal.remedy


def _version(name: str) -> str:
    return REGISTRY.version(name) or UNKNOWN


def _parse(module: Any) -> tuple[argparse.Namespace, list[str]]:
    """Megatron's namespace, and the words that no parser knows."""
    left: list[str] = []

    def complain(message: str) -> NoReturn:
        flag, _, reason = message.removeprefix("argument ").partition(": ")
        raise Refused(flag, reason, "give a value that fits")

    def watch(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parse = parser.parse_known_args

        def keep(*args: Any, **kwargs: Any) -> Any:
            space, rest = parse(*args, **kwargs)
            left[:] = rest
            return space, rest

        parser.parse_known_args = keep  # type: ignore[method-assign]
        parser.error = complain  # type: ignore[method-assign]
        return parser

    space = module.parse_args(extra_args_provider=watch, ignore_unknown_args=True)
    return space, left


def _model(space: argparse.Namespace) -> int:
    """Ranks that hold one copy of the model."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    product = 1
    for name in sizes:
        product *= getattr(space, name, 1) or 1
    return product


def _unknown(flag: str, megatron: str, with_mindspeed: bool) -> Refused:
    if flag in MINDSPEED and not with_mindspeed:
        return Refused(flag, f"Megatron {megatron} does not know it: it is a flag of MindSpeed, which is not here",
                       "give --mindspeed DIR, and have torch_npu importable; or leave it out")  # fmt: skip
    if flag in MINDSPEED:
        return Refused(flag, "it is a flag of another MindSpeed than this one", "leave it out, or use that MindSpeed")
    who = "neither Megatron nor MindSpeed nor the plugin" if with_mindspeed else "neither Megatron nor the plugin"
    return Refused(flag, f"{who} (here {megatron}) knows it", "correct or leave it out; MindSpeed-LLM adds more flags")


def _ours(space: argparse.Namespace, environ: Mapping[str, str]) -> list[Refused]:
    """Our own refusals, but for those that look at this machine."""
    from mindspeed_tft import arguments
    from mindspeed_tft.patches import megatron_arguments

    try:
        settings, origin = arguments.collect(space, environ)
    except Refused as refusal:
        return [refusal]
    found = list(arguments.conflicts(settings, origin))
    arguments.store(settings, space)
    if settings.enable_high_availability and not found:
        try:
            megatron_arguments.check(settings, space, environ, origin)
        except Refused as refusal:
            found.append(refusal)
        if getattr(space, "use_distributed_optimizer", False):
            space.num_distributed_optimizer_instances = settings.replicas
    return found


def _megatrons(module: Any, space: argparse.Namespace) -> list[Refused]:
    """What Megatron (and MindSpeed) say to the values, each in its own words."""
    said = io.StringIO()
    try:
        with REGISTRY.peeled(), contextlib.redirect_stdout(said):
            module.validate_args(space, dict(DEFAULTS))
    except (Exception, SystemExit) as exc:
        last = traceback.extract_tb(exc.__traceback__)[-1]
        told = str(exc).strip() or (last.line or "").strip() or type(exc).__name__
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        return [Refused("validate_args", f"{type(exc).__name__} at {where}: {told}", "correct the flags it is about")]
    return []
