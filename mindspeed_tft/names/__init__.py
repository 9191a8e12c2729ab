"""Import names of other packages, served by this one: scripts that were written for those run here unchanged.

Each name has a directory of its own, which is on nobody's path until somebody puts it there:

    export PYTHONPATH=$(python -m mindspeed_tft.names taskd):$PYTHONPATH

Where the real package can be imported too, the import is refused: which of the two a job gets must not depend on the
order of a path. The modules in there are thin; what they do is elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

HERE = Path(__file__).resolve().parent


def offered() -> list[str]:
    """The names that there are."""
    return sorted(path.name for path in HERE.iterdir() if (path / path.name / "__init__.py").is_file())


def directory(name: str) -> Path:
    """What has to be on the path so that `import NAME` finds ours.

    Raises:
        KeyError: there is no such name here.
    """
    if name not in offered():
        raise KeyError(name)
    return HERE / name


def others(name: str) -> list[str]:
    """The packages of this name that are not ours: their files on the path, and what is installed under this name."""
    ours = HERE / name / name / "__init__.py"
    found: dict[str, None] = {}
    for entry in sys.path:
        spec = PathFinder.find_spec(name, [entry or os.getcwd()])
        # A folder of that name without an __init__.py, such as one of logs, has no file.
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() != ours:
            found[spec.origin] = None
    if not found:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[f"the installed distribution {name} {metadata.version(name)}"] = None
    return list(found)


def claim(name: str) -> None:
    """Called by our package of this name when it is imported.

    Raises:
        ImportError: another package of this name is on the path.
    """
    if theirs := others(name):
        raise ImportError(
            f"import {name}: there are two packages of this name, the one of mindspeed_tft ({HERE / name}) and"
            f" {', '.join(theirs)}, and which one a process gets must not be left to chance. Remedy: uninstall the"
            f" other one (pip uninstall {name}), or take {HERE / name} off PYTHONPATH."
        )
