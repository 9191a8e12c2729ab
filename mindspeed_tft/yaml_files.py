"""The one reader of YAML files that users write: presets, rules, job files. It knows nothing of what they mean.

What PyYAML's safe loader takes for something else than was written, or takes silently, is a text here or an error:
the same key twice, numbers with a leading zero (octal) or with colons (base 60), dates. Whatever is wrong with a file
is told in one line that does not quote it: `tftctl doctor` tells other hosts of refusals, and a file may be anything.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MOST = 10_000_000  # characters of a document, each counted as often as it is referred to
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)\Z")
_FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+][0-9]+)?\Z
    |\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?\Z
    |[-+]?\.(?:inf|Inf|INF)\Z
    |\.(?:nan|NaN|NAN)\Z""",
    re.VERBOSE,
)
_OURS = {"tag:yaml.org,2002:int": _INTEGER, "tag:yaml.org,2002:float": _FLOAT, "tag:yaml.org,2002:timestamp": None}
_OLD_NUMBER = re.compile(r"[-+]?(?:0[0-9_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
# What PyYAML lets out where a value does not fit its tag.
_NOT_CONSTRUCTED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Unreadable(ValueError):
    """A file that is none, or no YAML. `reason` goes after the file's name."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason, self.remedy = reason, remedy


class _Loader(yaml.SafeLoader):
    """Reads what is written."""

    yaml_implicit_resolvers = {  # noqa: RUF012  the base class has it so
        first: [(tag, _OURS.get(tag, pattern)) for tag, pattern in rules if _OURS.get(tag, pattern) is not None]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Here a key still is what the file says: later those are among them that `<<` merges."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                problem = f"the key {shown(key.value)} is there twice"
                raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """With a line for values that are none: `!!int x`, or a number of more digits than Python reads."""
        try:
            return super().construct_object(node, deep)
        except _NOT_CONSTRUCTED as exc:
            problem = f"that cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from exc


def load(path: Path) -> Any:
    """The document in a file; None where it has none.

    Raises:
        Unreadable: no file, no YAML, or several documents.
    """
    documents = load_all(path)
    if len(documents) > 1:
        raise Unreadable("holds several documents", "write one")
    return documents[0] if documents else None


def load_all(path: Path) -> list[Any]:
    """All documents in a file, which `---` separates.

    Raises:
        Unreadable: no file, or no YAML.
    """
    try:
        return list(_documents(path.read_text(encoding="utf-8")))
    except UnicodeDecodeError:
        raise Unreadable("is not readable YAML: it is no text in UTF-8", "correct the file") from None
    except OSError as exc:
        raise Unreadable(f"cannot be read ({exc.strerror})", "give the path of a file that can be read") from None
    except RecursionError:
        raise Unreadable("is not readable YAML: it is nested too deeply", "correct the file") from None
    except (yaml.YAMLError, ValueError) as exc:
        raise Unreadable(f"is not readable YAML: {_problem(exc)}", "correct the file") from None


def _documents(text: str) -> Iterator[Any]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None  # as just checked
            if _size(node, {}) > MOST:
                problem = "it is too long once its aliases are written out"
                raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
            yield loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Characters of a node with all that it refers to, as if every alias were written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value)
    if id(node) not in known:
        known[id(node)] = MOST  # of one that refers to itself
        parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _problem(exc: Exception) -> str:
    """What is wrong, and in which line. Never the line itself."""
    if isinstance(exc, yaml.reader.ReaderError):
        return f"character {exc.position + 1} is not allowed"
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem_mark is not None:
        return f"{exc.problem} (line {exc.problem_mark.line + 1}, column {exc.problem_mark.column + 1})"
    return type(exc).__name__


def shown(value: object) -> str:
    """A value of the user's as a message quotes it, shortened: it may be of any size."""
    return _SHORT.repr(value)


def why_no_number(value: object) -> str:
    """Why a text is no number here, though it may look like one; "" when that is not so."""
    if not isinstance(value, str) or not _OLD_NUMBER.fullmatch(value):
        return ""
    what = "with a colon may be minutes and seconds" if ":" in value else "with a leading zero may be octal"
    return f"in YAML a number {what}"
