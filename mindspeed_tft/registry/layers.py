"""Who else has patched a target: the functions that lie on it, one over the other, and where each of them is from.

A wrapper that does not say what it wraps (`functools.wraps` does, in `__wrapped__`) hides what lies beneath it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import wrapt  # type: ignore[import-untyped, unused-ignore]

from mindspeed_tft.registry.proxies import Proxy
from mindspeed_tft.registry.sources import Place, Sources
from mindspeed_tft.registry.targets import ABSENT, Target, Unfit, describe

_OURS = __name__.partition(".")[0]
_PROXIES = (wrapt.ObjectProxy, wrapt.FunctionWrapper)
_FUNCTIONS = (FunctionType, functools.partial, *_PROXIES)


def strangers(target: Target, raw: Any, sources: Sources) -> tuple[str, ...]:
    """Functions in the chain `raw` that neither the target's own package nor we have put there, outermost first.

    Decorators in the package's sources are its own doing, wherever they are from.
    """
    foreign = [layer for layer in layers(raw) if _top(layer) not in (target.host, _OURS)]
    if not foreign:
        return ()
    try:
        known = _packages(sources.find(target))
    except Unfit:
        known = set()  # no sources to compare with: better one name too many
    return tuple(_name(layer) for layer in foreign if _top(layer) not in known)


def outermost(raw: Any) -> str:
    """The name of what lies on top, by the code that it runs."""
    layer = next(layers(raw), None)
    return describe(raw) if layer is None or isinstance(layer, type) else f"{_home(layer)}.{_label(layer)}"


def leads_around(held: Any, raw: Any) -> bool:
    """Whether who calls `held` comes to the innermost function of `raw`, what lies beneath us, but not through us."""
    # Other objects may answer to any name, with a new object each time.
    if not (issubclass(type(held), _FUNCTIONS) or inspect.getattr_static(held, "__wrapped__", None) is not None):
        return False
    chain = list(_chain(held))
    if any(type(layer) is Proxy and layer._self_chain.links for layer in chain):
        return False
    return next(reversed(chain), None) is next(reversed(list(layers(raw))), ABSENT)


def layers(raw: Any) -> Iterator[Any]:
    """The functions that are called one by the other, outermost first, without our own proxies."""
    return (layer for layer in _chain(raw) if type(layer) is not Proxy)


def _chain(raw: Any) -> Iterator[Any]:
    seen: set[int] = set()
    while raw is not None and id(raw) not in seen:
        seen.add(id(raw))
        # By type(), because a proxy claims to be of the class that it stands for.
        if issubclass(type(raw), _PROXIES):
            if type(raw) is Proxy:
                yield raw
            elif getattr(raw, "_self_wrapper", None) is not None:
                yield raw._self_wrapper
            raw = raw.__wrapped__
        elif isinstance(raw, (staticmethod, classmethod)):
            raw = raw.__func__
        elif isinstance(raw, functools.partial):
            raw = raw.func
        else:
            yield raw
            raw = getattr(raw, "__wrapped__", None)


def _home(layer: Any) -> str:
    """The module whose code it is. Not `__module__`, which functools.wraps copies from what is wrapped."""
    if isinstance(layer, FunctionType):
        return str(layer.__globals__.get("__name__", "?"))
    return str(getattr(layer, "__module__", None) or type(layer).__module__)


def _top(layer: Any) -> str:
    return _home(layer).partition(".")[0]


def _label(layer: Any) -> str:
    code = getattr(layer, "__code__", None)
    named = getattr(layer, "__qualname__", None) or type(layer).__qualname__
    # What functools.wraps has renamed is told by its code, which before Python 3.11 has the short name only.
    return getattr(code, "co_qualname", code.co_name) if code is not None and hasattr(layer, "__wrapped__") else named


def _name(layer: Any) -> str:
    code = getattr(layer, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if isinstance(code, CodeType) else ""
    return f"{_home(layer)}.{_label(layer)}{place}"


def _packages(place: Place) -> set[str]:
    """Those that the sources themselves bring in at this place."""
    found = {place.module.partition(".")[0]}
    names = vars(sys.modules[place.module]) if place.module in sys.modules else {}
    for decorator in place.decorators:
        thing = names.get(decorator.partition(".")[0])
        for name in decorator.split(".")[1:]:
            thing = getattr(thing, name, None)
        if thing is not None:
            found.add(_home(thing).partition(".")[0] if not isinstance(thing, type) else thing.__module__.split(".")[0])
    return found
