"""A stand-in for MindSpeed's patch manager that applies, removes and repeats patches by the same rules.

It (`mindspeed`, `mindspeed_llm`) and its host (`tinylm`) are written into a folder of each test.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_tft.patches import mindspeed as coexist
from mindspeed_tft.registry import Registry

HOST = {
    "tinylm/__init__.py": "",
    "tinylm/trace.py": "log = []",
    "tinylm/arguments.py": """
        import argparse
        from tinylm.trace import log
        def parse_args(extra_args_provider=None, argv=()):
            log.append("host parse_args")
            parser = argparse.ArgumentParser(allow_abbrev=False)
            parser.add_argument("--host-flag", action="store_true")
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return parser.parse_args(list(argv))
    """,
    "tinylm/initialize.py": """
        from tinylm.arguments import parse_args
        from tinylm.arguments import parse_args as parse
    """,
    "tinylm/optimizer.py": """
        from tinylm.trace import log
        class Chained:
            def __init__(self): log.append("host __init__")
            def step(self): log.append("host step")
            def ready(self): log.append("host ready")
            def untouched(self): log.append("host untouched")
        def get_optimizer(): log.append("host get_optimizer")
        def compile_helpers(): log.append("host compile_helpers")
    """,
    "tinylm/training.py": """
        from tinylm.trace import log
        from tinylm.optimizer import get_optimizer, compile_helpers
        from tinylm.initialize import parse_args
        def train(): log.append("host train")
    """,
}

# The rules of the original: a name that ends in wrapper or decorator wraps, any other replaces; the name of the target
# is followed by identity through all modules, on removal only through those without "mindspeed" in their name.
MINDSPEED = {
    "mindspeed/__init__.py": "",
    "mindspeed/patch_utils.py": """
        import importlib, sys
        class Patch:
            def __init__(self, path, new):
                self.path, self.first, self.now = path, None, None
                self.patch_func, self.wrappers, self.applied = None, [], False
                self.add(new)
            def add(self, new, force=False):
                if new.__name__.endswith(("wrapper", "decorator")):
                    if new not in self.wrappers:
                        self.wrappers.append(new)
                elif self.patch_func and not force:
                    raise RuntimeError("patched twice: " + self.path)
                else:
                    self.patch_func = new
                self.applied = False
            def owner(self):
                *modules, leaf = self.path.split(".")
                for cut in range(len(modules), 0, -1):
                    try:
                        owner = importlib.import_module(".".join(modules[:cut]))
                    except ModuleNotFoundError:
                        continue
                    for name in modules[cut:]:
                        owner = getattr(owner, name)
                    if not hasattr(owner, leaf):
                        setattr(owner, leaf, None)
                    return owner, leaf
                raise RuntimeError(self.path)
            def apply(self):
                if self.applied:
                    return
                owner, leaf = self.owner()
                there = getattr(owner, leaf)
                if self.first is None:
                    self.first = there
                made = self.patch_func or self.first
                for wrapper in self.wrappers:
                    made = wrapper(made)
                setattr(owner, leaf, made)
                for module in list(sys.modules.values()):
                    if leaf in vars(module) and vars(module)[leaf] is there:
                        setattr(module, leaf, made)
                self.applied, self.now = True, made
            def remove(self):
                owner, leaf = self.owner()
                for name, module in list(sys.modules.items()):
                    if "mindspeed" in name:
                        continue
                    if isinstance(owner, type):
                        module = vars(module).get(owner.__name__)
                    if module is not None and leaf in vars(module) and vars(module)[leaf] is self.now:
                        setattr(module, leaf, self.first)
                self.patch_func, self.now, self.applied, self.wrappers = None, None, False, []
        class MindSpeedPatchesManager:
            patches_info = {}
            @staticmethod
            def register_patch(path, new, force_patch=False):
                info = MindSpeedPatchesManager.patches_info
                if path in info:
                    info[path].add(new, force_patch)
                else:
                    info[path] = Patch(path, new)
            @staticmethod
            def remove_patches():
                for patch in MindSpeedPatchesManager.patches_info.values():
                    patch.remove()
            @staticmethod
            def apply_patches():
                for patch in MindSpeedPatchesManager.patches_info.values():
                    patch.apply()
    """,
    "mindspeed/features_manager/__init__.py": "",
    "mindspeed/features_manager/features_manager.py": """
        from mindspeed.patch_utils import MindSpeedPatchesManager as manager
        class MindSpeedFeaturesManager:
            FEATURES_LIST = []
            @classmethod
            def register_features_args(cls, parser):
                for feature in cls.FEATURES_LIST:
                    feature.register_args(parser)
            @classmethod
            def apply_features(cls):
                for feature in cls.FEATURES_LIST:
                    feature.register_patches(manager)
                manager.apply_patches()
    """,
    "mindspeed/functions.py": """
        from functools import wraps
        captured = {}
        def log(word):
            from tinylm.trace import log
            log.append(word)
        def parse_args_wrapper(parse_args):
            @wraps(parse_args)
            def wrapper(extra_args_provider=None, argv=()):
                from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager as features
                log("ms parse_args")
                def provider(parser):
                    if extra_args_provider is not None:
                        parser = extra_args_provider(parser)
                    features.register_features_args(parser)
                    return parser
                return parse_args(provider, argv)
            return wrapper
        def step(self): log("ms step")
        def get_optimizer_wrapper(fn):
            @wraps(fn)
            def wrapper():
                log("ms get_optimizer")
                return fn()
            return wrapper
        def ready_decorator(fn):
            @wraps(fn)
            def wrapper(self):
                log("ms ready")
                return fn(self)
            return wrapper
        def compile_helpers(): log("ms compile_helpers")
        def init(self):
            log("ms __init__")
            captured["__init__"](self)
    """,
    "mindspeed/megatron_adaptor.py": """
        from mindspeed import functions
        from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
        from mindspeed.patch_utils import MindSpeedPatchesManager
        class Basic:
            feature_name = "basic"
            def register_args(self, parser):
                parser.add_argument("--ms-flag", action="store_true")
            def register_patches(self, pm):
                from tinylm.optimizer import Chained
                functions.captured["__init__"] = Chained.__init__
                pm.register_patch("tinylm.arguments.parse_args", functions.parse_args_wrapper)
                pm.register_patch("tinylm.optimizer.Chained.step", functions.step)
                pm.register_patch("tinylm.optimizer.Chained.ready", functions.ready_decorator)
                pm.register_patch("tinylm.optimizer.Chained.__init__", functions.init)
                pm.register_patch("tinylm.optimizer.get_optimizer", functions.get_optimizer_wrapper)
                pm.register_patch("tinylm.optimizer.compile_helpers", functions.compile_helpers)
                pm.register_patch("tinylm.optimizer.gone_in_this_version", functions.compile_helpers)
        MindSpeedFeaturesManager.FEATURES_LIST[:] = [Basic()]
        MindSpeedFeaturesManager.apply_features()
        def repatch():
            MindSpeedPatchesManager.remove_patches()
            MindSpeedFeaturesManager.apply_features()
    """,
}

# Our targets; and what a call logs when MindSpeed has patched, without us.
TARGETS = {
    "tinylm.arguments:parse_args": ["ms parse_args", "host parse_args"],
    "tinylm.optimizer:Chained.__init__": ["ms __init__", "host __init__"],
    "tinylm.optimizer:Chained.step": ["ms step"],
    "tinylm.optimizer:Chained.ready": ["ms ready", "host ready"],
    "tinylm.optimizer:Chained.untouched": ["host untouched"],
    "tinylm.optimizer:get_optimizer": ["ms get_optimizer", "host get_optimizer"],
    "tinylm.optimizer:compile_helpers": ["ms compile_helpers"],
    "tinylm.training:train": ["host train"],
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    importlib.invalidate_caches()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Host and MindSpeed as if nothing of either had ever been imported."""
    tops = ("tinylm", "mindspeed", "mindspeed_llm")
    aside = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in tops}
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, HOST)
    write(tmp_path, MINDSPEED)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
        del sys.modules[name]
    sys.modules.update(aside)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setattr(coexist, "_installed", [])
    made = Registry()
    yield made
    made.undo()


