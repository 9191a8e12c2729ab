"""The books: what was declared, where our proxies lie, and all that puts them there and takes them away again.

When that happens is decided by the registry, under its lock; nothing here waits for a module or judges a version.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mindspeed_tft.registry.layers import layers, leads_around, outermost
from mindspeed_tft.registry.proxies import Chain, Proxy, Wrapper, beneath, replacing, retire
from mindspeed_tft.registry.targets import ABSENT, Found, Target, Unfit, find
from mindspeed_tft.registry.versions import fits

LOG = logging.getLogger(__name__.rpartition(".")[0])  # one for the whole package

Missing = Literal["error", "skip"]
# declared, skipped: only of a survey, where "waiting" is for a module that has not been imported.
State = Literal["declared", "waiting", "applied", "missing", "skipped", "undone", "conflict"]

_OURS = __name__.partition(".")[0]


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
    place: str = ""  # file:line of the target, in a survey
    others: tuple[str, ...] = ()  # who else has patched the target, as the last verify saw it


@dataclass(eq=False)
class Entry:
    """One declaration, and what became of it."""

    number: int
    function: Callable[..., Any]
    replaces: bool
    targets: tuple[Target, ...]
    group: str
    versions: str
    needs: str
    missing: Missing
    elsewhere: Missing
    order: int
    one_of: str
    origin: str

    active: bool = False
    undone: bool = False
    slot: Slot | None = None
    target: Target | None = None  # the one of `targets` that was taken
    reason: str = ""  # why no target was taken
    final: bool = False  # no further import can change `reason`
    conflict: str = ""  # what was left over by an undo
    refused: tuple[State, str] | None = None  # state and reason, since its group was refused

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Inner to outer: a replacement is the innermost, then by `order`, then by declaration."""
        return (not self.replaces, self.order, self.number)

    def absence(self, version: Callable[[str], str | None]) -> Missing:
        """What it means that the patch does not apply; `version` tells that of a host package."""
        have = [version(target.host) for target in self.targets]
        outside = self.versions and all(each is not None and not fits(each, self.versions) for each in have)
        return self.elsewhere if outside else self.missing

    @property
    def name(self) -> str:
        return str(self.target) if self.target else " | ".join(str(target) for target in self.targets)

    def row(self, version: Callable[[str], str | None]) -> Row:
        """As it is now; `version` tells that of a host package."""
        state, detail = self._state()
        return Row(
            target=self.name,
            group=self.group,
            kind="replace" if self.replaces else "wrap",
            state=state,
            versions=self.versions,
            host_version=version((self.target or self.targets[0]).host) or "",
            needs=self.needs,
            origin=self.origin,
            detail=detail,
            others=self.slot.others if self.slot is not None else (),
        )

    def _state(self) -> tuple[State, str]:
        slot = self.slot
        if self.conflict:
            return "conflict", self.conflict
        if self.undone:
            return "undone", ""
        if self.refused:
            return self.refused
        if not self.active:
            return "waiting", f"group {self.group!r} is not active"
        if slot is None:
            return ("missing" if self.final else "waiting"), self.reason
        if slot.lifted:
            return "waiting", "lifted while another patcher is at work"
        if not slot.in_place():
            there = "nothing" if slot.current is ABSENT else outermost(slot.current)
            return "conflict", f"{there} was put over ours; verify or reassert puts ours on top again"
        if slot.bypasses:
            return "conflict", slot.around()
        return "applied", f"over {slot.covered}, which was put over ours before" if slot.covered else ""


