"""`import mindspeed_tft.facade.mindio`: from here on `import mindio_ttp` in this process finds our names.

The one way to turn the facade on, so that it is seen in the program that uses it. Write it before whatever imports
`mindio_ttp` (for MindSpeed-LLM: as the first line of `pretrain_gpt.py`), and not beside `mindspeed_tft.adaptor`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from mindspeed_tft.facade.words import FacadeError

NAME = "mindio_ttp"
_FOLDER = str(Path(__file__).parent)


class _Finder:
    """Finds `mindio_ttp` in the folder beside this file; its submodules are found through it."""

    @staticmethod
    def find_spec(
        fullname: str, _path: Sequence[str] | None = None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.PathFinder.find_spec(NAME, [_FOLDER]) if fullname == NAME else None


def installed() -> bool:
    """Whether `mindio_ttp` means the facade in this process."""
    return _Finder in sys.meta_path


def install() -> None:
    """Make `mindio_ttp` mean the facade. Again is harmless.

    Raises:
        FacadeError: the real package can be imported, or is imported already: two would answer to one name.
    """
    if installed():
        return
    there = sys.modules.get(NAME)
    spec = there.__spec__ if there is not None else importlib.util.find_spec(NAME)
    if there is not None or spec is not None:
        where = getattr(there, "__file__", None) or (spec.origin if spec is not None else None) or "an unknown place"
        raise FacadeError(
            f"the facade serves the names of {NAME}, but a package of that name is there as well ({where}), and an"
            f" adaptor would find one or the other; uninstall it (pip uninstall {NAME}), or do not import {__name__}"
        )
    sys.meta_path.insert(0, _Finder)


def uninstall() -> None:
    """Undo `install`, for tests: modules that are imported are forgotten as well."""
    if installed():
        sys.meta_path.remove(_Finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]


install()
