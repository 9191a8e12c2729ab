"""The patch registry: declare a patch beside its wrapper, apply, lift, undo, list, survey and verify it.

A patch lands when its module is first imported, and is then the outermost layer of its target: one proxy a target,
however many of our wrappers it carries. Other patchers may come before or after, and may come again; `peeled()` makes
room for them.

What this package is not: it imports no host, names none, and knows no feature. Hosts, the packages of other patchers
and the sources of versions are told to it by the modules in `patches/`.

What it cannot do: a reference to a target that was taken out of its module or class (a closure, a default, an attribute
of an object) before the patch landed stays what it was, as with every patcher. One that was taken after, and that
outlives a change of the target by somebody else, calls straight through; `verify` tells of those that are names of
modules. A call that is under way when its target is patched goes on without the patch. And that wrappers run once a
call, also where somebody kept the original in a module and calls it from over us, holds on one thread: handed to
another thread, the original runs them again.
"""

from __future__ import annotations

from mindspeed_tft.registry.proxies import Wrapper
from mindspeed_tft.registry.registry import REGISTRY, Registry
from mindspeed_tft.registry.slots import Missing, Row, State
from mindspeed_tft.registry.sources import Sources
from mindspeed_tft.registry.targets import PatchError
from mindspeed_tft.registry.variants import Variants
from mindspeed_tft.registry.versions import version_of

__all__ = [
    "REGISTRY",
    "Missing",
    "PatchError",
    "Registry",
    "Row",
    "Sources",
    "State",
    "Variants",
    "Wrapper",
    "version_of",
]
