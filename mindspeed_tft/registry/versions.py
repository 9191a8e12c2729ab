"""Versions of host packages: how they are found without importing the host, and whether they satisfy a specifier.

Not a general parser of versions: only release numbers count.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_tft.registry.targets import PatchError


def version_of(package: str, file: str = "", distribution: str = "") -> Callable[[], str | None]:
    """A function that tells the version of `package` without importing it (None: the package is not there).

    `file`, relative to the package, is read first, because a source tree on PYTHONPATH has no metadata, or that of
    another installation. It may assign `__version__` a string, or MAJOR, MINOR and PATCH their numbers.
    """

    def version() -> str | None:
        for folder in folders_of(package) if file else ():
            source = Path(folder, file)
            if source.is_file():
                found = version_in(source)
                if found is not None:
                    return found
        if distribution:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                return None
        return None

    return version


def folders_of(package: str) -> Iterable[str]:
    """The folders of a top-level package, without importing it; none: it is not there, or is no package."""
    loaded = sys.modules.get(package)
    if loaded is not None:
        return list(getattr(loaded, "__path__", ()))
    spec = importlib.util.find_spec(package)  # of a top-level package: finds it without executing it
    return list(spec.submodule_search_locations or ()) if spec is not None else ()


def version_in(source: Path) -> str | None:
    """The version that a source file assigns; see `version_of`.

    Raises:
        PatchError: it cannot be read.
    """
    values: dict[str, Any] = {}
    try:
        body = ast.parse(source.read_bytes(), filename=str(source)).body
    except (OSError, SyntaxError, ValueError) as error:
        raise PatchError(f"the version in {source} cannot be read: {error}. Remedy: mend that file.") from error
    for node in body:
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


def clauses(specifier: str) -> list[tuple[str, tuple[int, ...], bool]]:
    """Parse ">=0.12,<0.17" and the like; ValueError names the clause that cannot be read."""
    found = []
    for text in filter(None, (part.strip() for part in specifier.split(","))):
        match = _CLAUSE.fullmatch(text)
        if match is None or (match[3] and match[1] not in ("==", "!=")):
            raise ValueError(f"{text!r} is no version clause such as '>=0.12' or '==0.12.*'")
        found.append((match[1], _numbers(match[2]), bool(match[3])))
    return found


def fits(version: str, specifier: str) -> bool:
    """Whether `version` satisfies `specifier`, by release numbers alone.

    A pre-release counts as its release: the development branch of a host calls itself rc0 for months, while its code is
    already that of the release.
    """
    match = _RELEASE.match(version)
    if match is None:
        return False
    have = _numbers(match[1])
    return all(_holds(have, *clause) for clause in clauses(specifier))


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
