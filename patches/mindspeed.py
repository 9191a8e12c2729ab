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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mindspeed_tft.patches import mindspeed_unproved
from mindspeed_tft.registry import Registry, version_of
from mindspeed_tft.settings import Refused

__all__ = [
    "GROUP",
    "add_flag_if_absent",
    "check_mindio",
    "flags_last",
    "forget_partials",
    "install",
    "loaded",
    "present",
    "refuse_conflicts",
    "stays_off",
]

GROUP = "mindspeed"  # of the patches that guard MindSpeed's manager

_PATCH_MANAGER = "mindspeed.patch_utils"
_FEATURES_MANAGER = "mindspeed.features_manager.features_manager"
_ADAPTOR = "mindspeed.megatron_adaptor"
_ARGUMENTS = "mindspeed.args_utils"
_TTP = "mindspeed.core.ttp"
_LLM_FEATURE = "mindspeed_llm.features_manager.high_availability"
_LLM_RUNTIME = "mindspeed_llm.core.high_availability"
_LLM_LOOP = "mindspeed_llm.training.training"

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


def refuse_conflicts(args: argparse.Namespace) -> Iterator[Refused]:
    """Why our features cannot be on beside what MindSpeed does in this process; nothing when they can."""
    if not loaded():
        return
    # What MindSpeed patches by is what it read from the command line when it was imported; `repatch` changes that.
    for space in (args, _early_arguments()):
        option = mindspeed_unproved.refused(space)
        if option is not None:
            yield Refused(option.flag, option.reason, option.remedy)
    if any(_patched_from(_TTP)):
        yield Refused(
            "--ttp-enabled",
            "MindSpeed's own TTP has patched the optimizer's classes that our dump and repair rely on",
            "leave ttp_enabled out of the arguments of repatch, or leave out --enable-high-availability",
        )
    for row in (row for registry in _installed for row in registry.list(GROUP)):
        if row.target.endswith(".apply_patches") and row.state in ("missing", "conflict"):
            yield Refused(
                "--enable-high-availability",
                f"{row.target}: {row.detail}. MindSpeed {row.host_version or '(version unknown)'} would overwrite our"
                " patches unnoticed",
                "install a MindSpeed that has it (2.0 or later), or leave out --enable-high-availability",
            )


def stays_off(args: argparse.Namespace) -> str:
    """Why our features stay off though they are asked for, for the user to read; "" when they do not.

    Forks of `pretrain` and `train` that act on the same flags are not protected by ours: MindSpeed-LLM's, and those of
    MindSpeed for Megatron core_r0.6.0.
    """
    who = _who_acts()
    if not (getattr(args, "enable_high_availability", False) and who):
        return ""
    return (
        f"{who} acts on --enable-high-availability itself, in its own training loop (mindio_ttp), and two systems would"
        f" both try to recover the job. So {who}'s is in force; this plugin stays off, and flags that begin with --tft-"
        " have no effect. To have MindSpeed-LLM's adaptor run on this project's engine, import"
        " mindspeed_tft.facade.mindio first, instead of mindspeed_tft.adaptor."
    )


def check_mindio() -> None:
    """Where `stays_off` has a reason.

    Raises:
        Refused: what is in force instead cannot work here.
    """
    if importlib.util.find_spec("mindio_ttp") is None:
        raise Refused(
            "--enable-high-availability",
            f"{_who_acts()} acts on this flag itself, in its own training loop, and needs mindio_ttp for it, which is"
            " not installed",
            "import mindspeed_tft.facade.mindio first, instead of mindspeed_tft.adaptor: it serves that name to"
            " MindSpeed-LLM; or install mindio_ttp, or leave out --enable-high-availability",
        )


def forget_partials(model: Iterable[Any]) -> None:
    """MindSpeed binds `start_param_sync` of each chunk to one kind of buckets while an optimizer of the chain updates,
    and binds it back afterwards; a step that is broken off leaves it so, and then the other kind is never gathered."""
    for chunk in model:
        vars(chunk).pop("start_param_sync", None)


def _early_arguments() -> Any:
    return getattr(sys.modules.get(_ARGUMENTS), "_MINDSPEED_ARGS", None)


def _who_acts() -> str:
    """Who else acts on our flags; "" when nobody does. MindSpeed-LLM's loop asks for them itself, also where the
    feature was taken out of the list."""
    if _LLM_LOOP in sys.modules or _llm_feature() or any(_patched_from(_LLM_RUNTIME)):
        return "MindSpeed-LLM"
    return "MindSpeed" if hasattr(sys.modules.get(_ADAPTOR), "high_availability_adaptation") else ""


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