@dataclass(eq=False)
class Slot:
    """One place where a proxy of ours lies, and all that goes through it."""

    target: Target
    found: Found
    entries: list[Entry] = field(default_factory=list)
    proxy: Any = None  # a Proxy or None; declared as such, mypy takes the field of a dataclass for a descriptor
    # Proxies on names that hold another object than the target does now, e.g. because somebody wrapped the target after
    # us and did not follow its names elsewhere: what went through us goes on going through us.
    branches: list[Proxy] = field(default_factory=list)
    names: list[tuple[dict[str, Any], str, Proxy]] = field(default_factory=list)  # names elsewhere, while lifted
    calls: threading.local | None = None  # which of the proxies a call has come through; see Chain
    lifted: bool = False
    covered: str = ""  # who was put over us, and lies beneath us or in our place
    bare: Any = ABSENT  # what lay in the owner itself when nobody had been put over us
    others: tuple[str, ...] = ()  # who else has patched the target
    bypasses: tuple[str, ...] = ()  # names elsewhere through which the target is called without us

    @property
    def current(self) -> Any:
        return vars(self.found.owner).get(self.found.leaf, ABSENT)

    @property
    def aliased(self) -> bool:
        """Functions of modules are imported by name; members of classes are always looked up."""
        return not isinstance(self.found.owner, type)

    def links(self) -> tuple[Wrapper, ...]:
        binds = self.found.binds
        ordered = sorted(self.entries, key=lambda entry: entry.rank, reverse=True)
        return tuple(replacing(e.function, binds) if e.replaces else e.function for e in ordered)

    def refresh(self) -> None:
        for proxy in self.proxies():
            proxy._self_chain.links = self.links()

    def in_place(self) -> bool:
        """Whether our proxy is what one finds at the target now, also when its class is another one by now."""
        try:
            return self.proxy is not None and find(self.target).raw is self.proxy
        except Unfit:
            return False

    def proxies(self) -> list[Any]:
        return [*self.branches, *([self.proxy] if self.proxy is not None else [])]

    def new_proxy(self, base: Any) -> Proxy:
        """One over all that were there before."""
        rank = 1 + max((proxy._self_chain.rank for proxy in self.proxies()), default=0)
        return Proxy(base, Chain(self.links(), rank, self.calls), self.target)

    def branch(self, old: Proxy) -> Proxy:
        """One for the names that went through `old`, beneath which their object still lies.

        Whoever patched over us may keep the original under such a name and call it, so this proxy and the one on the
        target must know of each other.
        """
        self.calls = self.calls or threading.local()
        made = Proxy(old.__wrapped__, Chain(self.links(), old._self_chain.rank), self.target)
        self.branches.append(made)
        for proxy in self.proxies():
            proxy._self_chain.calls = self.calls
        return made

    def around(self) -> str:
        """What `bypasses` means to a user."""
        return (
            f"who calls {' or '.join(self.bypasses)} gets the target without our patch: somebody else patched one of"
            f" the two before us. Remedy: import the plugin before what does that, or have it patch {self.target}"
            " and every name of it"
        )

    def cover(self) -> str:
        """The name of what lies in our place, if that may hold us."""
        there = beneath(self.current)
        if there is self.bare or any(there is proxy for proxy in self.proxies()):
            return ""
        return "nothing" if there is ABSENT else outermost(there)

    def settle(self, found: Found) -> None:
        """`found` is what lies beneath us from now on."""
        there = found.raw if found.own else ABSENT
        if there is self.bare or found.owner is not self.found.owner:
            self.covered = ""  # whoever was over us has put back what he found
        if not self.covered:
            self.bare = there
        self.found, self.lifted = found, False

    def put(self, value: Any) -> None:
        """Bind the target itself; ABSENT gives it back to the base class."""
        owner, leaf = self.found.owner, self.found.leaf
        if not isinstance(owner, type):
            vars(owner)[leaf] = value
        elif value is ABSENT:
            delattr(owner, leaf)
        else:
            setattr(owner, leaf, value)


def _patches_with(names: dict[str, Any], raw: Any) -> bool:
    """Whether a module's code is one of the layers of `raw`: what it holds of the target it calls from beneath us."""
    return any(getattr(layer, "__globals__", None) is names for layer in layers(raw))


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict):
            yield name, names


