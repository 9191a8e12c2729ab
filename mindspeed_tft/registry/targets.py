"""Targets: how they are written, where they lie, and how they are named in messages. Nothing here changes a target."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ABSENT: Any = object()  # "there is no such attribute", where None is a value


class PatchError(RuntimeError):
    """A patch cannot be declared, applied or verified. The message names the target, the reason and the remedy."""

    __module__ = __name__.rpartition(".")[0]  # a traceback names the place to import it from


class Unfit(Exception):
    """A target that is not there, or is nothing that can be wrapped; says which."""


@dataclass(frozen=True)
class Target:
    """`module:Qual.name`."""

    module: str
    path: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Target:
        module, colon, path = text.partition(":")
        names = tuple(path.split("."))
        if not colon or not all(name.isidentifier() for name in (*module.split("."), *names)):
            raise PatchError(
                f"{text!r} is no target. Write 'package.module:function' or 'package.module:Class.method'."
            )
        return cls(module, names)

    @property
    def host(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}:{'.'.join(self.path)}"


@dataclass(frozen=True)
class Found:
    owner: Any  # a module or a class
    leaf: str
    raw: Any  # as it lies in a __dict__: descriptors unbound
    own: bool  # lies in the owner's own __dict__ (False: inherited)

    @property
    def base(self) -> Any:
        return self.raw if self.own else _inherited(self.owner, self.leaf, self.raw)

    @property
    def binds(self) -> bool:
        return isinstance(self.owner, type) and not isinstance(self.raw, staticmethod)


def _inherited(owner: type, leaf: str, raw: Any) -> Any:
    """What a proxy wraps when `owner` only inherits `leaf`: a look-up at call time, as without us.

    Wrapping the inherited function itself would freeze it: a later patch of the base class would miss this class.
    """
    if isinstance(raw, staticmethod):

        def static(*args: Any, **kwargs: Any) -> Any:
            return getattr(super(owner, owner), leaf)(*args, **kwargs)

        return staticmethod(functools.update_wrapper(static, raw.__func__))
    if isinstance(raw, classmethod):

        def of_class(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
            return getattr(super(owner, cls), leaf)(*args, **kwargs)

        return classmethod(functools.update_wrapper(of_class, raw.__func__))

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, self), leaf)(*args, **kwargs)

    return functools.update_wrapper(method, raw)


def find(target: Target) -> Found:
    """Look `target` up in its module, which is imported.

    Never through getattr: on a class that binds, and on a module it may import others.
    """
    owner: Any = sys.modules.get(target.module)
    if owner is None:
        raise Unfit(f"module {target.module} is not imported any more")
    for name in target.path[:-1]:
        owner, where = _static(owner, name), owner
        if owner is ABSENT:
            raise Unfit(f"{describe(where)} has no {name!r}")
        if not isinstance(owner, type):
            raise Unfit(f"{name!r} in {describe(where)} is not a class")
    leaf = target.path[-1]
    raw, own = _static(owner, leaf), leaf in vars(owner)
    if raw is ABSENT:
        lazy = ""
        if isinstance(owner, ModuleType) and "__getattr__" in vars(owner):
            lazy = " of its own (it has a __getattr__: name the module that defines the target)"
        raise Unfit(f"{describe(owner)} has no {leaf!r}{lazy}")
    if raw is None:
        raise Unfit(f"{leaf!r} in {describe(owner)} is None (other patchers leave that where a function was missing)")
    if isinstance(raw, type):
        raise Unfit(f"{leaf!r} in {describe(owner)} is a class: wrap its __init__ or a method instead")
    if not (callable(raw) or isinstance(raw, (staticmethod, classmethod))):
        raise Unfit(
            f"{leaf!r} in {describe(owner)} is a {type(raw).__name__}: only functions and methods can be wrapped"
        )
    return Found(owner, leaf, raw, own)


def _static(owner: Any, name: str) -> Any:
    if not isinstance(owner, type):
        return vars(owner).get(name, ABSENT)
    for cls in owner.__mro__:
        # What comes from `object` counts as absent: object.__init__ and __new__ ask who overrides them, so that a class
        # that defines none would not work as before with a proxy there.
        if cls is not object and name in vars(cls):
            return vars(cls)[name]
    return ABSENT


def describe(thing: Any) -> str:
    if isinstance(thing, ModuleType):
        return f"module {thing.__name__}"
    if isinstance(thing, type):
        return f"class {thing.__module__}.{thing.__qualname__}"
    inner = getattr(thing, "__func__", thing)
    name = getattr(inner, "__qualname__", None) or type(inner).__name__
    return f"{getattr(inner, '__module__', None) or '?'}.{name}"
