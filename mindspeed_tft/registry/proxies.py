"""The wrapt proxies that we put on targets, and how they call our wrappers. Which lies where is not known here."""

from __future__ import annotations

import copy
import pkgutil
import threading
from collections.abc import Callable
from typing import Any

import wrapt  # type: ignore[import-untyped, unused-ignore]

from mindspeed_tft.registry.targets import Target

# The form of all our wrappers, wrapt's: (wrapped, instance, args, kwargs) -> result. `wrapped` is bound already;
# `instance` is None for functions and static methods, and the class for class methods.
Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


class Chain:
    """What a proxy calls: the wrappers of its target, outermost first; none, and the proxy is transparent.

    Where several proxies of one target lie over one another, because somebody patched it in between, a call that goes
    down through them is one call, and only the first that it comes to runs the wrappers.
    """

    __slots__ = ("calls", "links", "rank")

    def __init__(self, links: tuple[Wrapper, ...], rank: int = 0, calls: threading.local | None = None) -> None:
        """`rank`: a proxy of a higher one lies further out. `calls`: shared by all proxies of a target; None: one lies
        there alone."""
        self.links, self.rank, self.calls = links, rank, calls

    def __call__(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A retired proxy leaves no mark: it may lie over a live one, which is then the first of the call.
        if self.calls is None or not self.links:
            return _run(self.links, wrapped, instance, args, kwargs)
        above = getattr(self.calls, "rank", None)
        # A call never climbs: one that comes to the same rank again, or to a higher one, is the function calling
        # itself, and that goes through the wrappers like any other.
        links = self.links if above is None or self.rank >= above else ()
        self.calls.rank = self.rank
        try:
            return _run(links, wrapped, instance, args, kwargs)
        finally:
            self.calls.rank = above


def _run(links: tuple[Wrapper, ...], wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not links:
        return wrapped(*args, **kwargs)
    if len(links) > 1:
        wrapped = _Inner(wrapped, instance, links[1:])
        return links[0](wrapped, instance, args, kwargs)
    return links[0](wrapped, instance, args, kwargs)


class _Inner(wrapt.ObjectProxy):  # type: ignore[misc, type-arg, unused-ignore]
    """What a wrapper sees as `wrapped` when others of ours are beneath it: looks like the target, calls the next."""

    def __init__(self, wrapped: Any, instance: Any, links: tuple[Wrapper, ...]) -> None:
        super().__init__(wrapped)
        self._self_instance = instance
        self._self_links = links

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _run(self._self_links, self.__wrapped__, self._self_instance, args, kwargs)


class _BoundProxy(wrapt.BoundFunctionWrapper):  # type: ignore[misc, type-arg, unused-ignore]
    """A target that was looked up on an instance or a class. Copies and pickles like the method it stands for."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        holder = getattr(self.__wrapped__, "__self__", None)
        return self if holder is None else getattr(copy.deepcopy(holder, memo), self._self_parent._self_leaf)

    def __reduce__(self) -> Any:
        holder = getattr(self.__wrapped__, "__self__", None)
        if holder is None:
            return self._self_parent.__reduce__()
        return getattr, (holder, self._self_parent._self_leaf)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


class Proxy(wrapt.FunctionWrapper):  # type: ignore[misc, type-arg, unused-ignore]
    """The layer that we put on a target.

    wrapt's own proxies refuse to be copied or pickled. Hosts deep-copy configurations that hold functions, and pickle
    functions for processes of their own: ours are copied as functions are, and pickled as a place to look up, so that
    what was pickled loads where we are not installed.
    """

    __bound_function_wrapper__ = _BoundProxy

    def __init__(self, base: Any, chain: Chain, target: Target) -> None:
        super().__init__(base, chain)
        self._self_chain = chain
        self._self_leaf = target.path[-1]
        self._self_place = str(target)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> Any:
        return pkgutil.resolve_name, (self._self_place,)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


def replacing(function: Callable[..., Any], binds: bool) -> Wrapper:
    """A replacement in the form of a wrapper. `binds`: the target receives its instance or class as first argument."""

    def replaced(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(instance, *args, **kwargs) if binds else function(*args, **kwargs)

    return replaced


def beneath(raw: Any) -> Any:
    """What lies under proxies of ours that only pass through."""
    while type(raw) is Proxy and not raw._self_chain.links:
        raw = raw.__wrapped__
    return raw


def retire(proxy: Proxy) -> None:
    """Whoever still holds it passes through it from now on."""
    proxy._self_chain.links = ()
