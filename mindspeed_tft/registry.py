"""The patch registry: declare a patch beside its wrapper, apply, lift, undo, list and verify it.

A patch lands when its module is first imported, and is then the outermost layer of its target: one proxy a target,
however many of our wrappers it carries. Other patchers may come before or after, and may come again; `peeled()` makes
room for them.

What this module is not: it imports no host, names none, and knows no feature. Hosts, the packages of other patchers and
the sources of versions are told to it by the modules in `patches/`.

What it cannot do: a reference to a target that was taken out of its module or class (a closure, a default, an attribute
of an object) before the patch landed stays what it was, as with every patcher. One that was taken after, and that
outlives a change of the target by somebody else, calls straight through. And a call that is under way when its target
is patched goes on without the patch.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.metadata
import importlib.util
import logging
import operator
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import wrapt  # type: ignore[import-untyped, unused-ignore]

__all__ = ["REGISTRY", "Missing", "PatchError", "Registry", "Row", "State", "Wrapper", "version_of"]

LOG = logging.getLogger(__name__)

# The form of all our wrappers, wrapt's: (wrapped, instance, args, kwargs) -> result. `wrapped` is bound already;
# `instance` is None for functions and static methods, and the class for class methods.
Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
Missing = Literal["error", "skip"]
State = Literal["waiting", "applied", "missing", "undone", "conflict"]
_F = TypeVar("_F", bound=Callable[..., Any])

_ABSENT: Any = object()  # "there is no such attribute", where None is a value
_OURS = __name__.partition(".")[0]


class PatchError(RuntimeError):
    """A patch cannot be declared, applied or verified. The message names the target, the reason and the remedy."""


# ---------------------------------------------------------------------------------------------------- versions


def version_of(package: str, file: str = "", distribution: str = "") -> Callable[[], str | None]:
    """A function that tells the version of `package` without importing it (None: the package is not there).

    `file`, relative to the package, is read first, because a source tree on PYTHONPATH has no metadata, or that of
    another installation. It may assign `__version__` a string, or MAJOR, MINOR and PATCH their numbers.
    """

    def version() -> str | None:
        for folder in _folders(package) if file else ():
            source = Path(folder, file)
            if source.is_file():
                found = _version_in(source)
                if found is not None:
                    return found
        if distribution:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                return None
        return None

    return version


def _folders(package: str) -> Iterable[str]:
    loaded = sys.modules.get(package)
    if loaded is not None:
        return list(getattr(loaded, "__path__", ()))
    spec = importlib.util.find_spec(package)  # of a top-level package: finds it without executing it
    return list(spec.submodule_search_locations or ()) if spec is not None else ()


def _version_in(source: Path) -> str | None:
    values: dict[str, Any] = {}
    for node in ast.parse(source.read_text(encoding="utf-8"), filename=str(source)).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values.update({name.id: node.value.value for name in node.targets if isinstance(name, ast.Name)})
    numbers = [values.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    if all(isinstance(number, int) for number in numbers):
        return ".".join(str(number) for number in numbers) + str(values.get("PRE_RELEASE", ""))
    literal = values.get("__version__")
    return literal if isinstance(literal, str) else None


_CLAUSE = re.compile(r"(~=|==|!=|<=|>=|<|>)\s*v?(\d+(?:\.\d+)*)(\.\*)?")
_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)")
_ORDERED: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _clauses(specifier: str) -> list[tuple[str, tuple[int, ...], bool]]:
    """Parse ">=0.12,<0.17" and the like; ValueError names the clause that cannot be read."""
    clauses = []
    for text in filter(None, (part.strip() for part in specifier.split(","))):
        match = _CLAUSE.fullmatch(text)
        if match is None or (match[3] and match[1] not in ("==", "!=")):
            raise ValueError(f"{text!r} is no version clause such as '>=0.12' or '==0.12.*'")
        clauses.append((match[1], _numbers(match[2]), bool(match[3])))
    return clauses


def _fits(version: str, specifier: str) -> bool:
    """Whether `version` satisfies `specifier`, by release numbers alone.

    A pre-release counts as its release: the development branch of a host calls itself rc0 for months, while its code is
    already that of the release.
    """
    match = _RELEASE.match(version)
    if match is None:
        return False
    have = _numbers(match[1])
    return all(_holds(have, *clause) for clause in _clauses(specifier))


def _holds(have: tuple[int, ...], sign: str, want: tuple[int, ...], prefix: bool) -> bool:
    width = max(len(have), len(want))
    left, right = _padded(have, width), _padded(want, width)
    if sign in _ORDERED:
        return _ORDERED[sign](left, right)
    if sign == "~=":  # at least this, with all but the last given number unchanged
        return left >= right and left[: len(want) - 1] == right[: len(want) - 1]
    equal = left[: len(want)] == want if prefix else left == right
    return equal == (sign == "==")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("."))


def _padded(numbers: tuple[int, ...], width: int) -> tuple[int, ...]:
    return numbers + (0,) * (width - len(numbers))


# ------------------------------------------------------------------------------------------------ declarations


@dataclass(frozen=True)
class _Target:
    """`module:Qual.name`."""

    module: str
    path: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> _Target:
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


@dataclass(eq=False)
class _Entry:
    """One declaration, and what became of it."""

    number: int
    function: Callable[..., Any]
    replaces: bool
    targets: tuple[_Target, ...]
    group: str
    versions: str
    needs: str
    missing: Missing
    order: int
    one_of: str
    origin: str

    active: bool = False
    undone: bool = False
    slot: _Slot | None = None
    target: _Target | None = None  # the one of `targets` that was taken
    reason: str = ""  # why no target was taken
    final: bool = False  # no further import can change `reason`
    conflict: str = ""  # what was left over by an undo

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Inner to outer: a replacement is the innermost, then by `order`, then by declaration."""
        return (not self.replaces, self.order, self.number)

    @property
    def name(self) -> str:
        return str(self.target) if self.target else " | ".join(str(target) for target in self.targets)


