"""Beside MindSpeed's patch manager: a stand-in for it that applies, removes and repeats patches by the same rules.

The stand-in (`mindspeed`, `mindspeed_llm`) and its host (`tinylm`) are written into a folder of each test.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_tft.patches import mindspeed as coexist
from mindspeed_tft.registry import PatchError, Registry
from mindspeed_tft.settings import Refused

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


# ------------------------------------------------------------------------------------------------------ rules


def test_nothing_is_imported_by_us(folder: Path, registry: Registry) -> None:
    assert coexist.present() and not coexist.loaded()
    ours(registry)
    imported = {name.partition(".")[0] for name in sys.modules}
    assert not {"tinylm", "mindspeed"} & imported
    assert {row.state for row in registry.list()} == {"waiting"}


def test_the_stand_in_alone(folder: Path) -> None:
    """What the other tests compare with: MindSpeed without us, also after it has patched again."""
    adaptor = theirs()
    host()
    assert calls() == TARGETS
    adaptor.repatch()
    assert calls() == TARGETS
    sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager.remove_patches()
    assert calls()["tinylm.optimizer:Chained.step"] == ["host step"]


@pytest.mark.parametrize("order", ORDERS)
def test_outermost_and_once_in_every_import_order(folder: Path, registry: Registry, order: str) -> None:
    adaptor = start(order, registry)
    registry.verify("ours")
    registry.verify(coexist.GROUP)
    assert {row.state for row in registry.list()} == {"applied"}
    assert calls() == WITH_US
    for _ in range(3):
        adaptor.repatch()
        assert calls() == WITH_US
    assert {row.state for row in registry.list()} == {"applied"}
    assert not any(row.detail for row in registry.list()), "lifted in time, so nobody was ever over us"


@pytest.mark.parametrize("order", ORDERS)
def test_without_the_guard_it_goes_wrong(folder: Path, registry: Registry, order: str) -> None:
    """The control: the same checks fail when we do not make room."""
    adaptor = start(order, registry, guarded=False)
    wrong = 0
    for act in (lambda: None, adaptor.repatch):
        act()
        try:
            wrong += calls() != WITH_US
        except (AssertionError, RecursionError):  # two names of one target differ; ours calls theirs calls ours
            wrong += 1
    assert wrong


def test_a_name_that_mindspeed_does_not_follow_stays_ours(folder: Path, registry: Registry) -> None:
    start("ours host mindspeed", registry)
    log = sys.modules["tinylm.trace"].log
    log.clear()
    sys.modules["tinylm.initialize"].parse()
    assert log == ["ours", "host parse_args"]  # without us: ["host parse_args"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("repatched", [False, True])
def test_undo_leaves_what_mindspeed_made(folder: Path, registry: Registry, order: str, repatched: bool) -> None:
    adaptor = start(order, registry)
    if repatched:
        adaptor.repatch()
    assert registry.undo() == ()
    assert calls() == TARGETS
    for path, patch in sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager.patches_info.items():
        owner, leaf = patch.owner()
        assert vars(owner)[leaf] is patch.now, path
        assert type(patch.first).__module__ in ("builtins", "types"), f"{path}: MindSpeed took ours for the original"
    adaptor.repatch()
    assert calls() == TARGETS


def test_what_mindspeed_patches_with_is_left_alone(folder: Path, registry: Registry) -> None:
    """Rule 3: its replacement is the object that lies at the target, under the same name."""
    functions = importlib.import_module("mindspeed.functions")
    mine = functions.compile_helpers
    adaptor = start("mindspeed ours", registry)
    for _ in range(2):
        assert functions.compile_helpers is mine
        assert sys.modules["tinylm.optimizer"].compile_helpers.__wrapped__ is mine
        adaptor.repatch()

    registry.undo()
    careless = Registry()  # the control
    careless.wrap("tinylm.optimizer:compile_helpers", group="ours")(marking(""))
    careless.activate("ours")
    assert functions.compile_helpers is not mine
    careless.undo()
    assert functions.compile_helpers is mine


def test_while_mindspeed_is_at_work_it_sees_the_host_without_us(folder: Path, registry: Registry) -> None:
    adaptor = start("ours host mindspeed", registry)
    seen: list[list[str]] = []

    class Spy:
        feature_name = "spy"

        def register_args(self, parser: argparse.ArgumentParser) -> None: ...

        def register_patches(self, manager: Any) -> None:
            def look_wrapper(fn: Any) -> Any:
                seen.append([row.state for row in registry.list("ours")])
                assert type(fn).__name__ == "function"
                return fn

            manager.register_patch("tinylm.training.train", look_wrapper)

    sys.modules["mindspeed.features_manager.features_manager"].MindSpeedFeaturesManager.FEATURES_LIST.append(Spy())
    adaptor.repatch()
    assert seen == [["waiting"] * len(TARGETS)]
    assert calls() == WITH_US


def test_ours_come_back_when_mindspeed_fails(folder: Path, registry: Registry) -> None:
    start("mindspeed ours", registry)
    manager = sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager
    manager.register_patch("no_such_package.f", marking("x"))
    with pytest.raises(RuntimeError, match="no_such_package"):
        manager.apply_patches()
    assert calls() == WITH_US


def test_removed_for_good_we_stay_on_the_host(folder: Path, registry: Registry) -> None:
    start("ours mindspeed", registry)
    sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager.remove_patches()
    found = calls()
    assert found["tinylm.optimizer:Chained.step"] == ["ours", "host step"]
    assert found["tinylm.arguments:parse_args"] == ["ours", "host parse_args"]


def test_a_module_with_mindspeed_in_its_name_must_not_hold_functions_of_the_host(folder: Path) -> None:
    """Rule 6, of MindSpeed itself: why our modules look the host up when they are called."""
    write(folder, {"tft_mindspeed_like.py": "import tinylm.training\nfrom tinylm.training import get_optimizer"})
    adaptor = theirs()
    host()
    like = importlib.import_module("tft_mindspeed_like")
    old = like.get_optimizer
    try:
        adaptor.repatch()
        assert like.get_optimizer is old, "stale: still what MindSpeed made the first time"
        assert like.tinylm.training.get_optimizer is not old
    finally:
        del sys.modules["tft_mindspeed_like"]


def test_the_host_without_mindspeed(folder: Path, registry: Registry) -> None:
    start("ours host", registry)
    registry.verify("ours")
    assert calls() == {target: ["ours", logged[-1].replace("ms", "host")] for target, logged in TARGETS.items()}
    assert {row.state for row in registry.list(coexist.GROUP)} == {"waiting"}
    assert refusals(enable_high_availability=True) == []


# ------------------------------------------------------------------------------------------------------ flags

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


ARGV = ["--enable-high-availability", "--optimizer-replica-num", "3", "--ms-flag", "--host-flag"]
PARSED = {"enable_high_availability": True, "optimizer_replica_num": 3, "ms_flag": True, "host_flag": True}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("llm", [False, True])
def test_our_flags_come_after_those_of_the_features_and_only_if_absent(
    folder: Path, registry: Registry, order: str, llm: bool
) -> None:
    start(order, registry)
    if llm:
        with_llm(folder)
    assert vars(sys.modules["tinylm.initialize"].parse_args(argv=ARGV)) == PARSED


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("llm", [False, True])
def test_flags_through_a_provider_come_last_too(folder: Path, registry: Registry, order: str, llm: bool) -> None:
    start(order, registry)
    registry.undo(coexist.GROUP)
    if llm:
        with_llm(folder)
    called: list[str] = []

    def of_the_user(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        called.append("user")
        return parser

    parse_args = sys.modules["tinylm.initialize"].parse_args
    assert vars(parse_args(coexist.flags_last(of_the_user, our_flags), ARGV)) == PARSED and called == ["user"]
    assert vars(parse_args(coexist.flags_last(None, our_flags), ARGV)) == PARSED

    def too_early(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:  # the control
        our_flags(parser)
        return parser

    if llm:
        with pytest.raises(argparse.ArgumentError, match="conflicting option string"):
            parse_args(too_early, ARGV)


def test_add_flag_if_absent_returns_the_action_in_force() -> None:
    parser = argparse.ArgumentParser()
    first = parser.add_argument("--a-flag", action="store_true")
    assert coexist.add_flag_if_absent(parser, "--a-flag", type=int) is first
    group = parser.add_argument_group("ours")
    second = coexist.add_flag_if_absent(group, "--b-flag", "-b", type=int)
    assert coexist.add_flag_if_absent(parser, "-b") is second
    assert parser.parse_args(["--a-flag", "-b", "4"]) == argparse.Namespace(a_flag=True, b_flag=4)


# -------------------------------------------------------------------------------------------------- conflicts


def refusals(**arguments: Any) -> list[str]:
    return [str(refusal) for refusal in coexist.refuse_conflicts(argparse.Namespace(**arguments))]


def test_no_conflict_beside_mindspeed_alone(folder: Path, registry: Registry) -> None:
    start("mindspeed ours", registry)
    assert refusals(enable_high_availability=True, ttp_enabled=False) == []


def test_ttp_of_mindspeed_is_refused(folder: Path, registry: Registry) -> None:
    start("mindspeed ours", registry)
    (refusal,) = refusals(ttp_enabled=True)
    assert refusal.startswith("--ttp-enabled: ") and "Remedy: leave it out" in refusal

    # Switched on by repatch, where no argument tells.
    write(folder, {"mindspeed/core/__init__.py": "", "mindspeed/core/ttp/__init__.py": "def new(cls): pass"})
    manager = sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager
    manager.register_patch("tinylm.optimizer.Chained.new", importlib.import_module("mindspeed.core.ttp").new)
    (refusal,) = refusals()
    assert refusal.startswith("--ttp-enabled: ") and "repatch" in refusal


def test_what_mindspeed_patches_by_is_judged_too(folder: Path, registry: Registry) -> None:
    """`repatch` changes what MindSpeed has read from the command line, and not what Megatron reads from it."""
    start("mindspeed ours", registry)
    write(
        folder,
        {"mindspeed/args_utils.py": "import types\n_MINDSPEED_ARGS = types.SimpleNamespace(swap_optimizer=True)"},
    )
    importlib.import_module("mindspeed.args_utils")
    (refusal,) = refusals(swap_optimizer=False)
    assert refusal.startswith("--swap-optimizer: ")


def test_options_of_the_same_name_are_nobodys_business_without_mindspeed() -> None:
    assert refusals(swap_optimizer=True, pipeline_model_parallel_layout="Et|L") == []


def test_mindspeed_llm_is_in_force_where_it_acts_on_the_same_flag(folder: Path, registry: Registry) -> None:
    start("mindspeed ours", registry)
    on, off = argparse.Namespace(enable_high_availability=True), argparse.Namespace(enable_high_availability=False)
    assert coexist.stays_off(on) == ""
    with_llm(folder)
    assert coexist.stays_off(off) == ""
    line = coexist.stays_off(on)
    assert "MindSpeed-LLM's is in force" in line and "this plugin stays off" in line and "facade.mindio" in line

    features = sys.modules["mindspeed.features_manager.features_manager"].MindSpeedFeaturesManager
    features.FEATURES_LIST.pop()
    assert coexist.stays_off(on) == ""
    write(folder, {"mindspeed_llm/core/__init__.py": "", "mindspeed_llm/core/high_availability.py": "def f(): pass"})
    manager = sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager
    manager.register_patch("tinylm.training.train", importlib.import_module("mindspeed_llm.core.high_availability").f)
    assert coexist.stays_off(on) == line and refusals(enable_high_availability=True) == []

    manager.patches_info.pop("tinylm.training.train")
    assert coexist.stays_off(on) == ""
    write(folder, {"mindspeed_llm/training/__init__.py": "", "mindspeed_llm/training/training.py": ""})
    importlib.import_module("mindspeed_llm.training.training")
    assert coexist.stays_off(on) == line


def test_mindspeed_of_old_acts_on_the_same_flag_itself(folder: Path, registry: Registry) -> None:
    adaptor = start("mindspeed ours", registry)
    on = argparse.Namespace(enable_high_availability=True)
    assert coexist.stays_off(on) == ""
    adaptor.high_availability_adaptation = lambda manager, args: None  # as the one for core_r0.6.0 has it
    assert "So MindSpeed's is in force" in coexist.stays_off(on)


def test_mindspeed_llm_without_mindio_is_refused(folder: Path) -> None:
    with pytest.raises(Refused, match=r"needs mindio_ttp.*Remedy: import mindspeed_tft.facade.mindio"):
        coexist.check_mindio()
    write(folder, {"mindio_ttp/__init__.py": ""})
    coexist.check_mindio()


class Chunk:
    """As a model under MindSpeed, which gathers dense parameters and experts apart."""

    def start_param_sync(self, *, force_sync: bool = False, dense_or_moe_group: str | None = None) -> str:
        return dense_or_moe_group or "all"


def test_a_broken_update_does_not_leave_a_gather_of_one_part_behind() -> None:
    whole, broken = Chunk(), Chunk()
    gather: Any = broken.start_param_sync
    broken.start_param_sync = functools.partial(gather, dense_or_moe_group="dense")  # type: ignore[method-assign]
    assert broken.start_param_sync() == "dense"
    coexist.forget_partials([whole, broken])
    assert whole.start_param_sync() == broken.start_param_sync() == "all"


def test_an_old_mindspeed_without_remove_and_features(folder: Path, registry: Registry) -> None:
    source = MINDSPEED["mindspeed/patch_utils.py"].replace("def remove_patches", "def not_yet")
    write(folder, {"mindspeed/patch_utils.py": source})
    ours(registry)
    importlib.import_module("mindspeed.patch_utils")
    host()
    registry.verify("ours")
    states = {row.target.rpartition(".")[2]: row.state for row in registry.list(coexist.GROUP)}
    assert states == {"apply_patches": "applied", "remove_patches": "missing", "register_features_args": "waiting"}
    assert refusals() == []
    registry.verify(coexist.GROUP)


@pytest.mark.parametrize("order", ["ours mindspeed", "mindspeed ours"])
def test_a_mindspeed_with_another_manager_is_refused(folder: Path, registry: Registry, order: str) -> None:
    source = MINDSPEED["mindspeed/patch_utils.py"].replace("def apply_patches", "def apply_all_patches")
    write(folder, {"mindspeed/patch_utils.py": source})
    if order == "mindspeed ours":
        importlib.import_module("mindspeed.patch_utils")
        with pytest.raises(PatchError, match="MindSpeedPatchesManager has no 'apply_patches'"):
            ours(registry)
        return
    ours(registry)
    importlib.import_module("mindspeed.patch_utils")
    (refusal,) = refusals()
    assert "has no 'apply_patches'" in refusal and "install a MindSpeed" in refusal


def test_installed_twice_guards_once(folder: Path, registry: Registry) -> None:
    coexist.install(registry, our_flags)
    coexist.install(registry, our_flags)
    assert len(registry.list(coexist.GROUP)) == 3