def marking(target: str) -> Callable[..., Any]:
    def mark(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        importlib.import_module("tinylm.trace").log.append("ours")
        return wrapped(*args, **kwargs)

    return mark


def our_flags(parser: argparse.ArgumentParser) -> None:
    coexist.add_flag_if_absent(parser, "--enable-high-availability", action="store_true")
    coexist.add_flag_if_absent(parser, "--optimizer-replica-num", type=int, default=2)


def ours(registry: Registry, guarded: bool = True) -> None:
    """What our adaptor does at its import."""
    if guarded:
        coexist.install(registry, our_flags)
    for target in TARGETS:
        registry.wrap(target, group="ours")(marking(target))
    registry.activate("ours")


def theirs() -> Any:
    return importlib.import_module("mindspeed.megatron_adaptor")


def host() -> None:
    for name in ("training", "initialize"):
        importlib.import_module(f"tinylm.{name}")


def start(order: str, registry: Registry, guarded: bool = True) -> Any:
    """Everything imported, in one of the orders that people use; the adaptor of MindSpeed is returned."""
    adaptor = None
    for who in order.split():
        if who == "ours":
            ours(registry, guarded)
        elif who == "host":
            host()
        else:
            adaptor = theirs()
    host()
    return adaptor


ORDERS = ["mindspeed ours", "ours mindspeed", "ours host mindspeed", "host ours mindspeed", "host mindspeed ours"]


def calls() -> dict[str, list[str]]:
    """What each target logs when it is called, through its owner and through every name of it in the host."""
    from_module = {name: sys.modules[f"tinylm.{name}"] for name in ("arguments", "initialize", "optimizer", "training")}
    chained = vars(from_module["optimizer"])["Chained"]
    log = sys.modules["tinylm.trace"].log

    def logged(call: Callable[[], Any]) -> list[str]:
        log.clear()
        call()
        return list(log)

    found = {"tinylm.optimizer:Chained.__init__": logged(chained)}
    thing = chained()
    for name in ("step", "ready", "untouched"):
        found[f"tinylm.optimizer:Chained.{name}"] = logged(getattr(thing, name))
    aliases = {
        "tinylm.arguments:parse_args": ["arguments.parse_args", "initialize.parse_args", "training.parse_args"],
        "tinylm.optimizer:get_optimizer": ["optimizer.get_optimizer", "training.get_optimizer"],
        "tinylm.optimizer:compile_helpers": ["optimizer.compile_helpers", "training.compile_helpers"],
        "tinylm.training:train": ["training.train"],
    }
    for target, names in aliases.items():
        results = [logged(vars(from_module[name.split(".")[0]])[name.split(".")[1]]) for name in names]
        assert all(result == results[0] for result in results), (target, names, results)
        found[target] = results[0]
    return found


WITH_US = {target: ["ours", *logged] for target, logged in TARGETS.items()}


LLM = {
    "mindspeed_llm/__init__.py": "",
    "mindspeed_llm/features_manager/__init__.py": "",
    "mindspeed_llm/features_manager/high_availability/__init__.py": "",
    "mindspeed_llm/features_manager/high_availability/high_availability.py": """
        class HighAvailabilityFeature:
            feature_name = "high_availability"
            def register_args(self, parser):
                parser.add_argument_group(title="ha").add_argument("--enable-high-availability", action="store_true")
            def register_patches(self, pm): pass
    """,
}


def with_llm(folder: Path) -> None:
    write(folder, LLM)
    feature = importlib.import_module("mindspeed_llm.features_manager.high_availability.high_availability")
    features = importlib.import_module("mindspeed.features_manager.features_manager").MindSpeedFeaturesManager
    features.FEATURES_LIST.append(feature.HighAvailabilityFeature())


def refusals(**arguments: Any) -> list[str]:
    return [str(refusal) for refusal in coexist.refuse_conflicts(argparse.Namespace(**arguments))]
