"""Modules that a drill's job imports beside the plugin's adaptor, as users' programs do (`mindspeed.megatron_adaptor`).

The unbroken run imports them too, so what is compared is a training with them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_ENV = "TFT_DRILL_IMPORTS"


class Imports(NamedTuple):
    """Names of modules, in the order in which they are imported."""

    before: tuple[str, ...] = ()  # the adaptor
    after: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """For a job of `gpt_job`."""
        return {_ENV: json.dumps(self)} if any(self) else {}

    def roots(self) -> tuple[Path, ...]:
        """The folders, or files, of the top-level packages: what they hold may change a byte of a run.

        Raises:
            SpecError: one of them cannot be found.
        """
        from mindspeed_tft.faults.spec import SpecError  # not at the top: jobs import this module, and not much else

        found = []
        for name in dict.fromkeys(module.partition(".")[0] for module in (*self.before, *self.after)):
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise SpecError(f"--import {name}: there is no such module here; put its checkout on PYTHONPATH")
            found += [Path(place) for place in spec.submodule_search_locations or (spec.origin or "",)]
        return tuple(found)


NONE = Imports()


def wanted(environ: Mapping[str, str] = os.environ) -> Imports:
    """What this job was told to import."""
    before, after = json.loads(environ.get(_ENV, "[[], []]"))
    return Imports(tuple(before), tuple(after))


def load(modules: tuple[str, ...]) -> None:
    for module in modules:
        importlib.import_module(module)
