"""Living beside MindSpeed: the only module that names it.

MindSpeed has a patch manager of its own, which applies, removes and applies again what it registered. Here our patches
are lifted around each of its turns, so that it always finds Megatron as if we were not there, and are the outermost
layer after it. Our flags are added after those of its features. Either import order works; nothing here imports
MindSpeed or Megatron.

What this module is not: a place for patches of MindSpeed's features, nor for what runs on NPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterable
from typing import Any

from mindspeed_tft.registry import Registry, version_of

__all__ = ["GROUP", "add_flag_if_absent", "flags_last", "install", "loaded", "present", "refuse_conflicts"]

GROUP = "mindspeed"  # of the patches that guard MindSpeed's manager

_PATCH_MANAGER = "mindspeed.patch_utils"
_FEATURES_MANAGER = "mindspeed.features_manager.features_manager"
_TTP = "mindspeed.core.ttp"
_LLM_FEATURE = "mindspeed_llm.features_manager.high_availability"
_LLM_RUNTIME = "mindspeed_llm.core.high_availability"

AddFlags = Callable[[argparse.ArgumentParser], None]

_installed: list[Registry] = []


def loaded() -> bool:
    """Whether MindSpeed patches this process, or is about to."""
    return _PATCH_MANAGER in sys.modules


def present() -> bool:
    """Whether MindSpeed is loaded or could be imported; to be installed does not mean to be used."""
    return loaded() or "mindspeed" in sys.modules or importlib.util.find_spec("mindspeed") is not None


def install(registry: Registry, add_flags: AddFlags) -> None:
    """Make `registry` coexist with MindSpeed, whether that is loaded, will be, or never is.

    `add_flags(parser)` is called after MindSpeed's features have added theirs; see `add_flag_if_absent`.
    """
    if registry in _installed:
        return
    _installed.append(registry)
    # What these packages hold under a name of Megatron is what they patch Megatron with.
    registry.leave_alone("mindspeed", "mindspeed_llm")
    registry.host("mindspeed", version_of("mindspeed", distribution="mindspeed"))

    def make_room(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with registry.peeled():
            return wrapped(*args, **kwargs)

    def flags_after(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        add_flags(args[0] if args else kwargs["parser"])
        return result

    manager = f"{_PATCH_MANAGER}:MindSpeedPatchesManager"
    registry.wrap(f"{manager}.apply_patches", group=GROUP)(make_room)
    # Versions before Megatron core_r0.12.1 can neither remove patches nor have they a manager of features.
    registry.wrap(f"{manager}.remove_patches", group=GROUP, missing="skip")(make_room)
    features = f"{_FEATURES_MANAGER}:MindSpeedFeaturesManager"
    registry.wrap(f"{features}.register_features_args", group=GROUP, missing="skip")(flags_after)
    registry.activate(GROUP)


def add_flag_if_absent(parser: argparse._ActionsContainer, *flags: str, **options: Any) -> argparse.Action:
    """`parser.add_argument`, unless somebody (MindSpeed-LLM has flags of the same names) has added one of `flags`.

    Returns the action that is in force.
    """
    known: dict[str, argparse.Action] = parser._option_string_actions
    for flag in flags:
        if flag in known:
            return known[flag]
    return parser.add_argument(*flags, **options)


def flags_last(
    provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None, add_flags: AddFlags
) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """An `extra_args_provider` for Megatron's parse_args that adds our flags when parsing begins, not when called.

    Providers are called before MindSpeed's features add their flags, and these do not look whether a flag is there.
    """

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if provider is not None:
            parser = provider(parser)
        parse = parser.parse_known_args

        def parse_with_our_flags(*args: Any, **kwargs: Any) -> Any:
            add_flags(parser)
            return parse(*args, **kwargs)

        parser.parse_known_args = parse_with_our_flags  # type: ignore[method-assign]
        return parser

    return provide


def refuse_conflicts(args: argparse.Namespace) -> list[str]:
    """Why our features cannot be on beside what MindSpeed does in this process; empty when they can."""
    refusals = []
    if getattr(args, "ttp_enabled", False) or any(_patched_from(_TTP)):
        refusals.append(
            "--ttp-enabled: MindSpeed's own TTP replaces DistributedOptimizer.__new__ and ChainedOptimizer.step, which "
            "our dump and repair rely on. Remove --ttp-enabled (or ttp_enabled from the arguments of repatch), or "
            "remove --enable-high-availability."
        )
    if any(_patched_from(_LLM_RUNTIME)) or (getattr(args, "enable_high_availability", False) and _llm_feature()):
        refusals.append(
            "--enable-high-availability: MindSpeed-LLM's HighAvailabilityFeature (MindIO) acts on the same flag, and "
            "both would handle each fault. Take HighAvailabilityFeature out of MindSpeed-LLM's feature list, or do not "
            "import mindspeed_tft.adaptor."
        )
    refusals.extend(
        f"{row.target}: {row.detail}. MindSpeed {row.host_version or '(version unknown)'} would overwrite our patches "
        "unnoticed. Install a MindSpeed that has it (2.0 or later), or remove --enable-high-availability."
        for registry in _installed
        if loaded()
        for row in registry.list(GROUP)
        if row.target.endswith(".apply_patches") and row.state in ("missing", "conflict")
    )
    return refusals


def _patched_from(package: str) -> Iterable[bool]:
    """For each function that MindSpeed has registered as a patch: whether it is from `package`."""
    manager = getattr(sys.modules.get(_PATCH_MANAGER), "MindSpeedPatchesManager", None)
    for patch in dict(getattr(manager, "patches_info", {})).values():
        for function in (getattr(patch, "patch_func", None), *getattr(patch, "wrappers", ())):
            yield _is_of(getattr(function, "__module__", None), package)


def _llm_feature() -> bool:
    manager = getattr(sys.modules.get(_FEATURES_MANAGER), "MindSpeedFeaturesManager", None)
    return any(_is_of(type(feature).__module__, _LLM_FEATURE) for feature in getattr(manager, "FEATURES_LIST", ()))


def _is_of(module: object, package: str) -> bool:
    return isinstance(module, str) and f"{module}.".startswith(f"{package}.")
