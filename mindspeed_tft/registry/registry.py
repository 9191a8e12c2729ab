"""Class Registry: when a patch is applied, lifted and taken back, and what is said of it.

Not here: where proxies lie and how they get there (slots), and what they do when called (proxies).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

import wrapt  # type: ignore[import-untyped, unused-ignore]

from mindspeed_tft.registry.layers import strangers
from mindspeed_tft.registry.slots import Entry, Missing, Row, Slot, Slots
from mindspeed_tft.registry.sources import Sources
from mindspeed_tft.registry.survey import survey
from mindspeed_tft.registry.targets import Found, PatchError, Target, Unfit, describe, find
from mindspeed_tft.registry.versions import clauses, fits

LOG = logging.getLogger(__name__.rpartition(".")[0])  # one for the whole package

_F = TypeVar("_F", bound=Callable[..., Any])


class _Sentry:
    """A finder that finds nothing. It is asked at every import, and so learns early when a module that was being
    imported while a patch waited for it has come to its end."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        self._registry._look_again()


class Registry:
    """All patches of one plugin. `REGISTRY` is ours; others are for tests."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: list[Entry] = []
        self._slots = Slots()
        self._hosts: dict[str, Callable[[], str | None]] = {}
        self._known_versions: dict[str, str] = {}
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
            self._slots.left_alone.update(packages)

    def wrap(
        self,
        *targets: str,
        group: str,
        versions: str = "",
        needs: str = "",
        missing: Missing = "error",
        elsewhere: Missing | None = None,
        order: int = 0,
        one_of: str = "",
    ) -> Callable[[_F], _F]:
        """Declare that a function `(wrapped, instance, args, kwargs)` wraps a target.

        targets:  "package.module:function" or "package.module:Class.method"; of several, the first that exists is taken
        group:    patches that are activated together
        versions: of the host (the target's top package), e.g. ">=0.12,<0.17"; "" is any
        needs:    the flag that asks for the patch, for messages
        missing:  what it means that no target exists, or the version is another: an error, or nothing
        elsewhere: what it means that the version is another, where `missing` does not say it: "skip" for what only some
                  of the supported versions need
        order:    of two wrappers of one target the one with the higher order is outside; else the one declared later
        one_of:   patches of a group with the same word here are alternatives: it is enough that one of them applies
        """
        return self._declarer(
            targets, group, versions, needs, missing, elsewhere or missing, order, one_of, replaces=False
        )

    def replace(
        self,
        *targets: str,
        group: str,
        versions: str = "",
        needs: str = "",
        missing: Missing = "error",
        elsewhere: Missing | None = None,
        one_of: str = "",
    ) -> Callable[[_F], _F]:
        """Declare that a function is called instead of a target, with the target's own arguments. See `wrap`.

        It is the innermost layer: wrappers of the same target are called around it.
        """
        return self._declarer(targets, group, versions, needs, missing, elsewhere or missing, 0, one_of, replaces=True)

    def _declarer(
        self,
        targets: tuple[str, ...],
        group: str,
        versions: str,
        needs: str,
        missing: Missing,
        elsewhere: Missing,
        order: int,
        one_of: str,
        *,
        replaces: bool,
    ) -> Callable[[_F], _F]:
        parsed = tuple(Target.parse(target) for target in targets)

        def declare(function: _F) -> _F:
            origin = _origin(function)
            about = f"the patch of {' | '.join(targets) or '(no target)'} declared at {origin}"
            if not parsed or not group:
                raise PatchError(f"{about}: it names no {'group' if parsed else 'target'}. Give it one.")
            for name, value in (("missing", missing), ("elsewhere", elsewhere)):
                if value not in ("error", "skip"):
                    raise PatchError(f"{about}: {name}={value!r} is unknown. Write {name}='error' or {name}='skip'.")
            try:
                clauses(versions)
            except ValueError as error:
                raise PatchError(f"{about}: versions={versions!r}: {error}.") from error
            name = getattr(function, "__name__", "")
            if name.endswith(("wrapper", "decorator")):
                raise PatchError(
                    f"{about}: its function is named {name!r}, and other patchers take a function whose name ends in "
                    "'wrapper' or 'decorator' for one of their own kind. Name it by what it does."
                )
            entry = Entry(
                number=0,
                function=function,
                replaces=replaces,
                targets=parsed,
                group=group,
                versions=versions,
                needs=needs,
                missing=missing,
                elsewhere=elsewhere,
                order=order,
                one_of=one_of,
                origin=origin,
            )
            self._add(entry, about)
            return function

        return declare

    def _add(self, entry: Entry, about: str) -> None:
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

        Raises when a patch is already known not to fit; then none of the group is applied, and `list` and `survey` tell
        why until the next try.
        """
        with self._lock:
            entries = self._of(group)
            for entry in entries:
                entry.active, entry.undone, entry.conflict, entry.refused = True, False, "", None
                self._watch(entry)
            self._settle(quiet=True)
            problems = self._problems(entries, waiting=False)
            if problems:
                refusal = self._refusal(group, problems)
                because = f"group {group!r} was refused because of {', '.join(entry.name for entry in problems)}"
                reasons = {entry.number: entry.reason for entry in problems}
                self._withdraw(entries)
                for entry in entries:
                    reason = reasons.get(entry.number)
                    entry.undone = False
                    entry.refused = ("waiting", because) if reason is None else ("missing", reason)
                raise refusal

    def verify(self, group: str) -> tuple[Row, ...]:
        """Make sure that every patch of a group is in place and outermost, once everything should be imported.

        Returns the patches whose targets somebody else has patched as well, and logs who, by name: they go on working
        beneath ours, but nobody has proved the two together. Packages that are left alone count as known. Returned and
        logged are those patches, too, that are in conflict: a name in some module leads to the target and not to them.

        Raises one error that lists every target that is missing, of another version, or never imported.
        """
        with self._lock:
            entries = self._of(group)
            idle = [entry for entry in entries if not entry.active]
            if idle:
                raise PatchError(f"patch group {group!r} is not active. Call activate({group!r}) before verify.")
            self._settle(quiet=True)
            if not self._peels:
                self._slots.fasten(self._slots.all)
            problems = self._problems(entries, waiting=True)
            if problems:
                raise self._refusal(group, problems)
            return self._shared(entries)

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
                self._slots.lift([slot for slot in self._slots.all if slot.target.host not in self._slots.left_alone])

    def reassert(self) -> None:
        """Be the outermost layer of every target again: after `peel`, or after somebody patched without telling us."""
        with self._lock:
            self._peels = max(0, self._peels - 1)
            if not self._peels:
                self._slots.fasten(self._slots.all)
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

    def survey(
        self, sources: Sources | None = None, version: Callable[[str], str | None] | None = None
    ) -> tuple[Row, ...]:
        """The state of every patch; of those that are not active, whether they would find their targets.

        Imports nothing. `sources` and `version` (of a host package) are by default those that an import would find.
        """
        with self._lock:
            return survey(self._entries, sources or Sources(), version or self._version)

    def version(self, host: str) -> str | None:
        """The version of a host package, found without importing it; None: it is not there, or unknown."""
        with self._lock:
            return self._version(host)

    # -------------------------------------------------------------------------------------- when it lands

    def _watch(self, entry: Entry) -> None:
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
                    wanted = entry.absence(self._version) == "error" and not entry.one_of
                    level = logging.ERROR if wanted else logging.DEBUG
                    LOG.log(level, "patch of %s (%s) does not apply: %s", entry.name, entry.origin, entry.reason)

    def _place(self, entry: Entry) -> None:
        """Apply one entry to the first of its targets that exists, whatever the order in which they are imported."""
        reasons: list[tuple[Target, str]] = []
        final = True
        for target in entry.targets:
            try:
                reason, certain = self._misfit(entry, target)
                if not reason:
                    if entry.slot is None or entry.target != target:
                        self._attach(entry, target, find(target))
                    entry.reason, entry.final = "", False
                    return
            except Unfit as unfit:
                reason, certain = str(unfit), True
            reasons.append((target, reason))
            final &= certain
        if entry.slot is not None:
            self._detach(entry)
        several = len(reasons) > 1
        entry.reason = "; ".join(f"{target}: {reason}" if several else reason for target, reason in reasons)
        entry.final = final

    def _misfit(self, entry: Entry, target: Target) -> tuple[str, bool]:
        """Why a target is out of the question, before one looks at it; and whether that is the last word."""
        ready = self._ready(target.module)
        if entry.versions:
            if target.host not in self._hosts:
                return f"no source for the version of {target.host!r} was given (registry.host)", True
            version = self._version(target.host)
            if version is None and ready:
                return f"the version of {target.host} is unknown, and {entry.versions} is needed", True
            if version is not None and not fits(version, entry.versions):
                return f"made for {target.host} {entry.versions}, and this is {version}", True
        return ("", True) if ready else (f"module {target.module} has not been imported", False)

    def _attach(self, entry: Entry, target: Target, found: Found) -> None:
        slot = self._slots.at(found)
        if slot is not None and entry.replaces:
            for other in slot.entries:
                if other.replaces and other is not entry:
                    raise Unfit(f"it is replaced already by the patch declared at {other.origin}: drop one of the two")
        if entry.slot is not None and entry.slot is not slot:
            self._detach(entry)
        if slot is None:
            slot = Slot(target, found)
            self._slots.all.append(slot)
        if entry not in slot.entries:
            slot.entries.append(entry)
        entry.slot, entry.target = slot, target
        slot.refresh()
        try:
            self._slots.fasten([slot])
        except TypeError as error:  # types that are not written in Python refuse new attributes
            self._detach(entry)
            raise Unfit(f"{describe(found.owner)} cannot be changed ({error})") from error

    def _detach(self, entry: Entry) -> None:
        slot, entry.slot, entry.target = entry.slot, None, None
        if slot is None:
            return
        slot.entries.remove(entry)
        slot.refresh()
        if slot.entries:
            return
        self._slots.drop(slot)
        if slot.covered:
            entry.conflict = f"{slot.covered} was put over ours and may hold it: it passes through now"

    def _withdraw(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.active, entry.undone = False, True
            entry.reason, entry.final = "", False
            target = entry.target
            self._detach(entry)
            entry.target = target  # for the list

    # ------------------------------------------------------------------------------------------- report

    def _of(self, group: str) -> Sequence[Entry]:
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

    def _problems(self, entries: Iterable[Entry], *, waiting: bool) -> Sequence[Entry]:
        """The entries that do not apply and should; `waiting`: those too whose module may yet be imported."""

        def bad(entry: Entry) -> bool:
            return entry.slot is None and (waiting or entry.final)

        served = {entry.one_of for entry in entries if entry.one_of and not bad(entry)}
        return [e for e in entries if bad(e) and e.absence(self._version) == "error" and e.one_of not in served]

    def _shared(self, entries: Iterable[Entry]) -> tuple[Row, ...]:
        """The entries whose targets somebody else has patched too, or calls past our patch."""
        sources, shared = Sources(), []
        bypasses = self._slots.bypasses(self._slots.all)
        for entry in entries:
            slot = entry.slot
            if slot is None:
                continue
            slot.bypasses = bypasses.get(id(slot), ())
            if slot.bypasses:
                LOG.warning("the patch of %s (%s) is not everywhere: %s", slot.target, entry.origin, slot.around())
            slot.others = strangers(slot.target, slot.found.raw, sources)
            if slot.others or slot.bypasses:
                shared.append(self._row(entry))
            if not slot.others:
                continue
            known = all(name.partition(".")[0] in self._slots.left_alone for name in slot.others)
            LOG.log(
                logging.INFO if known else logging.WARNING,
                "%s is patched by others too, beneath our patch declared at %s: %s",
                slot.target, entry.origin, ", ".join(slot.others),
            )  # fmt: skip
        return tuple(shared)

    def _refusal(self, group: str, problems: Sequence[Entry]) -> PatchError:
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

    def _row(self, entry: Entry) -> Row:
        return entry.row(self._version)


def _origin(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


REGISTRY = Registry()