@dataclass(frozen=True)
class Row:
    """One line of `tftctl patches`."""

    target: str
    group: str
    kind: Literal["wrap", "replace"]
    state: State
    versions: str  # the specifier of the declaration, "" for any
    host_version: str  # "" when unknown
    needs: str  # the flag that asks for it
    origin: str  # file:line of the wrapper
    detail: str  # why it is in this state


# ----------------------------------------------------------------------------------------------------- proxies


class _Chain:
    """What a proxy calls: the wrappers of its target, outermost first; none, and the proxy is transparent."""

    __slots__ = ("links",)

    def __init__(self, links: tuple[Wrapper, ...]) -> None:
        self.links = links

    def __call__(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _run(self.links, wrapped, instance, args, kwargs)


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


class _Proxy(wrapt.FunctionWrapper):  # type: ignore[misc, type-arg, unused-ignore]
    """The layer that we put on a target.

    wrapt's own proxies refuse to be copied or pickled. Hosts deep-copy configurations that hold functions, and pickle
    functions for processes of their own: ours are copied as functions are, and pickled as a place to look up, so that
    what was pickled loads where we are not installed.
    """

    __bound_function_wrapper__ = _BoundProxy

    def __init__(self, base: Any, chain: _Chain, target: _Target) -> None:
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


def _replacing(function: Callable[..., Any], binds: bool) -> Wrapper:
    """A replacement in the form of a wrapper. `binds`: the target receives its instance or class as first argument."""

    def replaced(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(instance, *args, **kwargs) if binds else function(*args, **kwargs)

    return replaced


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


# ------------------------------------------------------------------------------------------------------- slots


class _Unfit(Exception):
    """A target that is not there, or is nothing that can be wrapped; says which."""


@dataclass(frozen=True)
class _Found:
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


def _find(target: _Target) -> _Found:
    """Look `target` up in its module, which is imported.

    Never through getattr: on a class that binds, and on a module it may import others.
    """
    owner: Any = sys.modules.get(target.module)
    if owner is None:
        raise _Unfit(f"module {target.module} is not imported any more")
    for name in target.path[:-1]:
        owner, where = _static(owner, name), owner
        if owner is _ABSENT:
            raise _Unfit(f"{_describe(where)} has no {name!r}")
        if not isinstance(owner, type):
            raise _Unfit(f"{name!r} in {_describe(where)} is not a class")
    leaf = target.path[-1]
    raw, own = _static(owner, leaf), leaf in vars(owner)
    if raw is _ABSENT:
        lazy = ""
        if isinstance(owner, ModuleType) and "__getattr__" in vars(owner):
            lazy = " of its own (it has a __getattr__: name the module that defines the target)"
        raise _Unfit(f"{_describe(owner)} has no {leaf!r}{lazy}")
    if raw is None:
        raise _Unfit(f"{leaf!r} in {_describe(owner)} is None (other patchers leave that where a function was missing)")
    if isinstance(raw, type):
        raise _Unfit(f"{leaf!r} in {_describe(owner)} is a class: wrap its __init__ or a method instead")
    if not (callable(raw) or isinstance(raw, (staticmethod, classmethod))):
        raise _Unfit(
            f"{leaf!r} in {_describe(owner)} is a {type(raw).__name__}: only functions and methods can be wrapped"
        )
    return _Found(owner, leaf, raw, own)


def _static(owner: Any, name: str) -> Any:
    if not isinstance(owner, type):
        return vars(owner).get(name, _ABSENT)
    for cls in owner.__mro__:
        # What comes from `object` counts as absent: object.__init__ and __new__ ask who overrides them, so that a class
        # that defines none would not work as before with a proxy there.
        if cls is not object and name in vars(cls):
            return vars(cls)[name]
    return _ABSENT


def _describe(thing: Any) -> str:
    if isinstance(thing, ModuleType):
        return f"module {thing.__name__}"
    if isinstance(thing, type):
        return f"class {thing.__module__}.{thing.__qualname__}"
    inner = getattr(thing, "__func__", thing)
    name = getattr(inner, "__qualname__", None) or type(inner).__name__
    return f"{getattr(inner, '__module__', None) or '?'}.{name}"


@dataclass(eq=False)
class _Slot:
    """One place where a proxy of ours lies, and all that goes through it."""

    target: _Target
    found: _Found
    entries: list[_Entry] = field(default_factory=list)
    proxy: Any = None  # a _Proxy or None; declared as such, mypy takes the field of a dataclass for a descriptor
    # Proxies on names that hold another object than the target does now, e.g. because somebody wrapped the target after
    # us and did not follow its names elsewhere: what went through us goes on going through us.
    branches: list[_Proxy] = field(default_factory=list)
    names: list[tuple[dict[str, Any], str, _Proxy]] = field(default_factory=list)  # names elsewhere, while lifted
    lifted: bool = False
    covered: str = ""  # who was put over us

    @property
    def current(self) -> Any:
        return vars(self.found.owner).get(self.found.leaf, _ABSENT)

    @property
    def aliased(self) -> bool:
        """Functions of modules are imported by name; members of classes are always looked up."""
        return not isinstance(self.found.owner, type)

    def links(self) -> tuple[Wrapper, ...]:
        binds = self.found.binds
        ordered = sorted(self.entries, key=lambda entry: entry.rank, reverse=True)
        return tuple(_replacing(e.function, binds) if e.replaces else e.function for e in ordered)

    def refresh(self) -> None:
        for proxy in self.proxies():
            proxy._self_chain.links = self.links()

    def in_place(self) -> bool:
        """Whether our proxy is what one finds at the target now, also when its class is another one by now."""
        try:
            return self.proxy is not None and _find(self.target).raw is self.proxy
        except _Unfit:
            return False

    def proxies(self) -> list[Any]:
        return [*self.branches, *([self.proxy] if self.proxy is not None else [])]

    def new_proxy(self, base: Any) -> _Proxy:
        return _Proxy(base, _Chain(self.links()), self.target)

    def put(self, value: Any) -> None:
        """Bind the target itself; _ABSENT gives it back to the base class."""
        owner, leaf = self.found.owner, self.found.leaf
        if not isinstance(owner, type):
            vars(owner)[leaf] = value
        elif value is _ABSENT:
            delattr(owner, leaf)
        else:
            setattr(owner, leaf, value)


def _retire(proxy: _Proxy) -> None:
    """Whoever still holds it passes through it from now on."""
    proxy._self_chain.links = ()


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            yield name, names


class _Sentry:
    """A finder that finds nothing. It is asked at every import, and so learns early when a module that was being
    imported while a patch waited for it has come to its end."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        self._registry._look_again()


# ---------------------------------------------------------------------------------------------------- registry


class Registry:
    """All patches of one plugin. `REGISTRY` is ours; others are for tests."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: list[_Entry] = []
        self._slots: list[_Slot] = []
        self._hosts: dict[str, Callable[[], str | None]] = {}
        self._known_versions: dict[str, str] = {}
        self._left_alone = {_OURS}
        self._peels = 0
        self._watched: set[str] = set()  # modules with a post-import hook that has not fired
        self._arriving: set[str] = set()  # modules whose body has ended, in whose post-import hook we are
        self._stragglers: set[str] = set()  # modules that were in the middle of their import when we looked
        self._sentry: _Sentry | None = None

    # ------------------------------------------------------------------------------------------ declare

    def host(self, package: str, version: Callable[[], str | None]) -> None:
        """Say how the version of a host package is found (see `version_of`); it must not import the package."""
        with self._lock:
            self._hosts[package] = version
            self._known_versions.pop(package, None)

    def leave_alone(self, *packages: str) -> None:
        """Never rebind names inside these top-level packages, and never lift patches from them: other patchers, whose
        names may be what they patch with."""
        with self._lock:
            self._left_alone.update(packages)

    def wrap(
        self,
        *targets: str,
        group: str,
        versions: str = "",
        needs: str = "",
        missing: Missing = "error",
        order: int = 0,
        one_of: str = "",
    ) -> Callable[[_F], _F]:
        """Declare that a function `(wrapped, instance, args, kwargs)` wraps a target.

        targets:  "package.module:function" or "package.module:Class.method"; of several, the first that exists is taken
        group:    patches that are activated together
        versions: of the host (the target's top package), e.g. ">=0.12,<0.17"; "" is any
        needs:    the flag that asks for the patch, for messages
        missing:  what it means that no target exists, or the version is another: an error, or nothing
        order:    of two wrappers of one target the one with the higher order is outside; else the one declared later
        one_of:   patches of a group with the same word here are alternatives: it is enough that one of them applies
        """
        return self._declarer(targets, group, versions, needs, missing, order, one_of, replaces=False)

    def replace(
        self,
        *targets: str,
        group: str,
        versions: str = "",
        needs: str = "",
        missing: Missing = "error",
        one_of: str = "",
    ) -> Callable[[_F], _F]:
        """Declare that a function is called instead of a target, with the target's own arguments. See `wrap`.

        It is the innermost layer: wrappers of the same target are called around it.
        """
        return self._declarer(targets, group, versions, needs, missing, 0, one_of, replaces=True)

    def _declarer(
        self,
        targets: tuple[str, ...],
        group: str,
        versions: str,
        needs: str,
        missing: Missing,
        order: int,
        one_of: str,
        *,
        replaces: bool,
    ) -> Callable[[_F], _F]:
        parsed = tuple(_Target.parse(target) for target in targets)

        def declare(function: _F) -> _F:
            origin = _origin(function)
            about = f"the patch of {' | '.join(targets) or '(no target)'} declared at {origin}"
            if not parsed or not group:
                raise PatchError(f"{about}: it names no {'group' if parsed else 'target'}. Give it one.")
            if missing not in ("error", "skip"):
                raise PatchError(f"{about}: missing={missing!r} is unknown. Write missing='error' or missing='skip'.")
            try:
                _clauses(versions)
            except ValueError as error:
                raise PatchError(f"{about}: versions={versions!r}: {error}.") from error
            name = getattr(function, "__name__", "")
            if name.endswith(("wrapper", "decorator")):
                raise PatchError(
                    f"{about}: its function is named {name!r}, and other patchers take a function whose name ends in "
                    "'wrapper' or 'decorator' for one of their own kind. Name it by what it does."
                )
            entry = _Entry(
                number=0,
                function=function,
                replaces=replaces,
                targets=parsed,
                group=group,
                versions=versions,
                needs=needs,
                missing=missing,
                order=order,
                one_of=one_of,
                origin=origin,
            )
            self._add(entry, about)
            return function

        return declare

    def _add(self, entry: _Entry, about: str) -> None:
        with self._lock:
            for known in self._entries:
                if (known.origin, known.targets, known.group) != (entry.origin, entry.targets, entry.group):
                    continue
                if known.active:
                    raise PatchError(f"{about} is active and declared a second time. Undo its group before reloading.")
                self._entries.remove(known)  # its module was loaded again
                break
            entry.number = 1 + max((known.number for known in self._entries), default=0)
            self._entries.append(entry)
            if any(known.active for known in self._entries if known.group == entry.group):
                entry.active = True  # declared late, in a module of its own
                self._watch(entry)
                self._settle()

    # ------------------------------------------------------------------------------ apply, undo, verify

    def activate(self, group: str) -> None:
        """Apply a group: each patch at once if its module is imported, else when it will be. Imports nothing.

        Raises when a patch is already known not to fit; then none of the group is applied.
        """
        with self._lock:
            entries = self._of(group)
            for entry in entries:
                entry.active, entry.undone, entry.conflict = True, False, ""
                self._watch(entry)
            self._settle(quiet=True)
            problems = self._problems(entries, waiting=False)
            if problems:
                refusal = self._refusal(group, problems)
                self._withdraw(entries)
                for entry in entries:
                    entry.undone = False
                raise refusal

    def verify(self, group: str) -> None:
        """Make sure that every patch of a group is in place and outermost, once everything should be imported.

        Raises one error that lists every target that is missing, of another version, or never imported.
        """
        with self._lock:
            entries = self._of(group)
            idle = [entry for entry in entries if not entry.active]
            if idle:
                raise PatchError(f"patch group {group!r} is not active. Call activate({group!r}) before verify.")
            self._settle(quiet=True)
            if not self._peels:
                self._fasten(self._slots)
            problems = self._problems(entries, waiting=True)
            if problems:
                raise self._refusal(group, problems)

    def undo(self, group: str | None = None) -> tuple[Row, ...]:
        """Take a group (or everything) back: every name is bound again to what it held without us.

        Where somebody has wrapped a target over us, that layer stays, with a proxy of ours beneath it that only passes
        through. Such targets are returned, and listed with state "conflict".
        """
        with self._lock:
            entries = [entry for entry in self._entries if entry.active and group in (None, entry.group)]
            if group is not None:
                self._of(group)  # an unknown group is an error
            self._withdraw(entries)
            if group is None and self._sentry is not None:
                sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self._sentry]
                self._sentry = None
            conflicts = tuple(self._row(entry) for entry in entries if entry.conflict)
        for row in conflicts:
            LOG.warning("undo of the patch of %s (%s) is incomplete: %s", row.target, row.origin, row.detail)
        return conflicts

    def peel(self) -> None:
        """Lift all our proxies, so that another patcher sees what would be there without us. `reassert` puts them back.

        Until then patches whose modules are imported wait. Calls nest.
        """
        with self._lock:
            self._peels += 1
            if self._peels == 1:
                self._lift([slot for slot in self._slots if slot.target.host not in self._left_alone])

    def reassert(self) -> None:
        """Be the outermost layer of every target again: after `peel`, or after somebody patched without telling us."""
        with self._lock:
            self._peels = max(0, self._peels - 1)
            if not self._peels:
                self._fasten(self._slots)
                self._settle()

    @contextmanager
    def peeled(self) -> Iterator[None]:
        """Make room for another patcher: `with registry.peeled(): other.apply()`."""
        self.peel()
        try:
            yield
        finally:
            self.reassert()

    def list(self, group: str | None = None) -> tuple[Row, ...]:
        """The state of every patch, as it is now."""
        with self._lock:
            return tuple(self._row(entry) for entry in self._entries if group in (None, entry.group))

    # -------------------------------------------------------------------------------------- when it lands

    def _watch(self, entry: _Entry) -> None:
        """Learn when the modules of an entry have been imported."""
        for name in {target.module for target in entry.targets} - self._watched:
            if sys.modules.get(name) is None:
                self._hook(name)
            elif not self._ready(name):
                self._await_end(name)

    def _hook(self, name: str) -> None:
        registering = True

        def arrived(_: ModuleType) -> None:
            with self._lock:
                self._watched.discard(name)
                if registering:  # fired at once: another thread has begun to import it, who knows how far
                    self._await_end(name)
                    return
                # The import system still calls the module unfinished, but its body has ended.
                self._arriving.add(name)
                try:
                    self._settle()
                finally:
                    self._arriving.discard(name)
                if self._peels:
                    self._await_end(name)

        self._watched.add(name)
        wrapt.register_post_import_hook(arrived, name)
        registering = False

    def _await_end(self, name: str) -> None:
        self._stragglers.add(name)
        if self._sentry is None:
            self._sentry = _Sentry(self)
            sys.meta_path.insert(0, self._sentry)

    def _look_again(self) -> None:
        # Never wait here: the import system asks its finders under a lock that a holder of ours may be waiting for.
        if not self._stragglers or self._peels or not self._lock.acquire(blocking=False):
            return
        try:
            if any(self._ready(name) for name in self._stragglers):
                self._settle()
        finally:
            self._lock.release()

    def _ready(self, name: str) -> bool:
        """Whether a module is imported to its end: before that, its body may yet bind the target anew."""
        module = sys.modules.get(name)
        if module is None:
            return False
        return name in self._arriving or not getattr(getattr(module, "__spec__", None), "_initializing", False)

    def _settle(self, *, quiet: bool = False) -> None:
        """Apply all that can be applied now. Raises nothing: it runs inside other people's imports.

        `quiet`: the caller raises what does not fit.
        """
        if self._peels:
            return
        self._stragglers = {name for name in self._stragglers if not self._ready(name)}
        for entry in self._entries:
            if entry.active:
                before = entry.reason
                self._place(entry)
                if entry.final and entry.reason != before and not quiet:
                    level = logging.ERROR if entry.missing == "error" and not entry.one_of else logging.DEBUG
                    LOG.log(level, "patch of %s (%s) does not apply: %s", entry.name, entry.origin, entry.reason)

    def _place(self, entry: _Entry) -> None:
        """Apply one entry to the first of its targets that exists, whatever the order in which they are imported."""
        reasons: list[tuple[_Target, str]] = []
        final = True
        for target in entry.targets:
            try:
                reason, certain = self._misfit(entry, target)
                if not reason:
                    if entry.slot is None or entry.target != target:
                        self._attach(entry, target, _find(target))
                    entry.reason, entry.final = "", False
                    return
            except _Unfit as unfit:
                reason, certain = str(unfit), True
            reasons.append((target, reason))
            final &= certain
        if entry.slot is not None:
            self._detach(entry)
        several = len(reasons) > 1
        entry.reason = "; ".join(f"{target}: {reason}" if several else reason for target, reason in reasons)
        entry.final = final

    def _misfit(self, entry: _Entry, target: _Target) -> tuple[str, bool]:
        """Why a target is out of the question, before one looks at it; and whether that is the last word."""
        ready = self._ready(target.module)
        if entry.versions:
            if target.host not in self._hosts:
                return f"no source for the version of {target.host!r} was given (registry.host)", True
            version = self._version(target.host)
            if version is None and ready:
                return f"the version of {target.host} is unknown, and {entry.versions} is needed", True
            if version is not None and not _fits(version, entry.versions):
                return f"made for {target.host} {entry.versions}, and this is {version}", True
        return ("", True) if ready else (f"module {target.module} has not been imported", False)

    def _attach(self, entry: _Entry, target: _Target, found: _Found) -> None:
        slot = self._slot_at(found)
        if slot is not None and entry.replaces:
            for other in slot.entries:
                if other.replaces and other is not entry:
                    raise _Unfit(f"it is replaced already by the patch declared at {other.origin}: drop one of the two")
        if entry.slot is not None and entry.slot is not slot:
            self._detach(entry)
        if slot is None:
            slot = _Slot(target, found)
            self._slots.append(slot)
        if entry not in slot.entries:
            slot.entries.append(entry)
        entry.slot, entry.target = slot, target
        slot.refresh()
        try:
            self._fasten([slot])
        except TypeError as error:  # types that are not written in Python refuse new attributes
            self._detach(entry)
            raise _Unfit(f"{_describe(found.owner)} cannot be changed ({error})") from error

    def _slot_at(self, found: _Found) -> _Slot | None:
        for slot in self._slots:
            at_place = slot.found.owner is found.owner and slot.found.leaf == found.leaf
            if at_place or any(found.raw is proxy for proxy in slot.proxies()):
                return slot
        return None

    def _detach(self, entry: _Entry) -> None:
        slot, entry.slot, entry.target = entry.slot, None, None
        if slot is None:
            return
        slot.entries.remove(entry)
        slot.refresh()
        if slot.entries:
            return
        self._slots.remove(slot)
        self._lift([slot])
        for proxy in slot.proxies():
            _retire(proxy)
        if slot.covered:
            entry.conflict = f"{slot.covered} was put over ours and may hold it: it passes through now"

    def _withdraw(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            entry.active, entry.undone = False, True
            entry.reason, entry.final = "", False
            target = entry.target
            self._detach(entry)
            entry.target = target  # for the list

    # --------------------------------------------------------------------------------- where it lies

    def _fasten(self, slots: Iterable[_Slot]) -> None:
        """Put the proxies of `slots` on top of what is there now."""
        loose = [slot for slot in slots if slot.lifted or not slot.in_place()]
        self._lift([slot for slot in loose if not slot.lifted and slot.proxy is not None])
        fresh: dict[int, _Slot] = {}  # by the id of what lay there
        for slot in loose:
            try:
                found = _find(slot.target)
            except _Unfit as unfit:
                self._lose(slot, str(unfit))
                continue
            old, was = slot.proxy, slot.found
            slot.found, slot.lifted = found, False
            unchanged = found.owner is was.owner and found.own == was.own and found.raw is was.raw
            if old is None or not unchanged:
                # A new one, and the old one passes through: who took it for the original calls it from beneath us now.
                slot.proxy = slot.new_proxy(found.base)
                if old is not None:
                    _retire(old)
            slot.put(slot.proxy)
            self._rebind_known(slot)
            if slot.aliased:
                fresh[id(found.raw)] = slot
        if fresh:
            self._rebind(fresh)

    def _rebind_known(self, slot: _Slot) -> None:
        """Names that went through us before the lift, and still hold what we put back there."""
        for names, key, proxy in slot.names:
            base = proxy.__wrapped__
            if names.get(key, _ABSENT) is base:
                live = next((known for known in reversed(slot.proxies()) if known.__wrapped__ is base), None)
                if live is None:
                    live = slot.new_proxy(base)
                    slot.branches.append(live)
                names[key] = live
        slot.names = []

    def _rebind(self, slots: Mapping[int, _Slot]) -> None:
        """Follow functions to the names that hold them in other modules."""
        taken = {(id(vars(slot.found.owner)), slot.found.leaf) for slot in self._slots}
        for module, names in _modules():
            # Another patcher's own name for what it patches with is no name of the target: rebound, it would take our
            # proxy for its replacement the next time.
            if module.partition(".")[0] in self._left_alone:
                continue
            for key, value in list(names.items()):
                slot = slots.get(id(value))
                if slot is None or value is not slot.found.raw or (id(names), key) in taken:
                    continue
                # Under another name only what is known by the target's name: one do-nothing function may stand in for
                # several targets, and must not tie them together.
                leaf = slot.found.leaf
                if key == leaf or getattr(value, "__name__", None) == leaf:
                    names[key] = slot.proxy

    def _lift(self, slots: Iterable[_Slot]) -> None:
        """Take the proxies of `slots` off, everywhere."""
        slots = [slot for slot in slots if not slot.lifted]
        by_proxy: dict[int, _Slot] = {}
        for slot in slots:
            slot.lifted = True
            current = slot.current
            if current is slot.proxy and slot.proxy is not None:
                slot.put(slot.found.raw if slot.found.own else _ABSENT)
            elif slot.proxy is not None and current is not (slot.found.raw if slot.found.own else _ABSENT):
                slot.covered = _describe(current) if current is not _ABSENT else "nothing"
            if slot.aliased:
                by_proxy.update({id(proxy): slot for proxy in slot.proxies()})
        if not by_proxy:
            return
        for module, names in _modules():
            for key, value in list(names.items()):
                if type(value) is _Proxy and id(value) in by_proxy:
                    names[key] = value.__wrapped__
                    # Another patcher's module that imported our proxy gets back what it would have without us, and
                    # keeps it: see _rebind.
                    if module.partition(".")[0] not in self._left_alone:
                        by_proxy[id(value)].names.append((names, key, value))

    def _lose(self, slot: _Slot, reason: str) -> None:
        """A target that was there is gone."""
        self._slots.remove(slot)
        for proxy in slot.proxies():
            _retire(proxy)
        for entry in slot.entries:
            entry.slot, entry.target = None, None
            entry.reason, entry.final = reason, True
            LOG.error("patch of %s (%s) has lost its target: %s", slot.target, entry.origin, reason)

    # ------------------------------------------------------------------------------------------- report

    def _of(self, group: str) -> Sequence[_Entry]:
        entries = [entry for entry in self._entries if entry.group == group]
        if not entries:
            known = ", ".join(sorted({entry.group for entry in self._entries})) or "none"
            raise PatchError(
                f"no patch is declared in group {group!r} (known groups: {known}). Import its patches first."
            )
        return entries

    def _version(self, host: str) -> str | None:
        known = self._known_versions.get(host)
        if known is None and host in self._hosts:
            known = self._hosts[host]()
            if known is not None:
                self._known_versions[host] = known
        return known

    def _problems(self, entries: Iterable[_Entry], *, waiting: bool) -> Sequence[_Entry]:
        """The entries that do not apply and should; `waiting`: those too whose module may yet be imported."""

        def bad(entry: _Entry) -> bool:
            return entry.slot is None and (waiting or entry.final)

        served = {entry.one_of for entry in entries if entry.one_of and not bad(entry)}
        return [e for e in entries if bad(e) and e.missing == "error" and e.one_of not in served]

    def _refusal(self, group: str, problems: Sequence[_Entry]) -> PatchError:
        lines = []
        for entry in problems:
            row = self._row(entry)
            version = f"{entry.targets[0].host} {row.host_version or '(version unknown)'}"
            flag = f", for {entry.needs}" if entry.needs else ""
            lines.append(f"  {row.target} [{version}]: {row.detail} (declared at {entry.origin}{flag})")
        flags = sorted({entry.needs for entry in problems if entry.needs})
        without = f", or leave out {' and '.join(flags)}" if flags else ""
        return PatchError(
            f"{len(lines)} patch(es) of group {group!r} do not fit what is installed:\n"
            + "\n".join(lines)
            + f"\nRemedy: install a version that the patches are made for{without}; or declare where the target is now."
        )

    def _row(self, entry: _Entry) -> Row:
        state, detail = self._state(entry)
        return Row(
            target=entry.name,
            group=entry.group,
            kind="replace" if entry.replaces else "wrap",
            state=state,
            versions=entry.versions,
            host_version=self._version((entry.target or entry.targets[0]).host) or "",
            needs=entry.needs,
            origin=entry.origin,
            detail=detail,
        )

    def _state(self, entry: _Entry) -> tuple[State, str]:
        slot = entry.slot
        if entry.conflict:
            return "conflict", entry.conflict
        if entry.undone:
            return "undone", ""
        if not entry.active:
            return "waiting", f"group {entry.group!r} is not active"
        if slot is None:
            return ("missing" if entry.final else "waiting"), entry.reason
        if slot.lifted:
            return "waiting", "lifted while another patcher is at work"
        if not slot.in_place():
            there = "nothing" if slot.current is _ABSENT else _describe(slot.current)
            return "conflict", f"{there} was put over ours; verify or reassert puts ours on top again"
        return "applied", f"over {slot.covered}, which was put over ours before" if slot.covered else ""


def _origin(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


REGISTRY = Registry()