class Slots:
    """All places of one registry: `fasten` puts our proxies on top there, `lift` takes them off."""

    def __init__(self) -> None:
        self.all: list[Slot] = []
        self.left_alone = {_OURS}  # top-level packages

    def at(self, found: Found) -> Slot | None:
        for slot in self.all:
            at_place = slot.found.owner is found.owner and slot.found.leaf == found.leaf
            if at_place or any(found.raw is proxy for proxy in slot.proxies()):
                return slot
        return None

    def drop(self, slot: Slot) -> None:
        """Give a place up that nothing is to go through any more."""
        self.all.remove(slot)
        self.lift([slot])
        for proxy in slot.proxies():
            retire(proxy)

    def fasten(self, slots: Iterable[Slot]) -> None:
        """Put the proxies of `slots` on top of what is there now."""
        loose = [slot for slot in slots if slot.lifted or not slot.in_place()]
        self.lift([slot for slot in loose if not slot.lifted and slot.proxy is not None])
        fresh: dict[int, Slot] = {}  # by the id of what lay there
        for slot in loose:
            try:
                found = find(slot.target)
                found = replace(found, raw=beneath(found.raw))  # others may have put an old proxy of ours back
            except Unfit as unfit:
                self._lose(slot, str(unfit))
                continue
            old, was = slot.proxy, slot.found
            slot.settle(found)
            unchanged = found.owner is was.owner and found.own == was.own and found.raw is was.raw
            if old is None or not unchanged:
                # A new one, and the old one passes through: who took it for the original calls it from beneath us now.
                slot.proxy = slot.new_proxy(found.base)
                if old is not None:
                    retire(old)
            slot.put(slot.proxy)
            self._rebind_known(slot)
            if slot.aliased:
                fresh[id(found.raw)] = slot
        if fresh:
            self._rebind(fresh)

    def _rebind_known(self, slot: Slot) -> None:
        """Names that went through us before the lift, and still hold what we put back there."""
        for names, key, proxy in slot.names:
            base = proxy.__wrapped__
            if names.get(key, ABSENT) is base:
                live = next((known for known in reversed(slot.proxies()) if known.__wrapped__ is base), None)
                names[key] = slot.branch(proxy) if live is None else live
        slot.names = []

    def _rebind(self, slots: Mapping[int, Slot]) -> None:
        """Follow functions to the names that hold them in other modules."""
        taken = {(id(vars(slot.found.owner)), slot.found.leaf) for slot in self.all}
        for module, names in _modules():
            # Another patcher's own name for what it patches with is no name of the target: rebound, it would take our
            # proxy for its replacement the next time.
            if module.partition(".")[0] in self.left_alone:
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

    def bypasses(self, slots: Iterable[Slot]) -> dict[int, tuple[str, ...]]:
        """By the id of each slot: names of its target in other modules that lead to it and not through us.

        Somebody wrapped such a name before we came, or kept what we have left since. Only told where the wrapper says
        what it wraps, and for names like the target's: under another one an object may well be somebody's own.
        """
        by_leaf: dict[str, list[Slot]] = {}
        for slot in slots:
            if slot.aliased and not slot.lifted:
                by_leaf.setdefault(slot.found.leaf, []).append(slot)
        found: dict[int, tuple[str, ...]] = {}
        for module, names in _modules():
            if module.partition(".")[0] in self.left_alone:
                continue
            for leaf in names.keys() & by_leaf.keys():
                for slot in by_leaf[leaf]:
                    if leads_around(names.get(leaf), slot.found.raw) and not _patches_with(names, slot.found.raw):
                        found[id(slot)] = (*found.get(id(slot), ()), f"{module}.{leaf}")
        return found

    def lift(self, slots: Iterable[Slot]) -> None:
        """Take the proxies of `slots` off, everywhere."""
        slots = [slot for slot in slots if not slot.lifted]
        by_proxy: dict[int, Slot] = {}
        for slot in slots:
            slot.lifted = True
            current = slot.current
            if slot.proxy is None:
                continue
            if current is slot.proxy:
                slot.put(slot.found.raw if slot.found.own else ABSENT)
            else:
                slot.covered = slot.cover()
                if beneath(current) is not current:
                    slot.put(beneath(current))
            if slot.aliased:
                by_proxy.update({id(proxy): slot for proxy in slot.proxies()})
        if not by_proxy:
            return
        for module, names in _modules():
            for key, value in list(names.items()):
                if type(value) is Proxy and id(value) in by_proxy:
                    names[key] = value.__wrapped__
                    # Another patcher's module that imported our proxy gets back what it would have without us, and
                    # keeps it: see _rebind.
                    if module.partition(".")[0] not in self.left_alone:
                        by_proxy[id(value)].names.append((names, key, value))

    def _lose(self, slot: Slot, reason: str) -> None:
        """A target that was there is gone."""
        self.all.remove(slot)
        for proxy in slot.proxies():
            retire(proxy)
        for entry in slot.entries:
            entry.slot, entry.target = None, None
            entry.reason, entry.final = reason, True
            LOG.error("patch of %s (%s) has lost its target: %s", slot.target, entry.origin, reason)
