"""Where a target is written, told from the sources of its package. Imports nothing, and executes nothing of it.

So it is known before a job starts, and for a release that is not installed, whether a patch will find its target. What
it cannot tell: names that come to be at run time (`setattr`, `globals()`, a module's `__getattr__`), and modules that
are not written in Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_tft.registry.targets import Target, Unfit
from mindspeed_tft.registry.versions import folders_of

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_FOLLOWED = 16  # modules that one name is followed through: imports may go in a circle


@dataclass(frozen=True)
class Place:
    """Where the definition of a target begins."""

    module: str  # the one that defines it, which may be another than the target's
    file: Path
    line: int
    decorators: tuple[str, ...]  # dotted names, outermost first

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class _Import:
    """`name` of `module`; or the module itself, where `name` is empty."""

    module: str
    name: str


_Binding = ast.stmt | ast.expr | _Import


class _Module:
    def __init__(self, name: str, file: Path) -> None:
        self.name, self.file = name, file
        self.is_package = file.name == "__init__.py"
        self.stars: list[str] = []
        self.names = self._bindings(ast.parse(file.read_bytes(), filename=str(file)).body)

    def _bindings(self, body: Iterable[ast.stmt]) -> dict[str, _Binding]:
        """What each name of a module or class is bound to; where it is bound several times, by the last one that is not
        None: other branches are for when something is not installed."""
        found: dict[str, _Binding] = {}
        for statement in _statements(body):
            for name, bound in self._bound(statement):
                if name not in found or not _is_none(bound):
                    found[name] = bound
        return found

    def _bound(self, statement: ast.stmt) -> Iterator[tuple[str, _Binding]]:
        if isinstance(statement, (*_Function, ast.ClassDef)):
            yield statement.name, statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        yield node.id, statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            yield statement.target.id, statement.value
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, _Import(alias.name if alias.asname else top, "")
        elif isinstance(statement, ast.ImportFrom):
            source = self._absolute(statement)
            for alias in statement.names:
                if alias.name == "*":
                    self.stars.append(source)
                else:
                    yield alias.asname or alias.name, _Import(source, alias.name)

    def _absolute(self, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        parts = self.name.split(".")
        base = parts[: len(parts) - statement.level + self.is_package]
        return ".".join([*base, *([statement.module] if statement.module else [])])

    def members(self, owner: ast.ClassDef) -> dict[str, _Binding]:
        return self._bindings(owner.body)


class Sources:
    """Looks targets up; each file is read once."""

    def __init__(self, folders: Callable[[str], Iterable[str | Path]] = folders_of) -> None:
        """`folders` tells the folders of a top-level package; none: it is not there."""
        self._folders = folders
        self._modules: dict[str, _Module | None] = {}

    def has(self, package: str) -> bool:
        """Whether there is such a top-level package."""
        return bool(list(self._folders(package)))

    def find(self, target: Target) -> Place:
        """Where a target is defined.

        Raises:
            Unfit: it is not there, or is nothing that can be wrapped; says which.
        """
        module = self._module(target.module)
        if module is None:
            raise Unfit(f"there is no source of a module {target.module}")
        where, bound = f"module {target.module}", self._name(module, target.path[0])
        for outer, name in zip(target.path, target.path[1:], strict=False):
            if bound is None:
                raise Unfit(f"{where} has no {outer!r}")
            module, owner = bound
            if not isinstance(owner, ast.ClassDef):
                raise Unfit(f"{outer!r} in {module.file} is not a class")
            where, bound = f"class {module.name}.{owner.name}", self._member(module, owner, name)
        if bound is None:
            raise Unfit(f"{where} has no {target.path[-1]!r}")
        return self._place(target, *bound)

    def _place(self, target: Target, module: _Module, node: _Binding) -> Place:
        leaf = target.path[-1]
        if isinstance(node, ast.ClassDef):
            raise Unfit(f"{leaf!r} in {module.file} is a class: wrap its __init__ or a method instead")
        if isinstance(node, ast.Constant):
            raise Unfit(f"{leaf!r} in {module.file} is {node.value!r}: only functions and methods can be wrapped")
        if isinstance(node, _Import):  # of a package that is not there: nothing speaks against it
            return Place(node.module, module.file, 1, ())
        decorators = node.decorator_list if isinstance(node, _Function) else []
        names = (ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in decorators)
        return Place(module.name, module.file, node.lineno, tuple(names))

    # --------------------------------------------------------------------------------------------- names

    def _name(self, module: _Module, name: str, depth: int = 0) -> tuple[_Module, _Binding] | None:
        """What a name of a module stands for, followed through imports as far as there are sources."""
        bound = module.names.get(name)
        if bound is None:
            for star in module.stars:
                source = self._module(star) if depth < _FOLLOWED else None
                found = self._name(source, name, depth + 1) if source else None
                if found is not None:
                    return found
            return None
        if isinstance(bound, _Import) and bound.name and depth < _FOLLOWED:
            source = self._module(bound.module)
            found = (module, bound) if source is None else self._name(source, bound.name, depth + 1)
            if found is None and self._module(f"{bound.module}.{bound.name}") is not None:
                return module, _Import(f"{bound.module}.{bound.name}", "")
            return found
        if isinstance(bound, ast.Name) and bound.id != name and depth < _FOLLOWED:  # another name of the same thing
            return self._name(module, bound.id, depth + 1) or (module, bound)
        return module, bound

    def _member(self, module: _Module, owner: ast.ClassDef, name: str) -> tuple[_Module, _Binding] | None:
        """A member of a class, of its own or inherited."""
        bound = module.members(owner).get(name)
        if bound is not None:
            return module, bound
        for base in owner.bases:
            place = self._dotted(module, base)
            if place is None or not isinstance(place[1], ast.ClassDef):
                continue  # not written in Python, or made at run time
            found = self._member(place[0], place[1], name) if place[1] is not owner else None
            if found is not None:
                return found
        return None

    def _dotted(self, module: _Module, node: ast.expr) -> tuple[_Module, _Binding] | None:
        """What `a.b.C` stands for."""
        if isinstance(node, ast.Subscript):  # Generic[T]
            return self._dotted(module, node.value)
        if isinstance(node, ast.Name):
            return self._name(module, node.id)
        if not isinstance(node, ast.Attribute):
            return None
        inner = self._dotted(module, node.value)
        if inner is None or not isinstance(inner[1], _Import):
            return None
        source = self._module(".".join(filter(None, (inner[1].module, inner[1].name))))
        return None if source is None else self._name(source, node.attr)

    # -------------------------------------------------------------------------------------------- modules

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            file = _file_of(name, self._folders)
            try:
                self._modules[name] = None if file is None else _Module(name, file)
            except (OSError, SyntaxError, ValueError) as error:
                raise Unfit(f"{file} cannot be read: {error}") from error
        return self._modules[name]


def _file_of(name: str, folders: Callable[[str], Iterable[str | Path]]) -> Path | None:
    """The file that an import of `name` would execute, found as the import system does; None: there is none."""
    top, *rest = name.split(".")
    places = [Path(folder) for folder in folders(top)]
    initial = next((place / "__init__.py" for place in places if (place / "__init__.py").is_file()), None)
    if not rest:
        return initial
    for part in rest:
        spaces = []
        for place in places:
            package, module = place / part / "__init__.py", place / f"{part}.py"
            if package.is_file():
                places, initial = [package.parent], package
                break
            if module.is_file():
                places, initial = [], module
                break
            if (place / part).is_dir():
                spaces.append(place / part)
        else:
            places, initial = spaces, None  # a namespace, or nothing
    return initial


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements that run with the body, those of branches too, but not those for type checkers alone."""
    for statement in body:
        yield statement
        if isinstance(statement, (*_Function, ast.ClassDef)):
            continue
        only_types = isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")
        parts = ("orelse",) if only_types else ("body", "handlers", "orelse", "finalbody")
        for part in parts:
            for inner in getattr(statement, part, ()):
                yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _is_none(bound: _Binding) -> bool:
    return isinstance(bound, ast.Constant) and bound.value is None
